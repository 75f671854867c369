// AVX512-BF16 matrix products on the bf16 dot product (vdpbf16ps), which adds two products to an f32 lane.
// Each element is one chain over pairs of k in order.
#if defined(__x86_64__)
#include "backends/cpu/bf16_vec.h"
#include "backends/cpu/gemm_walk.h"
#endif
#include "backends/cpu/kernel_table.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,bmi2")

namespace sluice::cpu {
namespace {

// From this many rows on the arithmetic of a panel takes longer than its bytes, if those are on their way:
// they are asked for a page ahead, which the processor's own prefetch does not cross. A single row waits for
// bytes all the time and gains nothing.
constexpr int kFetchRows = 2;
constexpr int64_t kFetchAhead = 4096;

constexpr int kMaxRows = 12;  // 12 rows x 2 vectors of sums, 2 of B, 1 broadcast: 27 of 32 registers

inline void StorePair(const GemmArgs& g, int64_t row, int64_t col, int64_t valid, __m512 v0, __m512 v1) {
  if (g.store == Store::kBF16) {
    uint16_t* c = static_cast<uint16_t*>(g.c) + row * g.ldc + col;
    _mm512_mask_storeu_epi16(c, First32(valid), ToBF16(v0, v1));
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
      if (MR >= kFetchRows) {
        __builtin_prefetch(b + (NP + p) * pe + k * kNr);
        __builtin_prefetch(b + (NP + p) * pe + k * kNr + 32);
      }
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

// Tiles of 1 .. kMaxRows rows x NP panels; a row count that NP panels do not fit takes as many as do.
template <int NP, int... kLess1>
constexpr auto TilesOf(std::integer_sequence<int, kLess1...>) {
  using Fn = void (*)(const GemmArgs&, int64_t, int64_t, const uint16_t*, int64_t);
  return std::array<Fn, kMaxRows>{Tile<kLess1 + 1, std::min(NP, PanelsBeside(kLess1 + 1, kMaxRows))>...};
}
template <int NP>
constexpr auto kTiles = TilesOf<NP>(std::make_integer_sequence<int, kMaxRows>());

void Gemm(const GemmArgs& g) {
  const int64_t pe = g.panel_bytes / 2;
  const uint16_t* b = static_cast<const uint16_t*>(g.b);
  WalkTiles<kMaxRows>(g, kNr, [&](int beside, int64_t row, int rows, int64_t panel) {
    const auto& tiles = beside == 4 ? kTiles<4> : (beside == 2 ? kTiles<2> : kTiles<1>);
    tiles[size_t(rows - 1)](g, row, panel * kNr, b + panel * pe, pe);
  });
}

double Peak(int64_t n, float* sink) {
  __m512 acc[24];
  const __m512bh x = (__m512bh)_mm512_set1_ps(sink[0]), y = (__m512bh)_mm512_set1_ps(sink[1]);
#pragma GCC unroll 24
  for (int i = 0; i < 24; ++i) acc[i] = _mm512_set1_ps(float(i));
  for (int64_t k = 0; k < n; ++k) {
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], x, y);
  }
  __m512 sum = acc[0];
  for (int i = 1; i < 24; ++i) sum = _mm512_add_ps(sum, acc[i]);
  sink[2] = _mm512_cvtss_f32(sum);
  return 24 * 64.0 * double(n);
}

// --- weights that stay e4m3: panels of codes with f32 block scales, rounded to bf16 on the way to the dot
// product ---

// Panel: [ceil(k / block)][32] f32 scales, then [ceil(k / 2)][32][2] codes.
struct Fp8Panel {
  const float* scale;
  const uint8_t* codes;
  Fp8Panel(const void* panel, int64_t k, int64_t block)
      : scale(static_cast<const float*>(panel)),
        codes(static_cast<const uint8_t*>(panel) + (k + block - 1) / block * kNr * 4) {}
};

// Factors of 8 columns x 2 rows of k, times 2^120; v: which eighth of the panel.
inline __m512 ScaleLanes(const float* scale, int v) {
  const __m512i pick = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512 s = _mm512_castps256_ps512(_mm256_loadu_ps(scale + 8 * v));
  return _mm512_mul_ps(_mm512_permutexvar_ps(pick, s), _mm512_set1_ps(0x1p120f));
}
inline __m512 Scaled16(const uint8_t* codes, __m512 scale) {
  return _mm512_mul_ps(Decode16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))), scale);
}

