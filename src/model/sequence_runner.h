// One sequence stepped through the model in place: no scheduler, no cache tree, its own small pool. For
// `sluice run`, the goldens and benches of the model alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kv/device_pool.h"
#include "model/model.h"

namespace sluice {

struct RunnerOptions {
  int64_t max_context = 0;
  int64_t chunk = 512;  // rows of one forward at most
  DType latent_dtype = DType::kF32;
  DType index_dtype = DType::kF32;
  int threads = 1;
};

class SequenceRunner {
 public:
  // Model and backend must outlive the runner.
  static StatusOr<std::unique_ptr<SequenceRunner>> Make(const Model& model, ops::Backend& backend,
                                                        const RunnerOptions& options);

  // Appends tokens (at least one) to the sequence, chunk by chunk. The logits of the last `keep` of them are
  // returned as [keep, vocab], oldest first.
  // With a draft layer its rows are filled too, and `draft` (if given) gets the drafting logits of the same
  // positions: the row of position p drafts the token at p + 1. Position 0 has no draft row and is left out.
  StatusOr<std::vector<float>> Extend(std::span<const int32_t> tokens, int64_t keep,
                                      std::vector<float>* draft = nullptr);
  void Reset() { length_ = 0; }

  int64_t length() const { return length_; }
  ForwardOptions& forward_options() { return forward_; }
  const DevicePool& pool() const { return *pool_; }
  ModelBuffers& buffers() { return *buffers_; }
  ops::Queue& queue() { return *queue_; }

 private:
  explicit SequenceRunner(const Model& model, const RunnerOptions& options)
      : model_(model), options_(options), tables_(options.chunk, 1) {}

  Status RunDraft(const ForwardBatch& batch, const std::vector<int32_t>& wanted, std::vector<float>* draft);

  const Model& model_;
  RunnerOptions options_;
  BatchTables tables_;
  std::unique_ptr<ops::Queue> queue_;
  std::unique_ptr<DevicePool> pool_;
  std::unique_ptr<ModelBuffers> buffers_;
  ForwardOptions forward_;
  int64_t length_ = 0;
  std::vector<float>
      hidden_;  // [chunk + 1, hidden]: the state before the chunk's first row, then those of the chunk
};

// Lowest id among the largest values.
int32_t GreedyToken(std::span<const float> logits);

}  // namespace sluice
