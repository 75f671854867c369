// All working memory of a forward pass, planned once from limits. A forward allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "config/model_config.h"
#include "ops/backend.h"

namespace sluice {

struct ModelLimits {
  int64_t max_rows = 0;         // rows of one batch
  int64_t max_seqs = 0;         // sequences of one batch
  int64_t max_logits_rows = 0;  // rows of one Logits call
  int64_t max_context = 0;      // largest position + 1
};

// One rank's buffers; used by one forward at a time. Row buffers hold Backend::RowCapacity(max_rows) rows.
// What only the attention half of a layer uses shares memory with what only the MLP half uses.
class ModelBuffers {
 public:
  static StatusOr<std::unique_ptr<ModelBuffers>> Make(const ModelConfig& config, const ops::Backend& backend,
                                                      const ModelLimits& limits);

  const ModelLimits& limits() const { return limits_; }
  int64_t bytes() const { return int64_t(arena_bytes_) + int64_t(rope_.size() * sizeof(float)); }
  ops::RopeTable rope() const;

  float* x = nullptr;  // [rows, hidden] residual stream
  void* h = nullptr;   // [rows, hidden] Act, normed
  // attention half
  float* in_proj = nullptr;    // [rows, q_lora + latent + index_dim]
  void* q_latent = nullptr;    // [rows, q_lora] Act
  float* q = nullptr;          // [rows, heads, nope + rope]
  void* q_nope = nullptr;      // [rows, heads, nope] Act
  void* q_full = nullptr;      // [rows, heads, kv_lora + rope] Act
  float* index_q = nullptr;    // [rows, index_heads, index_dim]
  float* index_w = nullptr;    // [rows, index_heads]
  void* latent_out = nullptr;  // [rows, heads, kv_lora] Act
  void* head_out = nullptr;    // [rows, heads, v_head] Act
  // MLP half
  float* router_in = nullptr;  // [rows, hidden]
  float* gate_up = nullptr;    // [rows, 2 * intermediate] of a dense MLP or the shared experts
  void* mlp_act = nullptr;     // [rows, intermediate] Act
  int32_t* expert = nullptr;   // [rows, experts_per_token]
  float* expert_weight = nullptr;
  // carried from layer to layer
  int32_t* selected = nullptr;        // [rows, topk]
  int32_t* selected_count = nullptr;  // [rows]
  // logits
  float* logits_x = nullptr;  // [logits_rows, hidden]
  void* logits_h = nullptr;   // [logits_rows, hidden] Act
  float* logits = nullptr;    // [logits_rows, vocab]
  // draft layer: its input [embedding | hidden] and the target's normed hidden
  void* draft_in = nullptr;  // [rows, 2 * hidden] Act

 private:
  ModelBuffers() = default;
  ModelLimits limits_;
  std::byte* arena_ = nullptr;
  size_t arena_bytes_ = 0;
  std::shared_ptr<void> arena_owner_;
  std::vector<float> rope_;  // cos then sin, [max_context, rope / 2] each
  int64_t rope_half_ = 0;
};

}  // namespace sluice
