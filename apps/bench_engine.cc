#include "bench_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/random.h"

namespace sluice {
namespace {

constexpr int32_t kOwnTokens = 16;  // at the end of each prompt
constexpr int32_t kAnswer = 300, kMargin = 20;

class Counter final : public OutputChannel {
 public:
  Counter(std::atomic<int64_t>* tokens, std::atomic<int64_t>* ended) : tokens_(tokens), ended_(ended) {}
  void Push(OutputEvent event) override {
    tokens_->fetch_add(int64_t(event.tokens.size()));
    if (event.finish == FinishReason::kNone) return;
    {
      std::lock_guard lock(mutex_);
      status_ = event.error;
    }
    ended_->fetch_add(1);
  }
  Status status() const {
    std::lock_guard lock(mutex_);
    return status_;
  }

 private:
  std::atomic<int64_t>* const tokens_;
  std::atomic<int64_t>* const ended_;
  mutable std::mutex mutex_;
  Status status_;
};

struct Moment {
  std::chrono::steady_clock::time_point time;
  int64_t steps, device, tokens;
};

Status MeasureAt(ServerConfig config, const std::shared_ptr<LoadedModel>& model,
                 const std::vector<int64_t>& batches, int64_t context, std::vector<EngineDecodeRow>* rows) {
  SteadyClock clock;
  const int64_t most = *std::max_element(batches.begin(), batches.end());
  config.decode_log_interval = 0;
  config.max_running_requests = most;
  config.max_total_tokens =
      (CeilDiv(context, kPageTokens) + (most + 1) * (CeilDiv(kAnswer + kOwnTokens, kPageTokens) + 2)) *
      kPageTokens;
  if (context + kAnswer >= model->context_length)
    return Invalid("{} tokens and an answer of {} do not fit the model's context of {}", context, kAnswer,
                   model->context_length);
  ASSIGN_OR_RETURN(std::unique_ptr<EngineStack> stack,
                   MakeEngineStack(config, model, &clock, /*time_device=*/true));
  SeededStream random(23);
  const auto tokens = [&](int64_t n) {
    std::vector<int32_t> list;
    for (int64_t i = 0; i < n; ++i)
      list.push_back(int32_t(random.Below(uint64_t(model->config.vocab_size - 64))));
    return list;
  };
  std::atomic<int64_t> made{0}, ended{0};
  std::vector<std::shared_ptr<Counter>> channels;
  const auto ask = [&](std::vector<int32_t> prompt, int32_t answer) {
    Request r;
    r.id = NextRequestId();
    r.rid = fmt::format("decode-{}", r.id.value);
    r.prompt = std::move(prompt);
    r.sampling.max_tokens = answer;
    r.sampling.temperature = 0;
    r.sampling.ignore_eos = true;
    r.output = channels.emplace_back(std::make_shared<Counter>(&made, &ended));
    return stack->engine->Submit(std::move(r));
  };
  // An error ends the wait, too: it ends a request that is not due to end yet.
  const auto wait = [&](int64_t tokens_made, int64_t requests_ended) {
    while (made < tokens_made && ended <= requests_ended)
      std::this_thread::sleep_for(std::chrono::microseconds(200));
  };
  const auto now = [&] {
    const RunnerTimes& t = *stack->times;
    return Moment{std::chrono::steady_clock::now(), t.steps, t.device, made};
  };
  const std::vector<int32_t> shared = tokens(context - kOwnTokens);
  RETURN_IF_ERROR(ask(shared, 1));  // fills the cache
  wait(1, 0);
  for (const int64_t batch : batches) {
    for (const auto& c : channels) RETURN_IF_ERROR(c->status());
    while (ended < int64_t(channels.size())) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    channels.clear();
    made = ended = 0;
    for (int64_t b = 0; b < batch; ++b) {
      std::vector<int32_t> prompt = shared;
      for (const int32_t t : tokens(kOwnTokens)) prompt.push_back(t);
      RETURN_IF_ERROR(ask(std::move(prompt), kAnswer));
    }
    wait(batch * kMargin, 0);
    const Moment from = now();
    wait(batch * (kAnswer - kMargin), 0);
    const Moment to = now();
    const double seconds = std::chrono::duration<double>(to.time - from.time).count();
    EngineDecodeRow& row = rows->emplace_back();
    row.step_depth = config.step_depth;
    row.batch = batch;
    row.context = context;
    row.steps = to.steps - from.steps;
    row.step_ms = seconds * 1e3 / double(std::max<int64_t>(1, row.steps));
    row.tokens_per_s = double(to.tokens - from.tokens) / seconds;
    if (to.device > from.device) row.host_gap = 1 - double(to.device - from.device) * 1e-9 / seconds;
  }
  while (ended < int64_t(channels.size())) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (const auto& c : channels) RETURN_IF_ERROR(c->status());
  return OkStatus();
}

}  // namespace

StatusOr<std::vector<EngineDecodeRow>> MeasureEngineDecode(ServerConfig config,
                                                           std::shared_ptr<LoadedModel> model,
                                                           const std::vector<int64_t>& batches,
                                                           int64_t context) {
  std::vector<EngineDecodeRow> rows;
  for (const int64_t depth : {0, 1}) {
    config.step_depth = depth;
    RETURN_IF_ERROR(MeasureAt(config, model, batches, context, &rows));
  }
  return rows;
}

}  // namespace sluice
