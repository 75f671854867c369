#include "schedule/draft_control.h"

#include <algorithm>

namespace sluice {
namespace {
constexpr double kDecay = 0.98;         // of what is known about a place, per observation
constexpr int64_t kProbeSteps = 128;    // without drafts nothing is learned: one is tried now and then
constexpr int64_t kProbeSequences = 4;  // where a try costs little
}  // namespace

void DraftControl::Observe(int32_t drafts, int32_t stood) {
  for (int32_t i = 0; i < drafts && i <= stood; ++i) {
    Place& p = places_[size_t(i)];
    p.proposed = p.proposed * kDecay + 1;
    p.stood = p.stood * kDecay + (i < stood ? 1 : 0);
  }
}

double DraftControl::Worth(int32_t k, int64_t sequences) const {
  const auto s = double(sequences);
  double tokens = 1, chance = 1;
  for (int32_t i = 0; i < k; ++i) {
    chance *= places_[size_t(i)].stood / places_[size_t(i)].proposed;
    tokens += chance;
  }
  const double rows = s * (1 + k);
  const double time = 1 + (rows - 1) * cost_.row + k * (cost_.pass + (s - 1) * cost_.pass_row);
  return s * tokens / time;
}

void DraftControl::BeginStep(int64_t sequences) {
  drafts_ = most_;
  if (!adaptive_) return;
  sequences = std::max<int64_t>(1, sequences);
  double best = Worth(0, sequences);
  drafts_ = 0;
  for (int32_t k = 1; k <= most_; ++k) {
    const double worth = Worth(k, sequences);
    if (worth <= best) continue;
    best = worth;
    drafts_ = k;
  }
  idle_steps_ = drafts_ > 0 ? 0 : idle_steps_ + 1;
  if (idle_steps_ >= kProbeSteps && sequences <= kProbeSequences) {
    drafts_ = std::min(most_, 1);
    idle_steps_ = 0;
  }
}

}  // namespace sluice
