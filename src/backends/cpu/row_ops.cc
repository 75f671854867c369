// Kernels over one row: conversions, norms, activations, quantisation. A reduction has a fixed shape that
// depends on the row's length alone: one vector of partial sums (or four, interleaved), the tail in a padded
// vector, then a fixed tree.
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/row_ops.cc"
#include "hwy/foreach_target.h"
// clang-format off
#include "hwy/highway.h"
#include "backends/cpu/vec-inl.h"
// clang-format on
#include "backends/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {

// The last n < L elements, zeros after them.
HWY_INLINE VF LoadTail(const float* x, int64_t n) {
  HWY_ALIGN float t[HWY_MAX_BYTES / sizeof(float)] = {};
  for (int64_t i = 0; i < n; ++i) t[i] = x[i];
  return hn::Load(df, t);
}
HWY_INLINE void StoreTail(VF v, float* y, int64_t n) {
  HWY_ALIGN float t[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, df, t);
  for (int64_t i = 0; i < n; ++i) y[i] = t[i];
}

// y[i] = f(i-th vector) for a row, where `load` makes a vector from an offset and a count.
template <class Fn>
HWY_INLINE void Map(const float* x, int64_t n, float* y, Fn fn) {
  const int64_t lanes = int64_t(L());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(fn(hn::LoadU(df, x + i)), df, y + i);
  if (i < n) StoreTail(fn(LoadTail(x + i, n - i)), y + i, n - i);
}

HWY_INLINE float SumOf(const float* x, int64_t n, float shift, bool square) {
  const int64_t lanes = int64_t(L());
  const VF s = hn::Set(df, shift);
  VF a0 = hn::Zero(df), a1 = a0, a2 = a0, a3 = a0;
  int64_t i = 0;
  if (square) {
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      const VF v0 = hn::Sub(hn::LoadU(df, x + i), s), v1 = hn::Sub(hn::LoadU(df, x + i + lanes), s);
      const VF v2 = hn::Sub(hn::LoadU(df, x + i + 2 * lanes), s),
               v3 = hn::Sub(hn::LoadU(df, x + i + 3 * lanes), s);
      a0 = hn::MulAdd(v0, v0, a0);
      a1 = hn::MulAdd(v1, v1, a1);
      a2 = hn::MulAdd(v2, v2, a2);
      a3 = hn::MulAdd(v3, v3, a3);
    }
  } else {
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      a0 = hn::Add(a0, hn::LoadU(df, x + i));
      a1 = hn::Add(a1, hn::LoadU(df, x + i + lanes));
      a2 = hn::Add(a2, hn::LoadU(df, x + i + 2 * lanes));
      a3 = hn::Add(a3, hn::LoadU(df, x + i + 3 * lanes));
    }
  }
  a0 = hn::Add(hn::Add(a0, a1), hn::Add(a2, a3));
  for (; i < n; i += lanes) {
    const int64_t left = n - i < lanes ? n - i : lanes;
    VF v = left == lanes ? hn::LoadU(df, x + i) : LoadTail(x + i, left);
    if (square) {
      v = hn::IfThenElseZero(hn::FirstN(df, size_t(left)), hn::Sub(v, s));
      v = hn::Mul(v, v);
    }
    a0 = hn::Add(a0, v);
  }
  return hn::GetLane(hn::SumOfLanes(df, a0));
}

void BF16ToF32Row(const uint16_t* x, int64_t n, float* y) {
  const int64_t lanes = int64_t(L());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(LoadBF16(x + i), df, y + i);
  for (; i < n; ++i) {
    const uint32_t u = uint32_t(x[i]) << 16;
    __builtin_memcpy(y + i, &u, 4);
  }
}

void F32ToBF16Row(const float* x, int64_t n, uint16_t* y) {
  const int64_t lanes = int64_t(L());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) StoreBF16(hn::LoadU(df, x + i), y + i);
  if (i < n) {
    HWY_ALIGN uint16_t t[HWY_MAX_BYTES / sizeof(float)];
    StoreBF16(LoadTail(x + i, n - i), t);
    for (int64_t j = i; j < n; ++j) y[j] = t[j - i];
  }
}

