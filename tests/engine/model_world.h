// A checkpoint behind the real scheduler, cache and runner, stepped in the test's thread.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/cpu/cpu_backend.h"
#include "cache/kv_cache.h"
#include "cp/split.h"
#include "engine/step_loop.h"
#include "exec/model_runner.h"
#include "exec/warm_up.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "recorder.h"
#include "weights/checkpoint.h"

namespace sluice {

struct RunShape {
  int64_t chunk = 256, max_running = 8, pages = 512, host_pages = 0;
  int32_t depth = 1;
  int threads = 1;
  DType kv = DType::kBF16;
  bool radix = false;
  bool dequant_verify = false;
  int32_t drafts = 0, ranks = 1;
  bool drop_drafts = false;  // those of little chance, however many sequences there are
  bool gather = false;       // ranks exchange rows through the communicator alone
  bool adaptive = false;
  bool warm_up = false;   // as at the start on a device
  bool threaded = false;  // steps run on a thread of their own
  int poison_step = -1;   // before this step the first page of the first sequence of the step becomes NaN
};

struct RunAnswer {
  std::vector<int32_t> tokens;
  uint64_t hash = 0;
  CachedTokens cached;
  Status error;
  std::vector<TokenOut> detail;
  FinishReason finish = FinishReason::kNone;
  int32_t matched = -1;
  bool operator==(const RunAnswer& o) const { return tokens == o.tokens && hash == o.hash; }
};

// Spoils a page of the pool between two steps, and counts the dummies that ranks would compute.
class PoisoningRunner final : public StepRunner {
 public:
  PoisoningRunner(StepRunner* inner, const DevicePool* pool, int step, int32_t ranks)
      : inner_(inner), pool_(pool), step_(step), ranks_(ranks) {}
  void Prepare(const ForwardBatch& batch) override { inner_->Prepare(batch); }
  void Run(const ForwardBatch& batch, StepResult* result) override {
    for (const BatchSeq& s : batch.seqs) {
      if (!s.decode && ranks_ > 1)
        padding += 2 * ranks_ * cp::SegmentComputeRows(s.num_rows, ranks_) - s.num_rows;
    }
    if (step_-- == 0) pool_->Poison(batch.pages[size_t(batch.seqs[0].page_begin)]);
    inner_->Run(batch, result);
  }
  int64_t padding = 0;  // rows

 private:
  StepRunner* const inner_;
  const DevicePool* const pool_;
  int step_;
  const int32_t ranks_;
};

class ModelWorld {
 public:
  // backend: null for the CPU's.
  ModelWorld(const std::string& folder, DType act, bool with_draft = false,
             std::unique_ptr<ops::Backend> backend = nullptr)
      : backend_(std::move(backend)) {
    auto config = LoadModelConfig(folder);
    EXPECT_TRUE(config.ok()) << config.status();
    config_ = *config;
    if (backend_ == nullptr) backend_ = cpu::MakeCpuBackend({act, "auto"}).value();
    auto model = Model::Load(config_, Checkpoint::Open(folder).value(), *backend_, {with_draft});
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = std::move(*model);
  }

  const ModelConfig& config() const { return config_; }

