// Steps without a request, run at start on a device with memory of its own, so that no later step is the
// first of its shape: kernels are loaded, what they keep is made, and small batches are recorded.
#pragma once

#include <string>

#include "base/clock.h"
#include "exec/rank_group.h"

namespace sluice {

struct WarmUpReport {
  int64_t steps = 0, most_rows = 0, longest_context = 0;
  double seconds = 0;
  std::string ToString() const;
};

// The numbers of rows that are run: 1, 2, 4, ... and `most` itself.
std::vector<int64_t> WarmUpRows(int64_t most);

// Prompts of those rows of the limits and decoding batches of those sequences, each at the start of a context
// and at its end. Rows go to the pool's scratch pages. From here on steps are checked where the backend does.
StatusOr<WarmUpReport> WarmUp(RankGroup& ranks, const DevicePool& pool, const ModelLimits& limits,
                              const Clock* clock);

}  // namespace sluice
