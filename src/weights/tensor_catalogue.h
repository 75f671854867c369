// The tensors that a model of a given config has, by name and shape: what is looked for in a checkpoint, and
// what dummy weights are made of. Source: the Hugging Face names of the DeepSeek and GLM families.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "config/model_config.h"

namespace sluice {

enum class TensorRole : uint8_t {
  kLinear,       // [out, in]; may be block FP8
  kUnquantized,  // [out, in] embedding, head, router, weights_proj, eh_proj; never FP8
  kNorm,         // [dim]
  kBias,         // [dim] k_norm.bias and the router's correction bias
};

struct ExpectedTensor {
  std::string name;
  TensorRole role{};
  std::vector<int64_t> shape;
  LogicalLayer layer;  // invalid: outside the layers
  bool indexer = false;
};

// "model.layers.7.self_attn." and so on.
std::string LayerPrefix(LogicalLayer layer);
inline constexpr std::string_view kIndexerInfix = "self_attn.indexer.";

// All tensors of the model proper, and of the draft layer when asked for (its copies of embedding and head
// excluded).
std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config, bool with_draft);

}  // namespace sluice
