// The engine: one thread that owns all scheduling and cache state, and the executor it drives.
//
// Thread-safe: Submit, Abort*, Flush, Snapshot. Every submitted request ends exactly once through its
// OutputChannel. The same step loop runs under the simulation with a virtual clock (StepOnce), so nothing
// here reads system time.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "cache/kv_cache.h"
#include "disagg/node_stats.h"
#include "request/request.h"
#include "schedule/draft_counters.h"

namespace sluice {

// A prefill or decode server's part in transfers; role "" on every other server.
using PdSnapshot = disagg::NodeStats;

struct EngineSnapshot {
  int64_t running = 0, queued = 0, used_tokens = 0, max_total_tokens = 0, steps = 0;
  int64_t prompt_tokens_total = 0, generation_tokens_total = 0, cached_tokens_total = 0,
          retractions_total = 0, forced_tokens_total = 0;
  int64_t requests_finished = 0, requests_aborted = 0, requests_failed = 0, requests_rejected = 0;
  double cpu_seconds = 0;  // of the engine thread
  DraftCounters drafts;
  int64_t decode_rows = 0;  // rows of running sequences, drafted ones included
  CacheStats cache;
  PdSnapshot pd;
};

// What people look at: bounded, made between two steps.
struct LiveSequence {
  std::string rid;
  int32_t choice = 0;
  int64_t prompt = 0, computed = 0, output = 0, cached = 0;  // tokens
  bool waiting = false;
};
struct EngineLive {
  EngineSnapshot snapshot;
  CacheSketch cache;
  std::vector<LiveSequence> sequences;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Takes the request or says why not: Exhausted when the queue is full (503), Invalid when prompt + 1
  // exceeds the context or the pool (400), Unavailable while shutting down (503). After OK exactly one final
  // event per choice follows.
  virtual Status Submit(Request request) = 0;
  // By rid; true if such a request was known (queued or running). The final event has kAbort.
  virtual bool Abort(const std::string& rid) = 0;
  virtual int64_t AbortAll() = 0;
  // These two return at once; the work ends before the next step is planned. Unknown names are nothing to do.
  // Nobody waits for the answer any more: as Abort.
  virtual void AbortSoon(std::string rid) { Abort(rid); }
  // Requests that run or wait at most at once; more in one call can never succeed.
  virtual int64_t RequestsMax() const { return std::numeric_limits<int64_t>::max(); }
  // A stop string ended this choice on the text side: its final event is kStop, the other choices go on.
  virtual void FinishSoon(std::string /*rid*/, int32_t /*choice*/) {}
  // False (and no change) when requests run or wait.
  virtual bool Flush() = 0;
  virtual bool DropDeviceCache() = 0;
  // Exchanges the storage tier (null: none). False and no change while requests run or wait, or when the old
  // one does not come to rest within some seconds. True: the old one is not used any more.
  virtual bool SetStorage(StorageBackend* storage, std::optional<PrefetchPolicy> policy) {
    return (void)storage, (void)policy, false;
  }
  virtual Status ClearStorage() { return Unsupported("this engine has no storage tier"); }
  virtual EngineSnapshot Snapshot() const = 0;
  virtual EngineLive Live(size_t /*nodes_max*/, size_t /*sequences_max*/) const {
    return {Snapshot(), {}, {}};
  }
  // Refuses new work; running and queued requests go on until `deadline` (engine clock), then are aborted;
  // returns when idle.
  virtual void Drain(Nanos deadline) = 0;
};

}  // namespace sluice
