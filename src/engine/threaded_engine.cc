#include "engine/threaded_engine.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/log.h"

namespace sluice {
namespace {

using std::chrono::milliseconds;

// With steps in flight their end wakes the engine; the timeout is for storage progress and deadlines.
constexpr milliseconds kWaitWithSteps{5};
constexpr milliseconds kWaitWithoutSteps{1};  // sequences wait for storage or for room
constexpr milliseconds kWaitIdle{200};
constexpr Nanos kStatusGap = 1'000'000'000;     // between status lines, however fast the steps
constexpr Nanos kAbandonRooms = 3'000'000'000;  // after the end of a shutdown's patience

double ThreadCpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

class ThreadedEngine final : public Engine {
 public:
  ThreadedEngine(const ThreadedEngineOptions& options, EngineParts parts, const Clock* clock)
      : options_(options),
        keep_alive_(std::move(parts.keep_alive)),
        clock_(clock),
        places_(options.loop.scheduler.max_running),
        role_(SetWake(std::move(parts.role))),
        executor_(std::move(parts.runner), [this] { Wake(); }),
        loop_(options.loop, std::move(parts.cache), &executor_, clock, role_.get()),
        thread_([this] { Run(); }) {}

  ~ThreadedEngine() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      draining_ = true;
    }
    Wake();
    thread_.join();
  }

  Status Submit(Request request) override {
    if (Status ok = loop_.Check(request); !ok.ok()) return ok;
    {
      std::lock_guard lock(mutex_);
      if (draining_) return Unavailable("the server is shutting down; send the request to another one");
      // Who will take a free place is no queue: running and waiting ones together are bounded.
      const int64_t queued = int64_t(inbox_.size()) + waiting_ - places_;
      if (queued >= options_.max_queued) {
        ++rejected_;
        return Exhausted("queue: {} requests wait already (--max-queued-requests {}); try again later",
                         queued, options_.max_queued);
      }
      inbox_.push_back(std::move(request));
    }
    Wake();
    return OkStatus();
  }

  bool Abort(const std::string& rid) override {
    bool known = false;
    Call([&] { known = loop_.Abort(rid, Aborted("the request was aborted")); });
    return known;
  }

  void AbortSoon(std::string rid) override {
    Post([this, rid = std::move(rid)] { loop_.Abort(rid, Aborted("the request was aborted")); });
  }

  int64_t RequestsMax() const override { return options_.max_queued + options_.loop.scheduler.max_running; }

  void FinishSoon(std::string rid, int32_t choice) override {
    Post([this, rid = std::move(rid), choice] { loop_.Finish(rid, choice); });
  }

  int64_t AbortAll() override {
    int64_t ended = 0;
    Call([&] { ended = loop_.AbortAll(Aborted("all requests were aborted")); });
    return ended;
  }

  bool Flush() override {
    return WhenNotVerifying([this] { return loop_.Flush(); });
  }

  bool DropDeviceCache() override {
    return WhenNotVerifying([this] { return loop_.DropDeviceCache(); });
  }

  bool SetStorage(StorageBackend* storage, std::optional<PrefetchPolicy> policy) override {
    for (int tries = 0; tries < 1000; ++tries) {
      bool done = false, idle = false;
      Call([&] {
        done = loop_.SetStorage(storage, policy);
        idle = loop_.Idle() || loop_.verifying();
      });
      if (done || !idle) return done;
      std::this_thread::sleep_for(milliseconds(5));  // the old one is at work
    }
    return false;
  }

  Status ClearStorage() override {
    Status status;
    Call([&] { status = loop_.ClearStorage(); });
    return status;
  }

  EngineSnapshot Snapshot() const override {
    EngineSnapshot snapshot;
    const_cast<ThreadedEngine*>(this)->Call([&] {
      snapshot = loop_.Snapshot();
      snapshot.cpu_seconds = ThreadCpuSeconds();
    });
    std::lock_guard lock(mutex_);
    snapshot.requests_rejected = rejected_;
    return snapshot;
  }

  EngineLive Live(size_t nodes_max, size_t sequences_max) const override {
    EngineLive live;
    const_cast<ThreadedEngine*>(this)->Call([&] { live = loop_.Live(nodes_max, sequences_max); });
    return live;
  }

  void Drain(Nanos deadline) override {
    std::unique_lock lock(mutex_);
    draining_ = true;
    drain_deadline_ = deadline;
    wake_flag_ = true;
    wake_.notify_all();
    drained_.wait(lock, [this] { return idle_ && inbox_.empty(); });
  }

 private:
  // What needs an engine at rest asks again while only a verification that it has ended keeps a step in
  // flight.
  bool WhenNotVerifying(const std::function<bool()>& f) {
    for (int tries = 0;; ++tries) {
      bool done = false, again = false;
      Call([&] {
        done = f();
        again = !done && loop_.verifying();
      });
      if (!again || tries == 1000) return done;
      std::this_thread::sleep_for(milliseconds(5));
    }
  }

  std::unique_ptr<PdRole> SetWake(std::unique_ptr<PdRole> role) {
    if (role != nullptr) role->wake = [this] { Wake(); };
    return role;
  }

  void Wake() {
    {
      std::lock_guard lock(mutex_);
      wake_flag_ = true;
    }
    wake_.notify_one();
  }

  // Runs f on the engine thread between two steps; does not wait.
  void Post(std::function<void()> f) {
    {
      std::lock_guard lock(mutex_);
      calls_.push_back(std::move(f));
      wake_flag_ = true;
    }
    wake_.notify_one();
  }

