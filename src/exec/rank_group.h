// One forward over all context-parallel ranks: a thread, a queue and buffers for each, one shared pool of
// owner lanes.
//
// Every rank follows the same RankSplit, made once per batch by the caller's thread, which is rank 0 itself.
// How rows reach other ranks is KvExchangeMode's; the choice is made here and nowhere else:
//   direct  a rank writes the rows it computes into their owners' pages, a fence per layer of a split forward
//           makes them visible, and ops read other lanes in place. For ranks of one address space.
//   gather  arenas meet in the communicator alone (exec/rank_pages.h): owners take rows, readers copy pages.
//
// Owned and called by one executor. Results do not depend on the number of ranks: a row's bits depend on its
// inputs alone.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "batch/rank_split.h"
#include "batch/row_exchange.h"
#include "comm/communicator.h"
#include "exec/draft_layer.h"
#include "exec/expert_exchange.h"
#include "model/model.h"
#include "model/model_batch.h"

namespace sluice {

enum class KvExchangeMode : uint8_t { kDirect, kGather };

struct RankGroupOptions {
  int32_t ranks = 1;
  bool spread_experts = false;  // each rank computes its share of the experts, for the rows of all
  KvExchangeMode kv_exchange = KvExchangeMode::kDirect;
  int64_t gather_buffer_bytes = 64 << 20;  // of one rank, with kGather
  int threads_per_rank = 1;
  int cores = 1;
  ModelLimits limits;  // of one rank
};

class RankGroup final : public DraftLayer {
 public:
  static StatusOr<std::unique_ptr<RankGroup>> Make(const Model& model, ops::Backend& backend,
                                                   const DevicePool& pool, const RankGroupOptions& options);
  ~RankGroup() override;
  // Room for staged rows and gathered pages, of all ranks; 0 with kDirect or one rank.
  static int64_t GatherBytes(const KvLayout& layout, const RankGroupOptions& options);

  // Ahead of Forward of the same batch, which stays where it is: the split and every rank's tables. On a
  // thread other than Forward's, while the batch before it runs; of two batches that are under way each has a
  // step number of its own.
  void Prepare(const ForwardBatch& batch);
  int64_t prepared() const {
    return prepared_.load(std::memory_order_relaxed);
  }  // forwards that found it done

  // tokens: [batch rows], resolved. hooks of `options` are called once a layer for the whole group, in layer
  // order: WaitReadable may be called by several ranks at once, LayerFinal by the last rank whose rows are
  // final. On return the residual stream of every row is where Logits finds it. options.verify_failed_row is
  // a batch row.
  // With wait = false and one rank on a device the work is enqueued only: Logits or Wait ends it.
  Status Forward(const ForwardBatch& batch, std::span<const int32_t> tokens, ForwardOptions& options,
                 bool wait = true);
  // Returns when all that was enqueued is done, with the device's status.
  Status Wait();
  // Logits of rows of the last Forward's batch: [rows.size(), vocab], valid until the next call.
  // REQUIRES rows.size() <= limits.max_logits_rows.
  const float* Logits(std::span<const int32_t> batch_rows);
  // In the place of Logits where Reduces(): the rows stay on the device; answers to requests about them
  // (place: an index into batch_rows) come back, and of the places in `whole` the logits, too: FetchLogits
  // then costs nothing. Valid until the next call. REQUIRES both lists <= limits.max_logits_rows.
  bool Reduces() const override;
  LogitsAnswers Reduce(std::span<const int32_t> batch_rows, std::span<const RowRequest> requests,
                       std::span<const int32_t> whole);
  const float* FetchLogits(int32_t place) override;
  LogitsAnswers ReduceDraft(std::span<const int32_t> rows, std::span<const RowRequest> requests) override;
  bool on_device() const;

  // Whether the residual stream of a row of the last Forward's batch holds numbers only.
  bool RowFinite(int32_t batch_row) const;
  // Residual stream [hidden] of a row of the last Forward's batch.
  const float* Hidden(int32_t batch_row) const;

  // DraftLayer, REQUIRES model.has_draft(). Nothing but the stored rows crosses ranks in FillDraft: a rank
  // takes the states of its own rows, as they stand before anything is gathered.
  void FinalHidden(std::span<const int32_t> batch_rows, float* out) override;
  Status FillDraft(const ForwardBatch& batch, std::span<const int32_t> next_token) override;
  Status DraftRows(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                   std::span<const int32_t> tokens, BatchHidden hidden, bool kv_only,
                   std::span<const int32_t> carried) override;
  const float* DraftLogits(std::span<const int32_t> rows) override;
  void DraftHidden(std::span<const int32_t> rows, float* out) override;

