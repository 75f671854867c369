// Steps without a request, run at start on a device with memory of its own, so that no later step is the
// first of its shape: kernels are loaded, what they keep is made, and small batches are recorded.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "exec/model_runner.h"

namespace sluice {

// What steps may bring, over all ranks.
struct WarmUpLimits {
  int64_t max_rows = 0;     // of one step
  int64_t max_seqs = 0;     // that run at once, at most half of the runner's slots
  int64_t max_context = 0;  // tokens of one sequence
  int32_t drafts = 0;       // drafted tokens of a sequence and step
};

struct WarmUpReport {
  int64_t steps = 0, most_rows = 0, longest_context = 0;
  int64_t verify_steps = 0, draft_passes = 0;
  int64_t device_bytes = 0;  // that it has left less free: recorded launches and what kernels keep
  double seconds = 0;
  std::string ToString() const;
};

// The numbers of rows that are run: 1, 2, 4, ... and `most` itself.
std::vector<int64_t> WarmUpRows(int64_t most);

// Prompts of those rows of the limits and decoding batches of those sequences, each at the start of a context
// and at its end (as far as the pool reaches); with drafts also every number of verified rows, and the draft
// layer's passes. Rows are sampled as requests ask: greedy, drawn, filtered, with logprobs. They go through
// the runner as any step does, over all of its ranks. REQUIRES that no page is in use; their contents are
// lost. From here on steps are checked where the backend does.
StatusOr<WarmUpReport> WarmUp(ModelRunner& runner, const DevicePool& pool, const WarmUpLimits& limits,
                              const Clock* clock);

}  // namespace sluice