void RmsNormRow(const float* x, const float* w, float eps, int64_t n, float* y) {
  const float mean = SumOf(x, n, 0, true) / float(n);
  const VF r = hn::Set(df, 1.0f / __builtin_sqrtf(mean + eps));
  const int64_t lanes = int64_t(L());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(df, x + i), r), hn::LoadU(df, w + i)), df, y + i);
  }
  if (i < n) StoreTail(hn::Mul(hn::Mul(LoadTail(x + i, n - i), r), LoadTail(w + i, n - i)), y + i, n - i);
}

void LayerNormRow(const float* x, const float* w, const float* b, float eps, int64_t n, float* y) {
  const float mean = SumOf(x, n, 0, false) / float(n);
  const float var = SumOf(x, n, mean, true) / float(n);
  const VF m = hn::Set(df, mean), r = hn::Set(df, 1.0f / __builtin_sqrtf(var + eps));
  const int64_t lanes = int64_t(L());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF v = hn::Mul(hn::Sub(hn::LoadU(df, x + i), m), r);
    hn::StoreU(hn::MulAdd(v, hn::LoadU(df, w + i), hn::LoadU(df, b + i)), df, y + i);
  }
  if (i < n) {
    const VF v = hn::Mul(hn::Sub(LoadTail(x + i, n - i), m), r);
    StoreTail(hn::MulAdd(v, LoadTail(w + i, n - i), LoadTail(b + i, n - i)), y + i, n - i);
  }
}

void SiluMulRow(const float* gate, const float* up, int64_t n, float* y) {
  const int64_t lanes = int64_t(L());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF g = hn::LoadU(df, gate + i);
    hn::StoreU(hn::Mul(hn::Mul(g, Sigmoid(g)), hn::LoadU(df, up + i)), df, y + i);
  }
  if (i < n) {
    const VF g = LoadTail(gate + i, n - i);
    StoreTail(hn::Mul(hn::Mul(g, Sigmoid(g)), LoadTail(up + i, n - i)), y + i, n - i);
  }
}

void ExpRow(const float* x, int64_t n, float* y) {
  Map(x, n, y, [](VF v) HWY_ATTR { return Exp(v); });
}
void SigmoidRow(const float* x, int64_t n, float* y) {
  Map(x, n, y, [](VF v) HWY_ATTR { return Sigmoid(v); });
}

// On the bits, so that a NaN anywhere is the result.
float AbsMaxRow(const float* x, int64_t n) {
  const int64_t lanes = int64_t(L());
  const auto magnitude = hn::Set(di, 0x7fffffff);
  auto m = hn::Zero(di);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    m = hn::Max(m, hn::And(hn::BitCast(di, hn::LoadU(df, x + i)), magnitude));
  if (i < n) m = hn::Max(m, hn::And(hn::BitCast(di, LoadTail(x + i, n - i)), magnitude));
  return hn::GetLane(hn::BitCast(df, hn::MaxOfLanes(di, m)));
}

void QuantE4M3Row(const float* x, int64_t n, float scale, uint8_t* y) {
  const int64_t lanes = int64_t(L());
  const VF s = hn::Set(df, scale);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) EncodeE4M3(hn::Div(hn::LoadU(df, x + i), s), y + i);
  if (i < n) {
    HWY_ALIGN uint8_t t[HWY_MAX_BYTES / sizeof(float)];
    EncodeE4M3(hn::Div(LoadTail(x + i, n - i), s), t);
    for (int64_t j = i; j < n; ++j) y[j] = t[j - i];
  }
}

void DequantE4M3Row(const uint8_t* x, int64_t n, float scale, float* y) {
  const int64_t lanes = int64_t(L());
  const VF s = hn::Set(df, scale);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Mul(DecodeE4M3(x + i), s), df, y + i);
  if (i < n) {
    HWY_ALIGN uint8_t t[HWY_MAX_BYTES / sizeof(float)] = {};
    for (int64_t j = i; j < n; ++j) t[j - i] = x[j];
    StoreTail(hn::Mul(DecodeE4M3(t), s), y + i, n - i);
  }
}

