#include <map>
#include <memory>
#include <vector>

#include "base/random.h"
#include "cache/kv_cache.h"
#include "chain_runner.h"
#include "engine/step_loop.h"
#include "flat_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kv/layout_fixture.h"
#include "recorder.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Results come back late and at random moments, so plans and commits interleave in every way.
class LazyExecutor final : public Executor {
 public:
  LazyExecutor(StepRunner* runner, uint64_t seed, double ready)
      : inner_(runner), random_(seed), ready_(ready) {}
  void Submit(StepBuffers* step) override { inner_.Submit(step); }
  StepBuffers* Poll() override { return random_.Chance(ready_) ? inner_.Poll() : nullptr; }

 private:
  InlineExecutor inner_;
  SeededStream random_;
  const double ready_;
};

enum class CacheKind { kFlat, kTree, kTreeAndHost };

struct Shape {
  CacheKind cache = CacheKind::kFlat;
  int64_t host_pages = 0;
  int32_t lanes = 1;  // owner lanes of the pages, as context-parallel ranks make them
  int64_t pages = 64, max_running = 8, chunk = 32, context = 4096;
  int32_t depth = 1;
  uint64_t seed = 1;
  double ready = 1.0;
  bool use_priority = false, lpm = false;
  int64_t max_prefill = 16384;
};

class World {
 public:
  explicit World(const Shape& shape)
      : shape_(shape),
        runner_(shape.pages + shape.lanes, int32_t(2 * shape.max_running), shape.host_pages),
        executor_(&runner_, shape.seed, shape.ready) {
    StepLoopOptions options;
    options.depth = shape.depth;
    options.scheduler.max_running = shape.max_running;
    options.scheduler.chunk_tokens = shape.chunk;
    options.scheduler.context_length = shape.context;
    options.scheduler.max_prefill_tokens = shape.max_prefill;
    options.scheduler.use_priority = shape.use_priority;
    if (shape.lpm) options.scheduler.policy = SchedulePolicy::kLongestPrefix;
    options.scheduler.eos_token_ids = {kChainEos};
    loop_ = std::make_unique<StepLoop>(options, MakeCache(), &executor_, &clock_);
  }

  std::unique_ptr<KvCache> MakeCache() {
    if (shape_.cache == CacheKind::kFlat) {
      return std::make_unique<FlatCache>(shape_.pages, [this](PageId p) { runner_.Poison(p); });
    }
    CacheOptions options;
    options.lanes = shape_.lanes;
    options.pages_per_lane = shape_.pages / shape_.lanes;
    if (shape_.cache == CacheKind::kTreeAndHost)
      options.host_pages_per_lane = shape_.host_pages / shape_.lanes;
    return MakeKvCache(options, testing::MakeLayout(testing::Small()), nullptr, nullptr);
  }

  std::shared_ptr<Recorder> Add(Request request) {
    auto recorder = std::make_shared<Recorder>(request.sampling.n);
    request.id = NextRequestId();
    if (request.rid.empty()) request.rid = "r" + std::to_string(requests_.size());
    request.output = recorder;
    requests_.push_back({request, recorder});
    EXPECT_TRUE(loop_->Check(request).ok());
    loop_->Enqueue(std::move(request));
    return recorder;
  }

  void Step() {
    clock_.Advance(1000000);
    loop_->StepOnce();
    ++turns_;
  }
  // Steps until nothing is left; fails when that takes suspiciously long.
  void Finish(int64_t limit = 200000) {
    while (!loop_->Idle() && limit-- > 0) Step();
    EXPECT_TRUE(loop_->Idle()) << "no end";
    CheckAudit();
    EXPECT_THAT(runner_.violations, IsEmpty());
    for (const auto& [request, recorder] : requests_) {
      EXPECT_TRUE(recorder->done()) << request.rid;
      EXPECT_THAT(recorder->violations(), IsEmpty());
    }
  }
  void CheckAudit() { EXPECT_THAT(loop_->Audit(), IsEmpty()); }

