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

template <int NP, typename TB>
void Rows(const GemmArgs& g, int64_t row, int rows, int64_t col, const TB* b, int64_t pe) {
  switch (rows) {
    case 1:
      return Tile<1, NP>(g, row, col, b, pe);
    case 2:
      return Tile<2, NP>(g, row, col, b, pe);
    case 3:
      return Tile<3, NP>(g, row, col, b, pe);
    case 4:
      return Tile<4, NP>(g, row, col, b, pe);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
    case 5:
      return Tile<5, NP>(g, row, col, b, pe);
    case 6:
      return Tile<6, NP>(g, row, col, b, pe);
#endif
#if HWY_TARGET == HWY_AVX3
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
#endif
    default:
      break;
  }
}

template <typename TB>
void Gemm(const GemmArgs& g) {
  if (g.rows <= 0) return;
  const int64_t nr = PanelWidth(), pe = g.panel_bytes / int64_t(sizeof(TB));
  const int64_t panels = (g.cols + nr - 1) / nr;
  const int64_t tiles = (g.rows + kMaxRows - 1) / kMaxRows;
  const int wide = g.rows <= kMaxRows / 4 ? 4 : (g.rows <= kMaxRows / 2 ? 2 : 1);  // panels side by side
  const TB* b = static_cast<const TB*>(g.b);
  // A small B stays in L2 whichever way it is walked: then go row by row, so that sums are stored along rows
  // and not down columns whose lines share a cache set. Which order changes no bit.
  if (tiles > 1 && panels * g.panel_bytes <= (256 << 10)) {
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int rows = int((g.rows - row + tiles - t - 1) / (tiles - t));
      for (int64_t p = 0; p < panels; ++p) {
        Rows<1>(g, row, rows, p * nr, b + p * pe, pe);
        if (g.prefetch != nullptr) g.prefetch->Step();
      }
      row += rows;
    }
    return;
  }
  for (int64_t p = 0; p < panels;) {
    const int np = p + wide <= panels ? wide : (p + 2 <= panels && wide > 1 ? 2 : 1);
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int rows = int((g.rows - row + tiles - t - 1) / (tiles - t));
      if (np == 4) {
        Rows<4>(g, row, rows, p * nr, b + p * pe, pe);
      } else if (np == 2) {
        Rows<2>(g, row, rows, p * nr, b + p * pe, pe);
      } else {
        Rows<1>(g, row, rows, p * nr, b + p * pe, pe);
      }
      row += rows;
      if (g.prefetch != nullptr) g.prefetch->Step();
    }
    p += np;
  }
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