void DecodePanel(const void* panel, int64_t k, int64_t block, uint16_t* out) {
  const Fp8Panel p(panel, k, block);
  for (int64_t first = 0; first < k; first += block) {
    const int64_t end = first + block < k ? first + block : k;
    const float* s = p.scale + first / block * kNr;
    const __m512 s0 = ScaleLanes(s, 0), s1 = ScaleLanes(s, 1), s2 = ScaleLanes(s, 2), s3 = ScaleLanes(s, 3);
    for (int64_t i = first; i < end; i += 2) {
      const uint8_t* c = p.codes + i * kNr;
      _mm512_storeu_si512(out + i * kNr, ToBF16(Scaled16(c, s0), Scaled16(c + 16, s1)));
      _mm512_storeu_si512(out + i * kNr + 32, ToBF16(Scaled16(c + 32, s2), Scaled16(c + 48, s3)));
    }
  }
}

template <int MR>
[[gnu::noinline]] void TileFp8(const GemmArgs& g, int64_t col, const std::byte* panel) {
  const uint16_t* a = static_cast<const uint16_t*>(g.a);
  const int64_t lda = g.lda;
  const Fp8Panel p(panel, g.k, g.scale_block);
  __m512 acc0[MR], acc1[MR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) acc0[i] = acc1[i] = _mm512_setzero_ps();
  for (int64_t first = 0; first < g.k; first += g.scale_block) {
    const int64_t end = first + g.scale_block < g.k ? first + g.scale_block : g.k;
    const float* s = p.scale + first / g.scale_block * kNr;
    const __m512 s0 = ScaleLanes(s, 0), s1 = ScaleLanes(s, 1), s2 = ScaleLanes(s, 2), s3 = ScaleLanes(s, 3);
    for (int64_t k = first; k < end; k += 2) {
      const uint8_t* c = p.codes + k * kNr;
      if (MR >= kFetchRows) __builtin_prefetch(c + kFetchAhead);
      const __m512bh b0 = (__m512bh)ToBF16(Scaled16(c, s0), Scaled16(c + 16, s1));
      const __m512bh b1 = (__m512bh)ToBF16(Scaled16(c + 32, s2), Scaled16(c + 48, s3));
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const __m512bh x = Broadcast(a + i * lda + k);
        acc0[i] = _mm512_dpbf16_ps(acc0[i], x, b0);
        acc1[i] = _mm512_dpbf16_ps(acc1[i], x, b1);
      }
    }
  }
  for (int i = 0; i < MR; ++i) StorePair(g, i, col, g.cols - col, acc0[i], acc1[i]);
}

// At most kFp8Rows rows; k even.
void GemmFp8(const GemmArgs& g) {
  const std::byte* b = static_cast<const std::byte*>(g.b);
  for (int64_t col = 0; col < g.cols; col += kNr, b += g.panel_bytes) {
    switch (g.rows) {
      case 1:
        TileFp8<1>(g, col, b);
        break;
      case 2:
        TileFp8<2>(g, col, b);
        break;
      case 3:
        TileFp8<3>(g, col, b);
        break;
      case 4:
        TileFp8<4>(g, col, b);
        break;
      case 5:
        TileFp8<5>(g, col, b);
        break;
      case 6:
        TileFp8<6>(g, col, b);
        break;
      default:
        break;
    }
  }
}

}  // namespace

void FillBf16Gemm(KernelTable* t) {
  t->gemm_pairs = Gemm;
  t->gemm_pairs_fp8 = GemmFp8;
  t->decode_panel_fp8 = DecodePanel;
  t->peak = Peak;
}

}  // namespace sluice::cpu
#pragma GCC pop_options
#else
namespace sluice::cpu {
void FillBf16Gemm(KernelTable*) {}
}  // namespace sluice::cpu
#endif
