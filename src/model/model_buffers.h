// All working memory of a forward pass, planned once from limits. A forward allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "config/model_config.h"
#include "model/model_batch.h"
#include "ops/backend.h"

namespace sluice {

struct ModelLimits {
  int64_t max_rows = 0;         // rows of one batch
  int64_t max_seqs = 0;         // sequences of one batch
  int64_t max_logits_rows = 0;  // rows of one Logits call
  int64_t max_context = 0;      // largest position + 1
};

// What a backend plans its scratch from.
ops::Limits OpLimits(const ModelConfig& config, const ModelLimits& limits);

// One rank's buffers; used by one forward at a time. Row buffers hold Backend::RowCapacity(max_rows) rows.
// What only the attention half of a layer uses shares memory with what only the MLP half uses.
class ModelBuffers {
 public:
  static StatusOr<std::unique_ptr<ModelBuffers>> Make(const ModelConfig& config, ops::Backend& backend,
                                                      const ModelLimits& limits);

  const ModelLimits& limits() const { return limits_; }
  int64_t bytes() const { return int64_t(arena_bytes_) + int64_t(rope_.size() * sizeof(float)); }
  ops::RopeTable rope() const;

  // The batch's tables where the backend's ops read them: the batch itself, or a copy made in the queue's
  // order.
  ModelBatch Place(ops::Queue& queue, const ModelBatch& batch);
  // Ahead of Place, on another thread than the forward's: puts the tables of a batch whose tokens are not
  // known where they are uploaded from. There are two places, and what one holds lasts until its forward is
  // done. Not on a device: nothing is to do.
  static constexpr int32_t kStages = 2;
  void Stage(int32_t place, ModelBatch* batch);
  // Row indices likewise; at most a batch's rows.
  const int32_t* PlaceRows(ops::Queue& queue, std::span<const int32_t> rows);
  bool on_device() const { return memory_ != nullptr; }

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
  // On a device with memory of its own: what the host reads of a forward once the queue was synchronised.
  float* host_logits = nullptr;    // [logits_rows, vocab]
  int32_t* host_finite = nullptr;  // [rows] 0: the residual row holds a NaN or an infinity
  std::vector<int32_t> host_selected, host_selected_count;  // for a hook that wants them
  // draft layer: its input [embedding | hidden] and the target's normed hidden
  void* draft_in = nullptr;  // [rows, 2 * hidden] Act
  // Of a device with memory of its own: states that the draft layer makes or takes. In a forward's place, so
  // they last from a norm to the draft pass that reads them.
  float* draft_hidden = nullptr;  // [rows, hidden]
  // There, too, in memory that host and device share: what is asked of rows of logits, and the answers.
  RowRequest* requests = nullptr;      // [logits_rows]
  ReducedRow* reduced = nullptr;       // [logits_rows]
  RowCandidate* candidates = nullptr;  // [logits_rows, kMostCandidates]

 private:
  ModelBuffers() = default;
  void FillRope(const ModelConfig& config);
  // Writes the tables side by side to `host`, tokens first and as long as there are any; *placed gets their
  // addresses on the device. The number of words.
  int64_t Arrange(const ModelBatch& batch, int32_t* host, ModelBatch* placed) const;
  ModelLimits limits_;
  std::byte* arena_ = nullptr;
  size_t arena_bytes_ = 0;
  std::shared_ptr<void> arena_owner_;
  DeviceMemory* memory_ = nullptr;
  std::shared_ptr<std::byte> rope_memory_, table_memory_, host_logits_memory_, host_finite_memory_,
      reduced_memory_, stage_memory_;
  int64_t table_words_ = 0;
  std::vector<int32_t> staging_;  // tables of one batch, side by side
  struct Staged {
    ModelBatch batch;
    int64_t words = 0;
  };
  std::array<Staged, kStages> stages_;
  std::vector<float> rope_;  // cos then sin, [max_context, rope / 2] each
  int64_t rope_half_ = 0;
};

}  // namespace sluice
