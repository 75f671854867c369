// The layer loop of all supported families: packed weights and one forward pass over a batch.
//
// MLA runs in one arithmetic form in every phase (absorbed): the query is folded into the latent space per
// head, attention reads latent rows, the result is unfolded per head. Rows are written to the pool first and
// read back from it, so a row that was cached and one that was just computed are the same bytes.
//
// Read-only after Load: several ranks may run Forward at once, each with its own queue, buffers and pool.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "batch/hidden_rows.h"
#include "config/model_config.h"
#include "kv/device_pool.h"
#include "model/model_batch.h"
#include "model/model_buffers.h"
#include "model/step_timer.h"
#include "ops/backend.h"
#include "weights/checkpoint.h"

namespace sluice {

// Called on the forward's thread; must return at once unless it has to wait.
class LayerHooks {
 public:
  virtual ~LayerHooks() = default;
  // Before the first read of the layer's KV: returns when rows that are being loaded from another tier have
  // arrived.
  virtual void WaitReadable(LogicalLayer) {}
  // The layer's KV is final: this batch's rows are written and its loaded pages have arrived.
  virtual void LayerFinal(LogicalLayer) {}
  // In the place of the backend's Moe; false: it has done nothing. Rows of every rank when experts are
  // spread.
  virtual bool RunExperts(ops::Queue&, const ops::MoeArgs&) { return false; }
  // Blocks that the layer's ops address beside the pool's pages.
  virtual ops::OwnBlocks Own(KvComponent, LogicalLayer) { return {}; }
  // Attention is about to read the latent rows of these positions: [rows, topk] ascending, -1 padded; null:
  // all that each row sees. In host memory; not called for a device with memory of its own.
  virtual void BeforeAttention(LogicalLayer, const int32_t* /*selected*/, const int32_t* /*count*/) {}
  // After a layer has chosen its own set. selected: [rows, topk] ascending, -1 padded.
  virtual void IndexSelected(LogicalLayer, const int32_t* /*selected*/, const int32_t* /*count*/) {}
  // The same, and a token's experts [rows, experts per token] with their weights, before they are used: a
  // test replaces them to compare arithmetic apart from discrete choices. In the backend's memory.
  virtual void ReviseSelection(LogicalLayer, int32_t* /*selected*/, int32_t* /*count*/) {}
  virtual void ReviseExperts(LogicalLayer, int32_t* /*expert*/, float* /*weight*/) {}
  // Whether a call above does anything in this forward; false: it may run without them, as one recorded
  // launch.
  virtual bool Active() const { return true; }
  // Whether IndexSelected is worth a wait for a device with memory of its own; without, it is not called
  // there.
  virtual bool WantsSelection() const { return false; }
};

struct ForwardOptions {
  LayerHooks* hooks = nullptr;
  StepTimer* timer = nullptr;
  float* index_gap =
      nullptr;           // [rows] scratch that IndexSelect fills with the gap at the border; may be null
  bool kv_only = false;  // DraftForward: store the rows' KV and stop; nothing reads their outputs
  // DraftForward: for each row the row of the DraftForward before whose index selection it takes, ascending.
  const int32_t* carried_selection = nullptr;
  bool dequant_only_topk = true;
  bool dequant_freely = true;  // see ops::AttentionArgs
  bool dequant_verify = false;
  int32_t verify_failed_row = -1;    // out, with dequant_verify
  LogicalLayer verify_failed_layer;  // out
};

struct LoadOptions {
  bool with_draft = false;
  std::function<void(int64_t done, int64_t all)> progress;  // layers
};

class Model {
 public:
  // Validates and packs the checkpoint, then gives its page cache back. Keeps it for the embedding table.
  static StatusOr<std::unique_ptr<Model>> Load(const ModelConfig& config,
                                               std::unique_ptr<Checkpoint> checkpoint, ops::Backend& backend,
                                               const LoadOptions& options = {});
  ~Model();

  const ModelConfig& config() const { return config_; }
  bool has_draft() const { return draft_ != nullptr; }
  const Digest256& identity() const { return identity_; }
  const std::vector<std::string>& notices() const { return notices_; }
  int64_t packed_bytes() const { return packed_bytes_; }

  // Runs all layers; the residual stream of every row stays in buffers.x. Errors are bugs (Internal).
  Status Forward(ops::Queue& queue, const ModelBatch& batch, const DevicePool& pool, ModelBuffers& buffers,
                 ForwardOptions& options) const;
  // Final norm and head of some rows of the last Forward: returns [rows.size(), vocab], valid until the next
  // call with these buffers. REQUIRES rows.size() <= limits.max_logits_rows.
  // REQUIRES no Draft call since: they share the residual stream.
  const float* Logits(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& buffers,
                      StepTimer* timer = nullptr) const;

