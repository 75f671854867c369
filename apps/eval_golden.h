// `sluice eval MODEL --golden DIR`: a model against stored outputs of an independent implementation.
#pragma once

#include <string>

#include "base/status.h"
#include "config/server_config.h"

namespace sluice {

// Prints a table, or writes one JSON document to `json` ("-": standard output). Exit code 1 when a figure is
// outside its bound: with float32 logits within 2e-4 and equal greedy tokens and top-k sets, else the same
// greedy token at >= 99% of the positions with a clear margin.
StatusOr<int> RunGolden(const ServerConfig& config, const std::string& folder, const std::string& json);

}  // namespace sluice
