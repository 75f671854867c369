// AVX512-BF16 tiles of latent and index rows, their softmax and index scores.
#if defined(__x86_64__)
#include "backends/cpu/bf16_vec.h"
#endif
#include <iterator>

#include "backends/cpu/kernel_table.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,bmi2")

namespace sluice::cpu {
namespace {

// 16 rows of 16 dwords -> 16 vectors, vector d = dword d of the 16 rows.
inline void Transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// 64 rows of n bf16 -> two pair panels; rows past count are zero.
void PackKeys(const uint16_t* const* rows, int64_t count, int64_t n, uint16_t* keys) {
  const int64_t pairs = (n + 1) / 2, panel = pairs * 2 * kNr;
  for (int64_t base = 0; base < 64; base += 16) {
    uint16_t* out = keys + base / kNr * panel + base % kNr * 2;
    if (base >= count) {
      for (int64_t d = 0; d < pairs; ++d) _mm512_storeu_si512(out + d * 2 * kNr, _mm512_setzero_si512());
      continue;
    }
    for (int64_t d = 0; d < pairs; d += 16) {
      const int64_t left = n - d * 2;  // elements
      const __mmask32 m = First32(left);
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        r[i] =
            base + i < count ? _mm512_maskz_loadu_epi16(m, rows[base + i] + d * 2) : _mm512_setzero_si512();
      }
      Transpose16(r);
      const int64_t end = pairs - d < 16 ? pairs - d : 16;
      if (end == 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (d + i) * 2 * kNr, r[i]);
      } else {
        for (int i = 0; i < end; ++i) _mm512_storeu_si512(out + (d + i) * 2 * kNr, r[i]);
      }
    }
  }
}

// Where the first halves of two vectors of 32 go when they interleave.
inline __m512i InterleaveLow() {
  alignas(64) static constexpr auto kLow = [] {
    struct {
      uint16_t v[32];
    } x{};
    for (int i = 0; i < 16; ++i) x.v[2 * i] = uint16_t(i), x.v[2 * i + 1] = uint16_t(32 + i);
    return x;
  }();
  return _mm512_load_si512(kLow.v);
}

// k = 64 rows in pairs, columns = values: two rows interleave.
void PackValues(const uint16_t* const* rows, int64_t count, int64_t n, uint16_t* values) {
  const __m512i low = InterleaveLow();
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t t = 0; t < 32; ++t) {
    const uint16_t* a = 2 * t < count ? rows[2 * t] : nullptr;
    const uint16_t* b = 2 * t + 1 < count ? rows[2 * t + 1] : nullptr;
    uint16_t* out = values + t * 2 * kNr;
    for (int64_t c = 0; c < n; c += kNr, out += 64 * kNr) {
      const __mmask32 m = First32(n - c);
      const __m512i va = a == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(m, a + c);
      const __m512i vb = b == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(m, b + c);
      _mm512_storeu_si512(out, _mm512_permutex2var_epi16(va, low, vb));
      _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(va, high, vb));
    }
  }
}

// Sixteen rows turn in registers into what PackKeys would store, and each vector meets all pairs at once. An
// element is the same chain over pairs of k as in Gemm.
template <int M>
void ScoreRows(const FewPairsArgs& a) {
  const int64_t dim = a.kv_lora + a.rope, pairs = (dim + 1) / 2;
  const uint16_t* q = static_cast<const uint16_t*>(a.q);
  for (int64_t base = 0; base < a.count; base += 16) {
    const uint16_t* rows[16];
    const int64_t here = a.count - base < 16 ? a.count - base : 16;
    for (int64_t i = 0; i < 16; ++i)  // what the columns behind the last row hold is never looked at
      rows[i] = reinterpret_cast<const uint16_t*>(a.rows[base + (i < here ? i : here - 1)]);
    __m512 sum[M];
#pragma GCC unroll 8
    for (int h = 0; h < M; ++h) sum[h] = _mm512_setzero_ps();
    for (int64_t d = 0; d < pairs; d += 16) {
      const __mmask32 in = First32(dim - d * 2);
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi16(in, rows[i] + d * 2);
      Transpose16(r);
      const uint16_t* x = q + d * 2;
      if (pairs - d >= 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 8
          for (int h = 0; h < M; ++h)
            sum[h] = _mm512_dpbf16_ps(sum[h], (__m512bh)r[i], Broadcast(x + h * dim + 2 * i));
        }
      } else {
        for (int64_t i = 0; i < pairs - d; ++i) {
#pragma GCC unroll 8
          for (int h = 0; h < M; ++h)
            sum[h] = _mm512_dpbf16_ps(sum[h], (__m512bh)r[i], Broadcast(x + h * dim + 2 * i));
        }
      }
      a.prefetch->Step();
    }
#pragma GCC unroll 8
    for (int h = 0; h < M; ++h) _mm512_storeu_ps(a.s + h * 64 + base, sum[h]);
  }
}

template <int M>
void MergeRows(const FewPairsArgs& a) {
  const __m512i low = InterleaveLow(), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const uint16_t* p = static_cast<const uint16_t*>(a.p);
  for (int64_t c = 0; c < a.kv_lora; c += kNr) {
    const __mmask32 in = First32(a.kv_lora - c);
    __m512 sum0[M], sum1[M];
#pragma GCC unroll 8
    for (int h = 0; h < M; ++h) sum0[h] = sum1[h] = _mm512_setzero_ps();
    for (int64_t j = 0; j < a.count; j += 2) {
      const __m512i v = _mm512_maskz_loadu_epi16(in, reinterpret_cast<const uint16_t*>(a.rows[j]) + c);
      const __m512i w =
          j + 1 < a.count ? _mm512_maskz_loadu_epi16(in, reinterpret_cast<const uint16_t*>(a.rows[j + 1]) + c)
                          : _mm512_setzero_si512();
      const __m512bh v0 = (__m512bh)_mm512_permutex2var_epi16(v, low, w);
      const __m512bh v1 = (__m512bh)_mm512_permutex2var_epi16(v, high, w);
#pragma GCC unroll 8
      for (int h = 0; h < M; ++h) {
        const __m512bh x = Broadcast(p + h * 64 + j);
        sum0[h] = _mm512_dpbf16_ps(sum0[h], x, v0);
        sum1[h] = _mm512_dpbf16_ps(sum1[h], x, v1);
      }
    }
    const __mmask16 m0 = First(a.kv_lora - c), m1 = First(a.kv_lora - c - 16);
#pragma GCC unroll 8
    for (int h = 0; h < M; ++h) {
      float* o = a.o + h * a.kv_lora + c;
      const __m512 alpha = _mm512_set1_ps(a.alpha[h]), beta = _mm512_set1_ps(a.beta[h]);
      _mm512_mask_storeu_ps(
          o, m0, _mm512_fmadd_ps(sum0[h], beta, _mm512_mul_ps(_mm512_maskz_loadu_ps(m0, o), alpha)));
      _mm512_mask_storeu_ps(
          o + 16, m1,
          _mm512_fmadd_ps(sum1[h], beta, _mm512_mul_ps(_mm512_maskz_loadu_ps(m1, o + 16), alpha)));
    }
    a.prefetch->Step();
  }
}

using FewPairsFn = void (*)(const FewPairsArgs&);
void ScoreFew(const FewPairsArgs& a) {
  static constexpr FewPairsFn kOf[] = {ScoreRows<1>, ScoreRows<2>, ScoreRows<3>, ScoreRows<4>,
                                       ScoreRows<5>, ScoreRows<6>, ScoreRows<7>, ScoreRows<8>};
  static_assert(std::size(kOf) == KernelTable::kFewPairs);
  kOf[a.m - 1](a);
}
void MergeFew(const FewPairsArgs& a) {
  static constexpr FewPairsFn kOf[] = {MergeRows<1>, MergeRows<2>, MergeRows<3>, MergeRows<4>,
                                       MergeRows<5>, MergeRows<6>, MergeRows<7>, MergeRows<8>};
  kOf[a.m - 1](a);
}

void DecodeFp8(const std::byte* row, int64_t n, float scale, uint16_t* out) {
  const uint8_t* x = reinterpret_cast<const uint8_t*>(row);
  // value * 2^-120 * 2^120 * scale: exact until the last product, in either order; the first cannot overflow.
  const bool small = scale < 128.0f;
  const __m512 s = _mm512_set1_ps(small ? scale * 0x1p120f : scale);
  const __m512 unit = _mm512_set1_ps(small ? 1.0f : 0x1p120f);
  int64_t i = 0;
  if (small) {
    for (; i + 32 <= n; i += 32) {
      const __m128i* p = reinterpret_cast<const __m128i*>(x + i);
      _mm512_storeu_si512(out + i, ToBF16(_mm512_mul_ps(Decode16(_mm_loadu_si128(p)), s),
                                          _mm512_mul_ps(Decode16(_mm_loadu_si128(p + 1)), s)));
    }
  }
  for (; i < n; i += 16) {
    const __mmask16 m = First(n - i);
    const __m512 v = _mm512_mul_ps(_mm512_mul_ps(Decode16(_mm_maskz_loadu_epi8(m, x + i)), unit), s);
    _mm256_mask_storeu_epi16(out + i, m, (__m256i)_mm512_cvtneps_pbh(v));
  }
}

void FloatsToBF16(const float* x, int64_t n, uint16_t* y) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    _mm512_storeu_si512(y + i, ToBF16(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16)));
  }
  for (; i < n; i += 16) {
    const __mmask16 m = First(n - i);
    _mm256_mask_storeu_epi16(y + i, m, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(m, x + i)));
  }
}

void DecodeLatent(const std::byte* row, RowFormat format, int64_t kv_lora, int64_t rope, void* to) {
  uint16_t* out = static_cast<uint16_t*>(to);
  if (format == RowFormat::kBF16) {
    std::memcpy(out, row, size_t(kv_lora + rope) * 2);
    return;
  }
  if (format == RowFormat::kF32)
    return FloatsToBF16(reinterpret_cast<const float*>(row), kv_lora + rope, out);
  const int64_t tiles = (kv_lora + 127) / 128;
  for (int64_t t = 0; t < tiles; ++t) {
    float scale;
    std::memcpy(&scale, row + kv_lora + t * 4, 4);
    DecodeFp8(row + t * 128, kv_lora - t * 128 < 128 ? kv_lora - t * 128 : 128, scale, out + t * 128);
  }
  std::memcpy(out + kv_lora, row + kv_lora + tiles * 4, size_t(rope) * 2);
}

void LoadLatent(const LatentBlock& b) {
  const int64_t dim = b.kv_lora + b.rope;
  const uint16_t* rows[64];
  uint16_t* buffer = static_cast<uint16_t*>(b.row);
  for (int64_t j = 0; j < b.count; ++j) {
    if (b.format == RowFormat::kBF16) {
      rows[j] = reinterpret_cast<const uint16_t*>(b.rows[j]);
      continue;
    }
    DecodeLatent(b.rows[j], b.format, b.kv_lora, b.rope, buffer + j * dim);
    rows[j] = buffer + j * dim;
  }
  PackKeys(rows, b.count, dim, static_cast<uint16_t*>(b.keys));
  PackValues(rows, b.count, b.kv_lora, static_cast<uint16_t*>(b.values));
}

// P relative to the block's maximum, rounded to bf16; the sum is of the rounded values.
void Softmax(const SoftmaxArgs& a) {
  const __m512 scale = _mm512_set1_ps(a.scale), low = _mm512_set1_ps(-3.0e38f);
  for (int64_t row = 0; row < a.m; ++row) {
    const int64_t valid = a.valid[row];
    const float* s = a.s + row * 64;
    uint16_t* p = static_cast<uint16_t*>(a.p) + row * 64;
    __m512 v[4];
    if (valid >= 64) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) v[j] = _mm512_mul_ps(_mm512_loadu_ps(s + 16 * j), scale);
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __mmask16 in = First(valid - 16 * j);
        v[j] = _mm512_mask_mul_ps(low, in, _mm512_maskz_loadu_ps(in, s + 16 * j), scale);
      }
    }
    const float top =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3])));
    const __m512 m = _mm512_set1_ps(top);
    __m512 e[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) e[j] = ExpNegative(_mm512_sub_ps(v[j], m));
    if (valid < 64) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) e[j] = _mm512_maskz_mov_ps(First(valid - 16 * j), e[j]);
    }
    const __m512i h0 = ToBF16(e[0], e[1]), h1 = ToBF16(e[2], e[3]);
    _mm512_storeu_si512(p, h0);
    _mm512_storeu_si512(p + 32, h1);
    // Even and odd halves of each pair, in one fixed order.
    const __m512i odd = _mm512_set1_epi32(int32_t(0xffff0000u));
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(h0, 16)),
                                                   _mm512_castsi512_ps(_mm512_and_si512(h0, odd))),
                                     _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(h1, 16)),
                                                   _mm512_castsi512_ps(_mm512_and_si512(h1, odd))));
    a.alpha[row] = top;  // of the block, until the merge below
    a.beta[row] = _mm512_reduce_add_ps(sum);
  }
  // Running statistics of 16 rows at once. A row without a valid column keeps what it had.
  for (int64_t row = 0; row < a.m; row += 16) {
    const __mmask16 in = First(a.m - row);
    const __mmask16 some =
        _mm512_mask_cmpgt_epi32_mask(in, _mm512_maskz_loadu_epi32(in, a.valid + row), _mm512_setzero_si512());
    const __m512 old = _mm512_maskz_loadu_ps(in, a.run_max + row);
    const __m512 block = _mm512_maskz_loadu_ps(in, a.alpha + row),
                 sum = _mm512_maskz_loadu_ps(in, a.beta + row);
    const __m512 now = _mm512_max_ps(old, block);
    const __m512 alpha = ExpNegative(_mm512_sub_ps(old, now)), beta = ExpNegative(_mm512_sub_ps(block, now));
    const __m512 run =
        _mm512_fmadd_ps(sum, beta, _mm512_mul_ps(_mm512_maskz_loadu_ps(in, a.run_sum + row), alpha));
    _mm512_mask_storeu_ps(a.run_max + row, some, now);
    _mm512_mask_storeu_ps(a.run_sum + row, some, run);
    _mm512_mask_storeu_ps(a.alpha + row, in, _mm512_mask_blend_ps(some, _mm512_set1_ps(1.0f), alpha));
    _mm512_mask_storeu_ps(a.beta + row, in, _mm512_maskz_mov_ps(some, beta));
  }
}

void LoadIndex(const std::byte* data, int64_t count, RowFormat format, int64_t dim, void* keys) {
  constexpr int64_t kMaxDim = 512;
  alignas(64) uint16_t buffer[16 * kMaxDim];
  uint16_t* out = static_cast<uint16_t*>(keys);
  const uint16_t* rows[64];
  if (format == RowFormat::kBF16) {
    for (int64_t j = 0; j < count; ++j) rows[j] = reinterpret_cast<const uint16_t*>(data) + j * dim;
    PackKeys(rows, count, dim, out);
    return;
  }
  // 16 rows at a time through the buffer; each group is one quarter of the columns.
  const int64_t pairs = (dim + 1) / 2;
  for (int64_t base = 0; base < 64; base += 16) {
    const int64_t n = count - base < 16 ? count - base : 16;
    uint16_t* quarter = out + base / kNr * (pairs * 2 * kNr) + base % kNr * 2;
    if (n <= 0) {
      for (int64_t d = 0; d < pairs; ++d) _mm512_storeu_si512(quarter + d * 2 * kNr, _mm512_setzero_si512());
      continue;
    }
    for (int64_t j = 0; j < n; ++j) {
      rows[j] = buffer + j * dim;
      if (format == RowFormat::kF32) {
        FloatsToBF16(reinterpret_cast<const float*>(data) + (base + j) * dim, dim, buffer + j * dim);
      } else {
        DecodeFp8(data + (base + j) * dim, dim, 1.0f, buffer + j * dim);
      }
    }
    for (int64_t d = 0; d < pairs; d += 16) {
      const int64_t left = dim - d * 2;
      const __mmask32 m = First32(left);
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        r[i] = i < n ? _mm512_maskz_loadu_epi16(m, rows[i] + d * 2) : _mm512_setzero_si512();
      }
      Transpose16(r);
      const int64_t end = pairs - d < 16 ? pairs - d : 16;
      for (int64_t i = 0; i < end; ++i) _mm512_storeu_si512(quarter + (d + i) * 2 * kNr, r[i]);
    }
  }
}

