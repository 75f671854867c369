// Performs steps under the virtual clock on real KV memory: real copies, fingerprint rows in the place of a
// model, the product's sampler. Faults come from a seed.
//
// A step runs somewhere between its start and its due time; a backup reads its pages anywhere up to its
// acknowledgement, which may come with the result of a later step. Layer L of a load is there just before
// layer L is computed, not earlier.
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/random.h"
#include "exec/drafter.h"
#include "exec/executor.h"
#include "kv/host_pool.h"
#include "sampling/sampler.h"
#include "sampling/verify.h"
#include "sim/fingerprint.h"
#include "sim/ranked_forward.h"
#include "sim/report.h"
#include "sim/sim_draft_layer.h"

namespace sluice::sim {

// What the stand-in answers after a row: a pure function of its chain.
void LogitsOf(uint64_t chain, std::vector<float>* logits);

struct ExecutorFaults {
  Nanos step_min = 200'000, step_max = 5'000'000;
  double slow_step = 0;   // takes up to a second
  double step_error = 0;  // the whole step fails
  double bad_row = 0;     // a sequence's rows hold NaN
  double copy_error = 0;  // per plan
  double late_ack = 0;    // per backup: with a later step's result
};

class SimExecutor final : public Executor {
 public:
  SimExecutor(const DevicePool* device, const HostPool* host, int32_t slots, const Clock* clock,
              Journal* journal, uint64_t seed, const ExecutorFaults& faults, int32_t draft_tokens = 0);

  void Submit(StepBuffers* step) override;
  StepBuffers* Poll() override;
  Nanos NextDue() const;  // max() when nothing is submitted

  // Forwards run on as many ranks as the pool has lanes, bit by bit between start and due time. rank_error:
  // of a forward, one of whose ranks fails in the middle.
  void UseRanks(uint64_t seed, double rank_error);

  // The namespace root of what the engine will put on a page it has just taken.
  void SetRoot(PageId page, uint64_t root) { roots_[page.value] = root; }
  uint64_t RootOf(PageId page) const;

 private:
  struct Queued {
    StepBuffers* step;
    Nanos due = 0;
    bool started = false, ran = false;
  };
  struct LateBackup {
    CopyPlan plan;
    bool made = false;
  };
  void Start(Queued* q);
  void Run(const ForwardBatch& batch, StepResult* result);
  // planned: as the engine made it; batch: with starts and drafted tokens filled in.
  void Forward(const ForwardBatch& planned, const ForwardBatch& batch, StepResult* result);
  void Finish(const ForwardBatch& planned, const ForwardBatch& batch, std::vector<bool>& lost,
              StepResult* result);
  void BeginOnRanks(const ForwardBatch& batch, StepResult* result);
  void FinishOnRanks();
  void Lose(const ForwardBatch& batch, const BatchSeq& seq);
  PageId PageOf(const ForwardBatch& batch, const BatchSeq& seq, int64_t position) const;

  const DevicePool* device_;
  const HostPool* host_;
  const Clock* clock_;
  Journal* journal_;
  SeededStream random_;
  ExecutorFaults faults_;
  FingerprintRows rows_;
  Sampler sampler_;
  RunVerifier verifier_{&sampler_};
  SimDraftLayer draft_layer_;
  std::unique_ptr<Drafter> drafter_;  // null without speculation
  std::vector<uint64_t> row_chains_;
  std::vector<int32_t> row_tokens_;
  std::deque<Queued> queue_;
  std::vector<LateBackup> late_;
  std::unordered_map<int32_t, uint64_t> roots_;
  std::vector<std::vector<uint64_t>> chains_;  // scratch, per sequence of the batch
  std::vector<std::vector<int32_t>> tokens_;
  std::vector<float> logits_;

  std::unique_ptr<RankedForward> ranks_;
  double rank_error_ = 0;
  const ForwardBatch* rank_batch_ = nullptr;  // begun on the ranks and not finished
  StepResult* rank_result_ = nullptr;
  std::vector<bool> lost_;  // per sequence of rank_batch_
  int32_t loaded_ = -1;     // last layer whose loads have arrived
};

}  // namespace sluice::sim