  // --- steps of a device with memory of its own
  // Status of all ranks' devices; an error is for good.
  Status DeviceStatus() const;
  // The calls that the caller's thread makes from here to EndStep are counted (ops::Queue); `waits` holds for
  // one rank, since several wait for one another.
  void BeginStep();
  Status EndStep(int64_t waits);
  void WarmedUp();
  std::string Where() const;  // what each rank's device is at; callable from any thread
  // From here on the queue of one rank is marked (ops::Queue::Mark) where a forward begins and behind the
  // work that is waited for.
  void MarkForwards() { marks_ = true; }
  // A page of the pool in the place of another, in the step's order.
  void CopyPage(PageId from, PageId to);

  int32_t ranks() const { return int32_t(ranks_.size()); }
  const RankSplit& split() const { return plan_->split; }  // of the last Forward
  ops::Queue& queue() const;                               // of rank 0

  // Bytes that crossed ranks until the last Forward: cache rows and pages, and rows on their way to experts
  // of other ranks and back. With kDirect, what kernels read and wrote in place is worked out from the batch.
  int64_t bytes_moved() const { return bytes_moved_.load(std::memory_order_relaxed); }
  // The draft layer's part of them: its rows and pages, and states that leave the rank that computed them.
  int64_t draft_bytes_moved() const { return draft_bytes_moved_.load(std::memory_order_relaxed); }
  int64_t working_bytes() const;  // buffers of all ranks
  // With kGather: pages of a layer that found no room in a gather buffer and were read in place; page copies
  // begun while another layer ran. Both since the start, until the last Forward.
  int64_t pages_in_place() const { return pages_in_place_.load(std::memory_order_relaxed); }
  int64_t chunks_ahead() const { return chunks_ahead_.load(std::memory_order_relaxed); }

 private:
  struct RankState;
  class Hooks;
  class DraftHooks;
  // What a batch comes to before its tokens are known.
  struct Plan {
    std::atomic<int64_t> step{-1};  // that it was prepared for; -1: nothing, or Forward has taken it
    const ForwardBatch* batch = nullptr;
    Status status;
    RankSplit split;
  };
  RankGroup(const Model& model, const DevicePool& pool, const RankGroupOptions& options);
  void RunOnAll(const std::function<void(RankState&)>& work);
  Status Split(const ForwardBatch& batch, Plan* plan) const;
  Status ForwardOn(RankState& rank, const ForwardBatch& batch, std::span<const int32_t> tokens,
                   int32_t prepared);
  Status MakePages();
  LogitsAnswers Answers(Model::LogitsKind kind, std::span<const RowRequest> requests,
                        std::span<const int32_t> whole, StepTimer* timer);
  void CountBytes(const ForwardBatch& batch);
  // Of a draft pass that `rank` has run; with_reads: what it read in place counts, too. moved_before: its
  // BytesMoved() at the start.
  void CountDraftBytes(RankState& rank, std::span<const PageId> pages, bool with_reads, int64_t moved_before);
  void CountStates(std::span<const int32_t> batch_rows);
  // Runs `own` on every rank that has some of `rows` and puts its results, `width` floats a row, in order.
  const float* Collect(std::span<const int32_t> rows, const std::vector<RankRow>& where, int64_t width,
                       float* out, const std::function<const float*(RankState&)>& own);

  const Model& model_;
  const DevicePool& pool_;
  const RankGroupOptions options_;
  const WaitMode wait_mode_;
  // Prepared ones in turn, behind them that of a forward that nothing was prepared for.
  std::array<Plan, ModelBuffers::kStages + 1> plans_;
  int32_t next_place_ = 0;       // Prepare's
  Plan* plan_ = &plans_.back();  // of the last Forward
  std::atomic<int64_t> prepared_{0};
  RowExchange exchange_;  // with kGather
  std::vector<std::unique_ptr<RankState>> ranks_;
  std::vector<std::atomic<int32_t>> layer_arrivals_;
  ForwardOptions* options_in_ = nullptr;
  bool marks_ = false;
  bool wait_ = true;                         // of the Forward that runs
  std::vector<MemoryRun> runs_;              // of CopyPage
  std::vector<float> logits_;                // [max_logits_rows, vocab], only with several ranks
  std::vector<int32_t> fetched_;             // places of the last Reduce whose logits are on the host
  std::vector<RankRow> draft_where_;         // rows of the last DraftRows
  std::unique_ptr<ExpertExchange> experts_;  // null: each rank computes all experts of its rows
  std::atomic<int64_t> bytes_moved_{0}, draft_bytes_moved_{0}, pages_in_place_{0}, chunks_ahead_{0};

  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(RankState&)>* work_ = nullptr;
  std::atomic<int64_t> generation_{0};
  std::atomic<int32_t> running_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace sluice
