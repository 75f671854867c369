#include "engine/threaded_engine.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/random.h"
#include "chain_runner.h"
#include "flat_cache.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "recorder.h"
#include "spdlog/sinks/base_sink.h"

namespace sluice {

namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr int64_t kPages = 64;

class SlowRunner final : public StepRunner {
 public:
  SlowRunner(int32_t slots, milliseconds delay) : inner_(kPages, slots), delay_(delay) {}
  void Run(const ForwardBatch& batch, StepResult* result) override {
    if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
    inner_.Run(batch, result);
    if (!inner_.violations.empty()) result->status = Internal("{}", inner_.violations[0]);
  }

 private:
  ChainRunner inner_;
  const milliseconds delay_;
};

std::unique_ptr<Engine> MakeEngine(const Clock* clock, int64_t max_queued = 1000,
                                   milliseconds delay = milliseconds(0), int64_t max_running = 8) {
  ThreadedEngineOptions options;
  options.loop.scheduler.max_running = max_running;
  options.loop.scheduler.chunk_tokens = 32;
  options.loop.scheduler.context_length = 4096;
  options.loop.scheduler.eos_token_ids = {kChainEos};
  options.max_queued = max_queued;
  EngineParts parts;
  parts.cache = std::make_unique<FlatCache>(kPages, nullptr);
  parts.runner = std::make_unique<SlowRunner>(int32_t(2 * max_running), delay);
  return MakeThreadedEngine(options, std::move(parts), clock);
}

Request MakeRequest(uint64_t seed, int32_t max_tokens, std::shared_ptr<Recorder> out) {
  SeededStream random(seed);
  Request r;
  for (uint64_t i = 0; i < 5 + seed % 100; ++i) r.prompt.push_back(int32_t(random.Below(60)));
  r.id = NextRequestId();
  r.rid = "t" + std::to_string(seed);
  r.sampling.max_tokens = max_tokens;
  r.sampling.temperature = 1;
  r.sampling.seed = seed;
  r.output = std::move(out);
  return r;
}

void WaitFor(const std::function<bool()>& done) {
  for (int i = 0; i < 20000 && !done(); ++i) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(done());
}

TEST(ThreadedEngine, AnswersFromManyThreadsEqualTheOracle) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock);
  constexpr int kThreads = 4, kEach = 20;
  std::vector<std::thread> threads;
  std::vector<std::vector<std::shared_ptr<Recorder>>> outs(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        outs[size_t(t)].push_back(std::make_shared<Recorder>(1));
        EXPECT_TRUE(engine->Submit(MakeRequest(uint64_t(t * 100 + i), 30, outs[size_t(t)].back())).ok());
        if (i % 5 == 0) engine->Snapshot();
      }
    });
  }
  for (auto& t : threads) t.join();
  for (int t = 0; t < kThreads; ++t) {
    for (int i = 0; i < kEach; ++i) {
      const auto& out = outs[size_t(t)][size_t(i)];
      WaitFor([&] { return out->done(); });
      EXPECT_EQ(out->choice(0).tokens,
                ChainOracle(MakeRequest(uint64_t(t * 100 + i), 30, nullptr), 0, 4096).tokens);
    }
  }
  const EngineSnapshot s = engine->Snapshot();
  EXPECT_EQ(s.requests_finished, kThreads * kEach);
  EXPECT_EQ(s.running + s.queued, 0);
  EXPECT_GT(s.cpu_seconds, 0);
}

TEST(ThreadedEngine, AFullQueueRefusesAndCounts) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock, 4, milliseconds(20), 1);
  std::vector<std::shared_ptr<Recorder>> outs;
  int refused = 0;
  for (int i = 0; i < 20; ++i) {
    auto out = std::make_shared<Recorder>(1);
    const Status s = engine->Submit(MakeRequest(uint64_t(i), 3, out));
    if (s.ok()) {
      outs.push_back(out);
    } else {
      EXPECT_EQ(s.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(s.message()), HasSubstr("--max-queued-requests 4"));
      ++refused;
    }
  }
  EXPECT_GE(refused, 15);
  EXPECT_EQ(engine->Snapshot().requests_rejected, refused);
  for (const auto& out : outs) WaitFor([&] { return out->done(); });
}

