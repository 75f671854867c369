// The engine of a server: a StepLoop on a thread of its own and an executor thread beside it.
#pragma once

#include <memory>

#include "base/clock.h"
#include "cache/kv_cache.h"
#include "engine/engine.h"
#include "engine/pd_role.h"
#include "engine/step_loop.h"
#include "exec/executor.h"

namespace sluice {

struct ThreadedEngineOptions {
  StepLoopOptions loop;
  int64_t max_queued = 1024;           // requests that wait beyond the free places of max_running
  int64_t status_interval_steps = 40;  // between status lines, at most one a second; <= 0: none
};

struct EngineParts {
  std::shared_ptr<void> keep_alive;  // what cache and runner point to (pools, storage, model); goes last
  std::unique_ptr<KvCache> cache;
  std::unique_ptr<StepRunner> runner;
  std::unique_ptr<PdRole> role;  // null: neither prefill nor decode
};

// `clock` must outlive the engine. The destructor aborts what is left and joins the threads.
std::unique_ptr<Engine> MakeThreadedEngine(const ThreadedEngineOptions& options, EngineParts parts,
                                           const Clock* clock);

}  // namespace sluice
