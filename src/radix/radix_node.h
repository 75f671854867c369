// One edge of the tree with what it leads to: a run of whole pages and where their bytes lie in each tier.
//
// Invariants (RadixTree::Audit walks them):
//  1. tokens are the node's own compact array of `pages` pages; siblings differ in their first page.
//  2. slots[t][0, resident[t]) are the pages' places in tier t; residency is a prefix, in a node and along
//  every path: a node
//     with pages in tier t has a parent whose pages all are in tier t. Every page is in some tier.
//  3. held[t] > 0 (leases of sequences, copies, storage) keeps the node's places in tier t; ancestors are
//  kept by children[t].
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/digest.h"

namespace sluice {

enum class Tier : uint8_t { kDevice = 0, kHost = 1 };
constexpr int kTiers = 2;
constexpr int32_t kMaxLanes = 8;

struct RadixNode {
  RadixNode* parent = nullptr;
  RadixNode* first_child = nullptr;
  RadixNode* next = nullptr;  // siblings
  RadixNode* prev = nullptr;
  int32_t* tokens = nullptr;  // [capacity pages], then the two slot arrays in the same block
  int32_t* slots[kTiers] = {nullptr, nullptr};
  int64_t start = 0;  // pages before this node
  int32_t pages = 0, capacity = 0;
  int32_t resident[kTiers] = {0, 0};
  int32_t children = 0;
  int32_t tier_children[kTiers] = {0, 0};  // children with resident[t] > 0
  int32_t held[kTiers] = {0, 0};
  int32_t lock = 0;  // sequences whose path ends here; part of held[kDevice]
  // Lazy protection counts, see RadixTree::Settle.
  int32_t protected_children[kTiers] = {0, 0};
  bool counted_held[kTiers] = {false, false};
  int32_t dirty_at[kTiers] = {-1, -1};
  int32_t heap_at[kTiers] = {-1, -1};
  std::array<int32_t, kMaxLanes> lane_pages[kTiers] = {};
  // Host pages that are not on the device, slots[1][resident[0], resident[1]), by lane. Not the difference of
  // the two counts above: a sequence that computed pages which the host tier had puts its own on any lane.
  std::array<int32_t, kMaxLanes> host_only = {};
  uint64_t id = 0;  // unique for the tree's life; hashes use it, never the address
  uint64_t edge_hash = 0;
  int64_t last_access = 0, created = 0;
  int32_t hits = 0, priority = 0;
  bool dead = false;  // matches nothing any more; goes when the last hold goes
  // Owned by the cache's tiers.
  int32_t host_ready = 0;    // pages of resident[kHost] whose bytes are complete
  int32_t stored = 0;        // pages handed to the storage tier
  int32_t from_storage = 0;  // pages whose host bytes came from storage and were not used yet
  int64_t backup_op = 0, load_op = 0, store_op = 0;
  bool backup_queued = false;
  std::unique_ptr<Digest256[]> digests;  // of pages [0, digest_pages)
  int32_t digest_pages = 0, digest_capacity = 0;
  // Roots only.
  const std::string* name_space = nullptr;
  Digest256 root_digest{};

  bool is_root() const { return parent == nullptr; }
  int64_t end() const { return start + pages; }
};

}  // namespace sluice
