// AVX512-BF16: matrix products, latent tiles and index scores on the bf16 dot product (vdpbf16ps), which adds
// two products to an f32 lane. Each element is one chain over pairs of k in order.
#include <immintrin.h>

#include <cstring>

#include "backends/cpu/kernel_table.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,bmi2")

namespace sluice::cpu {
namespace {

constexpr int64_t kNr = 32;
constexpr int kMaxRows = 12;  // 12 rows x 2 vectors of sums, 2 of B, 1 broadcast: 27 of 32 registers

inline __m512bh Pairs(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh Broadcast(const uint16_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return (__m512bh)_mm512_set1_epi32(v);
}
inline __m512i ToBF16(__m512 lo, __m512 hi) { return (__m512i)_mm512_cvtne2ps_pbh(hi, lo); }
inline __mmask16 First(int64_t n) {
  return n >= 16 ? __mmask16(0xffff) : (n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1));
}

inline void StorePair(const GemmArgs& g, int64_t row, int64_t col, int64_t valid, __m512 v0, __m512 v1) {
  if (g.store == Store::kBF16) {
    uint16_t* c = static_cast<uint16_t*>(g.c) + row * g.ldc + col;
    const __mmask32 m = valid >= 32 ? __mmask32(0xffffffffu) : __mmask32((1u << valid) - 1);
    _mm512_mask_storeu_epi16(c, m, ToBF16(v0, v1));
    return;
  }
  float* c = static_cast<float*>(g.c) + row * g.ldc + col;
  const __mmask16 m0 = First(valid), m1 = First(valid - 16);
  if (g.store == Store::kF32Add) {
    v0 = _mm512_add_ps(_mm512_maskz_loadu_ps(m0, c), v0);
    v1 = _mm512_add_ps(_mm512_maskz_loadu_ps(m1, c + 16), v1);
  } else if (g.store == Store::kMerge) {
    const __m512 alpha = _mm512_set1_ps(g.alpha[row]), beta = _mm512_set1_ps(g.beta[row]);
    v0 = _mm512_fmadd_ps(v0, beta, _mm512_mul_ps(_mm512_maskz_loadu_ps(m0, c), alpha));
    v1 = _mm512_fmadd_ps(v1, beta, _mm512_mul_ps(_mm512_maskz_loadu_ps(m1, c + 16), alpha));
  }
  _mm512_mask_storeu_ps(c, m0, v0);
  _mm512_mask_storeu_ps(c + 16, m1, v1);
}

// MR rows x NP panels in registers; pe = elements from panel to panel.
template <int MR, int NP>
[[gnu::noinline]] void Tile(const GemmArgs& g, int64_t row, int64_t col, const uint16_t* b, int64_t pe) {
  const uint16_t* a = static_cast<const uint16_t*>(g.a) + row * g.lda;
  const int64_t lda = g.lda;
  __m512 acc[MR][2 * NP];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int p = 0; p < 2 * NP; ++p) acc[i][p] = _mm512_setzero_ps();
  }
  const int64_t even = g.k / 2 * 2;
  for (int64_t k = 0; k < even; k += 2) {
    __m512bh bv[2 * NP];
#pragma GCC unroll 8
    for (int p = 0; p < NP; ++p) {
      bv[2 * p] = Pairs(b + p * pe + k * kNr);
      bv[2 * p + 1] = Pairs(b + p * pe + k * kNr + 32);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const __m512bh x = Broadcast(a + i * lda + k);
#pragma GCC unroll 8
      for (int p = 0; p < 2 * NP; ++p) acc[i][p] = _mm512_dpbf16_ps(acc[i][p], x, bv[p]);
    }
  }
  if (even < g.k) {
    for (int i = 0; i < MR; ++i) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(a[i * lda + even]);
      for (int p = 0; p < 2 * NP; ++p) {
        acc[i][p] = _mm512_dpbf16_ps(acc[i][p], x, Pairs(b + p / 2 * pe + even * kNr + p % 2 * 32));
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      StorePair(g, row + i, col + p * kNr, g.cols - col - p * kNr, acc[i][2 * p], acc[i][2 * p + 1]);
    }
  }
}

template <int NP>
void Rows(const GemmArgs& g, int64_t row, int rows, int64_t col, const uint16_t* b, int64_t pe) {
  switch (rows) {
    case 1:
      return Tile<1, NP>(g, row, col, b, pe);
    case 2:
      return Tile<2, NP>(g, row, col, b, pe);
    case 3:
      return Tile<3, NP>(g, row, col, b, pe);
    case 4:
      return Tile < 4, NP < 2 ? NP : 2 > (g, row, col, b, pe);
    case 5:
      return Tile < 5, NP < 2 ? NP : 2 > (g, row, col, b, pe);
    case 6:
      return Tile < 6, NP < 2 ? NP : 2 > (g, row, col, b, pe);
    case 7:
      return Tile<7, 1>(g, row, col, b, pe);
    case 8:
      return Tile<8, 1>(g, row, col, b, pe);
    case 9:
      return Tile<9, 1>(g, row, col, b, pe);
    case 10:
      return Tile<10, 1>(g, row, col, b, pe);
    case 11:
      return Tile<11, 1>(g, row, col, b, pe);
    case 12:
      return Tile<12, 1>(g, row, col, b, pe);
    default:
      break;
  }
}

