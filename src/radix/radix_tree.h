// Prefix tree over whole pages of tokens, one root per namespace.
//
// Owns nodes, their tokens and their slot lists; what a slot number means is the caller's business. One
// thread. A match touches only the backing tokens (memcmp) and allocates nothing. Children are found by a
// hash of their first page and confirmed by comparing tokens. Only the node where a path ends is held; its
// ancestors stay because it exists.
//
// Protection counts: "evictable pages" needs to know which nodes lie above a held one. Hold and Unhold only
// note the node (O(1)); Settle walks the noted ones when a count is asked for.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "base/digest.h"
#include "radix/child_table.h"
#include "radix/evict_order.h"
#include "radix/radix_key.h"
#include "radix/radix_node.h"

namespace sluice {

struct RadixOptions {
  int32_t page_tokens = 64;  // REQUIRES a multiple of 4
  int32_t lanes = 1;         // slot s belongs to lane s % lanes; at most kMaxLanes
  EvictionPolicy policy = EvictionPolicy::kLru;
  // Content identity that starts every digest chain, see RootDigest.
  Digest256 fingerprint{};
};

class RadixTree {
 public:
  // Where a match ended: `in_node` pages of `node` match (all of them unless the walk ended inside it).
  struct Match {
    RadixNode* node = nullptr;
    int32_t in_node = 0;
    int64_t pages = 0;  // matched from where the walk began
  };

  explicit RadixTree(const RadixOptions& options);
  ~RadixTree();
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  const RadixOptions& options() const { return options_; }

  RadixNode* FindRoot(std::string_view name_space) const;  // null: nothing cached there
  RadixNode* GetRoot(std::string_view name_space);  // made when missing; goes with its last child and hold

  // Longest match of key below `from`, whose own pages all precede the key (a root, or a cursor at a node's
  // end).
  Match Walk(RadixNode* from, RadixKey key) const;
  // The child of `node` that shares at least the first page of key, and how many pages it shares.
  RadixNode* FindChild(const RadixNode* node, RadixKey key, int32_t* common) const;

  // A new child with its own copy of the key; no residency yet. REQUIRES that no child has the key's first
  // page.
  RadixNode* AddChild(RadixNode* parent, RadixKey key);
  // Whether `pages` more fit into the node's block, or the block is so small that moving it costs nothing.
  // Else a child is the better place: a long prompt that comes in chunks would be copied with each.
  bool GrowsCheaply(const RadixNode& node, int64_t pages) const;
  // Appends pages in place. REQUIRES a node without children.
  void Extend(RadixNode* node, RadixKey key);
  // Cuts [0, pages) into a new parent; `node` keeps its identity, its holds and the rest. Returns the new
  // upper node.
  RadixNode* Split(RadixNode* node, int32_t pages);

  // Residency grows and shrinks at the tail. Add REQUIRES the parent complete in the tier.
  void AddResident(RadixNode* node, Tier tier, std::span<const int32_t> slots);
  // Drops the last n slots of the tier (freed(slot) for each, last first). Pages that no tier holds any more
  // leave the tree; a node without pages is gone afterwards (returns false); the caller then reaps its
  // parent.
  bool DropResident(RadixNode* node, Tier tier, int32_t n, const std::function<void(int32_t)>& freed);

  void Hold(RadixNode* node, Tier tier) {
    const int t = int(tier);
    if (node->held[t]++ == 0) Note(node, t);
  }
  void Unhold(RadixNode* node, Tier tier) {
    const int t = int(tier);
    SLUICE_CHECK(node->held[t] > 0, "tier {} of node {} is not held", t, node->id);
    if (--node->held[t] == 0) {
      Note(node, t);
      Offer(node, tier);
    }
  }
  void Lock(RadixNode* node) {
    ++node->lock;
    Hold(node, Tier::kDevice);
  }
  void Unlock(RadixNode* node) {
    SLUICE_CHECK(node->lock > 0, "node {} is not locked", node->id);
    --node->lock;
    Unhold(node, Tier::kDevice);
  }
  // After holds are gone: removes a dead node without children, or a root without anything. freed as in
  // DropResident.
  void Reap(RadixNode* node, const std::function<void(Tier, int32_t)>& freed);

  // Marks node and everything below as dead. Nothing matches it from now on; Reap (or this call) frees what
  // is not held.
  void Kill(RadixNode* node, const std::function<void(Tier, int32_t)>& freed);