TEST(ThreadedEngine, FreePlacesAreNoQueue) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock, 0, milliseconds(5), 3);  // none may wait, three may run
  EXPECT_EQ(engine->RequestsMax(), 3);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::shared_ptr<Recorder>> outs;
    for (int i = 0; i < 3; ++i) {
      outs.push_back(std::make_shared<Recorder>(1));
      EXPECT_TRUE(engine->Submit(MakeRequest(uint64_t(round * 10 + i), 40, outs.back())).ok()) << round << i;
    }
    const Status fourth = engine->Submit(MakeRequest(99, 3, std::make_shared<Recorder>(1)));
    EXPECT_EQ(fourth.code(), absl::StatusCode::kResourceExhausted);
    for (const auto& out : outs) WaitFor([&] { return out->done(); });
    WaitFor([&] { return engine->Snapshot().running == 0; });
  }
}

TEST(ThreadedEngine, AbortStormLeavesNothingBehind) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock);
  std::atomic<bool> stop{false};
  std::thread aborter([&] {
    SeededStream random(1);
    while (!stop) engine->Abort("t" + std::to_string(random.Below(300)));
  });
  std::vector<std::shared_ptr<Recorder>> outs;
  for (int i = 0; i < 300; ++i) {
    outs.push_back(std::make_shared<Recorder>(1));
    EXPECT_TRUE(engine->Submit(MakeRequest(uint64_t(i), 50, outs.back())).ok());
  }
  for (const auto& out : outs) WaitFor([&] { return out->done(); });
  stop = true;
  aborter.join();
  WaitFor([&] { return engine->Flush(); });
  const EngineSnapshot s = engine->Snapshot();
  EXPECT_EQ(s.requests_finished + s.requests_aborted, 300);
  EXPECT_EQ(s.cache.device.leased, 0);
  EXPECT_EQ(s.cache.device.free, kPages);
  for (const auto& out : outs) EXPECT_TRUE(out->violations().empty());
}

TEST(ThreadedEngine, FinishSoonEndsOneChoiceAndAbortSoonTheRest) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock, 100, milliseconds(1));
  auto out = std::make_shared<Recorder>(3);
  Request r = MakeRequest(1, 4000, out);
  r.rid = "cut";
  r.sampling.n = 3;
  r.sampling.ignore_eos = true;
  EXPECT_TRUE(engine->Submit(std::move(r)).ok());
  WaitFor([&] { return out->choice(1).events > 0; });
  engine->FinishSoon("cut", 1);
  engine->FinishSoon("unknown", 0);
  WaitFor([&] { return out->choice(1).finish != FinishReason::kNone; });
  EXPECT_EQ(out->choice(1).finish, FinishReason::kStop);
  EXPECT_EQ(out->choice(0).finish, FinishReason::kNone);
  engine->FinishSoon("cut", 1);  // twice is nothing
  engine->AbortSoon("cut");
  WaitFor([&] { return out->done(); });
  EXPECT_EQ(out->choice(0).finish, FinishReason::kAbort);
  EXPECT_TRUE(out->violations().empty());
  WaitFor([&] { return engine->Flush(); });
}

TEST(ThreadedEngine, DrainFinishesWhatRunsAndRefusesTheRest) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock, 100, milliseconds(1));
  auto out = std::make_shared<Recorder>(1);
  Request r = MakeRequest(1, 20, out);
  r.sampling.ignore_eos = true;
  EXPECT_TRUE(engine->Submit(std::move(r)).ok());
  engine->Drain(clock.Now() + 20'000'000'000);
  EXPECT_TRUE(out->done());
  EXPECT_EQ(out->choice(0).finish, FinishReason::kLength);
  EXPECT_EQ(engine->Submit(MakeRequest(2, 5, nullptr)).code(), absl::StatusCode::kUnavailable);
}

TEST(ThreadedEngine, DrainAbortsAtTheDeadline) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock, 100, milliseconds(5));
  auto out = std::make_shared<Recorder>(1);
  Request r = MakeRequest(1, 4000, out);
  r.sampling.ignore_eos = true;
  EXPECT_TRUE(engine->Submit(std::move(r)).ok());
  engine->Drain(clock.Now() + 50'000'000);
  EXPECT_TRUE(out->done());
  EXPECT_EQ(out->choice(0).finish, FinishReason::kAbort);
  EXPECT_EQ(out->choice(0).error.code(), absl::StatusCode::kUnavailable);
}

