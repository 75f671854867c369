// Row spaces of a context-parallel forward. None converts into another, nor from a plain integer without
// naming it; a function that takes the wrong one does not compile.
//
//   RequestRow  token index inside one request's new tokens
//   GlobalRow   token index in the flattened batch (request after request, no padding)
//   ComputeRow  row of one rank's padded buffers; dummy rows lie between valid ones, one run per request and
//   segment ValidRow    row of one rank's buffers after the dummy rows are taken out (same order) GatheredRow
//   row of the all-gathered compute buffers: rank * rows_per_rank + ComputeRow
#pragma once

#include "base/ids.h"

namespace sluice::cp {

using RequestRow = Id<struct RequestRowTag>;
using GlobalRow = Id<struct GlobalRowTag>;
using ComputeRow = Id<struct ComputeRowTag>;
using ValidRow = Id<struct ValidRowTag>;
using GatheredRow = Id<struct GatheredRowTag>;

}  // namespace sluice::cp
