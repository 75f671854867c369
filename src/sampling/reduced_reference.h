// What a device makes of a row of logits, written down plainly: tests compare devices with it, and the
// sampler on top of it with the sampler on whole rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/reduced_row.h"
#include "base/row_arithmetic.h"
#include "sampling/row_math.h"

namespace sluice::testing {

// threshold: where the list of candidates ends. A device chooses it; any choice must do.
inline ReducedRow Reduce(const float* x, int32_t n, const RowRequest& request, float threshold,
                         std::vector<RowCandidate>* candidates) {
  ReducedRow r;
  candidates->clear();
  const RowScan scan = ScanRow(x, n);
  r.max = scan.max;
  r.unusable = scan.unusable;
  if (scan.unusable) return r;
  r.best = FirstIndexOf(x, n, scan.max);
  if (request.hash) {
    for (int l = 0; l < 4; ++l) r.hash_lane[l] = row::HashSeed(l);
    for (int32_t i = 0; i + 8 <= n; i += 8) {
      uint64_t words[4];
      std::memcpy(words, x + i, sizeof words);
      for (int l = 0; l < 4; ++l) r.hash_lane[l] = row::HashTurn(r.hash_lane[l], words[l]);
    }
    std::copy(x + n / 8 * 8, x + n, r.hash_tail);
  }
  if (request.near)
    for (int32_t i = 0; i < n; ++i)
      if (x[i] > r.max - kNearRange) r.near_sum += std::exp(x[i] - r.max);
  if (request.temperature == 0) return r;
  std::vector<float> w(static_cast<size_t>(n));
  ExpWeights(x, n, r.max, request.temperature, w.data());
  r.total = SumBlocks(w.data(), n);
  if (request.filtered) {
    r.threshold = threshold;
    for (int32_t i = 0; i < n; ++i)
      if (w[size_t(i)] > 0 && w[size_t(i)] >= threshold) candidates->push_back({w[size_t(i)], i});
    r.candidates = int32_t(candidates->size());
    std::reverse(candidates->begin(), candidates->end());
    candidates->resize(std::min(candidates->size(), size_t(kMostCandidates)));
    return r;
  }
  const double target = request.uniform * r.total;
  double before = 0;
  for (int32_t begin = 0; begin < n && r.drawn < 0; begin += 64) {
    const int32_t end = std::min(n, begin + 64);
    double block = 0;
    for (int32_t i = begin; i < end; ++i) block += double(w[size_t(i)]);
    if (before + block > target) {
      double inside = 0;
      for (int32_t i = begin; i < end; ++i) {
        if (w[size_t(i)] <= 0) continue;
        inside += double(w[size_t(i)]);
        r.drawn = i;
        if (before + inside > target) break;
      }
    }
    before += block;
  }
  for (int32_t i = n - 1; i >= 0 && r.drawn < 0; --i)
    if (w[size_t(i)] > 0) r.drawn = i;
  r.drawn_value = x[r.drawn];
  return r;
}

}  // namespace sluice::testing