  // Every choice that was not cut short equals the oracle; one that was is a prefix of it.
  void CheckAnswers() {
    const int64_t limit = std::min(shape_.context, shape_.pages * kPageTokens);
    for (const auto& [request, recorder] : requests_) {
      for (int32_t c = 0; c < request.sampling.n; ++c) {
        const ChainAnswer want = ChainOracle(request, c, limit);
        const Recorder::Choice got = recorder->choice(c);
        if (got.finish == FinishReason::kAbort) {
          ASSERT_LE(got.tokens.size(), want.tokens.size());
          EXPECT_TRUE(std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()))
              << request.rid << ":" << c;
          continue;
        }
        EXPECT_EQ(got.tokens, want.tokens) << request.rid << ":" << c;
        EXPECT_EQ(int(got.finish), int(want.finish)) << request.rid << ":" << c << " " << got.error.message();
        if (request.sampling.hash_logits && got.finish != FinishReason::kError) {
          EXPECT_EQ(got.logits_hash, want.logits_hash);
        }
      }
    }
  }

  StepLoop& loop() { return *loop_; }
  ChainRunner& runner() { return runner_; }
  VirtualClock& clock() { return clock_; }
  int64_t turns() const { return turns_; }

 private:
  const Shape shape_;
  ChainRunner runner_;
  LazyExecutor executor_;
  VirtualClock clock_;
  std::unique_ptr<StepLoop> loop_;
  std::vector<std::pair<Request, std::shared_ptr<Recorder>>> requests_;
  int64_t turns_ = 0;
};

Request MakeRequest(SeededStream* random, int64_t prompt_max, int32_t tokens_max) {
  Request r;
  const int64_t len = 1 + int64_t(random->Below(uint64_t(prompt_max)));
  for (int64_t i = 0; i < len; ++i) r.prompt.push_back(int32_t(random->Below(60)));
  SamplingParams& p = r.sampling;
  p.max_tokens = 1 + int32_t(random->Below(uint64_t(tokens_max)));
  p.temperature = random->Chance(0.4) ? 0 : float(random->Unit() * 1.5);
  p.seed = random->Next();
  p.hash_logits = random->Chance(0.5);
  if (random->Chance(0.2)) p.top_k = int32_t(random->Below(20));
  if (random->Chance(0.2)) p.top_p = float(random->Unit());
  if (random->Chance(0.2)) p.presence_penalty = 0.5f;
  if (random->Chance(0.2)) p.frequency_penalty = 0.25f;
  if (random->Chance(0.2)) p.repetition_penalty = 1.3f;
  if (random->Chance(0.2)) p.min_tokens = int32_t(random->Below(10));
  if (random->Chance(0.2)) p.stop_token_ids = {int32_t(random->Below(60))};
  if (random->Chance(0.2)) p.ignore_eos = true;
  if (random->Chance(0.2)) p.logit_bias = {{int32_t(random->Below(60)), 3.0f}};
  if (random->Chance(0.15)) p.n = 2 + int32_t(random->Below(5));
  return r;
}

Request Greedy(std::vector<int32_t> prompt, int32_t max_tokens) {
  Request r;
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  r.sampling.temperature = 0;
  r.sampling.ignore_eos = true;
  return r;
}

std::vector<int32_t> Range(int32_t n) {
  std::vector<int32_t> v;
  for (int32_t i = 0; i < n; ++i) v.push_back(i % 60);
  return v;
}

TEST(Scheduler, OneRequestGivesTheOracleAtBothDepths) {
  for (const int32_t depth : {0, 1}) {
    Shape shape;
    shape.depth = depth;
    World world(shape);
    world.Add(Greedy(Range(100), 20));
    world.Finish();
    world.CheckAnswers();
  }
}