TEST(ThreadedEngine, DestructionEndsEveryRequest) {
  SteadyClock clock;
  std::vector<std::shared_ptr<Recorder>> outs;
  {
    auto engine = MakeEngine(&clock, 100, milliseconds(2));
    for (int i = 0; i < 30; ++i) {
      outs.push_back(std::make_shared<Recorder>(1));
      EXPECT_TRUE(engine->Submit(MakeRequest(uint64_t(i), 1000, outs.back())).ok());
    }
  }
  for (const auto& out : outs) EXPECT_TRUE(out->done());
}

class CountingSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  std::atomic<int> lines{0};

 protected:
  void sink_it_(const spdlog::details::log_msg&) override { ++lines; }
  void flush_() override {}
};

TEST(ThreadedEngine, ThousandsOfRequestsWriteNoLine) {
  const auto sink = std::make_shared<CountingSink>();
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink));
  SteadyClock clock;
  const Nanos begin = clock.Now();
  {
    auto engine = MakeEngine(&clock, 20000);
    std::vector<std::shared_ptr<Recorder>> outs;
    for (int i = 0; i < 10000; ++i) {
      outs.push_back(std::make_shared<Recorder>(1));
      Request r = MakeRequest(uint64_t(i % 7), 2, outs.back());
      EXPECT_TRUE(engine->Submit(std::move(r)).ok());
    }
    for (const auto& out : outs) WaitFor([&] { return out->done(); });
  }
  spdlog::set_default_logger(before);
  EXPECT_LE(sink->lines, 1 + double(clock.Now() - begin) * 1e-9);  // the status line, at most one a second
}

// Time passes by steps only: `per_step` each.
class StepClock final : public Clock {
 public:
  explicit StepClock(Nanos per_step) : per_step_(per_step) {}
  Nanos Now() const override { return now_; }
  void Step() { now_ += per_step_; }

 private:
  const Nanos per_step_;
  std::atomic<Nanos> now_{0};
};

class ClockedRunner final : public StepRunner {
 public:
  explicit ClockedRunner(StepClock* clock) : inner_(kPages, 16), clock_(clock) {}
  void Run(const ForwardBatch& batch, StepResult* result) override {
    clock_->Step();
    inner_.Run(batch, result);
  }

 private:
  ChainRunner inner_;
  StepClock* const clock_;
};

struct StatusLines {
  int64_t steps = 0, lines = 0;
};
StatusLines CountStatusLines(int64_t interval, Nanos per_step) {
  const auto sink = std::make_shared<CountingSink>();
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink));
  StatusLines counted;
  {
    StepClock clock(per_step);
    ThreadedEngineOptions options;
    options.loop.scheduler.max_running = 8;
    options.loop.scheduler.context_length = 4096;
    options.loop.scheduler.eos_token_ids = {kChainEos};
    options.status_interval_steps = interval;
    EngineParts parts;
    parts.cache = std::make_unique<FlatCache>(kPages, nullptr);
    parts.runner = std::make_unique<ClockedRunner>(&clock);
    auto engine = MakeThreadedEngine(options, std::move(parts), &clock);
    auto out = std::make_shared<Recorder>(1);
    Request r = MakeRequest(1, 1000, out);
    r.sampling.ignore_eos = true;
    EXPECT_TRUE(engine->Submit(std::move(r)).ok());
    WaitFor([&] { return out->done(); });
    counted.steps = engine->Snapshot().steps;
  }
  spdlog::set_default_logger(before);
  counted.lines = sink->lines;
  return counted;
}

TEST(ThreadedEngine, StatusLinesComeBySteps) {
  const Nanos second = 1'000'000'000;
  // Slow steps: every 40th makes a line. Steps are counted ahead of their end, hence one more or less.
  const StatusLines slow = CountStatusLines(40, second);
  EXPECT_GE(slow.steps, 1000);
  EXPECT_NEAR(double(slow.lines), double(slow.steps) / 40, 1);
  EXPECT_NEAR(double(CountStatusLines(100, second).lines), double(slow.steps) / 100, 1);
  // Fast ones: no more than one line a second.
  const StatusLines fast = CountStatusLines(1, second / 100);
  EXPECT_LE(fast.lines, fast.steps / 100 + 1);
  EXPECT_GE(fast.lines, fast.steps / 100 - 2);
  EXPECT_EQ(CountStatusLines(0, second).lines, 0);
}

TEST(ThreadedEngine, TooLongAPromptIsRefusedBeforeItQueues) {
  SteadyClock clock;
  auto engine = MakeEngine(&clock);
  Request r = MakeRequest(1, 5, nullptr);
  r.prompt.resize(5000);
  EXPECT_EQ(engine->Submit(std::move(r)).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice
