// The engine without its thread: accept, plan, submit, collect, commit. The threaded engine and the
// simulation drive it.
//
// Owns the scheduler, the cache and the step buffers. One thread; time comes from the clock it was given.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "cache/kv_cache.h"
#include "engine/engine.h"
#include "engine/pd_role.h"
#include "exec/executor.h"
#include "schedule/scheduler.h"

namespace sluice {

struct StepLoopOptions {
  SchedulerOptions scheduler;
  int32_t depth = 1;    // steps planned ahead of the last committed one: 0 or 1
  bool verify = false;  // hits that the cache has chosen are computed again while there is nothing else to do
};

class StepLoop {
 public:
  // Neither `executor` nor `clock` is owned.
  // `role`: of a prefill or decode instance, else null; not owned.
  StepLoop(const StepLoopOptions& options, std::unique_ptr<KvCache> cache, Executor* executor,
           const Clock* clock, PdRole* role = nullptr);
  // REQUIRES no step in flight (see Idle).
  ~StepLoop();

  enum class Progress : uint8_t {
    kMoved,    // a step was submitted or committed
    kWaiting,  // steps are in flight, or sequences wait for storage or room
    kIdle,     // nothing to do until a request comes
  };
  // Commits what is done, then plans and submits up to depth + 1 steps.
  Progress StepOnce();

  Status Check(const Request& request) const { return scheduler_.Check(request); }
  void Enqueue(Request request) {
    AbandonVerification();
    if (request.remote.active && role_ != nullptr) role_->Accept(&request);
    scheduler_.Enqueue(std::move(request), clock_->Now());
  }
  bool Abort(std::string_view rid, const Status& reason) { return scheduler_.Abort(rid, reason); }
  int64_t AbortAll(const Status& reason) { return scheduler_.AbortAll(reason); }
  bool Finish(std::string_view rid, int32_t choice) { return scheduler_.Finish(rid, choice); }
  bool Idle() const { return scheduler_.idle(); }
  // A hit is being computed again; the engine is not idle then. Any request ends that.
  bool verifying() const { return verifying_; }
  // From now on no hit is computed again.
  void StopVerification() {
    verify_ = false;
    AbandonVerification();
  }
  // Both: false and no change while requests run or wait.
  bool Flush();
  bool DropDeviceCache();
  bool SetStorage(StorageBackend* storage, std::optional<PrefetchPolicy> policy);
  Status ClearStorage() { return cache_->ClearStorage(); }

  EngineSnapshot Snapshot() const;
  EngineLive Live(size_t nodes_max, size_t sequences_max) const;
  // Violations of the scheduler's and the cache's invariants; when idle also of what an idle engine must look
  // like.
  std::vector<std::string> Audit() const;
  const Scheduler& scheduler() const { return scheduler_; }
  KvCache& cache() { return *cache_; }
  int64_t steps_in_flight() const { return in_flight_; }

 private:
  void StartVerification();
  void AbandonVerification();

  const StepLoopOptions options_;
  std::unique_ptr<KvCache> cache_;
  Executor* const executor_;
  const Clock* const clock_;
  PdRole* const role_;
  Scheduler scheduler_;
  std::vector<std::unique_ptr<StepBuffers>> buffers_;
  std::vector<StepBuffers*> free_;
  int64_t in_flight_ = 0;
  bool verify_, verifying_ = false;
};

}  // namespace sluice
