#include "engine/step_loop.h"

#include <utility>

#include "base/check.h"

namespace sluice {
namespace {
const std::string kVerificationName("\0verify", 7);  // no client can send it
}

StepLoop::StepLoop(const StepLoopOptions& options, std::unique_ptr<KvCache> cache, Executor* executor,
                   const Clock* clock, PdRole* role)
    : options_(options),
      cache_(std::move(cache)),
      executor_(executor),
      clock_(clock),
      role_(role),
      scheduler_(options.scheduler, cache_.get()),
      verify_(options.verify) {
  SLUICE_CHECK(options.depth == 0 || options.depth == 1, "depth {}", options.depth);
  if (role_ != nullptr) {
    role_->Attach(&scheduler_);
    scheduler_.SetRemote(role_);
  }
  for (int32_t i = 0; i <= options.depth; ++i) {
    buffers_.push_back(std::make_unique<StepBuffers>());
    free_.push_back(buffers_.back().get());
  }
}

StepLoop::~StepLoop() { SLUICE_CHECK(in_flight_ == 0, "{} steps are in flight", in_flight_); }

StepLoop::Progress StepLoop::StepOnce() {
  bool moved = false;
  while (StepBuffers* done = executor_->Poll()) {
    scheduler_.Commit(done->result);
    free_.push_back(done);
    --in_flight_;
    moved = true;
    if (options_.depth > 0) break;  // plan the next step before looking for another result
  }
  if (role_ != nullptr) moved |= role_->Poll();
  const Nanos now = clock_->Now();
  if (cache_->Poll(now)) scheduler_.OnCacheProgress();
  if (scheduler_.idle()) verifying_ = false;
  if (verify_ && scheduler_.idle()) StartVerification();
  while (!free_.empty()) {
    StepBuffers* step = free_.back();
    step->Clear();
    if (!scheduler_.Plan(now, &step->batch)) break;
    free_.pop_back();
    executor_->Submit(step);
    ++in_flight_;
    moved = true;
  }
  if (moved) return Progress::kMoved;
  return scheduler_.idle() ? Progress::kIdle : Progress::kWaiting;
}

void StepLoop::StartVerification() {
  VerifyJob job;
  if (!cache_->TakeVerification(&job)) return;
  Request request;
  request.id = NextRequestId();
  request.rid = kVerificationName;
  request.prompt = std::move(job.tokens);
  request.verify_name_space = std::move(job.name_space);
  request.sampling.max_tokens = 1;
  request.sampling.temperature = 0;
  if (!scheduler_.Check(request).ok()) return;
  scheduler_.Enqueue(std::move(request), clock_->Now());
  verifying_ = true;
}

void StepLoop::AbandonVerification() {
  if (!verifying_) return;
  scheduler_.Abort(kVerificationName, absl::CancelledError("other work came"));
  if (scheduler_.idle()) verifying_ = false;
}

bool StepLoop::Flush() {
  AbandonVerification();
  return scheduler_.idle() && cache_->Flush();
}

bool StepLoop::SetStorage(StorageBackend* storage, std::optional<PrefetchPolicy> policy) {
  AbandonVerification();
  return scheduler_.idle() && cache_->SetStorage(storage, policy);
}

bool StepLoop::DropDeviceCache() {
  AbandonVerification();
  return scheduler_.idle() && cache_->DropDevice();
}

EngineSnapshot StepLoop::Snapshot() const {
  const SchedulerCounters& c = scheduler_.counters();
  EngineSnapshot s;
  s.cache = cache_->Stats();
  s.running = scheduler_.running();
  s.queued = scheduler_.waiting();
  s.used_tokens = (s.cache.device.all - s.cache.device.free) * kPageTokens;
  s.max_total_tokens = cache_->total_pages() * kPageTokens;
  s.steps = c.steps;
  s.prompt_tokens_total = c.prompt_tokens;
  s.generation_tokens_total = c.generation_tokens;
  s.cached_tokens_total = c.cached_tokens;
  s.retractions_total = c.retractions;
  s.forced_tokens_total = c.forced_tokens;
  s.requests_finished = c.finished;
  s.requests_aborted = c.aborted;
  s.requests_failed = c.failed;
  s.drafts = c.drafts;
  s.decode_rows = c.decode_rows;
  if (role_ != nullptr) s.pd = role_->Snapshot();
  return s;
}

EngineLive StepLoop::Live(size_t nodes_max, size_t sequences_max) const {
  EngineLive live;
  live.snapshot = Snapshot();
  live.cache = cache_->Sketch(nodes_max, 64 * nodes_max);
  scheduler_.ForEachSequence([&](const Sequence& s) {
    if (live.sequences.size() == sequences_max) return;
    live.sequences.push_back({.rid = s.group->request.rid,
                              .choice = s.choice,
                              .prompt = s.group->prompt_len(),
                              .computed = s.computed,
                              .output = s.produced(),
                              .cached = s.group->cached.total(),
                              .waiting = s.state == SeqState::kWaiting});
  });
  return live;
}

std::vector<std::string> StepLoop::Audit() const {
  std::vector<std::string> wrong = scheduler_.Audit();
  for (std::string& w : cache_->Audit()) wrong.push_back("cache: " + std::move(w));
  if (scheduler_.idle()) {
    const CacheStats stats = cache_->Stats();
    if (stats.device.leased != 0)
      wrong.push_back(fmt::format("idle with {} leased pages", stats.device.leased));
    if (stats.device.free + stats.device.leased + stats.device.cached != stats.device.all) {
      wrong.push_back(fmt::format("device pages: {} free + {} leased + {} cached != {}", stats.device.free,
                                  stats.device.leased, stats.device.cached, stats.device.all));
    }
  }
  return wrong;
}

}  // namespace sluice
