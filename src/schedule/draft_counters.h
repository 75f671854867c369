// What became of drafted tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice {

constexpr int32_t kMaxDraftTokens = 16;

// One verification step of one sequence is one run. Place i counts the drafts i + 1 tokens ahead.
struct DraftCounters {
  int64_t runs = 0, proposed = 0, accepted = 0;  // accepted: tokens kept besides the sampled one
  // reached: those before it stood, so that it was decided whether it does.
  std::array<int64_t, kMaxDraftTokens> proposed_at{}, reached_at{}, accepted_at{};
  std::array<int64_t, kMaxDraftTokens + 1> runs_by_accepted{};

  // stood: drafts that were what was sampled; kept: those that the answer holds (it may end inside the run).
  void Add(int32_t drafts, int32_t stood, int32_t kept) {
    ++runs;
    proposed += drafts;
    accepted += kept;
    ++runs_by_accepted[std::size_t(kept)];
    for (int32_t i = 0; i < drafts; ++i) ++proposed_at[std::size_t(i)];
    for (int32_t i = 0; i < drafts && i <= stood; ++i) ++reached_at[std::size_t(i)];
    for (int32_t i = 0; i < stood; ++i) ++accepted_at[std::size_t(i)];
  }
  // What came after `before` was read of the same engine.
  DraftCounters Since(const DraftCounters& before) const {
    DraftCounters d = *this;
    d.runs -= before.runs;
    d.proposed -= before.proposed;
    d.accepted -= before.accepted;
    for (std::size_t i = 0; i < proposed_at.size(); ++i) {
      d.proposed_at[i] -= before.proposed_at[i];
      d.reached_at[i] -= before.reached_at[i];
      d.accepted_at[i] -= before.accepted_at[i];
    }
    for (std::size_t i = 0; i < runs_by_accepted.size(); ++i)
      d.runs_by_accepted[i] -= before.runs_by_accepted[i];
    return d;
  }
};

}  // namespace sluice
