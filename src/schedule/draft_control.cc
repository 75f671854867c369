#include "schedule/draft_control.h"

#include <algorithm>

namespace sluice {
namespace {
constexpr double kDecay = 0.98;         // of what is known about a place, per observation
constexpr double kSurplus = 1.3;        // a further pass is time spent before its gain is known
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

void DraftControl::ObserveWork(const StepWork& work) {
  cost_.Observe(work);
  if (work.drafting == 0) return;
  double expected = 0, reached = 1;
  // A step that tries one draft tells nothing of the passes for further ones.
  const int32_t planned = work.draft_most > 0 ? std::min(most_, work.draft_most) : most_;
  for (int32_t i = 0; i < planned; ++i) {
    expected += reached;
    reached *= places_[size_t(i)].verified / places_[size_t(i)].planned;
  }
  passes_seen_ = passes_seen_ * kDecay + double(work.draft_rows) / work.drafting;
  passes_expected_ = passes_expected_ * kDecay + expected;
}

double DraftControl::Worth(int32_t k, int64_t sequences) const {
  const DraftCost& cost = cost_.cost();
  const auto s = double(sequences);
  double tokens = 1, rows = 1, passes = 0;
  double reached = 1, all = 1;  // a draft at this place is verified; it and all before it stand
  for (int32_t i = 0; i < k; ++i) {
    const Place& p = places_[size_t(i)];
    passes += reached * (cost.pass + (s - 1) * cost.pass_row);
    reached *= p.verified / p.planned;
    all *= p.verified / p.planned * p.stood / p.proposed;
    rows += reached;
    tokens += all;
  }
  return s * tokens / (cost.Rows(s * rows) + passes * passes_seen_ / passes_expected_);
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
  const DraftCost& cost = cost_.cost();
  const auto s = double(sequences);
  const double row = s * (1 + drafts_) > double(cost.few_rows) ? cost.more_row : cost.row;
  keep_ = best * row;
  another_pass_ = kSurplus * best * (cost.pass + (s - 1) * cost.pass_row) / s;
  idle_steps_ = drafts_ > 0 ? 0 : idle_steps_ + 1;
  if (idle_steps_ >= kProbeSteps && sequences <= kProbeSequences) {
    drafts_ = std::min(most_, 1);
    idle_steps_ = 0;
  }
}

}  // namespace sluice
