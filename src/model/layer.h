// The packed weights of one decoder layer. Private to model/.
#pragma once

#include <memory>
#include <vector>

#include "model/model.h"

namespace sluice {

struct Model::Layer {
  LogicalLayer id;
  bool moe = false, computes_index = false;
  ops::Constant input_norm, post_norm;        // [hidden]
  ops::Constant q_latent_norm;                // [q_lora]
  ops::Constant kv_latent_norm;               // [kv_lora]
  ops::Constant index_norm, index_norm_bias;  // [index_dim]

  // Products of the normed input, side by side in in_proj: [q latent | latent row | index key]. One matrix
  // where all parts are stored alike.
  struct InPart {
    std::unique_ptr<ops::Linear> weight;
    int64_t column = 0;
  };
  std::vector<InPart> in;
  std::unique_ptr<ops::Linear> q;                 // from the latent, or from the normed input without one
  std::unique_ptr<ops::Linear> index_q, index_w;  // full layers
  std::unique_ptr<ops::Linear> fold, unfold;      // per head: nope -> kv_lora, kv_lora -> v
  std::unique_ptr<ops::Linear> out;
  std::unique_ptr<ops::Linear> gate_up, down;  // dense MLP or shared experts; null: no shared expert
  ops::Constant router, router_bias;           // [experts, hidden], [experts]
  std::unique_ptr<ops::Linear> experts_gate_up, experts_down;
};

struct Model::Draft {
  ops::Constant embedding_norm, hidden_norm, head_norm;
  std::unique_ptr<ops::Linear> combine;  // [hidden, 2 * hidden]
  std::unique_ptr<Layer> layer;
};

}  // namespace sluice
