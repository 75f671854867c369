// The arithmetic of one value of a row of logits, for the loops on the host and those on a device: the same
// bits in both. Math says how a product, a sum and a quotient are made there, none fused with another. Who
// compiles this for a device defines SLUICE_EVERYWHERE as the marks of its functions.
#pragma once

#include <bit>
#include <cstdint>

#ifndef SLUICE_EVERYWHERE
#define SLUICE_EVERYWHERE
#endif

namespace sluice::row {

struct HostMath {
  static float Mul(float a, float b) { return a * b; }
  static float Add(float a, float b) { return a + b; }
  static float Div(float a, float b) { return a / b; }
  static int32_t BitsOf(float v) { return std::bit_cast<int32_t>(v); }
  static float FloatOf(int32_t v) { return std::bit_cast<float>(v); }
};

constexpr int32_t kPlusInf = 0x7f800000;
constexpr int32_t kMinusInfKey = int32_t(0xff800000u) ^ 0x7fffffff;

// Order of floats as order of int32: NaNs land outside [-inf, +inf] on either side. An integer maximum
// vectorises without the licence to reorder that a float maximum would need.
template <typename M = HostMath>
SLUICE_EVERYWHERE inline int32_t OrderKey(float v) {
  const int32_t bits = M::BitsOf(M::Add(v, 0.0f));  // -0 becomes +0
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
template <typename M = HostMath>
SLUICE_EVERYWHERE inline float OfOrderKey(int32_t key) {
  return M::FloatOf(key ^ ((key >> 31) & 0x7fffffff));
}
SLUICE_EVERYWHERE inline bool Unusable(int32_t high, int32_t low) {
  return high >= kPlusInf || low < kMinusInfKey || high == kMinusInfKey;
}

// exp(x) for x <= 0 by 2^n * p(r), relative error under 2e-7; 0 below -87.
template <typename M = HostMath>
SLUICE_EVERYWHERE inline float ExpNonPositive(float x) {
  const float t = x < -87.0f ? -87.0f : x;
  const float shifted =
      M::Add(M::Mul(t, 1.44269504088896341f), 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const float n = M::Add(shifted, -12582912.0f);
  const float r =
      M::Add(M::Add(t, -M::Mul(n, 0.693359375f)), M::Mul(n, 2.12194440e-4f));  // ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = M::Add(M::Mul(p, r), 1.3981999507e-3f);
  p = M::Add(M::Mul(p, r), 8.3334519073e-3f);
  p = M::Add(M::Mul(p, r), 4.1665795894e-2f);
  p = M::Add(M::Mul(p, r), 1.6666665459e-1f);
  p = M::Add(M::Mul(p, r), 5.0000001201e-1f);
  p = M::Add(M::Add(M::Mul(p, M::Mul(r, r)), r), 1.0f);
  const float scale = M::FloatOf(int32_t(uint32_t(M::BitsOf(shifted) - 0x4B400000 + 127) << 23));
  const float y = M::Mul(p, scale);
  return x < -87.0f ? 0.0f : y;
}
template <typename M = HostMath>
SLUICE_EVERYWHERE inline float Weight(float x, float max, float temperature) {
  return ExpNonPositive<M>(M::Div(M::Add(x, -max), temperature));
}

// The hash of a row is four chains of 64-bit words, eight values a turn.
constexpr uint64_t kHashOdd = 0x9FB21C651E98DF25ull;
SLUICE_EVERYWHERE constexpr uint64_t HashSeed(int lane) {
  return lane == 0   ? 0x243F6A8885A308D3ull
         : lane == 1 ? 0x13198A2E03707344ull
         : lane == 2 ? 0xA4093822299F31D0ull
                     : 0x082EFA98EC4E6C89ull;
}
SLUICE_EVERYWHERE inline uint64_t HashTurn(uint64_t lane, uint64_t word) {
  const uint64_t v = (lane ^ word) * kHashOdd;
  return v << 29 | v >> 35;
}

}  // namespace sluice::row