TEST(Scheduler, AtDepthOneTheNextStepIsPlannedBeforeTheResult) {
  Shape shape;
  World world(shape);
  world.Add(Greedy(Range(10), 20));
  world.Step();
  EXPECT_EQ(world.loop().steps_in_flight(), 2);
  shape.depth = 0;
  World plain(shape);
  plain.Add(Greedy(Range(10), 20));
  plain.Step();
  EXPECT_EQ(plain.loop().steps_in_flight(), 1);
  world.Finish();
  plain.Finish();
}

TEST(Scheduler, NeverPlansBeyondTheLastToken) {
  Shape shape;
  World world(shape);
  world.Add(Greedy(Range(10), 5));
  world.Finish();
  EXPECT_EQ(world.runner().rows, 10 + 4);
  EXPECT_EQ(world.loop().scheduler().counters().dropped_tokens, 0);
}

TEST(Scheduler, ATokenSampledAfterTheStopIsDropped) {
  Shape shape;
  World world(shape);
  Request r = Greedy(Range(10), 50);
  r.sampling.stop_token_ids = {ChainOracle(r, 0, 4096).tokens[7]};
  const auto out = world.Add(std::move(r));
  world.Finish();
  world.CheckAnswers();
  EXPECT_EQ(out->choice(0).finish, FinishReason::kStop);
  EXPECT_EQ(out->choice(0).matched_stop, out->choice(0).tokens.back());
  EXPECT_EQ(world.loop().scheduler().counters().dropped_tokens, 1);
}

TEST(Scheduler, ChunksAndDecodesShareStepsWithinTheBudget) {
  Shape shape;
  shape.chunk = 16;
  World world(shape);
  for (int i = 0; i < 6; ++i) world.Add(Greedy(Range(70 + i), 30));
  world.Finish();
  world.CheckAnswers();
  EXPECT_GT(world.runner().mixed_steps, 10);
  EXPECT_LE(world.runner().largest_step, 16 + shape.max_running);
}

TEST(Scheduler, WithoutChunksAPromptIsOneStep) {
  Shape shape;
  shape.chunk = -1;
  shape.max_prefill = 128;
  World world(shape);
  world.Add(Greedy(Range(300), 2));
  world.Add(Greedy(Range(100), 2));
  world.Add(Greedy(Range(20), 2));
  world.Finish();
  world.CheckAnswers();
  EXPECT_GE(world.runner().largest_step, 300);
}

TEST(Scheduler, RunningLimitHolds) {
  Shape shape;
  shape.max_running = 3;
  World world(shape);
  for (int i = 0; i < 10; ++i) world.Add(Greedy(Range(5 + i), 10));
  while (!world.loop().Idle()) {
    world.Step();
    EXPECT_LE(world.loop().scheduler().running(), 3);
  }
  world.Finish();
  world.CheckAnswers();
}

TEST(Scheduler, RetractionDoesNotChangeTokens) {
  for (const int32_t depth : {0, 1}) {
    Shape shape;
    shape.depth = depth;
    shape.pages = 8;
    World world(shape);
    for (int i = 0; i < 8; ++i) {
      Request r = Greedy(Range(30 + i), 200);
      r.sampling.temperature = 1;
      r.sampling.seed = uint64_t(i);
      r.sampling.frequency_penalty = 0.1f;
      r.sampling.hash_logits = true;
      world.Add(std::move(r));
    }
    world.Finish();
    world.CheckAnswers();
    EXPECT_GT(world.loop().scheduler().counters().retractions, 0) << depth;
  }
}

TEST(Scheduler, OneSequenceMayFillTheWholePool) {
  Shape shape;
  shape.pages = 4;
  World world(shape);
  const auto out = world.Add(Greedy(Range(10), 1000));
  world.Add(Greedy(Range(10), 1000));
  world.Finish();
  world.CheckAnswers();
  EXPECT_EQ(out->choice(0).tokens.size(), 4 * 64 - 10);
  EXPECT_EQ(out->choice(0).finish, FinishReason::kLength);
}

