// sluice bench step: the control plane's own time of a decode step (schedule, cache, batch, commit), with a
// model that answers at once.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <vector>

#include "base/random.h"
#include "cache/kv_cache.h"
#include "commands.h"
#include "engine/step_loop.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "replay.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

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

struct StepTimes {
  double p50_us = 0, p99_us = 0;
};

StepTimes Measure(int64_t batch, int64_t context, int32_t depth, int steps) {
  StepLoopOptions options;
  options.depth = depth;
  options.scheduler.max_running = batch;
  options.scheduler.chunk_tokens = 8192;
  options.scheduler.context_length = 2 * context + steps + 4096;
  NullRunner runner;
  InlineExecutor executor(&runner);
  VirtualClock clock;
  CacheOptions cache;
  cache.pages_per_lane = batch * (CeilDiv(context + steps, kPageTokens) + 20);
  StepLoop loop(options, MakeKvCache(cache, ReplayLayout(), nullptr, nullptr), &executor, &clock);
  SeededStream random(1);
  for (int64_t b = 0; b < batch; ++b) {
    Request r;
    for (int64_t i = 0; i < context; ++i) r.prompt.push_back(int32_t(random.Below(1000)));
    r.rid = std::to_string(b);
    r.sampling.max_tokens = steps + 1000;
    r.sampling.ignore_eos = true;
    r.output = std::make_shared<Sink>();
    loop.Enqueue(std::move(r));
  }
  while (loop.scheduler().counters().generation_tokens < batch * 3) loop.StepOnce();
  std::vector<double> us;
  for (int i = 0; i < steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    loop.StepOnce();
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  loop.AbortAll(Aborted("done"));
  while (!loop.Idle()) loop.StepOnce();
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 99 / 100]};
}

}  // namespace

int RunBenchStep(const std::vector<std::string>& args) {
  std::vector<int64_t> batches = {32, 256}, contexts = {1024, 8192};
  int steps = 400;
  double limit_us = 500;
  bool check = false;
  std::string json;
  CLI::App app("Time of the control plane for a decode step, without the model's", "sluice bench step");
  app.option_defaults()->always_capture_default();
  app.add_option("--batch", batches, "running sequences")->delimiter(',')->check(CLI::Range(1, 4096));
  app.add_option("--context", contexts, "tokens of each prompt")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--steps", steps, "measured steps")->check(CLI::Range(10, 100000));
  app.add_option("--limit", limit_us, "microseconds that --check allows the median");
  app.add_flag("--check", check, "exit 1 when a median is above the limit");
  app.add_option("--json", json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "bench step", args)) return *code;
  Json rows = Json::array();
  std::string table =
      fmt::format("{:>6} {:>8} {:>6} {:>9} {:>9}\n", "batch", "context", "depth", "p50 us", "p99 us");
  bool missed = false;
  for (const int64_t batch : batches) {
    for (const int64_t context : contexts) {
      for (const int32_t depth : {0, 1}) {
        const StepTimes t = Measure(batch, context, depth, steps);
        missed |= t.p50_us > limit_us;
        rows.push_back({{"batch", batch},
                        {"context", context},
                        {"depth", depth},
                        {"p50_us", t.p50_us},
                        {"p99_us", t.p99_us}});
        table +=
            fmt::format("{:>6} {:>8} {:>6} {:>9.1f} {:>9.1f}\n", batch, context, depth, t.p50_us, t.p99_us);
      }
    }
  }
  const Json document = {{"limit_us", limit_us}, {"rows", rows}};
  if (json.empty()) {
    std::cout << table;
  } else if (json == "-") {
    std::cout << document.dump(2) << "\n";
  } else if (std::ofstream out(json); !(out << document.dump(2) << "\n")) {
    return FailWith("bench step", Unavailable("--json: cannot write {}", json));
  }
  return check && missed ? kExitCheckFailed : kExitOk;
}

}  // namespace sluice