  // Runs f on the engine thread between two steps and waits for it. Requests submitted before are accepted
  // before.
  void Call(std::function<void()> f) {
    SLUICE_CHECK(std::this_thread::get_id() != thread_.get_id(), "called from the engine thread");
    std::mutex done_mutex;
    std::condition_variable done_signal;
    bool done = false;
    {
      std::lock_guard lock(mutex_);
      calls_.push_back([&] {
        f();
        std::lock_guard done_lock(done_mutex);
        done = true;
        done_signal.notify_all();
      });
      wake_flag_ = true;
    }
    wake_.notify_one();
    std::unique_lock lock(done_mutex);
    done_signal.wait(lock, [&] { return done; });
  }

  void Run() {
    pthread_setname_np(pthread_self(), "sluice-engine");
    last_status_ = looked_ = clock_->Now();
    std::deque<Request> requests;
    std::deque<std::function<void()>> calls;
    for (;;) {
      bool stop = false;
      Nanos drain_deadline = 0;
      {
        std::lock_guard lock(mutex_);
        requests.swap(inbox_);
        calls.swap(calls_);
        waiting_ += int64_t(requests.size());
        if (!requests.empty()) idle_ = false;
        stop = stop_;
        drain_deadline = draining_ ? drain_deadline_ : 0;
        wake_flag_ = false;
      }
      for (Request& r : requests) loop_.Enqueue(std::move(r));
      requests.clear();
      for (const auto& call : calls) call();
      calls.clear();
      if (stop || drain_deadline > 0) loop_.StopVerification();
      if (stop) loop_.AbortAll(Unavailable("the server is shutting down"));
      if (drain_deadline > 0 && clock_->Now() >= drain_deadline) {
        loop_.AbortAll(Unavailable("the server is shutting down and the time for running requests is over"));
      }
      if (role_ != nullptr && !loop_.Idle() && (stop || drain_deadline > 0)) {
        // A peer that does not answer holds pages: not longer than this.
        const Nanos since = stop ? 0 : drain_deadline;
        if (stop && stop_since_ == 0) stop_since_ = clock_->Now();
        if (clock_->Now() >= std::max(since, stop_since_) + kAbandonRooms) role_->Abandon();
      }
      const StepLoop::Progress progress = loop_.StepOnce();
      LogStatus();
      std::unique_lock lock(mutex_);
      waiting_ = loop_.scheduler().waiting_new();
      places_ = std::max<int64_t>(0, options_.loop.scheduler.max_running - loop_.scheduler().running());
      idle_ = loop_.Idle() && inbox_.empty();
      if (idle_) drained_.notify_all();
      if (progress == StepLoop::Progress::kMoved) continue;
      if (stop && idle_ && calls_.empty()) return;
      const milliseconds timeout = progress == StepLoop::Progress::kIdle ? kWaitIdle
                                   : loop_.steps_in_flight() > 0         ? kWaitWithSteps
                                                                         : kWaitWithoutSteps;
      wake_.wait_for(lock, timeout, [this] { return wake_flag_ || stop_; });
    }
  }

  void LogStatus() {
    if (options_.status_interval_steps <= 0) return;
    const Nanos now = clock_->Now();
    if (!loop_.Idle()) busy_ += now - looked_;  // rates are those of the time with work
    looked_ = now;
    const SchedulerCounters& c = loop_.scheduler().counters();
    if (c.steps - logged_.steps < options_.status_interval_steps || now - last_status_ < kStatusGap) return;
    const double seconds = std::max(1e-6, double(busy_) * 1e-9);
    const CacheStats cache = loop_.cache().Stats();
    const int64_t prompt = c.prompt_tokens - logged_.prompt_tokens;
    spdlog::info(
        "running {}, queued {}, prompt {:.0f} tokens/s ({:.0f}% cached), output {:.0f} tokens/s, pages {} of "
        "{} in "
        "use, retracted {}",
        loop_.scheduler().running(), loop_.scheduler().waiting(), double(prompt) / seconds,
        prompt > 0 ? 100.0 * double(c.cached_tokens - logged_.cached_tokens) / double(prompt) : 0.0,
        double(c.generation_tokens - logged_.generation_tokens) / seconds,
        cache.device.all - cache.device.free, cache.device.all, c.retractions - logged_.retractions);
    logged_ = c;
    last_status_ = now;
    busy_ = 0;
  }

  const ThreadedEngineOptions options_;
  const std::shared_ptr<void> keep_alive_;
  const Clock* const clock_;

  mutable std::mutex mutex_;
  std::condition_variable wake_, drained_;
  bool wake_flag_ = false, stop_ = false, draining_ = false, idle_ = true;
  Nanos drain_deadline_ = 0;
  int64_t waiting_ = 0, rejected_ = 0;
  int64_t places_;  // of --max-running-requests that are free, when the engine last looked
  std::deque<Request> inbox_;
  std::deque<std::function<void()>> calls_;

  const std::unique_ptr<PdRole> role_;  // outlives the executor, which it observes
  ThreadExecutor executor_;
  StepLoop loop_;  // engine thread only, except Check
  SchedulerCounters logged_;
  Nanos last_status_ = 0, looked_ = 0, busy_ = 0, stop_since_ = 0;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> MakeThreadedEngine(const ThreadedEngineOptions& options, EngineParts parts,
                                           const Clock* clock) {
  return std::make_unique<ThreadedEngine>(options, std::move(parts), clock);
}

}  // namespace sluice
