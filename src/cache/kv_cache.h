// The KV cache of one engine: radix tree + page pool + host tier + storage tier. It never sees a request: it
// takes token spans and namespaces and gives pages. Engine thread only; time comes in as a value; all copies
// leave as CopyPlan data.
//
// Life of a sequence (S = SequenceKv):
//   Begin    match the prompt, lock the hit, plan loads of host pages; at most prompt - 1 tokens are hits,
//   whole pages. Grow     own pages up to n tokens (evicting if it must); false = no room now, nothing
//   changed. Commit   after a step was COMPUTED: rows [0, computed) are final; full pages among them enter
//   the tree. A page that the
//            tree already has is swapped for the tree's (ours is given back), so S.pages may change for
//            positions < computed.
//   Release  sequence ends or is retracted: commit what is final, give the rest back, unlock.
//
//   [0 ........ cached) [cached ........ computed) [computed ..... num_tokens)
//    tree's pages,       own pages; full ones move   own pages, not final
//    locked by leaf      to the tree at Commit
//
// Steps planned ahead. The engine names each batch when it submits it (StepSubmitted, rising numbers) and
// when its result is in (StepRetired). An own page that Commit or Release gives back while steps are
// submitted is not handed out again before all of them have retired: they may still read or write it. So
// Release may be called as soon as a sequence is out of the schedule, even if a submitted batch still
// computes a row of it; that row is lost. Tree pages need no such wait: a page of the tree is never written
// again, and a later batch that reuses an evicted one runs after the batches that read it. An executor that
// starts the loads of a batch before the batches ahead of it have ended must not do so when Release is called
// early. A caller that never names steps gets its pages back at once.
//
// Copies. The pages of a load are in S.pages at once; its plan comes out of the next TakeCopies and must ride
// on the batch that the engine submits next, or on one without rows when nothing else is to be done. Batches
// run in order, so every later batch may read those pages. After a failed load every sequence that is Lost is
// released with keep = false.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/digest.h"
#include "base/ids.h"
#include "base/status.h"
#include "kv/copy_plan.h"
#include "kv/host_pool.h"
#include "kv/kv_layout.h"
#include "radix/evict_order.h"
#include "request/request.h"

