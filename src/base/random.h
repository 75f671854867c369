// Random numbers as pure functions of a counter (Philox 4x32-10, Salmon et al. 2011) and a small seeded
// stream.
#pragma once

#include <array>
#include <cstdint>

namespace sluice {

constexpr std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> ctr, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * ctr[0], p1 = uint64_t(0xCD9E8D57u) * ctr[2];
    ctr = {uint32_t(p1 >> 32) ^ ctr[1] ^ key[0], uint32_t(p1), uint32_t(p0 >> 32) ^ ctr[3] ^ key[1],
           uint32_t(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return ctr;
}

// Uniform in (0, 1): 24 bits, never 0 and never 1.
constexpr float UnitFloat(uint32_t bits) { return (float(bits >> 8) + 0.5f) * (1.0f / 16777216.0f); }

// SplitMix64 stream for tests, simulation and synthetic data. Same seed, same sequence, on every machine.
class SeededStream {
 public:
  explicit constexpr SeededStream(uint64_t seed) : state_(seed) {}
  constexpr uint64_t Next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  constexpr uint64_t Below(uint64_t n) { return n == 0 ? 0 : Next() % n; }
  constexpr double Unit() { return double(Next() >> 11) * 0x1.0p-53; }
  constexpr bool Chance(double p) { return Unit() < p; }

 private:
  uint64_t state_;
};

}  // namespace sluice