TEST(Scheduler, ChoicesForkOffOnePrefill) {
  for (const int32_t prompt : {1, 63, 64, 65, 130}) {
    Shape shape;
    World world(shape);
    Request r = Greedy(Range(prompt), 40);
    r.sampling.temperature = 1;
    r.sampling.n = 5;
    const auto out = world.Add(std::move(r));
    world.Finish();
    world.CheckAnswers();
    EXPECT_EQ(world.runner().rows, prompt + 5 * 39) << prompt;  // the prompt is computed once
    EXPECT_NE(out->choice(0).tokens, out->choice(1).tokens);
  }
}

TEST(Scheduler, MoreChoicesThanSlotsOrPagesStillAnswerAll) {
  Shape shape;
  shape.max_running = 3;
  shape.pages = 6;
  World world(shape);
  Request r = Greedy(Range(100), 60);
  r.sampling.temperature = 1;
  r.sampling.n = 9;
  world.Add(std::move(r));
  world.Finish();
  world.CheckAnswers();
}

TEST(Scheduler, NanEndsOneRequestAndLeavesTheOthers) {
  Shape shape;
  World world(shape);
  Request bad = Greedy({5, 6, kChainNan}, 10);
  bad.sampling.n = 3;
  const auto out = world.Add(std::move(bad));
  world.Add(Greedy(Range(50), 20));
  world.Finish();
  world.CheckAnswers();
  for (int c = 0; c < 3; ++c) {
    EXPECT_EQ(out->choice(c).finish, FinishReason::kError);
    EXPECT_EQ(out->choice(c).error.code(), absl::StatusCode::kInternal);
  }
  EXPECT_EQ(world.loop().scheduler().counters().failed, 1);
}

TEST(Scheduler, AFailedStepEndsItsRequestsAndNoOthers) {
  Shape shape;
  World world(shape);
  const auto first = world.Add(Greedy(Range(50), 20));
  for (int i = 0; i < 4; ++i) world.Step();
  world.runner().fail_steps = {Unavailable("device lost")};
  world.Step();
  world.Step();
  world.Step();
  const auto second = world.Add(Greedy(Range(40), 5));
  world.Finish();
  EXPECT_EQ(first->choice(0).finish, FinishReason::kError);
  EXPECT_EQ(first->choice(0).error.message(), "device lost");
  EXPECT_EQ(second->choice(0).tokens, ChainOracle(Greedy(Range(40), 5), 0, 4096).tokens);
}

TEST(Scheduler, AbortEndsARequestInEveryState) {
  for (const int32_t depth : {0, 1}) {
    for (int steps = 0; steps < 14; ++steps) {
      Shape shape;
      shape.depth = depth;
      shape.chunk = 16;
      World world(shape);
      Request r = Greedy(Range(60), 20);
      r.rid = "gone";
      r.sampling.n = 3;
      const auto out = world.Add(std::move(r));
      world.Add(Greedy(Range(33), 10));
      for (int i = 0; i < steps; ++i) world.Step();
      const bool known = world.loop().Abort("gone", Aborted("client left"));
      EXPECT_EQ(world.loop().Abort("gone", Aborted("again")), false);
      EXPECT_TRUE(known);
      world.CheckAudit();
      world.Finish();
      world.CheckAnswers();
      for (int c = 0; c < 3; ++c) EXPECT_EQ(out->choice(c).finish, FinishReason::kAbort);
      EXPECT_EQ(world.loop().scheduler().counters().aborted, 1);
    }
  }
}

TEST(Scheduler, AnAbortedRequestIsGoneWithinTwoSteps) {
  for (const int32_t depth : {0, 1}) {
    for (int steps = 0; steps < 14; ++steps) {
      Shape shape;
      shape.depth = depth;
      shape.chunk = 16;
      World world(shape);
      Request r = Greedy(Range(60), 20);
      r.rid = "gone";
      r.sampling.n = 3;
      world.Add(std::move(r));
      for (int i = 0; i < steps; ++i) world.Step();
      const int64_t before = world.loop().scheduler().counters().steps;
      EXPECT_TRUE(world.loop().Abort("gone", Aborted("client left")));
      EXPECT_LE(world.loop().steps_in_flight(), 2) << "depth " << depth << ", aborted after " << steps;
      world.Finish();
      EXPECT_EQ(world.loop().scheduler().counters().steps, before) << "nothing was planned for it any more";
    }
  }
}