namespace sluice {

struct RadixNode;
class DevicePool;
class HostPool;
class KvRecorder;
class StorageBackend;

enum class WritePolicy : uint8_t { kWriteThrough, kWriteThroughSelective, kWriteBack };
enum class PrefetchPolicy : uint8_t { kBestEffort, kWaitComplete, kTimeout };

struct CacheOptions {
  int32_t lanes = 1;
  int64_t pages_per_lane = 0;       // usable pages, without the scratch page
  int64_t host_pages_per_lane = 0;  // 0: no host tier
  bool enable_radix = true;         // false: --disable-radix-cache
  EvictionPolicy eviction = EvictionPolicy::kLru;
  WritePolicy write_policy = WritePolicy::kWriteThrough;
  PrefetchPolicy prefetch = PrefetchPolicy::kBestEffort;
  int64_t load_back_min_tokens = 64;
  // Storage: a prompt whose unknown rest is shorter does not ask; waits as the prefetch policy says.
  int64_t prefetch_min_tokens = 256;
  Nanos prefetch_timeout_base = 2'000'000'000;  // timeout: base + per 1024 tokens, at most the maximum
  Nanos prefetch_timeout_per_ki = 100'000'000;
  Nanos prefetch_timeout_max = 30'000'000'000;  // also ends a reservation whose owner never comes back
  Nanos prefetch_stale =
      1'000'000'000;  // what storage said before a sequence's turn is asked again after this
  Nanos best_effort_base = 50'000'000;  // best_effort: about as long as computing would take
  Nanos best_effort_per_page = 2'000'000;
  // Device pages kept free per lane between steps when there is a host tier; advice, never waited for. -1:
  // 1/32 of the lane.
  int64_t free_room_pages = -1;
  Nanos slow_eviction = 1'000'000;  // an eviction whose planning takes longer is counted and warned of
  // Debug builds: freed device pages are overwritten in this pool.
  bool poison_on_free = false;
  const DevicePool* poison_pool = nullptr;
  KvRecorder* recorder = nullptr;  // --debug-kv; null: nothing is recorded
  // --verify-cache: this share of hits becomes a VerifyJob. REQUIRES the pool that the rows lie in. bad_page
  // gets the evidence of each difference.
  double verify_share = 0;
  uint64_t verify_seed = 0;
  const DevicePool* verify_pool = nullptr;
  std::function<void(const std::string&)> bad_page;
};

// A hit that shall be computed once more: the engine runs it as a fresh sequence when it has nothing else to
// do.
struct VerifyJob {
  std::string name_space;
  std::vector<int32_t> tokens;  // of the hit, whole pages
};

struct TierCounts {  // exact partition (I11): free + leased + cached = all, per lane
  int64_t all = 0, free = 0, leased = 0, cached = 0;
};

struct CacheStats {
  TierCounts device, host;
  int64_t dead_pages_device = 0;  // part of device.cached: match nothing, go when a copy or sequence ends
  int64_t nodes = 0;
  int64_t page_bytes = 0;
  int64_t hit_tokens_device = 0, hit_tokens_host = 0, hit_tokens_storage = 0, lookup_tokens = 0;
  int64_t evicted_pages_device = 0, evicted_pages_host = 0;
  int64_t backup_pages = 0, load_pages = 0, pending_backups = 0, pending_loads = 0;
  int64_t deficit_evictions = 0, free_room_misses = 0, loads_waited = 0;
  int64_t lanes_passed_over = 0;  // pages taken from another lane than their turn's, which had no room
  // Events that are also warned of, rarely: room was made slower than CacheOptions::slow_eviction; an
  // eviction freed less than was asked; a lane stayed short although all lanes together have room.
  int64_t slow_evictions = 0, short_evictions = 0, lane_deficits = 0;
  // Entries of page lists that planning of evictions and load-backs has looked at. Owners are counted on the
  // nodes, so this never exceeds the pages that were evicted and loaded.
  int64_t planning_page_visits = 0;
  int64_t storage_read_bytes = 0, storage_write_bytes = 0, storage_errors = 0;
  int64_t backups_skipped = 0;    // pages that found no room in the host tier
  int64_t dropped_unwritten = 0;  // write_back: pages evicted without a copy because nothing could wait
  int64_t failed_loads = 0, failed_backups = 0;
  int64_t prefetches = 0, prefetch_pages = 0, prefetch_timeouts = 0;
  int64_t prefetches_put_off = 0;  // found no room before their sequence's turn
  int64_t prefetches_repeated =
      0;  // began again at their sequence's turn: not all that storage has was there
  int64_t pending_prefetches = 0, reserved_host_pages = 0;  // held for prefetches that are on their way
  int64_t awaited_host_pages = 0;  // brought by prefetches whose sequences have not begun
  int64_t pending_stores = 0, stores_skipped = 0;
  int64_t verified_pages = 0, verify_differences = 0;  // compared with a second computation
  int64_t verify_skipped = 0;                          // hits chosen for it, but gone or pushed out before
  int64_t deferred_pages = 0;  // given back, waiting for submitted steps; part of device.leased
};

// What the tree looks like, for people. Parents before children; of a large tree the most recently used part.
struct CacheSketch {
  struct Node {
    uint64_t id = 0;
    int32_t parent = -1;  // index in `nodes`; -1: begins at a prompt's first token
    int64_t start = 0;    // pages before it
    std::string pages;    // a letter a page: its lane ('0' to '7') on the device, else 'h' (host)
    int32_t lock = 0;     // sequences whose path ends here
    int32_t hits = 0;
  };
  std::vector<Node> nodes;
  std::vector<TierCounts> lanes;  // device pages of each lane
  int64_t left_out = 0;           // nodes of the tree that are not in the list
};

// A running sequence's hold on the cache. Movable, owned by the scheduler's sequence.
struct SequenceKv {
  std::string name_space;     // framed namespace key (salt, adapter)
  std::vector<PageId> pages;  // covers positions [0, 64 * pages.size())
  int64_t cached = 0;         // tokens whose pages belong to the tree (locked), multiple of 64
  int64_t computed = 0;       // tokens whose rows are final in this sequence's pages
  CachedTokens hit;           // what Begin found, by tier
  RadixNode* node = nullptr;  // cursor: deepest locked node of the path
  bool active = false;
  int64_t prefetch = 0;  // storage prefetch of this sequence; 0 none yet, -1 over
  bool prefetch_put_off = false;
  // Set before Begin: hits nothing and publishes nothing; Release with keep compares its rows with the
  // tree's.
  bool fresh = false;
  std::string label;  // what records are written under; may stay empty
};

enum class BeginResult : uint8_t { kReady, kWaitStorage, kNoRoom };

class KvCache {
 public:
  virtual ~KvCache() = default;

