// The cache's state in one place; the operations are in sequences.cc (Begin to Release), eviction.cc,
// copies.cc (host tier), storage_glue.cc and audit.cc. Not included outside this folder, except by its tests.
//
// Who may touch a node that is under a copy: every op holds its nodes in the tiers that it reads or writes
// until its end is reported, and a split shares the op between the halves (SplitNode). A node has at most one
// op of each kind.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/random.h"
#include "base/rare_warning.h"
#include "cache/kv_cache.h"
#include "cache/kv_record.h"
#include "cache/page_pool.h"
#include "radix/radix_tree.h"
#include "storage/storage.h"

namespace sluice {

using LaneCounts = std::array<int64_t, kMaxLanes>;

class KvCacheImpl final : public KvCache {
 public:
  KvCacheImpl(const CacheOptions& options, const KvLayout& layout, HostPool* host, StorageBackend* storage);
  ~KvCacheImpl() override;

  BeginResult Begin(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                    Nanos now) override;
  bool Grow(SequenceKv* seq, int64_t num_tokens) override;
  void Commit(SequenceKv* seq, std::span<const int32_t> tokens, int64_t computed, int32_t priority) override;
  void Release(SequenceKv* seq, std::span<const int32_t> tokens, bool keep) override;
  void Prefetch(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                Nanos now) override;
  void StepSubmitted(int64_t step) override;
  void StepRetired(int64_t step) override;
  bool RoomComing() const override;
  PageId TakePage(SequenceKv* seq) override;
  CachedTokens Peek(std::string_view name_space, std::span<const int32_t> tokens) const override;
  void TakeCopies(std::vector<CopyPlan>* loads, std::vector<CopyPlan>* backups) override;
  void OnCopiesDone(std::span<const int64_t> ids, std::span<const int64_t> failed) override;
  bool Lost(const SequenceKv& seq) const override { return seq.node != nullptr && seq.node->dead; }
  bool TakeVerification(VerifyJob* job) override;
  bool Poll(Nanos now) override;
  int64_t AvailablePages() const override;
  int64_t total_pages() const override { return device_.all(); }
  bool Flush() override;
  bool DropDevice() override;
  bool SetStorage(StorageBackend* storage, std::optional<PrefetchPolicy> policy) override;
  Status ClearStorage() override;
  CacheStats Stats() const override;
  CacheSketch Sketch(size_t nodes_max, size_t pages_max) const override;
  std::vector<std::string> Audit() const override;

  RadixTree& tree_for_test() { return tree_; }
  const PagePool& device_for_test() const { return device_; }
  const PagePool& host_for_test() const { return host_; }

 private:
  // Pages [from, to) of a node.
  struct Segment {
    RadixNode* node;
    int32_t from, to;
  };
  enum class OpKind : uint8_t { kBackup, kLoad, kStore };
  struct Op {
    OpKind kind{};
    std::vector<Segment> segments;  // parents before children
  };
  struct QueuedNode {  // nodes come and go while they wait: the id tells whether it is still the same one
    RadixNode* node;
    uint64_t id;
    bool alive() const { return node->id == id; }
  };
  struct Deferred {
    int64_t step;
    int32_t page;
  };
  struct PrefetchRecord {
    std::string name_space;
    std::vector<int32_t> tokens;  // whole pages that may be hits
    int64_t start = 0;            // first page asked for
    std::vector<Digest256> keys;  // of pages [start, ...)
    std::vector<int32_t> pages;   // reserved host pages, as many as storage has
    std::vector<uint8_t> got;     // per reserved page: 0 on its way, 1 complete, 2 lost
    int64_t stored = 0;           // pages that storage said it has
    size_t next_get = 0;          // pages handed to storage
    int in_flight = 0;            // tickets
    Nanos begun = 0, deadline = 0, hard_deadline = 0;
    bool told_late = false;  // that the deadline has passed
    bool asked = false;      // the existence answer is in
    bool stopped = false;    // nothing more is handed out; drains, then goes
    bool abandoned = false;  // the owner left: nothing is inserted
    bool early = false;      // asked for before Begin
  };
  // What an early prefetch has left for its owner, who has not begun yet.
  struct Arrival {
    int64_t pages = 0;       // brought to the host tier
    int64_t stored_end = 0;  // storage has the prompt's pages up to here
    Nanos asked = 0;
  };
  struct Ticket {
    enum class Kind : uint8_t { kExists, kGet, kStore, kDelete } kind{};
    int64_t owner = 0;            // prefetch or op id
    size_t first = 0, count = 0;  // pages of the prefetch
  };

  int32_t lanes() const { return options_.lanes; }
  bool has_host() const { return options_.host_pages_per_lane > 0; }
  RadixKey Key(std::span<const int32_t> tokens) const { return RadixKey(tokens, int32_t(kPageTokens)); }
  PagePool& pool(Tier tier) { return tier == Tier::kDevice ? device_ : host_; }