TEST(Scheduler, ADeadlineEndsAWaitingAndARunningRequest) {
  Shape shape;
  shape.max_running = 1;
  World world(shape);
  Request runs = Greedy(Range(10), 1000);
  runs.deadline = 20 * 1000000;
  Request waits = Greedy(Range(10), 1000);
  waits.deadline = 10 * 1000000;
  const auto a = world.Add(std::move(runs)), b = world.Add(std::move(waits));
  while (!b->done()) world.Step();
  EXPECT_LE(world.clock().Now(), 11 * 1000000);
  EXPECT_FALSE(a->done());
  world.Finish();
  for (const auto& out : {a, b}) {
    EXPECT_EQ(out->choice(0).finish, FinishReason::kAbort);
    EXPECT_EQ(out->choice(0).error.code(), absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_GT(a->choice(0).tokens.size(), 5u);
}

TEST(Scheduler, PriorityGoesFirstWhenAskedFor) {
  for (const bool use : {false, true}) {
    Shape shape;
    shape.max_running = 1;
    shape.use_priority = use;
    World world(shape);
    Request low = Greedy(Range(10), 5), high = Greedy(Range(11), 5);
    high.priority = 5;
    const auto a = world.Add(std::move(low)), b = world.Add(std::move(high));
    while (!a->done() && !b->done()) world.Step();
    EXPECT_EQ(b->done(), use);
    world.Finish();
  }
}

TEST(Scheduler, PromptLogprobsCoverEveryAskedPositionAcrossChunks) {
  for (const int32_t max_tokens : {0, 3}) {
    for (const int32_t from : {0, 1, 40, 99, 100}) {
      Shape shape;
      shape.chunk = 17;
      World world(shape);
      Request r = Greedy(Range(100), max_tokens);
      r.sampling.prompt_logprobs_from = from;
      r.sampling.top_logprobs = 2;
      const auto out = world.Add(r);
      world.Finish();
      const Recorder::Choice got = out->choice(0);
      EXPECT_EQ(got.finish, FinishReason::kLength);
      EXPECT_EQ(got.tokens.size(), size_t(max_tokens));
      ASSERT_EQ(got.prompt_logprobs.size(), size_t(100 - from));
      uint64_t hash = 0x1234567;
      for (int32_t p = 0; p < 100; ++p) {
        if (p >= from) {
          const TokenOut& entry = got.prompt_logprobs[size_t(p - from)];
          EXPECT_EQ(entry.token, r.prompt[size_t(p)]);
          if (p > 0) {
            std::vector<float> logits;
            ChainLogits(hash, false, &logits);
            Sampler sampler(kChainVocab, 1);
            SampleRow row;
            row.slot = SlotId(0);
            row.sample = false;
            row.logprob_of = r.prompt[size_t(p)];
            SampledToken want;
            sampler.Sample(row, logits.data(), &want);
            EXPECT_EQ(entry.logprob, want.logprob) << p;
            EXPECT_EQ(entry.top.size(), 2u);
          }
        }
        hash = ChainHash(hash, r.prompt[size_t(p)]);
      }
    }
  }
}

TEST(Scheduler, ZeroTokensEndAtOnceWithoutAStep) {
  World world(Shape{});
  Request r = Greedy(Range(10), 0);
  r.sampling.n = 2;
  const auto out = world.Add(std::move(r));
  EXPECT_TRUE(out->done());
  EXPECT_EQ(out->choice(1).finish, FinishReason::kLength);
  world.Finish();
  EXPECT_EQ(world.runner().steps, 0);
}

TEST(Scheduler, ChecksNameWhatIsTooLong) {
  Shape shape;
  shape.context = 100;
  World world(shape);
  const Status context = world.loop().Check(Greedy(Range(100), 5));
  EXPECT_EQ(context.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(context.message()), ::testing::HasSubstr("context of 100"));
  EXPECT_TRUE(world.loop().Check(Greedy(Range(99), 5)).ok());
  EXPECT_TRUE(world.loop().Check(Greedy(Range(100), 0)).ok());
  shape.context = 4096;
  shape.pages = 2;
  World small(shape);
  EXPECT_THAT(std::string(small.loop().Check(Greedy(Range(128), 5)).message()),
              ::testing::HasSubstr("cache of 128"));
  EXPECT_FALSE(small.loop().Check(Greedy({}, 5)).ok());
}

TEST(Scheduler, ASecondTurnFindsTheFirstInTheTree) {
  Shape shape;
  shape.cache = CacheKind::kTree;
  World world(shape);
  const auto first = world.Add(Greedy(Range(200), 30));
  world.Finish();
  std::vector<int32_t> prompt = Range(200);
  for (const int32_t t : first->choice(0).tokens) prompt.push_back(t);
  for (int i = 0; i < 20; ++i) prompt.push_back(i);
  const int64_t before = world.runner().rows;
  const auto second = world.Add(Greedy(prompt, 5));
  world.Finish();
  world.CheckAnswers();
  EXPECT_EQ(second->choice(0).cached.device, 192);  // 229 rows were final: three whole pages
  EXPECT_EQ(world.runner().rows - before, 250 - 192 + 4);
  EXPECT_EQ(world.loop().scheduler().counters().cached_tokens, 192);
}

TEST(Scheduler, AnotherSaltFindsNothing) {
  Shape shape;
  shape.cache = CacheKind::kTree;
  World world(shape);
  world.Add(Greedy(Range(200), 3));
  world.Finish();
  Request r = Greedy(Range(200), 3);
  r.cache_salt = "other";
  const auto out = world.Add(std::move(r));
  world.Finish();
  EXPECT_EQ(out->choice(0).cached.total(), 0);
}

TEST(Scheduler, LongestPrefixGoesFirstUnderLpm) {
  for (const bool lpm : {false, true}) {
    Shape shape;
    shape.cache = CacheKind::kTree;
    shape.max_running = 1;
    shape.lpm = lpm;
    World world(shape);
    world.Add(Greedy(Range(300), 2));
    world.Finish();
    Request miss = Greedy(Range(300), 2);
    miss.cache_salt = "cold";
    const auto busy = world.Add(Greedy(Range(10), 3));
    const auto a = world.Add(std::move(miss)), b = world.Add(Greedy(Range(310), 2));
    while (!a->done() && !b->done()) world.Step();
    EXPECT_EQ(b->done(), lpm);
    world.Finish();
    EXPECT_TRUE(busy->done());
  }
}

// Arrivals, aborts, deadlines, forks, penalties, a pool that is too small, results that come late: every
// answer equals the oracle (or a prefix of it when it was cut), nothing leaks, every row read was right.
class RandomLife : public ::testing::TestWithParam<CacheKind> {};

TEST_P(RandomLife, EqualsTheOracleAtBothDepths) {
  SchedulerCounters all;
  int64_t loaded = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SeededStream random(seed);
    Shape shape;
    shape.cache = GetParam();
    shape.seed = seed;
    if (shape.cache != CacheKind::kFlat && random.Chance(0.3)) shape.lanes = 3;
    shape.depth = int32_t(seed % 2);
    shape.pages = (2 + int64_t(random.Below(10))) * 3;
    shape.host_pages = shape.cache == CacheKind::kTreeAndHost ? (7 + int64_t(random.Below(20))) * 3 : 0;
    shape.max_running = 1 + int64_t(random.Below(10));
    shape.chunk = random.Chance(0.2) ? -1 : 1 + int64_t(random.Below(80));
    shape.max_prefill = 200;
    shape.ready = 0.3 + 0.7 * random.Unit();
    shape.use_priority = random.Chance(0.3);
    shape.lpm = random.Chance(0.3);
    World world(shape);
    if (random.Chance(0.3)) world.runner().load_failure_share = 0.3;
    const int64_t prompt_max = std::min<int64_t>(200, shape.pages * kPageTokens - 1);
    std::vector<std::string> live;
    std::vector<std::vector<int32_t>> known;  // prompts that later ones begin with
    for (int i = 0; i < 40; ++i) {
      Request r = MakeRequest(&random, prompt_max, 80);
      if (!known.empty() && random.Chance(0.6)) {
        std::vector<int32_t> base = known[random.Below(known.size())];
        base.resize(random.Below(base.size()) + 1);
        base.insert(base.end(), r.prompt.begin(), r.prompt.end());
        base.resize(std::min<size_t>(base.size(), size_t(prompt_max)));
        r.prompt = std::move(base);
      }
      known.push_back(r.prompt);
      r.rid = "q" + std::to_string(i);
      r.priority = int32_t(random.Below(3));
      if (random.Chance(0.1)) r.cache_salt = "s";
      if (random.Chance(0.05)) r.deadline = world.clock().Now() + Nanos(random.Below(300)) * 1000000 + 1;
      if (random.Chance(0.05)) r.prompt.back() = kChainNan;
      if (random.Chance(0.4)) r.sampling.constraint = ChainConstraint(seed * 100 + uint64_t(i));
      live.push_back(r.rid);
      world.Add(std::move(r));
      for (uint64_t s = random.Below(20); s > 0; --s) world.Step();
      if (random.Chance(0.2)) world.loop().Abort(live[random.Below(live.size())], Aborted("test"));
      if (random.Chance(0.02)) world.loop().AbortAll(Aborted("all"));
      world.CheckAudit();
      if (::testing::Test::HasFailure()) return;
    }
    world.Finish();
    world.CheckAnswers();
    if (::testing::Test::HasFailure()) return;
    const SchedulerCounters& c = world.loop().scheduler().counters();
    all.retractions += c.retractions;
    all.cached_tokens += c.cached_tokens;
    all.dropped_tokens += c.dropped_tokens;
    all.aborted += c.aborted;
    all.failed += c.failed;
    all.forced_tokens += c.forced_tokens;
    loaded += world.runner().loaded_pages;
  }
  // The search went where it should.
  EXPECT_GT(all.retractions, 10);
  EXPECT_GT(all.dropped_tokens, 50);
  EXPECT_GT(all.aborted, 100);
  EXPECT_GT(all.failed, 10);
  EXPECT_GT(all.forced_tokens, 2000);
  EXPECT_EQ(all.cached_tokens > 1000, GetParam() != CacheKind::kFlat);
  EXPECT_EQ(loaded > 50, GetParam() == CacheKind::kTreeAndHost);
}

INSTANTIATE_TEST_SUITE_P(Caches, RandomLife,
                         ::testing::Values(CacheKind::kFlat, CacheKind::kTree, CacheKind::kTreeAndHost));

TEST(Scheduler, TheSameCallsGiveTheSameSteps) {
  std::vector<int64_t> rows;
  for (int run = 0; run < 2; ++run) {
    Shape shape;
    shape.pages = 10;
    shape.ready = 0.5;
    World world(shape);
    SeededStream random(4);
    for (int i = 0; i < 20; ++i) {
      world.Add(MakeRequest(&random, 100, 60));
      world.Step();
    }
    world.Finish();
    rows.push_back(world.runner().steps);
    rows.push_back(world.runner().rows);
    rows.push_back(world.turns());
  }
  EXPECT_EQ(rows[0], rows[3]);
  EXPECT_EQ(rows[1], rows[4]);
  EXPECT_EQ(rows[2], rows[5]);
}

}  // namespace
}  // namespace sluice
