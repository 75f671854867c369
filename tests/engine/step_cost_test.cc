// The control plane's own time for a step at batch 256: schedule, cache, batch build, commit. Bounds are
// loose enough for a busy machine; the printed medians are the figures to look at.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "base/random.h"
#include "cache/kv_cache.h"
#include "engine/step_loop.h"
#include "gtest/gtest.h"
#include "kv/layout_fixture.h"

namespace sluice {
namespace {

// Samples a token for every row at once: the engine's share is all that is left.
class NullRunner final : public StepRunner {
 public:
  void Run(const ForwardBatch& batch, StepResult* result) override {
    result->samples.resize(batch.samples.size());
    for (size_t i = 0; i < batch.samples.size(); ++i) {
      result->samples[i].slot = batch.samples[i].slot;
      result->samples[i].token = int32_t(batch.step % 50);
    }
  }
};

class Sink final : public OutputChannel {
 public:
  void Push(OutputEvent) override {}
};

double MedianStepUs(int64_t batch, int64_t context, int32_t depth) {
  StepLoopOptions options;
  options.depth = depth;
  options.scheduler.max_running = batch;
  options.scheduler.chunk_tokens = 8192;
  options.scheduler.context_length = 2 * context + 4096;
  NullRunner runner;
  InlineExecutor executor(&runner);
  VirtualClock clock;
  CacheOptions cache;
  cache.pages_per_lane = batch * (CeilDiv(context, 64) + 20);
  StepLoop loop(options, MakeKvCache(cache, testing::MakeLayout(testing::Small()), nullptr, nullptr),
                &executor, &clock);
  SeededStream random(1);
  for (int64_t b = 0; b < batch; ++b) {
    Request r;
    for (int64_t i = 0; i < context; ++i) r.prompt.push_back(int32_t(random.Below(1000)));
    r.rid = std::to_string(b);
    r.sampling.max_tokens = 1000;
    r.sampling.ignore_eos = true;
    r.output = std::make_shared<Sink>();
    loop.Enqueue(std::move(r));
  }
  while (loop.scheduler().counters().generation_tokens < batch * 3) loop.StepOnce();
  std::vector<double> us;
  for (int i = 0; i < 400; ++i) {
    const auto start = std::chrono::steady_clock::now();
    loop.StepOnce();
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  loop.AbortAll(Aborted("done"));
  while (!loop.Idle()) loop.StepOnce();
  std::sort(us.begin(), us.end());
  std::printf("batch %4ld context %6ld depth %d: step p50 %.1f us, p99 %.1f us\n", long(batch), long(context),
              depth, us[us.size() / 2], us[us.size() * 99 / 100]);
  return us[us.size() / 2];
}

TEST(StepCost, ADecodeStepOf256StaysFarBelowAMillisecond) {
  MedianStepUs(32, 1024, 1);
  const double short_us = MedianStepUs(256, 1024, 1), long_us = MedianStepUs(256, 8192, 1);
#ifdef NDEBUG
  EXPECT_LT(short_us, 500);
  EXPECT_LT(long_us, 500);
#else
  GTEST_SKIP() << "debug build: " << short_us << " and " << long_us << " us mean nothing";
#endif
}

}  // namespace
}  // namespace sluice