void Gemm(const GemmArgs& g) {
  if (g.rows <= 0) return;
  const int64_t pe = g.panel_bytes / 2, panels = (g.cols + kNr - 1) / kNr;
  const int64_t tiles = (g.rows + kMaxRows - 1) / kMaxRows;
  const int wide = g.rows <= 3 ? 4 : (g.rows <= 6 ? 2 : 1);  // panels side by side
  const uint16_t* b = static_cast<const uint16_t*>(g.b);
  for (int64_t p = 0; p < panels;) {
    const int np = p + wide <= panels ? wide : (p + 2 <= panels && wide > 1 ? 2 : 1);
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int rows = int((g.rows - row + tiles - t - 1) / (tiles - t));
      if (np == 4) {
        Rows<4>(g, row, rows, p * kNr, b + p * pe, pe);
      } else if (np == 2) {
        Rows<2>(g, row, rows, p * kNr, b + p * pe, pe);
      } else {
        Rows<1>(g, row, rows, p * kNr, b + p * pe, pe);
      }
      row += rows;
    }
    p += np;
  }
}

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
      const __mmask32 m = left >= 32 ? __mmask32(0xffffffffu) : __mmask32((1u << left) - 1);
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

// k = 64 rows in pairs, columns = values: two rows interleave.
void PackValues(const uint16_t* const* rows, int64_t count, int64_t n, uint16_t* values) {
  alignas(64) static constexpr auto kLow = [] {
    struct {
      uint16_t v[32];
    } x{};
    for (int i = 0; i < 16; ++i) x.v[2 * i] = uint16_t(i), x.v[2 * i + 1] = uint16_t(32 + i);
    return x;
  }();
  const __m512i low = _mm512_load_si512(kLow.v);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t t = 0; t < 32; ++t) {
    const uint16_t* a = 2 * t < count ? rows[2 * t] : nullptr;
    const uint16_t* b = 2 * t + 1 < count ? rows[2 * t + 1] : nullptr;
    uint16_t* out = values + t * 2 * kNr;
    for (int64_t c = 0; c < n; c += kNr, out += 64 * kNr) {
      const __mmask32 m = n - c >= 32 ? __mmask32(0xffffffffu) : __mmask32((1u << (n - c)) - 1);
      const __m512i va = a == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(m, a + c);
      const __m512i vb = b == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(m, b + c);
      _mm512_storeu_si512(out, _mm512_permutex2var_epi16(va, low, vb));
      _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(va, high, vb));
    }
  }
}

// 16 e4m3 codes as f32: the code in f32's fields is the value times 2^-120.
inline __m512 Decode16(__m128i codes) {
  const __m512i b = _mm512_cvtepu8_epi32(codes);
  const __m512i mag = _mm512_and_si512(b, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(b, _mm512_set1_epi32(0x80)), 24);
  const __m512 v = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_slli_epi32(mag, 20))),
                                 _mm512_set1_ps(0x1p120f));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(mag, _mm512_set1_epi32(0x7f));
  return _mm512_mask_blend_ps(nan, v, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

void DecodeFp8(const std::byte* row, int64_t n, float scale, uint16_t* out) {
  const uint8_t* x = reinterpret_cast<const uint8_t*>(row);
  const __m512 s = _mm512_set1_ps(scale);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512 lo = _mm512_mul_ps(Decode16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))), s);
    const __m512 hi =
        _mm512_mul_ps(Decode16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i + 16))), s);
    _mm512_storeu_si512(out + i, ToBF16(lo, hi));
  }
  for (; i < n; i += 16) {
    const __mmask16 m = First(n - i);
    const __m512 v = _mm512_mul_ps(Decode16(_mm_maskz_loadu_epi8(m, x + i)), s);
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
      const __mmask32 m = left >= 32 ? __mmask32(0xffffffffu) : __mmask32((1u << left) - 1);
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

void FillBf16Pairs(KernelTable* t) {
  t->gemm_pairs = Gemm;
  t->f32_to_bf16 = FloatsToBF16;
  t->load_latent = LoadLatent;
  t->decode_latent = DecodeLatent;
  t->load_index = LoadIndex;
  t->index_scores = IndexScores;
}

}  // namespace sluice::cpu
#pragma GCC pop_options
#else
namespace sluice::cpu {
void FillBf16Pairs(KernelTable*) {}
}  // namespace sluice::cpu
#endif