template <int NH>
inline void IndexHeads(const uint16_t* q, const float* w, int64_t dim, const uint16_t* panel, __m512* s0,
                       __m512* s1) {
  __m512 a0[NH], a1[NH];
#pragma GCC unroll 8
  for (int h = 0; h < NH; ++h) a0[h] = a1[h] = _mm512_setzero_ps();
  for (int64_t k = 0; k < dim; k += 2) {
    const __m512bh b0 = Pairs(panel + k * kNr), b1 = Pairs(panel + k * kNr + 32);
#pragma GCC unroll 8
    for (int h = 0; h < NH; ++h) {
      const __m512bh x = Broadcast(q + h * dim + k);
      a0[h] = _mm512_dpbf16_ps(a0[h], x, b0);
      a1[h] = _mm512_dpbf16_ps(a1[h], x, b1);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < NH; ++h) {
    const __m512 wh = _mm512_set1_ps(w[h]);
    *s0 = _mm512_fmadd_ps(wh, _mm512_max_ps(a0[h], _mm512_setzero_ps()), *s0);
    *s1 = _mm512_fmadd_ps(wh, _mm512_max_ps(a1[h], _mm512_setzero_ps()), *s1);
  }
}

void IndexScores(const IndexScoreArgs& a) {
  const uint16_t* q = static_cast<const uint16_t*>(a.q);
  for (int64_t base = 0; base < 64; base += kNr) {
    const uint16_t* panel = static_cast<const uint16_t*>(a.keys) + base / kNr * (a.dim * kNr);
    __m512 s0 = _mm512_setzero_ps(), s1 = s0;
    int64_t h = 0;
    for (; h + 8 <= a.heads; h += 8) IndexHeads<8>(q + h * a.dim, a.w + h, a.dim, panel, &s0, &s1);
    for (; h + 2 <= a.heads; h += 2) IndexHeads<2>(q + h * a.dim, a.w + h, a.dim, panel, &s0, &s1);
    for (; h < a.heads; ++h) IndexHeads<1>(q + h * a.dim, a.w + h, a.dim, panel, &s0, &s1);
    _mm512_storeu_ps(a.out + base, _mm512_mul_ps(s0, _mm512_loadu_ps(a.key_scale + base)));
    _mm512_storeu_ps(a.out + base + 16, _mm512_mul_ps(s1, _mm512_loadu_ps(a.key_scale + base + 16)));
  }
}

}  // namespace

void FillBf16Attention(KernelTable* t) {
  t->f32_to_bf16 = FloatsToBF16;
  t->load_latent = LoadLatent;
  t->decode_latent = DecodeLatent;
  t->score_few = ScoreFew;
  t->merge_few = MergeFew;
  t->softmax = Softmax;
  t->load_index = LoadIndex;
  t->index_scores = IndexScores;
}

}  // namespace sluice::cpu
#pragma GCC pop_options
#else
namespace sluice::cpu {
void FillBf16Attention(KernelTable*) {}
}  // namespace sluice::cpu
#endif
