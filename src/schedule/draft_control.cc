#include "schedule/draft_control.h"

#include <algorithm>

namespace sluice {
namespace {
constexpr double kDecay = 0.98;         // of what is known about a place, per observation
constexpr int64_t kProbeSteps = 128;    // without drafts nothing is learned: one is tried now and then
constexpr int64_t kProbeSequences = 4;  // where a try costs little
}  // namespace

void DraftControl::Observe(int32_t planned, int32_t verified, int32_t stood) {
  for (int32_t i = 0; i < planned && i <= verified; ++i) {
    Place& p = places_[size_t(i)];
    p.planned = p.planned * kDecay + 1;
    p.verified = p.verified * kDecay + (i < verified ? 1 : 0);
  }
  for (int32_t i = 0; i < verified && i <= stood; ++i) {
    Place& p = places_[size_t(i)];
    p.proposed = p.proposed * kDecay + 1;
    p.stood = p.stood * kDecay + (i < stood ? 1 : 0);
  }
}

double DraftControl::Rows(double rows) const {
  const auto few = double(cost_.few_rows);
  return 1 + (std::min(rows, few) - 1) * cost_.row + std::max(0.0, rows - few) * cost_.more_row;
}

double DraftControl::Worth(int32_t k, int64_t sequences) const {
  const auto s = double(sequences);
  double tokens = 1, rows = 1, passes = 0;
  double reached = 1, all = 1;  // a draft at this place is verified; it and all before it stand
  for (int32_t i = 0; i < k; ++i) {
    const Place& p = places_[size_t(i)];
    passes += reached * (cost_.pass + (s - 1) * cost_.pass_row);
    reached *= p.verified / p.planned;
    all *= p.verified / p.planned * p.stood / p.proposed;
    rows += reached;
    tokens += all;
  }
  return s * tokens / (Rows(s * rows) + passes);
}

void DraftControl::BeginStep(int64_t sequences) {
  drafts_ = most_;
  if (!adaptive_) return;
  sequences = std::max<int64_t>(1, sequences);
  double best = Worth(0, sequences);
  drafts_ = 0;
  // How many of them are made and get a row is decided draft by draft.
  if (const double worth = Worth(most_, sequences); worth > best) {
    best = worth;
    drafts_ = most_;
  }
  // More time is well spent where it gives tokens at the rate of the step as a whole.
  const auto s = double(sequences);
  const double row = s * (1 + drafts_) > double(cost_.few_rows) ? cost_.more_row : cost_.row;
  keep_ = best * row;
  go_on_ = best * (row + (cost_.pass + (s - 1) * cost_.pass_row) / s);
  idle_steps_ = drafts_ > 0 ? 0 : idle_steps_ + 1;
  if (idle_steps_ >= kProbeSteps && sequences <= kProbeSequences) {
    drafts_ = std::min(most_, 1);
    idle_steps_ = 0;
  }
}

}  // namespace sluice
