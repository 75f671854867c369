// Hidden states, one a row, with the row space they are in as part of their type: a rank's own rows before
// anything is gathered, or the rows of the whole batch. Which one a caller has is never read off a length,
// and none converts into the other; taking a rank's rows out of the batch's is a copy that somebody writes
// down.
#pragma once

#include <cstdint>

#include "cp/row_spaces.h"

namespace sluice {

template <typename Row>
class HiddenRows {
 public:
  HiddenRows() = default;
  // data: [rows, width], outlives this view.
  HiddenRows(const float* data, int64_t rows, int64_t width) : data_(data), rows_(rows), width_(width) {}
  const float* data() const { return data_; }
  int64_t rows() const { return rows_; }
  int64_t width() const { return width_; }
  const float* at(Row row) const { return data_ + int64_t(row.value) * width_; }

 private:
  const float* data_ = nullptr;
  int64_t rows_ = 0, width_ = 0;
};

using RankHidden = HiddenRows<cp::ValidRow>;    // CP-local: one rank's rows, in its order
using BatchHidden = HiddenRows<cp::GlobalRow>;  // global: the batch's rows

}  // namespace sluice
