// What rows and passes of the draft layer cost, learned from the times of the steps that ran. Times are
// inputs: the same steps with the same times in the same order give the same costs, and without times the
// costs stay as they were given.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "batch/forward_batch.h"

namespace sluice {

// Time relative to a forward of one row. A row that shares its step with others costs less than a step of its
// own, because the weights are read once; behind the first few the arithmetic of each shows in full.
struct DraftCost {
  double row = 0.3;  // one more row of the model
  int64_t few_rows = 4;
  double more_row = 0.4;   // one more behind few_rows
  double pass = 0.19;      // one pass of the draft layer and head, its first row included
  double pass_row = 0.06;  // one more row of it

  // Of a forward of so many rows.
  double Rows(double rows) const {
    const auto few = double(few_rows);
    return 1 + ((rows < few ? rows : few) - 1) * row + (rows > few ? rows - few : 0) * more_row;
  }
};

// Least squares of the relative errors over the last few hundred steps, drawn to the costs given at first as
// far as steps of one kind only leave them open.
class DraftCostModel {
 public:
  explicit DraftCostModel(const DraftCost& first) : first_(first), cost_(first) {}

  // Steps without a time, or with other work than decoding, are not looked at.
  void Observe(const StepWork& work);
  const DraftCost& cost() const { return cost_; }

 private:
  static constexpr size_t kTerms = 5;  // first row, a row, a row behind few, a pass, a row of a pass
  using Terms = std::array<double, kTerms>;
  Terms Of(const StepWork& work) const;
  void Solve();

  DraftCost first_;
  DraftCost cost_;
  std::array<Terms, kTerms> products_{};  // decayed sums of terms[i] * terms[j] / time^2
  Terms sums_{};                          // and of terms[i] / time
  double steps_ = 0, unit_ = 0;           // decayed; mean time of one row
  int64_t ignored_ = 0;                   // in a row
};

}  // namespace sluice
