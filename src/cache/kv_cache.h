// The KV cache of one engine: radix tree + page pool + host tier + storage tier. It never sees a request: it takes token spans
// and namespaces and gives pages. Engine thread only; time comes in as a value; all copies leave as CopyPlan data.
//
// Life of a sequence (S = SequenceKv):
//   Begin    match the prompt, lock the hit, plan loads of host pages; at most prompt - 1 tokens are hits, whole pages.
//   Grow     own pages up to n tokens (evicting if it must); false = no room now, nothing changed.
//   Commit   after a step was COMPUTED: rows [0, computed) are final; full pages among them enter the tree. A page that the
//            tree already has is swapped for the tree's (ours is freed), so S.pages may change for positions < computed.
//   Release  sequence ends or is retracted: commit what is final, give the rest back, unlock. Must be called only when no
//            submitted batch refers to its pages.
//
//   [0 ........ cached) [cached ........ computed) [computed ..... num_tokens)
//    tree's pages,       own pages; full ones move   own pages, not final
//    locked by leaf      to the tree at Commit
#pragma once

#include <cstdint>
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
#include "kv/kv_layout.h"
#include "request/request.h"

namespace sluice {

enum class EvictionPolicy : uint8_t { kLru, kLfu, kFifo, kMru, kPriority };
enum class WritePolicy : uint8_t { kWriteThrough, kWriteThroughSelective, kWriteBack };
enum class HostLayout : uint8_t { kLayerFirst, kPageFirst, kPageFirstDirect, kLayerPageFirst };
enum class PrefetchPolicy : uint8_t { kBestEffort, kWaitComplete, kTimeout };

struct CacheOptions {
  int32_t lanes = 1;
  int64_t pages_per_lane = 0;         // usable pages, without the scratch page
  int64_t host_pages_per_lane = 0;    // 0: no host tier
  bool enable_radix = true;           // false: --disable-radix-cache
  EvictionPolicy eviction = EvictionPolicy::kLru;
  WritePolicy write_policy = WritePolicy::kWriteThrough;
  PrefetchPolicy prefetch = PrefetchPolicy::kBestEffort;
  int64_t load_back_min_tokens = 64;
  bool poison_on_free = false;
};

struct TierCounts {                    // exact partition (I11): free + leased + cached = all, per lane
  int64_t all = 0, free = 0, leased = 0, cached = 0;
};

struct CacheStats {
  TierCounts device, host;
  int64_t nodes = 0;
  int64_t hit_tokens_device = 0, hit_tokens_host = 0, hit_tokens_storage = 0, lookup_tokens = 0;
  int64_t evicted_pages_device = 0, evicted_pages_host = 0;
  int64_t backup_pages = 0, load_pages = 0, pending_backups = 0, pending_loads = 0;
  int64_t deficit_evictions = 0, free_room_misses = 0, loads_waited = 0;
  int64_t storage_read_bytes = 0, storage_write_bytes = 0, storage_errors = 0;
};

class RadixNode;

// A running sequence's hold on the cache. Movable, owned by the scheduler's sequence.
struct SequenceKv {
  std::string name_space;              // framed namespace key (salt, adapter)
  std::vector<PageId> pages;           // covers positions [0, 64 * pages.size())
  int64_t cached = 0;                  // tokens whose pages belong to the tree (locked), multiple of 64
  int64_t computed = 0;                // tokens whose rows are final in this sequence's pages
  CachedTokens hit;                    // what Begin found, by tier
  RadixNode* node = nullptr;           // cursor: deepest locked node of the path
  bool active = false;
};

enum class BeginResult : uint8_t { kReady, kWaitStorage, kNoRoom };

class KvCache {
 public:
  virtual ~KvCache() = default;

  // name_space from NamespaceKey(). On kReady the hit (S.computed = hit tokens) is locked and device pages for it exist; host
  // hits have a load planned (see TakeLoads) that must ride on the sequence's first batch. kWaitStorage: a storage prefetch
  // is running, ask again after Poll. kNoRoom: not even the load fits; nothing is held.
  virtual BeginResult Begin(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens, Nanos now) = 0;
  virtual bool Grow(SequenceKv* seq, int64_t num_tokens) = 0;
  virtual void Commit(SequenceKv* seq, std::span<const int32_t> tokens, int64_t computed, int32_t priority) = 0;
  // keep: final full pages enter the tree; false (failed step, NaN): they are given back.
  virtual void Release(SequenceKv* seq, std::span<const int32_t> tokens, bool keep) = 0;

  // A page for a fork's copy of a partial tail page; the caller adds it to its SequenceKv. Invalid id: no room.
  virtual PageId TakePage(SequenceKv* seq) = 0;
  // Longest hit in tokens that Begin would find now (device, host), without locking or touching; for lpm ordering.
  virtual CachedTokens Peek(std::string_view name_space, std::span<const int32_t> tokens) const = 0;

  // Copies planned since the last call; the executor performs them with the next batch.
  virtual void TakeCopies(std::vector<CopyPlan>* loads, std::vector<CopyPlan>* backups) = 0;
  virtual void OnCopiesDone(std::span<const int64_t> ids, std::span<const int64_t> failed) = 0;
  // Storage completions, deadlines, free-room top-up. True when something happened that could unblock a sequence.
  virtual bool Poll(Nanos now) = 0;

  // Pages that a new sequence could get now (free + evictable), for admission.
  virtual int64_t AvailablePages() const = 0;
  virtual int64_t total_pages() const = 0;
  // Empties every tier of unlocked entries. REQUIRES no active sequence; false and no change otherwise.
  virtual bool Flush() = 0;
  // For eval: drop the device copies of everything that has a host copy (or storage copy), keep the lower tiers.
  virtual bool DropDevice() = 0;
  virtual CacheStats Stats() const = 0;
  // Full invariant walk (compact keys, counts, partition); a message per violation.
  virtual std::vector<std::string> Audit() const = 0;
};

// Tagged, length-framed: ("salt", salt), ("adapter", adapter). Equal strings in other places never collide.
std::string NamespaceKey(std::string_view salt, std::string_view adapter);

// Where storage puts and gets pages of the host tier. Null storage: two tiers. Host pool: the memory the plans refer to.
class HostPool;
class StorageTier;
std::unique_ptr<KvCache> MakeKvCache(const CacheOptions& options, const KvLayout& layout, HostPool* host, StorageTier* storage);

}  // namespace sluice
