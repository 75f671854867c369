// A step on a real model: slots, page copies, loads and backups, forward, logits, sampling.
//
// Owns the ranks with their working buffers, the per-slot sampling state and the copy thread. Used by one
// executor. Steady state allocates nothing beyond what the result lists need.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "exec/copy_worker.h"
#include "exec/drafter.h"
#include "exec/executor.h"
#include "exec/rank_group.h"
#include "exec/watchdog.h"
#include "kv/device_pool.h"
#include "kv/host_pool.h"
#include "model/model.h"
#include "ops/backend.h"
#include "sampling/verify.h"

namespace sluice {

// Follows a forward from outside. Called on the executor thread (LayerFinal: on the last rank that arrives);
// must not block and does not allocate in the steady state.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Every row of this layer that the step's sequences have, cached ones included, is final.
  virtual void LayerFinal(int64_t step, LogicalLayer layer) = 0;
  // The same once a device has passed `event`; null: once it has passed that of a later layer of the step, or
  // LayerFinal has come for one. An event is recorded for layers that end a group: one for all that the batch
  // holds.
  virtual bool EndsGroup(LogicalLayer) { return true; }
  virtual void LayerQueued(int64_t step, LogicalLayer layer, std::shared_ptr<DeviceEvent> event) = 0;
  // Nothing of the step reads or writes pages any more.
  virtual void StepDone(int64_t step, const Status& status) = 0;
};

struct ModelRunnerOptions {
  int32_t num_slots = 0;
  int64_t max_rows = 0;  // of one step, over all ranks
  int64_t max_logits_rows = 0;
  bool dequant_only_topk = true;
  bool dequant_verify = false;
  int32_t draft_tokens = 0;                   // of a slot at most; 0: the draft layer, if any, is left alone
  int64_t rank_rows = 0;                      // rows of one rank's forward at most; with draft_tokens
  StepObserver* observer = nullptr;           // outlives the runner
  IoBackend io_backend = IoBackend::kDirect;  // who copies between the pools
  double step_seconds = 0;                    // a step that takes longer ends the process; 0: no limit
  bool time_device = false;                   // RunnerTimes::device; one rank, no drafts
};

// Where the time of all steps went, in nanoseconds; readable from any thread.
struct RunnerTimes {
  std::atomic<int64_t> steps{0}, rows{0}, forward{0}, logits{0}, sampling{0}, draft{0}, total{0};
  // Between the first and the last work of each step on a device, where that is timed.
  std::atomic<int64_t> device{0};
};

class ModelRunner final : public StepRunner, private LayerHooks {
 public:
  // model, device and host (may be null: no host tier) outlive the runner.
  ModelRunner(const Model& model, std::unique_ptr<RankGroup> ranks, const DevicePool& device,
              const HostPool* host, const ModelRunnerOptions& options);
  ~ModelRunner() override;

  // With drafts nothing: which rows a step has follows from what stood in the one before.
  void Prepare(const ForwardBatch& batch) override;
  void Run(const ForwardBatch& batch, StepResult* result) override;
  const RunnerTimes& times() const { return times_; }
  // Steps between these two are nobody's: the observer does not see them, and what they have taught or
  // counted is forgotten.
  void BeginWarmUp() { warming_ = true; }
  void EndWarmUp();
  const RankGroup& ranks() const { return *ranks_; }

 private:
  Status Compute(const ForwardBatch& batch, StepResult* result);
  void ResolveTokens(const ForwardBatch& batch);
  void CheckRows(const ForwardBatch& batch, StepResult* result);
  Status SampleRows(const ForwardBatch& batch, StepResult* result);
  // samples [first, end) of the batch, whose rows are logits_rows_, where logits stay on the device.
  Status SampleReduced(const ForwardBatch& batch, size_t first, size_t end, StepResult* result);
  Status Draft(const ForwardBatch& batch, const ForwardBatch& resolved, StepResult* result);
  std::unique_ptr<Drafter> MakeDrafter();
  void WaitReadable(LogicalLayer layer) override;
  void LayerFinal(LogicalLayer layer) override;
  bool Active() const override { return observer_ != nullptr || loading_; }

  const Model& model_;
  const std::unique_ptr<RankGroup> ranks_;
  const ModelRunnerOptions options_;
  const size_t max_logits_rows_;
  std::unique_ptr<CopyWorker> copies_;  // null without a host tier
  bool loading_ = false;                // this step waits for pages layer by layer
  Sampler sampler_;
  RunVerifier verifier_{&sampler_};
  std::unique_ptr<Drafter> drafter_;  // null without speculation
  ForwardOptions forward_;
  std::vector<int32_t> tokens_;       // [max_rows] ids of the step's rows
  std::vector<int32_t> logits_rows_;  // rows of one Logits call
  std::vector<int32_t> whole_rows_;   // places of one Reduce call that are needed whole
  std::vector<RowRequest> requests_;
  RunnerTimes times_;
  Watchdog watchdog_;
  StepObserver* const observer_;
  bool warming_ = false;
  int64_t step_ = 0;
  int64_t waits_ = 0;  // for the device in this step: one a pass through the head, as a rule one in all
};

}  // namespace sluice
