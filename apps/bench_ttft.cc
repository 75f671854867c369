#include "bench_ttft.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/random.h"

namespace sluice {
namespace {

class FirstToken final : public OutputChannel {
 public:
  explicit FirstToken(const Clock* clock) : clock_(clock) {}
  void Push(OutputEvent event) override {
    std::lock_guard lock(mutex_);
    if (first_ == 0 && !event.tokens.empty()) first_ = clock_->Now();
    cached_ = event.cached;
    if (event.finish == FinishReason::kNone) return;
    status_ = event.error;
    done_ = true;
    ended_.notify_all();
  }
  Nanos Wait(CachedTokens* cached, Status* status) {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return done_; });
    *cached = cached_;
    *status = status_;
    return first_;
  }

 private:
  const Clock* const clock_;
  std::mutex mutex_;
  std::condition_variable ended_;
  Nanos first_ = 0;
  CachedTokens cached_;
  Status status_;
  bool done_ = false;
};

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + long(v.size() / 2), v.end());
  return v[v.size() / 2];
}

}  // namespace

StatusOr<std::vector<TtftRow>> MeasureTtft(ServerConfig config, std::shared_ptr<LoadedModel> model,
                                           int64_t prompt_tokens, int64_t rounds) {
  SteadyClock clock;
  const int64_t pages = CeilDiv(prompt_tokens + 1, kPageTokens);
  config.enable_hierarchical_cache = true;
  config.decode_log_interval = 0;
  config.max_total_tokens = (2 * pages + 2) * kPageTokens;
  config.hicache_ratio = 8;
  config.max_running_requests = 2;
  ASSIGN_OR_RETURN(std::unique_ptr<EngineStack> stack, MakeEngineStack(config, model, &clock));
  Engine& engine = *stack->engine;
  SeededStream random(17);
  const auto prompt = [&] {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < prompt_tokens; ++i)
      tokens.push_back(int32_t(random.Below(uint64_t(model->config.vocab_size - 64))));
    return tokens;
  };
  const auto ask = [&](const std::vector<int32_t>& tokens, CachedTokens* cached) -> StatusOr<double> {
    Request r;
    r.id = NextRequestId();
    r.rid = fmt::format("ttft-{}", r.id.value);
    r.prompt = tokens;
    r.sampling.max_tokens = 1;
    r.sampling.temperature = 0;
    r.sampling.ignore_eos = true;
    auto channel = std::make_shared<FirstToken>(&clock);
    r.output = channel;
    const Nanos from = clock.Now();
    RETURN_IF_ERROR(engine.Submit(std::move(r)));
    Status status;
    const Nanos first = channel->Wait(cached, &status);
    RETURN_IF_ERROR(status);
    return double(first - from) / 1e6;
  };
  const auto empty_device = [&]() -> Status {
    for (int i = 0; i < 20000; ++i) {
      if (engine.DropDeviceCache()) return OkStatus();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return Internal("the device tier could not be emptied");
  };
  const int64_t hit = (prompt_tokens - 1) / kPageTokens * kPageTokens;
  std::vector<TtftRow> rows(4);
  const char* names[] = {"cold", "warm", "l2", "l2 nearly full"};
  std::vector<double> ms[4], ratio[4];
  for (int64_t round = 0; round <= rounds; ++round) {  // round 0 warms up
    const std::vector<int32_t> tokens = prompt();
    double cold = 0;
    for (int i = 0; i < 4; ++i) {
      if (i >= 2) RETURN_IF_ERROR(empty_device());
      CachedTokens cached;
      if (i == 3) {  // another prompt takes half of the tier
        RETURN_IF_ERROR(ask(prompt(), &cached).status());
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // copies end, the engine goes to rest
      const CacheStats before = engine.Snapshot().cache;
      ASSIGN_OR_RETURN(const double took, ask(tokens, &cached));
      const CacheStats after = engine.Snapshot().cache;
      const int64_t want[] = {0, cached.device, cached.host, cached.host};
      if (cached.total() != want[i] || (i > 0 && cached.total() != hit))
        return Internal("{}: {} + {} tokens came from the device and host tier, {} were expected", names[i],
                        cached.device, cached.host, i == 0 ? 0 : hit);
      rows[size_t(i)].cached_tokens = cached.total();
      rows[size_t(i)].deficit_evictions += after.deficit_evictions - before.deficit_evictions;
      if (i == 0) cold = took;
      if (round == 0) continue;
      ms[i].push_back(took);
      ratio[i].push_back(took / cold);
    }
  }
  for (int i = 0; i < 4; ++i) {
    rows[size_t(i)].from = names[i];
    rows[size_t(i)].prompt_tokens = prompt_tokens;
    rows[size_t(i)].ms = Median(ms[i]);
    rows[size_t(i)].ratio = Median(ratio[i]);
  }
  return rows;
}

}  // namespace sluice
