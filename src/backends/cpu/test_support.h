// What the CPU backend's tests share: seeded data, every instruction class of this processor, rounding to
// Act.
#pragma once

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/cpu_backend.h"

namespace sluice::cpu::testing {

struct Numerics {
  std::string isa;
  DType act;
};

// "avx2_bf16": usable in a test name.
inline std::string Label(const Numerics& n) {
  return n.isa + (n.act == DType::kBF16 ? "_act_bf16" : "_act_f32");
}

inline std::vector<Numerics> AllNumerics() {
  std::vector<Numerics> all;
  for (const char* isa : {"portable", "avx2", "avx512", "avx512_bf16"}) {
    for (DType act : {DType::kF32, DType::kBF16}) {
      if (MakeCpuBackend({.act = act, .isa = isa}).ok()) all.push_back({isa, act});
    }
  }
  return all;
}

inline std::unique_ptr<ops::Backend> Make(const Numerics& n) {
  return std::move(MakeCpuBackend({.act = n.act, .isa = n.isa})).value();
}

inline std::vector<float> Normal(int64_t n, uint64_t seed, float scale = 1.0f) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> d(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(rng);
  return v;
}

inline float RoundTo(DType act, float x) { return act == DType::kBF16 ? BF16ToF32(F32ToBF16(x)) : x; }

// Values as the backend's activation type, and back.
inline std::vector<std::byte> ToAct(DType act, const std::vector<float>& v) {
  std::vector<std::byte> out(v.size() * size_t(SizeOf(act)));
  for (size_t i = 0; i < v.size(); ++i) {
    if (act == DType::kBF16) {
      const uint16_t b = F32ToBF16(v[i]);
      std::memcpy(out.data() + i * 2, &b, 2);
    } else {
      std::memcpy(out.data() + i * 4, &v[i], 4);
    }
  }
  return out;
}
inline std::vector<float> FromAct(DType act, const std::vector<std::byte>& v) {
  std::vector<float> out(v.size() / size_t(SizeOf(act)));
  for (size_t i = 0; i < out.size(); ++i) {
    if (act == DType::kBF16) {
      uint16_t b;
      std::memcpy(&b, v.data() + i * 2, 2);
      out[i] = BF16ToF32(b);
    } else {
      std::memcpy(&out[i], v.data() + i * 4, 4);
    }
  }
  return out;
}

// Relative size of a whole unit: two values that round the same number up and down are this far apart.
inline double Ulp(DType act) { return act == DType::kBF16 ? 0x1p-7 : 0x1p-23; }

}  // namespace sluice::cpu::testing
