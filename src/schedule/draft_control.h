// How many tokens to draft for each sequence of a step: as many as give the most tokens for the time, given
// how often drafts have stood and how many sequences the step has. A pure function of what it has been told:
// the same steps in the same order give the same answers.
#pragma once

#include <array>
#include <cstdint>

#include "schedule/draft_counters.h"

namespace sluice {

// Time relative to a forward of one row. A row that shares its step with others costs less than a step of its
// own, because the weights are read once.
struct DraftCost {
  double row = 0.3;        // one more row of the model
  double pass = 0.15;      // one pass of the draft layer and head, its first row included
  double pass_row = 0.05;  // one more row of it
};

class DraftControl {
 public:
  // adaptive false: always `most`.
  DraftControl(int32_t most, bool adaptive, const DraftCost& cost)
      : most_(most), adaptive_(adaptive), cost_(cost) {}

  // A run of `drafts` was verified, of which the first `stood` were right.
  void Observe(int32_t drafts, int32_t stood);
  // Decides for a step of so many decoding sequences; 0: no drafts.
  void BeginStep(int64_t sequences);
  int32_t drafts() const { return drafts_; }

  // Tokens for the time with k drafts, in units of plain one-row steps.
  double Worth(int32_t k, int64_t sequences) const;

 private:
  struct Place {
    double proposed = 1, stood = 0.9;  // decayed; the first drafts are taken on trust
  };
  const int32_t most_;
  const bool adaptive_;
  const DraftCost cost_;
  std::array<Place, kMaxDraftTokens> places_{};  // each given that all before it stood
  int32_t drafts_ = 0;
  int64_t idle_steps_ = 0;  // since drafts were last made
};

}  // namespace sluice
