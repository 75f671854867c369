#include "sampling/row_math.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "batch/forward_batch.h"

namespace sluice {
namespace {

constexpr int32_t kPlusInf = 0x7f800000;
constexpr int32_t kMinusInfKey = int32_t(0xff800000u) ^ 0x7fffffff;

// Order of floats as order of int32: NaNs land outside [-inf, +inf] on either side. An integer maximum
// vectorises without the licence to reorder that a float maximum would need.
inline int32_t OrderKey(float v) {
  const int32_t bits = std::bit_cast<int32_t>(v + 0.0f);  // -0 becomes +0
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// exp(x) for x <= 0 by 2^n * p(r), relative error under 2e-7; 0 below -87.
inline float ExpNonPositive(float x) {
  const float t = std::max(x, -87.0f);
  const float shifted = t * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (t - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const float scale = std::bit_cast<float>((std::bit_cast<int32_t>(shifted) - 0x4B400000 + 127) << 23);
  const float y = p * scale;
  return x < -87.0f ? 0.0f : y;
}

}  // namespace

RowScan ScanRow(const float* x, int32_t n) {
  int32_t high = std::numeric_limits<int32_t>::min(), low = std::numeric_limits<int32_t>::max();
  for (int32_t i = 0; i < n; ++i) {
    const int32_t key = OrderKey(x[i]);
    high = std::max(high, key);
    low = std::min(low, key);
  }
  RowScan scan;
  scan.unusable = high >= kPlusInf || low < kMinusInfKey || high == kMinusInfKey;
  scan.max = std::bit_cast<float>(high ^ ((high >> 31) & 0x7fffffff));
  return scan;
}

int32_t FirstIndexOf(const float* x, int32_t n, float max) {
  for (int32_t i = 0; i < n; ++i) {
    if (x[i] == max) return i;
  }
  return -1;
}

void ExpWeights(const float* x, int32_t n, float max, float temperature, float* w) {
  for (int32_t i = 0; i < n; ++i) w[i] = ExpNonPositive((x[i] - max) / temperature);
}

double SumBlocks(const float* w, int32_t n) {
  double total = 0;
  for (int32_t begin = 0; begin < n; begin += 64) {
    double block = 0;
    const int32_t end = std::min(n, begin + 64);
    for (int32_t i = begin; i < end; ++i) block += double(w[i]);
    total += block;
  }
  return total;
}

double LogSumExp(const float* x, int32_t n, float max, float* w) {
  ExpWeights(x, n, max, 1.0f, w);
  return double(max) + std::log(SumBlocks(w, n));
}

float ShareOf(const float* x, int32_t n, float max, int32_t of) {
  constexpr float kFar = 14;  // 10,000 of them are a hundredth of the greatest
  float sum = 0;
  for (int32_t i = 0; i < n; ++i)
    if (x[i] > max - kFar) sum += std::exp(x[i] - max);
  return std::exp(x[of] - max) / sum;
}

bool AllFinite(const float* x, int64_t n) {
  int32_t high = 0;
  for (int64_t i = 0; i < n; ++i) high = std::max(high, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return high < kPlusInf;
}

uint64_t HashRow(const float* x, int32_t n) {
  constexpr uint64_t kOdd = 0x9FB21C651E98DF25ull;
  uint64_t lane[4] = {0x243F6A8885A308D3ull, 0x13198A2E03707344ull, 0xA4093822299F31D0ull,
                      0x082EFA98EC4E6C89ull};
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t words[4];
    std::memcpy(words, x + i, sizeof(words));
    for (int l = 0; l < 4; ++l) lane[l] = std::rotl((lane[l] ^ words[l]) * kOdd, 29);
  }
  uint64_t h = uint64_t(uint32_t(n));
  for (; i < n; ++i) h = JoinLogitsHash(h, std::bit_cast<uint32_t>(x[i]));
  for (const uint64_t l : lane) h = JoinLogitsHash(h, l);
  return h;
}

}  // namespace sluice
