#include "sampling/row_math.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/row_arithmetic.h"
#include "batch/forward_batch.h"

namespace sluice {
namespace {

using row::kPlusInf;

}  // namespace

RowScan ScanRow(const float* x, int32_t n) {
  int32_t high = std::numeric_limits<int32_t>::min(), low = std::numeric_limits<int32_t>::max();
  for (int32_t i = 0; i < n; ++i) {
    const int32_t key = row::OrderKey(x[i]);
    high = std::max(high, key);
    low = std::min(low, key);
  }
  RowScan scan;
  scan.unusable = row::Unusable(high, low);
  scan.max = row::OfOrderKey(high);
  return scan;
}

int32_t FirstIndexOf(const float* x, int32_t n, float max) {
  for (int32_t i = 0; i < n; ++i) {
    if (x[i] == max) return i;
  }
  return -1;
}

void ExpWeights(const float* x, int32_t n, float max, float temperature, float* w) {
  for (int32_t i = 0; i < n; ++i) w[i] = row::Weight(x[i], max, temperature);
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
  float sum = 0;
  for (int32_t i = 0; i < n; ++i)
    if (x[i] > max - kNearRange) sum += std::exp(x[i] - max);
  return std::exp(x[of] - max) / sum;
}

bool AllFinite(const float* x, int64_t n) {
  int32_t high = 0;
  for (int64_t i = 0; i < n; ++i) high = std::max(high, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return high < kPlusInf;
}

uint64_t HashRow(const float* x, int32_t n) {
  uint64_t lane[4];
  for (int l = 0; l < 4; ++l) lane[l] = row::HashSeed(l);
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t words[4];
    std::memcpy(words, x + i, sizeof(words));
    for (int l = 0; l < 4; ++l) lane[l] = row::HashTurn(lane[l], words[l]);
  }
  return FinishHash(lane, x + i, n);
}

uint64_t FinishHash(const uint64_t lane[4], const float* tail, int32_t n) {
  uint64_t h = uint64_t(uint32_t(n));
  for (int32_t i = 0; i < n % 8; ++i) h = JoinLogitsHash(h, std::bit_cast<uint32_t>(tail[i]));
  for (int l = 0; l < 4; ++l) h = JoinLogitsHash(h, lane[l]);
  return h;
}

}  // namespace sluice
