// Whether the sequences of a step draft, and from which chance to stand on a draft is worth its time: what
// gives the most tokens for the time, given how often drafts have stood and how many sequences the step has.
// How many are made for a sequence follows draft by draft from that (exec/drafter.h). A pure function of what
// it has been told: the same steps in the same order give the same answers.
#pragma once

#include <array>
#include <cstdint>

#include "schedule/draft_counters.h"

namespace sluice {

// Time relative to a forward of one row. A row that shares its step with others costs less than a step of its
// own, because the weights are read once; behind the first few the arithmetic of each shows in full.
struct DraftCost {
  double row = 0.3;  // one more row of the model
  int64_t few_rows = 4;
  double more_row = 0.4;   // one more behind few_rows
  double pass = 0.19;      // one pass of the draft layer and head, its first row included
  double pass_row = 0.06;  // one more row of it
};

class DraftControl {
 public:
  // adaptive false: always `most`.
  DraftControl(int32_t most, bool adaptive, const DraftCost& cost)
      : most_(most), adaptive_(adaptive), cost_(cost) {}

  // `planned` tokens were to be drafted, `verified` of them got a row, and the first `stood` were right.
  void Observe(int32_t planned, int32_t verified, int32_t stood);
  // Decides for a step of so many decoding sequences; 0: no drafts.
  void BeginStep(int64_t sequences);
  int32_t drafts() const { return drafts_; }
  // Chances to stand from which on a draft is worth its row, and from which on it is worth another one behind
  // it (ForwardBatch::draft_keep and draft_on). 0 where the length is fixed.
  double keep() const { return keep_; }
  double go_on() const { return go_on_; }

  // Tokens for the time with k drafts, in units of plain one-row steps.
  double Worth(int32_t k, int64_t sequences) const;

 private:
  struct Place {
    double proposed = 1, stood = 0.9;  // decayed; the first drafts are taken on trust
    double planned = 1, verified = 1;  // decayed; where the place before was verified
  };
  double Rows(double rows) const;  // time of a forward
  const int32_t most_;
  const bool adaptive_;
  const DraftCost cost_;
  std::array<Place, kMaxDraftTokens> places_{};  // each given that all before it stood
  int32_t drafts_ = 0;
  double keep_ = 0, go_on_ = 0;
  int64_t idle_steps_ = 0;  // since drafts were last made
};

}  // namespace sluice
