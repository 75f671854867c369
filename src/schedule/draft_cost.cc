#include "schedule/draft_cost.h"

#include <algorithm>
#include <cmath>

namespace sluice {
namespace {
constexpr double kDecay = 0.996;
constexpr double kTrust = 0.3;    // what the first costs count, against some tens of steps of each kind
constexpr double kFar = 2.5;      // times what was expected: something else held the step up
constexpr int64_t kFarInRow = 8;  // then it is another machine: all is learned anew
constexpr double kLeast = 0.05, kMost = 20;  // of a cost, relative to the first one
}  // namespace

DraftCostModel::Terms DraftCostModel::Of(const StepWork& w) const {
  const auto few = std::min<int64_t>(w.rows, first_.few_rows);
  return {1.0, double(few - 1), double(w.rows - few), double(w.draft_passes),
          double(w.draft_rows - w.draft_passes)};
}

void DraftCostModel::Observe(const StepWork& work) {
  if (work.ns <= 0 || work.rows <= 0) return;
  const Terms x = Of(work);
  const auto time = double(work.ns);
  const double units = cost_.Rows(double(work.rows)) + x[3] * cost_.pass + x[4] * cost_.pass_row;
  if (steps_ > 1 && (time > kFar * unit_ * units || time * kFar < unit_ * units)) {
    if (++ignored_ < kFarInRow) return;
    *this = DraftCostModel(first_);
  }
  ignored_ = 0;
  steps_ = steps_ * kDecay + 1;
  unit_ += (time / units - unit_) / steps_;
  for (size_t i = 0; i < kTerms; ++i) {
    for (size_t j = 0; j < kTerms; ++j)
      products_[i][j] = products_[i][j] * kDecay + x[i] * x[j] / (time * time);
    sums_[i] = sums_[i] * kDecay + x[i] / time;
  }
  Solve();
}

// In units of the first costs, so that being drawn to them means being drawn to 1.
void DraftCostModel::Solve() {
  const Terms first = {1, first_.row, first_.more_row, first_.pass, first_.pass_row};
  std::array<Terms, kTerms> a;
  Terms b;
  for (size_t i = 0; i < kTerms; ++i) {
    const double scale = unit_ * first[i];
    for (size_t j = 0; j < kTerms; ++j) a[i][j] = products_[i][j] * scale * unit_ * first[j];
    a[i][i] += kTrust;
    b[i] = sums_[i] * scale + kTrust;
  }
  // Symmetric and positive: elimination needs no pivots.
  for (size_t k = 0; k < kTerms; ++k) {
    for (size_t i = k + 1; i < kTerms; ++i) {
      const double f = a[i][k] / a[k][k];
      for (size_t j = k; j < kTerms; ++j) a[i][j] -= f * a[k][j];
      b[i] -= f * b[k];
    }
  }
  for (size_t k = kTerms; k-- > 0;) {
    for (size_t j = k + 1; j < kTerms; ++j) b[k] -= a[k][j] * b[j];
    b[k] /= a[k][k];
  }
  for (double& v : b) v = std::clamp(v, kLeast, kMost);
  cost_.row = first_.row * b[1] / b[0];
  cost_.more_row = first_.more_row * b[2] / b[0];
  cost_.pass = first_.pass * b[3] / b[0];
  cost_.pass_row = first_.pass_row * b[4] / b[0];
}

}  // namespace sluice
