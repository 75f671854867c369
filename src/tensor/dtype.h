// Element types and their exact scalar conversions (the slow, obvious forms; kernels have their own).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace sluice {

enum class DType : uint8_t { kF32, kBF16, kF16, kF8E4M3, kI32, kI64, kU8 };

constexpr int64_t SizeOf(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kF8E4M3:
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr std::string_view Name(DType t) {
  switch (t) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "float16";
    case DType::kF8E4M3:
      return "fp8_e4m3";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8";
  }
  return "?";
}

inline float BF16ToF32(uint16_t b) { return std::bit_cast<float>(uint32_t(b) << 16); }

// Round to nearest even; NaN stays NaN (quiet).
inline uint16_t F32ToBF16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// OCP e4m3fn: bias 7, max 448, 0x7f and 0xff are NaN, no infinities.
inline float E4M3ToF32(uint8_t b) {
  if ((b & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  const int e = (b >> 3) & 15, m = b & 7;
  const float v = e == 0 ? std::ldexp(float(m), -9) : std::ldexp(float(8 + m), e - 10);
  return b & 0x80 ? -v : v;
}

// Round to nearest even, saturating at +-448; NaN gives 0x7f.
inline uint8_t F32ToE4M3(float f) {
  const uint8_t sign = std::signbit(f) ? 0x80 : 0;
  float a = std::fabs(f);
  if (std::isnan(f)) return uint8_t(sign | 0x7f);
  if (a >= 448.0f) return uint8_t(sign | 0x7e);
  int e = 0;
  if (a == 0.0f) return sign;
  std::frexp(a, &e);
  e = e - 1 < -6 ? -6 : e - 1;                           // exponent of the step, subnormals share e = -6
  const float q = std::nearbyint(std::ldexp(a, 3 - e));  // 0..16 in units of 2^(e-3)
  const int m = int(q);
  if (m >= 16) return uint8_t(sign | ((e + 8) << 3));  // rounded up into the next binade
  if (m >= 8) return uint8_t(sign | ((e + 7) << 3) | (m - 8));
  return uint8_t(sign | m);  // subnormal (e == -6)
}

}  // namespace sluice
