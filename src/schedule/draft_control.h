// How many tokens the sequences of a step draft, and from which chance to stand on a draft is worth its time:
// what gives the most tokens for the time, given how often drafts have stood, how many sequences the step has
// and what rows and passes cost.
// How many of them are made for a sequence follows draft by draft from that (exec/drafter.h). A pure function
// of what it has been told: the same steps in the same order give the same answers.
#pragma once

#include <array>
#include <cstdint>

#include "schedule/draft_cost.h"
#include "schedule/draft_counters.h"

namespace sluice {

class DraftControl {
 public:
  // adaptive false: always `most`.
  DraftControl(int32_t most, bool adaptive, const DraftCost& cost)
      : most_(most), adaptive_(adaptive), cost_(cost) {}

  const DraftCost& cost() const { return cost_.cost(); }

  // `planned` tokens were to be drafted, `verified` of them got a row, and the first `stood` were right.
  void Observe(int32_t planned, int32_t verified, int32_t stood);
  // What a step did and has taken.
  void ObserveWork(const StepWork& work);
  // Decides for a step of so many decoding sequences; 0: no drafts.
  void BeginStep(int64_t sequences);
  int32_t drafts() const { return drafts_; }
  // The chance to stand from which on a draft is worth its row, and what a pass that makes another one must
  // bring beyond that (ForwardBatch::draft_keep and draft_pass). 0 where the length is fixed.
  double keep() const { return keep_; }
  double another_pass() const { return another_pass_; }

  // Tokens for the time with k drafts, in units of plain one-row steps.
  double Worth(int32_t k, int64_t sequences) const;

 private:
  struct Place {
    double proposed = 1, stood = 0.9;  // decayed; the first drafts are taken on trust
    double planned = 1, verified = 1;  // decayed; where the place before was verified
  };
  const int32_t most_;
  const bool adaptive_;
  DraftCostModel cost_;
  std::array<Place, kMaxDraftTokens> places_{};   // each given that all before it stood
  double passes_seen_ = 1, passes_expected_ = 1;  // decayed; behind drafts that stood not all are made
  int32_t drafts_ = 0;
  double keep_ = 0, another_pass_ = 0;
  int64_t idle_steps_ = 0;  // since drafts were last made
};

}  // namespace sluice
