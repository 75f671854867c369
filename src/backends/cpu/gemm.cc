// f32 matrix products over packed panels, weights in f32 or bf16. Each element is acc = fma(a[k], b[k], acc)
// for k in order.
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/gemm.cc"
#include "hwy/foreach_target.h"
// clang-format off
#include "hwy/highway.h"
#include "backends/cpu/vec-inl.h"
// clang-format on
#include "backends/cpu/gemm_walk.h"
#include "backends/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {

// Registers: AVX-512 has 32, so 12 rows x 2 vectors; AVX2 16, so 6 x 2.
#if HWY_TARGET == HWY_AVX3
constexpr int kMaxRows = 12;
#elif HWY_TARGET == HWY_AVX2
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 4;
#endif
HWY_INLINE int64_t PanelWidth() { return int64_t(2 * L()); }

HWY_INLINE VF LoadB(const float* p) { return hn::LoadU(df, p); }
HWY_INLINE VF LoadB(const uint16_t* p) { return LoadBF16(p); }

HWY_NOINLINE void StorePair(const GemmArgs& g, int64_t row, int64_t col, int64_t valid, VF v0, VF v1) {
  const int64_t lanes = int64_t(L());
  HWY_ALIGN float full[2 * HWY_MAX_BYTES / sizeof(float)];
  if (g.store == Store::kBF16) {
    uint16_t* c = static_cast<uint16_t*>(g.c) + row * g.ldc + col;
    if (valid >= 2 * lanes) {
      StoreBF16(v0, c);
      StoreBF16(v1, c + lanes);
      return;
    }
    HWY_ALIGN uint16_t half[2 * HWY_MAX_BYTES / sizeof(float)];
    StoreBF16(v0, half);
    StoreBF16(v1, half + lanes);
    for (int64_t i = 0; i < valid; ++i) c[i] = half[i];
    return;
  }
  float* c = static_cast<float*>(g.c) + row * g.ldc + col;
  const bool whole = valid >= 2 * lanes;
  float* from = c;
  if (!whole) {
    for (int64_t i = 0; i < 2 * lanes; ++i) full[i] = i < valid && g.store != Store::kF32 ? c[i] : 0.0f;
    from = full;
  }
  if (g.store == Store::kF32Add) {
    v0 = hn::Add(hn::LoadU(df, from), v0);
    v1 = hn::Add(hn::LoadU(df, from + lanes), v1);
  } else if (g.store == Store::kMerge) {
    const VF alpha = hn::Set(df, g.alpha[row]), beta = hn::Set(df, g.beta[row]);
    v0 = hn::MulAdd(v0, beta, hn::Mul(hn::LoadU(df, from), alpha));
    v1 = hn::MulAdd(v1, beta, hn::Mul(hn::LoadU(df, from + lanes), alpha));
  }
  hn::StoreU(v0, df, from);
  hn::StoreU(v1, df, from + lanes);
  if (!whole) {
    for (int64_t i = 0; i < valid; ++i) c[i] = full[i];
  }
}

// MR rows x NP panels in registers.
template <int MR, int NP, typename TB>
HWY_NOINLINE void Tile(const GemmArgs& g, int64_t row, int64_t col, const TB* b, int64_t panel_elements) {
  const int64_t nr = PanelWidth(), lanes = int64_t(L());
  const float* a[MR];
  for (int i = 0; i < MR; ++i) a[i] = static_cast<const float*>(g.a) + (row + i) * g.lda;
  VF acc0[MR][NP], acc1[MR][NP];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) acc0[i][p] = acc1[i][p] = hn::Zero(df);
  }
  for (int64_t k = 0; k < g.k; ++k) {
    VF b0[NP], b1[NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      b0[p] = LoadB(b + p * panel_elements + k * nr);
      b1[p] = LoadB(b + p * panel_elements + k * nr + lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const VF x = hn::Set(df, a[i][k]);
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) {
        acc0[i][p] = hn::MulAdd(x, b0[p], acc0[i][p]);
        acc1[i][p] = hn::MulAdd(x, b1[p], acc1[i][p]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
      StorePair(g, row + i, col + p * nr, g.cols - col - p * nr, acc0[i][p], acc1[i][p]);
  }
}

// Tiles of 1 .. kMaxRows rows x NP panels; a row count that NP panels do not fit takes as many as do.
template <int NP, typename TB, int... kLess1>
constexpr auto TilesOf(std::integer_sequence<int, kLess1...>) {
  using Fn = void (*)(const GemmArgs&, int64_t, int64_t, const TB*, int64_t);
  return std::array<Fn, kMaxRows>{Tile<kLess1 + 1, std::min(NP, PanelsBeside(kLess1 + 1, kMaxRows)), TB>...};
}
template <int NP, typename TB>
constexpr auto kTiles = TilesOf<NP, TB>(std::make_integer_sequence<int, kMaxRows>());

template <typename TB>
void Gemm(const GemmArgs& g) {
  const int64_t nr = PanelWidth(), pe = g.panel_bytes / int64_t(sizeof(TB));
  const TB* b = static_cast<const TB*>(g.b);
  WalkTiles<kMaxRows>(g, nr, [&](int beside, int64_t row, int rows, int64_t panel) {
    const auto& tiles = beside == 4 ? kTiles<4, TB> : (beside == 2 ? kTiles<2, TB> : kTiles<1, TB>);
    tiles[size_t(rows - 1)](g, row, panel * nr, b + panel * pe, pe);
  });
}

double Peak(int64_t n, float* sink) {
  constexpr int kSums = 2 * kMaxRows;
  VF acc[kSums];
  const VF x = hn::Set(df, sink[0]), y = hn::Set(df, sink[1]);
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) acc[i] = hn::Set(df, float(i));
  for (int64_t k = 0; k < n; ++k) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) acc[i] = hn::MulAdd(acc[i], x, y);
  }
  VF sum = acc[0];
  for (int i = 1; i < kSums; ++i) sum = hn::Add(sum, acc[i]);
  sink[2] = hn::GetLane(sum);
  return 2.0 * kSums * double(L()) * double(n);
}

void FillGemmHere(KernelTable* t) {
  t->peak = Peak;
  t->nr = PanelWidth();
  t->gemm_f32 = Gemm<float>;
  t->gemm_f32_bf16 = Gemm<uint16_t>;
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {
void FillGemm(Isa isa, KernelTable* t) {
  switch (isa) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      return N_AVX3::FillGemmHere(t);
    case Isa::kAvx2:
      return N_AVX2::FillGemmHere(t);
    case Isa::kPortable:
      return HWY_NAMESPACE::FillGemmHere(t);
  }
}
}  // namespace sluice::cpu
#endif