  // sequences.cc
  struct Hit {
    RadixTree::Match match;
    int64_t device = 0, total = 0;  // pages
  };
  static Hit Measure(const RadixTree::Match& match);
  // The node at whose end page index `end` of the path lies; splits when it lies inside one.
  RadixNode* NodeEndingAt(RadixNode* deepest, int64_t end);
  RadixNode* SplitNode(RadixNode* node, int32_t pages);
  void SplitOp(int64_t RadixNode::*slot, RadixNode* up, RadixNode* low, int32_t pages);
  void GiveBack(int32_t page);  // a leased device page: free, or deferred while steps are submitted
  int32_t NextLane(const SequenceKv& seq) const;
  void ChooseLanes(const SequenceKv& seq, int64_t add, LaneCounts* need);
  void CountHit(RadixNode* node);
  void Reap(RadixNode* node);
  void FreeSlot(Tier tier, int32_t slot);
  BeginResult PlanLoad(SequenceKv* seq, RadixNode* end, int64_t device_pages, int64_t total_pages);

  // verify.cc
  void ChooseForVerification(const SequenceKv& seq, std::span<const int32_t> tokens);
  void CompareFresh(const SequenceKv& seq, std::span<const int32_t> tokens);
  bool SamePage(const SequenceKv& seq, int64_t page, int32_t slot, std::string* evidence) const;
  void DropBadPage(RadixNode* node, int32_t in_node);

  // eviction.cc
  bool MakeRoom(Tier tier, const LaneCounts& need, bool urgent);
  bool Evict(Tier tier, LaneCounts deficit, bool urgent);
  void ReportLaneDeficit(Tier tier, int32_t lane, const LaneCounts& deficit);
  void EvictTail(RadixNode* node, Tier tier, int32_t pages);
  void TopUpFreeRoom();

  // copies.cc
  void QueueBackup(RadixNode* node);
  bool PlanBackup(RadixNode* node, int64_t op_id, Op* op, CopyPlan* plan);
  void EndOp(int64_t id, bool ok);
  void HoldSegment(const Segment& s, OpKind kind, int sign);
  static int64_t RadixNode::*SlotOf(OpKind kind);

  // storage_glue.cc
  void QueueStore(RadixNode* node);
  void PlanStores();
  bool PollStorage(Nanos now);
  bool StartPrefetch(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                     const Hit& hit, Nanos now);
  BeginResult CheckPrefetch(SequenceKv* seq, Nanos now, std::optional<Arrival>* arrival);
  void OnExists(int64_t id, PrefetchRecord& r, const std::vector<StorageOutcome>& outcomes);
  void PumpGets(int64_t id, PrefetchRecord& r);
  void CountFailure(StorageOutcome outcome);
  void StopPrefetch(int64_t id, PrefetchRecord& r);
  int64_t InsertPrefetched(PrefetchRecord& r);
  bool PathOnHost(const PrefetchRecord& r) const;
  void EndPrefetchIfDrained(int64_t id);
  void AbandonPrefetch(SequenceKv* seq);
  StorageItem ItemFor(const Digest256& key, int32_t host_page) const;
  int64_t MaxReserved() const { return host_.all() / 2; }
  std::optional<Arrival> TakeArrival(int64_t prefetch);

  CacheOptions options_;
  KvLayout layout_;
  HostPool* host_pool_;
  StorageBackend* storage_;
  RadixTree tree_;
  PagePool device_, host_;
  int64_t free_room_ = 0;  // per lane

  int64_t active_ = 0, fresh_active_ = 0;
  std::deque<VerifyJob> verify_queue_;
  SeededStream verify_random_;
  int64_t next_lane_ = 0;
  int64_t last_submitted_ = -1, last_retired_ = -1;
  std::deque<Deferred> deferred_;  // rising steps

  int64_t next_id_ = 1;  // copy plans, ops and prefetches
  absl::flat_hash_map<int64_t, Op> ops_;
  std::vector<CopyPlan> planned_loads_;
  std::deque<QueuedNode> backup_queue_, store_queue_;
  bool backup_blocked_ = false;  // the last backup found no host room: do not wait for write-backs
  bool room_coming_ = false;
  bool dropping_ = false;          // DropDevice has queued its backups
  std::vector<RadixNode*> aside_;  // scratch of MakeRoom
  std::vector<int32_t> lanes_;     // scratch of ChooseLanes

  absl::flat_hash_map<int64_t, PrefetchRecord> prefetches_;
  absl::flat_hash_map<int64_t, Arrival> arrivals_;  // by prefetch
  absl::flat_hash_map<uint64_t, Ticket> tickets_;
  std::vector<StorageCompletion> completions_;
  int64_t reserved_host_ = 0;
  int64_t awaited_host_ = 0;     // pages of arrivals_
  int64_t store_in_flight_ = 0;  // pages
  bool something_happened_ = false;

  CacheStats stats_;  // running counters only
  RareWarning slow_warning_, short_warning_, deficit_warning_;
  RareWarning storage_error_warning_, storage_corrupt_warning_, storage_full_warning_;
};

}  // namespace sluice
