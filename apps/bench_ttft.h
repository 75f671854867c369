// Time to the first token of the same prompt cold, from the device tier and from the host tier, in one
// engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/server_config.h"
#include "engine_setup.h"

namespace sluice {

struct TtftRow {
  std::string from;  // cold, warm, l2, l2 nearly full
  int64_t prompt_tokens = 0, cached_tokens = 0;
  double ms = 0;     // median
  double ratio = 0;  // of the cold median; the median over rounds of the ratio within a round
  int64_t deficit_evictions = 0;
};

// Each round takes a new random prompt: computed from nothing, asked again, asked again after the device tier
// was emptied, and once more after that with so many other pages in the device tier that the load just fits.
StatusOr<std::vector<TtftRow>> MeasureTtft(ServerConfig config, std::shared_ptr<LoadedModel> model,
                                           int64_t prompt_tokens, int64_t rounds);

}  // namespace sluice