  // Everything is submitted at once (or, with `turns`, one after another so that later ones find earlier ones
  // cached).
  std::vector<RunAnswer> Answer(const std::vector<Request>& requests, const RunShape& shape,
                                bool turns = false) {
    KvLayoutOptions layout_options;
    layout_options.latent_dtype = layout_options.index_dtype = shape.kv;
    layout_options.with_draft = shape.drafts > 0;
    const KvLayout layout = KvLayout::Make(config_, layout_options).value();
    const int64_t lane_pages = CeilDiv(shape.pages, shape.ranks);
    const auto device = DevicePool::Make(layout, shape.ranks, lane_pages + 1, backend_->memory()).value();
    std::unique_ptr<HostPool> host;
    if (shape.host_pages > 0)
      host = HostPool::Make(layout, HostLayout::kLayerFirst, shape.ranks, shape.host_pages).value();

    StepLoopOptions options;
    options.depth = shape.depth;
    options.scheduler.max_running = shape.max_running;
    options.scheduler.chunk_tokens = shape.chunk;
    options.scheduler.context_length = std::min<int64_t>(config_.max_positions, 8192);
    options.scheduler.eos_token_ids = config_.eos_token_ids;
    options.scheduler.draft_tokens = shape.drafts;
    options.scheduler.adaptive_drafts = shape.drop_drafts;
    if (shape.drop_drafts)
      options.scheduler.draft_cost = {.row = 0.2, .more_row = 0.2, .pass = 0.02, .pass_row = 0.01};
    RankGroupOptions group;
    group.ranks = shape.ranks;
    if (shape.gather) group.kv_exchange = KvExchangeMode::kGather;
    group.threads_per_rank = group.cores = shape.threads;
    group.limits = {MaxStepRows(options.scheduler), shape.max_running, 16, options.scheduler.context_length};
    EXPECT_TRUE(backend_->Plan(OpLimits(config_, group.limits)).ok());
    ModelRunnerOptions runner_options;
    runner_options.num_slots = NumSlots(options.scheduler);
    runner_options.max_rows = group.limits.max_rows;
    runner_options.max_logits_rows = 16;
    runner_options.dequant_verify = shape.dequant_verify;
    runner_options.draft_tokens = shape.drafts;
    runner_options.rank_rows = group.limits.max_rows;
    ModelRunner runner(*model_, RankGroup::Make(*model_, *backend_, *device, group).value(), *device,
                       host.get(), runner_options);
    VirtualClock clock;
    if (shape.warm_up) {
      const auto warm = WarmUp(
          runner, *device,
          {runner_options.max_rows, shape.max_running, group.limits.max_context, shape.drafts}, &clock);
      EXPECT_TRUE(warm.ok()) << warm.status();
      if (warm.ok()) warm_up = *warm;
      EXPECT_EQ(runner.times().steps, 0);
    }
    auto owned = std::make_unique<PoisoningRunner>(&runner, device.get(), shape.poison_step, shape.ranks);
    PoisoningRunner& poisoning = *owned;
    std::unique_ptr<Executor> executor;
    if (shape.threaded) {
      executor = std::make_unique<ThreadExecutor>(std::move(owned), nullptr);
    } else {
      executor = std::make_unique<InlineExecutor>(&poisoning);
    }
    CacheOptions cache;
    cache.lanes = shape.ranks;
    cache.pages_per_lane = lane_pages;
    cache.host_pages_per_lane = shape.host_pages;
    cache.enable_radix = shape.radix;
    cache.poison_on_free = true;
    cache.poison_pool = device.get();
    StepLoop loop(options, MakeKvCache(cache, layout, host.get(), nullptr), executor.get(), &clock);
    std::vector<std::shared_ptr<Recorder>> outs;
    const auto finish = [&] {
      for (int64_t i = 0; (shape.threaded || i < 100000) && !loop.Idle(); ++i) {
        clock.Advance(1000000);
        if (loop.StepOnce() != StepLoop::Progress::kMoved && shape.threaded) std::this_thread::yield();
      }
      EXPECT_TRUE(loop.Idle());
      EXPECT_THAT(loop.Audit(), ::testing::IsEmpty());
    };
    for (Request r : requests) {
      outs.push_back(std::make_shared<Recorder>(r.sampling.n));
      r.output = outs.back();
      r.id = NextRequestId();
      r.sampling.hash_logits = true;
      EXPECT_TRUE(loop.Check(r).ok()) << loop.Check(r);
      loop.Enqueue(std::move(r));
      if (turns) finish();
      if (turns && shape.host_pages > 0) {  // the device tier is emptied between turns
        for (int i = 0; i < 100 && !loop.DropDeviceCache(); ++i) finish(), loop.StepOnce();
      }
    }
    finish();
    retractions = loop.scheduler().counters().retractions;
    loaded_pages = loop.cache().Stats().load_pages;
    drafts = loop.scheduler().counters().drafts;
    padding = poisoning.padding;
    prepared = runner.ranks().prepared();
    forwards = runner.times().steps;
    std::vector<RunAnswer> answers;
    for (const auto& out : outs) {
      EXPECT_THAT(out->violations(), ::testing::IsEmpty());
      for (int32_t c = 0; out->done() && c < out->n(); ++c) {
        const Recorder::Choice choice = out->choice(c);
        answers.push_back({choice.tokens, choice.logits_hash, choice.cached, choice.error, choice.detail,
                           choice.finish, choice.matched_stop});
      }
    }
    return answers;
  }

  int64_t retractions = 0, loaded_pages = 0;  // of the last Answer
  int64_t padding = 0;                        // rows without a token that its ranks had to make room for
  int64_t prepared = 0, forwards = 0;         // steps that found their tables made, and all
  DraftCounters drafts;
  WarmUpReport warm_up;

 private:
  ModelConfig config_;
  std::unique_ptr<ops::Backend> backend_;
  std::unique_ptr<Model> model_;
};

}  // namespace sluice
