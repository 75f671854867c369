// How many weights a model of this shape has and which of them a rank holds, for capacity planning.
#pragma once

#include <cstdint>

#include "config/model_config.h"

namespace sluice {

struct ParameterCount {
  int64_t embedding = 0;  // embedding and head
  int64_t attention = 0;  // all layers, indexers of the layers that compute included
  int64_t dense_mlp = 0;  // dense layers and shared experts, gates
  int64_t routed_experts = 0;
  int64_t draft = 0;          // the MTP layer, its experts included
  int64_t draft_experts = 0;  // of it, routed experts
  int64_t total() const { return embedding + attention + dense_mlp + routed_experts + draft; }
};

ParameterCount CountParameters(const ModelConfig& model);

// Weights that one rank keeps when experts are spread over ep ranks and all else is replicated (context
// parallelism).
int64_t ParametersPerRank(const ParameterCount& count, int64_t ep, bool with_draft);

}  // namespace sluice
