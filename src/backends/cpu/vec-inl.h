// Vector building blocks shared by the per-target kernel files. Included once per target by foreach_target.
#if defined(SLUICE_BACKENDS_CPU_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_BACKENDS_CPU_VEC_INL_H_
#undef SLUICE_BACKENDS_CPU_VEC_INL_H_
#else
#define SLUICE_BACKENDS_CPU_VEC_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::Repartition<uint32_t, DF>;
using DI = hn::Repartition<int32_t, DF>;
using DU16 = hn::Rebind<uint16_t, DF>;
using DU8 = hn::Rebind<uint8_t, DF>;
using VF = hn::Vec<DF>;
inline constexpr DF df{};
inline constexpr DU du{};
inline constexpr DI di{};
inline constexpr DU16 du16{};
inline constexpr DU8 du8{};

HWY_INLINE size_t L() { return hn::Lanes(df); }

HWY_INLINE VF LoadBF16(const uint16_t* p) {
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, p))));
}

// Round to nearest even; NaN stays NaN.
HWY_INLINE void StoreBF16(VF v, uint16_t* p) {
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fff))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(u), hn::Set(du, 0x40));
  const auto bits = hn::IfThenElse(hn::RebindMask(du, hn::Ne(v, v)), quiet, rounded);
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, bits)), du16, p);
}

// e^x for x in [-87, 88], 0 below, about 1 ulp: x = n ln2 + r, |r| <= ln2 / 2, Taylor to r^7.
HWY_INLINE VF Exp(VF x) {
  const auto tiny = hn::Lt(x, hn::Set(df, -87.0f));
  const VF c = hn::Min(hn::Max(x, hn::Set(df, -87.0f)), hn::Set(df, 88.0f));
  const VF n = hn::Round(hn::Mul(c, hn::Set(df, 1.44269504f)));
  VF r = hn::NegMulAdd(n, hn::Set(df, 0.693145751953125f), c);  // high part of ln2: 15 bits, n * it is exact
  r = hn::NegMulAdd(n, hn::Set(df, 1.42860677e-6f), r);
  VF p = hn::Set(df, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(df, 0.5f));
  p = hn::MulAdd(p, hn::Mul(r, r), r);
  p = hn::Add(p, hn::Set(df, 1.0f));
  const auto power = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  const VF e = hn::Mul(p, hn::BitCast(df, power));
  const VF result = hn::IfThenZeroElse(tiny, e);
  return hn::IfThenElse(hn::Ne(x, x), x, result);
}

HWY_INLINE VF Sigmoid(VF x) {
  const VF one = hn::Set(df, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(hn::Neg(x))));
}

// The value of an e4m3 byte, exact: the code shifted to f32's fields is the value times 2^-120.
HWY_INLINE VF DecodeE4M3(const uint8_t* p) {
  const auto b = hn::PromoteTo(du, hn::LoadU(du8, p));
  const auto mag = hn::And(b, hn::Set(du, 0x7f));
  const auto sign = hn::ShiftLeft<24>(hn::And(b, hn::Set(du, 0x80)));
  const VF v = hn::Mul(hn::BitCast(df, hn::Or(sign, hn::ShiftLeft<20>(mag))), hn::Set(df, 0x1p120f));
  const auto nan = hn::Eq(mag, hn::Set(du, 0x7f));
  return hn::IfThenElse(hn::RebindMask(df, nan), hn::BitCast(df, hn::Set(du, 0x7fc00000u)), v);
}

// Round to nearest even, saturating at 448; NaN gives 0x7f.
HWY_INLINE void EncodeE4M3(VF v, uint8_t* p) {
  const auto u = hn::BitCast(du, v);
  const auto sign = hn::ShiftRight<24>(hn::And(u, hn::Set(du, 0x80000000u)));
  const VF a = hn::Min(hn::Abs(v), hn::Set(df, 448.0f));
  const auto ua = hn::BitCast(du, a);
  const auto odd = hn::And(hn::ShiftRight<20>(ua), hn::Set(du, 1));
  const auto normal =
      hn::Sub(hn::ShiftRight<20>(hn::Add(ua, hn::Add(odd, hn::Set(du, 0x7ffff)))), hn::Set(du, 120u << 3));
  const VF magic = hn::Set(df, 16384.0f);  // ulp 2^-9, the step of the subnormals
  const auto subnormal = hn::Sub(hn::BitCast(du, hn::Add(a, magic)), hn::BitCast(du, magic));
  const auto small = hn::RebindMask(du, hn::Lt(a, hn::Set(df, 0x1p-6f)));
  auto code = hn::Or(sign, hn::IfThenElse(small, subnormal, normal));
  code = hn::IfThenElse(hn::RebindMask(du, hn::Ne(v, v)), hn::Set(du, 0x7f), code);
  hn::StoreU(hn::DemoteTo(du8, hn::BitCast(di, code)), du8, p);
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
