// Decode speed of a whole engine (scheduler, cache, executor, sampling), and on a device with memory of its
// own how long it has nothing to do between two steps.
#pragma once

#include <memory>
#include <vector>

#include "config/server_config.h"
#include "engine_setup.h"

namespace sluice {

struct EngineDecodeRow {
  int64_t step_depth = 0;  // steps planned ahead: 0 or 1
  int64_t batch = 0, context = 0, steps = 0;
  double step_ms = 0, tokens_per_s = 0;
  double host_gap = -1;  // share of the time in which the device had no work; < 0: not known
};

// For one step at a time and for steps that are planned and prepared while the one before them runs, and each
// batch: that many requests with one prompt of `context` tokens (but for its end) decode at once,
// greedily; measured while all of them run.
StatusOr<std::vector<EngineDecodeRow>> MeasureEngineDecode(ServerConfig config,
                                                           std::shared_ptr<LoadedModel> model,
                                                           const std::vector<int64_t>& batches,
                                                           int64_t context);

}  // namespace sluice