  // Order.
  void Touch(RadixNode* node) { node->last_access = ++tick_; }
  void TouchPath(RadixNode* node);  // node and its ancestors, one tick
  bool Evictable(const RadixNode* node, Tier tier) const {
    const int t = int(tier);
    return !node->is_root() && node->resident[t] > 0 && node->held[t] == 0 && node->tier_children[t] == 0;
  }
  // The evictable node that the policy gives up first, or null. It stays in the order.
  RadixNode* Victim(Tier tier);
  // Takes a victim out of the order so that the next one shows; Offer brings it back.
  void SetAside(RadixNode* node, Tier tier) { order(tier).Remove(node); }
  void Offer(RadixNode* node, Tier tier);

  // Counts, per lane. Cached = resident in the tier; evictable = resident and not at or above a held node.
  int64_t cached(Tier tier, int32_t lane) const { return cached_[int(tier)][size_t(lane)]; }
  int64_t evictable(Tier tier, int32_t lane) {
    Settle(int(tier));
    return cached(tier, lane) - protected_[int(tier)][size_t(lane)];
  }
  // Resident in the tier, but matching nothing any more: what Kill could not free yet. Part of cached.
  int64_t dead_pages(Tier tier) const { return dead_pages_[int(tier)]; }
  int64_t nodes() const { return table_.size(); }       // live ones, roots not counted
  int64_t total_nodes() const { return total_nodes_; }  // with dead ones
  int64_t roots() const { return int64_t(roots_.size()); }

  // Digest of page `i` of the node; computed once per page, from the root down.
  const Digest256& Digest(RadixNode* node, int32_t i);
  static Digest256 RootDigest(const Digest256& fingerprint, std::string_view name_space);

  // Depth-first, parents before children; f must not change the tree.
  void ForEach(const std::function<void(const RadixNode&)>& f) const;
  std::vector<RadixNode*> Children(RadixNode* node) const;
  std::vector<RadixNode*> Roots() const;
  // One message per broken invariant.
  std::vector<std::string> Audit() const;

 private:
  struct HeapPos {
    int tier;
    int32_t& operator()(RadixNode* n) const { return n->heap_at[tier]; }
  };
  using Order = EvictOrder<RadixNode, HeapPos>;
  struct Root {
    std::string name_space;
    RadixNode node;
  };

  Order& order(Tier tier) { return orders_[size_t(tier)]; }
  int64_t PageBytes() const { return int64_t(options_.page_tokens) * 4; }
  EvictKey KeyOf(const RadixNode* node) const;
  uint64_t EdgeHash(const RadixNode* parent, const int32_t* first_page) const;
  int32_t CommonPages(const int32_t* a, const int32_t* b, int32_t n) const;
  RadixNode* NewNode();
  void FreeNode(RadixNode* node);
  void Reserve(RadixNode* node, int32_t pages);
  void LinkChild(RadixNode* parent, RadixNode* node);
  void UnlinkChild(RadixNode* node);
  void RemoveNode(RadixNode* node);
  bool Protected(const RadixNode* node, int t) const {
    return node->counted_held[t] || node->protected_children[t] > 0;
  }
  void Note(RadixNode* node, int t) {
    if (node->dirty_at[t] < 0) {
      node->dirty_at[t] = int32_t(dirty_[t].size());
      dirty_[t].push_back(node);
    }
  }
  void Settle(int t);
  void SettleNode(RadixNode* node, int t);
  void AddProtected(const RadixNode* node, int t, int sign);
  void CountSlot(RadixNode* node, int t, int32_t slot, int sign);
  void CountHostOnly(RadixNode* node, Tier tier, int32_t at, int sign);

  RadixOptions options_;
  uint64_t seed_;
  ChildTable table_;
  absl::flat_hash_map<std::string, std::unique_ptr<Root>> roots_;
  std::vector<std::unique_ptr<RadixNode[]>> chunks_;
  RadixNode* free_nodes_ = nullptr;  // linked by next
  std::vector<Order> orders_;
  std::vector<RadixNode*> dirty_[kTiers];
  std::array<int64_t, kMaxLanes> cached_[kTiers] = {}, protected_[kTiers] = {};
  int64_t dead_pages_[kTiers] = {0, 0};
  uint64_t next_id_ = 1;
  int64_t tick_ = 0, total_nodes_ = 0;
};

}  // namespace sluice
