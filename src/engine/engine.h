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
#include "disagg/room_timeline.h"
#include "request/request.h"
#include "schedule/draft_counters.h"

namespace sluice {

// One transfer, as it is or as it ended.
struct PdRoom {
  uint64_t room = 0;
  std::string phase, result, mode, fallback, error;
  int64_t prompt_tokens = 0, pages = 0, layers_done = 0, layers = 0, bytes_done = 0, bytes = 0;
  int64_t latent_bytes = 0, index_bytes = 0, draft_bytes = 0, aux_bytes = 0, bytes_overlapped = 0;
  int64_t chunks = 0, writes = 0, retries = 0, layers_at_end = 0, bytes_at_end = 0;
  double bootstrap_s = 0, queue_s = 0, wait_layers_s = 0, wait_completions_s = 0, transfer_s = 0;
};

// A prefill or decode server's part in transfers; role "" on every other server.
struct PdSnapshot {
  std::string role, transport, instance_id, last_error;
  uint64_t epoch = 0;
  std::vector<std::string> peers;
  int64_t bytes_sent = 0, bytes_received = 0, bytes_before_forward_end = 0;
  int64_t latent_bytes = 0, index_bytes = 0, draft_bytes = 0, aux_bytes = 0;
  int64_t rooms_completed = 0, rooms_failed = 0, rooms_aborted = 0;
  int64_t rooms_per_layer = 0, rooms_by_flag = 0, rooms_by_fault = 0, rooms_empty = 0;
  int64_t layers_sent_at_end = 0, bytes_sent_at_end = 0, writes = 0, write_retries = 0;
  int64_t aborts_sent = 0, abort_acks = 0, fences = 0, late_frames = 0;
  int64_t active_rooms = 0, leased_pages = 0, outstanding_writes = 0, digests_checked = 0;
  double abort_ack_seconds = 0, wait_layers_s = 0, wait_completions_s = 0, transfer_s = 0;
  std::vector<PdRoom> rooms, ended;  // some of the active ones; the last ones that ended
  disagg::RoomTimelines timelines;
};

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