int64_t Collect(const float* x, int64_t n, float least, int32_t* out) {
  const int64_t lanes = int64_t(L());
  const VF pivot = hn::Set(df, least);
  const auto step = hn::Set(di, int32_t(lanes));
  auto at = hn::Iota(di, 0);
  int64_t count = 0, i = 0;
  for (; i + lanes <= n; i += lanes, at = hn::Add(at, step)) {
    const auto mask = hn::RebindMask(di, hn::Ge(hn::LoadU(df, x + i), pivot));
    hn::StoreU(hn::Compress(at, mask), di, out + count);
    count += int64_t(hn::CountTrue(di, mask));
  }
  for (; i < n; ++i) {
    if (x[i] >= least) out[count++] = int32_t(i);
  }
  return count;
}

// MR x NC dot products; each has one vector of partial sums.
template <int MR, int NC>
HWY_INLINE void DotTile(const float* x, const float* w, int64_t n, int64_t cols, float* out) {
  VF acc[MR][NC];
  for (int i = 0; i < MR; ++i) {
    for (int j = 0; j < NC; ++j) acc[i][j] = hn::Zero(df);
  }
  const int64_t lanes = int64_t(L());
  int64_t k = 0;
  for (; k + lanes <= n; k += lanes) {
    VF b[NC];
#pragma GCC unroll 4
    for (int j = 0; j < NC; ++j) b[j] = hn::LoadU(df, w + j * n + k);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const VF a = hn::LoadU(df, x + i * n + k);
#pragma GCC unroll 4
      for (int j = 0; j < NC; ++j) acc[i][j] = hn::MulAdd(a, b[j], acc[i][j]);
    }
  }
  if (k < n) {
    for (int i = 0; i < MR; ++i) {
      const VF a = LoadTail(x + i * n + k, n - k);
      for (int j = 0; j < NC; ++j) acc[i][j] = hn::MulAdd(a, LoadTail(w + j * n + k, n - k), acc[i][j]);
    }
  }
  for (int i = 0; i < MR; ++i) {
    for (int j = 0; j < NC; ++j) out[i * cols + j] = hn::GetLane(hn::SumOfLanes(df, acc[i][j]));
  }
}

template <int MR>
void DotRows(const float* x, const float* w, int64_t cols, int64_t n, float* out) {
  int64_t j = 0;
  for (; j + 4 <= cols; j += 4) DotTile<MR, 4>(x, w + j * n, n, cols, out + j);
  for (; j < cols; ++j) DotTile<MR, 1>(x, w + j * n, n, cols, out + j);
}

void Dots(const float* x, int64_t rows, const float* w, int64_t cols, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) DotRows<4>(x + i * n, w, cols, n, out + i * cols);
  for (; i < rows; ++i) DotRows<1>(x + i * n, w, cols, n, out + i * cols);
}

void Combine(float* y, const float* const* d, const float* w, int64_t count, int64_t n) {
  const int64_t lanes = int64_t(L());
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VF s = hn::Zero(df);
    for (int64_t j = 0; j < count; ++j) s = hn::MulAdd(hn::Set(df, w[j]), hn::LoadU(df, d[j] + i), s);
    hn::StoreU(hn::Add(hn::LoadU(df, y + i), s), df, y + i);
  }
  if (i < n) {
    VF s = hn::Zero(df);
    for (int64_t j = 0; j < count; ++j) s = hn::MulAdd(hn::Set(df, w[j]), LoadTail(d[j] + i, n - i), s);
    StoreTail(hn::Add(LoadTail(y + i, n - i), s), y + i, n - i);
  }
}

void FillRowOpsHere(KernelTable* t) {
  t->bf16_to_f32 = BF16ToF32Row;
  t->f32_to_bf16 = F32ToBF16Row;
  t->rms_norm = RmsNormRow;
  t->layer_norm = LayerNormRow;
  t->silu_mul = SiluMulRow;
  t->exp = ExpRow;
  t->sigmoid = SigmoidRow;
  t->abs_max = AbsMaxRow;
  t->quant_e4m3 = QuantE4M3Row;
  t->dequant_e4m3 = DequantE4M3Row;
  t->collect = Collect;
  t->dots = Dots;
  t->combine = Combine;
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {
void FillRowOps(Isa isa, KernelTable* t) {
  switch (isa) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      return N_AVX3::FillRowOpsHere(t);
    case Isa::kAvx2:
      return N_AVX2::FillRowOpsHere(t);
    case Isa::kPortable:
      return HWY_NAMESPACE::FillRowOpsHere(t);
  }
}
}  // namespace sluice::cpu
#endif