  // name_space from NamespaceKey(). On kReady the hit (S.computed = hit tokens) is locked and device pages
  // for it exist; host hits have a load planned (see TakeLoads) that must ride on the sequence's first batch.
  // kWaitStorage: a storage prefetch is running, ask again after Poll. kNoRoom: not even the load fits;
  // nothing is held.
  virtual BeginResult Begin(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                            Nanos now) = 0;
  virtual bool Grow(SequenceKv* seq, int64_t num_tokens) = 0;
  virtual void Commit(SequenceKv* seq, std::span<const int32_t> tokens, int64_t computed,
                      int32_t priority) = 0;
  // keep: final full pages enter the tree; false (failed step, NaN): they are given back. Also ends the
  // prefetch of a sequence that never got ready.
  virtual void Release(SequenceKv* seq, std::span<const int32_t> tokens, bool keep) = 0;

  // Optional, as early as the tokens are known: starts the storage prefetch that Begin would start. What such
  // prefetches bring takes at most half of the host tier until their sequences begin; one that finds no room
  // is put off (SequenceKv::prefetch_put_off), to be asked for again when sequences ahead have begun.
  virtual void Prefetch(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                        Nanos now) {
    (void)seq, (void)name_space, (void)tokens, (void)now;
  }
  virtual void StepSubmitted(int64_t step) { (void)step; }
  virtual void StepRetired(int64_t step) { (void)step; }
  // After Grow or Begin found no room: copies or steps on their way will make some, so waiting helps more
  // than retracting.
  virtual bool RoomComing() const { return false; }

  // A page for a fork's copy of a partial tail page; the caller adds it to its SequenceKv. Invalid id: no
  // room.
  virtual PageId TakePage(SequenceKv* seq) = 0;
  // Longest hit in tokens that Begin would find now (device, host), without locking or touching; for lpm
  // ordering.
  virtual CachedTokens Peek(std::string_view name_space, std::span<const int32_t> tokens) const = 0;

  // Copies planned since the last call (appended); the executor performs them with the next batch.
  virtual void TakeCopies(std::vector<CopyPlan>* loads, std::vector<CopyPlan>* backups) = 0;
  virtual void OnCopiesDone(std::span<const int64_t> ids, std::span<const int64_t> failed) = 0;
  // After a failed load: true when the sequence's path holds pages of it. It must be released with keep =
  // false.
  virtual bool Lost(const SequenceKv& seq) const { return (void)seq, false; }
  // The next hit to be computed again, oldest first.
  virtual bool TakeVerification(VerifyJob* job) { return (void)job, false; }
  // Storage completions, deadlines, free-room top-up. True when something happened that could unblock a
  // sequence.
  virtual bool Poll(Nanos now) = 0;

  // Pages that a new sequence could get now (free + evictable), for admission.
  virtual int64_t AvailablePages() const = 0;
  virtual int64_t total_pages() const = 0;
  // Empties device and host tier (storage has its own Clear). False and no change while a sequence is active.
  // Pages under a copy match nothing from now on and are free when the copy ends.
  virtual bool Flush() = 0;
  // For eval: empties the device tier, keeping the lower ones; pages without a host copy get one first where
  // there is room. False: a sequence is active, or copies are planned or on their way; run them and call
  // again.
  virtual bool DropDevice() = 0;
  // Another storage tier from now on, or none (null); what the host tier has is offered to it. False and no
  // change while a sequence is active or the old one still works on something (nothing new is given to it).
  virtual bool SetStorage(StorageBackend* storage, std::optional<PrefetchPolicy> policy) {
    return (void)storage, (void)policy, false;
  }
  // Makes everything stored a miss. Unsupported without storage.
  virtual Status ClearStorage() { return Unsupported("there is no storage tier"); }
  virtual CacheStats Stats() const = 0;
  // Work is bounded by nodes_max and pages_max (of all nodes together).
  virtual CacheSketch Sketch(size_t nodes_max, size_t pages_max) const {
    return (void)nodes_max, (void)pages_max, CacheSketch();
  }
  // Full invariant walk (compact keys, counts, partition); a message per violation.
  virtual std::vector<std::string> Audit() const = 0;
};

// Tagged, length-framed: ("salt", salt), ("adapter", adapter). Equal strings in other places never collide.
std::string NamespaceKey(std::string_view salt, std::string_view adapter);

// Host pool: the memory that plans and storage refer to; may be null without storage. Null storage: two
// tiers. Both outlive the cache.
std::unique_ptr<KvCache> MakeKvCache(const CacheOptions& options, const KvLayout& layout, HostPool* host,
                                     StorageBackend* storage);

}  // namespace sluice