  // On a device with memory of its own, in the place of Logits or DraftLogits: the first `requests` of
  // buffers.requests are answered in buffers.reduced and buffers.candidates, and of `whole` (places among
  // rows) the logits come to the host as FetchLogits brings them. All once the queue was synchronised.
  enum class LogitsKind : uint8_t { kTarget, kDraft };
  void Reduce(ops::Queue& queue, LogitsKind kind, std::span<const int32_t> rows, int64_t requests,
              std::span<const int32_t> whole, ModelBuffers& buffers, StepTimer* timer = nullptr) const;
  // One row of the last Reduce, by its place: [vocab].
  const float* FetchLogits(ops::Queue& queue, int32_t place, ModelBuffers& buffers) const;

  // --- draft layer, REQUIRES has_draft().
  // Row r stands for slot p = start + i of its sequence, p >= 1: made from the hidden state at p - 1 and the
  // token at p, rope position p - 1, its KV stored in slot p. It drafts the token at p + 1. `batch` is built
  // with slot_shift 1.

  // State after the final norm of some rows of the last Forward, as the draft layer takes it: out
  // [rows.size(), hidden], where ops write.
  void FinalHidden(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& buffers, float* out) const;
  // hidden: one row for each of the batch, that of p - 1, where ops read. Overwrites the residual stream.
  Status DraftForward(ops::Queue& queue, const ModelBatch& batch, RankHidden hidden, const DevicePool& pool,
                      ModelBuffers& buffers, ForwardOptions& options) const;
  // Of some rows of the last DraftForward: logits as Logits(), and the state that a further draft step takes
  // as `hidden`, where ops write.
  const float* DraftLogits(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& buffers,
                           StepTimer* timer = nullptr) const;
  void DraftHidden(ops::Queue& queue, std::span<const int32_t> rows, ModelBuffers& buffers, float* out) const;

  // What was packed how, one line per kind of matrix, for inspect.
  struct KernelLine {
    std::string matrix, shape, kernel;
    int64_t count = 0, bytes = 0;
  };
  std::vector<KernelLine> kernels() const;

 private:
  struct Layer;
  struct Draft;
  struct Pass;
  Model(const ModelConfig& config, ops::Backend& backend);
  StatusOr<std::unique_ptr<Layer>> LoadLayer(LogicalLayer layer, bool moe);
  StatusOr<std::unique_ptr<ops::Linear>> Pack(std::string_view kind, std::span<const std::string> names);
  StatusOr<std::unique_ptr<ops::Linear>> PackExperts(std::string_view kind, const std::string& prefix,
                                                     std::span<const std::string_view> parts);
  Status PackLatentHeads(const std::string& name, Layer& layer);
  void Record(std::string_view kind, const ops::Linear& linear);
  Status RunLayer(Pass& pass, const Layer& layer) const;
  Status RunLayers(ops::Queue& queue, const ModelBatch& placed, const DevicePool& pool, ModelBuffers& buffers,
                   ForwardOptions& options) const;
  int64_t ContextRange(int64_t context, int64_t limit) const;
  void Embed(Pass& pass) const;
  void NormRows(ops::Queue& queue, std::span<const int32_t> rows, const ops::Constant& weight,
                ModelBuffers& buffers, float* out_f32) const;
  void Head(ops::Queue& queue, std::span<const int32_t> rows, const ops::Constant& norm,
            ModelBuffers& buffers, StepTimer* timer) const;
  const float* HostLogits(ops::Queue& queue, int64_t rows, ModelBuffers& buffers, StepTimer* timer) const;
  // `run` over the placed batch; on a device with nobody in between as one recorded launch. kind: of pass.
  template <typename Run>
  Status Recorded(ops::Queue& queue, const ModelBatch& batch, const ModelBatch& at, const DevicePool& pool,
                  ModelBuffers& buffers, ForwardOptions& options, int64_t kind, const Run& run) const;
  Status RunDraft(Pass& pass, RankHidden hidden) const;
  void Attend(Pass& pass, const Layer& layer) const;
  ops::OwnBlocks Own(const Pass& pass, KvComponent component, LogicalLayer layer) const;
  void WriteKv(Pass& pass, const Layer& layer) const;
  void ProjectQuery(Pass& pass, const Layer& layer) const;
  void SelectRows(Pass& pass, const Layer& layer) const;
  void CarrySelection(Pass& pass) const;
  void AttendRows(Pass& pass, const Layer& layer) const;
  void Project(Pass& pass, const ops::Linear& w, const void* x, void* y, ops::OutMode mode,
               int64_t y_ld = 0) const;
  int64_t InColumns(const Layer& layer) const;  // of in_proj
  void RunMlp(Pass& pass, const Layer& layer) const;

  ModelConfig config_;
  ops::Backend& backend_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::unique_ptr<Draft> draft_;
  ops::WeightView embedding_;
  std::shared_ptr<std::byte> embedding_memory_;  // of a backend with memory of its own
  ops::Constant final_norm_;
  std::unique_ptr<ops::Linear> head_;
  Digest256 identity_{};
  std::vector<std::string> notices_;
  std::vector<KernelLine> kernels_;
  int64_t packed_bytes_ = 0;
};

}  // namespace sluice
