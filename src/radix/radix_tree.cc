#include "radix/radix_tree.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <random>

#include "base/plant.h"

namespace sluice {
namespace {
constexpr int32_t kBlockPages = 64;  // compared by one memcmp: 16 KiB, half of an L1 cache
constexpr size_t kNodesPerChunk = 64;
}  // namespace

RadixTree::RadixTree(const RadixOptions& options) : options_(options) {
  SLUICE_CHECK(options_.page_tokens > 0 && options_.page_tokens % 4 == 0, "page_tokens {}",
               options_.page_tokens);
  SLUICE_CHECK(options_.lanes >= 1 && options_.lanes <= kMaxLanes, "lanes {}", options_.lanes);
  // Seeded by the process so that no client can aim at one bucket; results never depend on it.
  seed_ = (uint64_t(std::random_device()()) << 32) | std::random_device()();
  orders_.emplace_back(HeapPos{int(Tier::kDevice)});
  orders_.emplace_back(HeapPos{int(Tier::kHost)});
}

RadixTree::~RadixTree() {
  for (RadixNode* root : Roots()) {
    std::vector<RadixNode*> todo = Children(root);
    while (!todo.empty()) {
      RadixNode* n = todo.back();
      todo.pop_back();
      for (RadixNode* c = n->first_child; c != nullptr; c = c->next) todo.push_back(c);
      ::operator delete(n->tokens);
      n->tokens = nullptr;
    }
  }
}

RadixNode* RadixTree::FindRoot(std::string_view name_space) const {
  const auto it = roots_.find(absl::string_view(name_space.data(), name_space.size()));
  return it == roots_.end() ? nullptr : &it->second->node;
}

RadixNode* RadixTree::GetRoot(std::string_view name_space) {
  if (RadixNode* found = FindRoot(name_space)) return found;
  auto root = std::make_unique<Root>();
  root->name_space = std::string(name_space);
  root->node.name_space = &root->name_space;
  root->node.id = next_id_++;
  root->node.root_digest = RootDigest(options_.fingerprint, name_space);
  RadixNode* node = &root->node;
  roots_.emplace(root->name_space, std::move(root));
  return node;
}

uint64_t RadixTree::EdgeHash(const RadixNode* parent, const int32_t* first_page) const {
  return HashTokens(first_page, PageBytes(), seed_ + parent->id * 0x9E3779B97F4A7C15ull);
}

int32_t RadixTree::CommonPages(const int32_t* a, const int32_t* b, int32_t n) const {
  const int64_t page = options_.page_tokens, bytes = PageBytes();
  int32_t i = 0;
  while (i < n) {
    const int32_t step = std::min(n - i, kBlockPages);
    if (std::memcmp(a + i * page, b + i * page, size_t(step * bytes)) != 0) break;
    i += step;
  }
  while (i < n && std::memcmp(a + i * page, b + i * page, size_t(bytes)) == 0) ++i;
  return i;
}

RadixNode* RadixTree::FindChild(const RadixNode* node, RadixKey key, int32_t* common) const {
  const int64_t n = key.pages();
  RadixNode* only = node->first_child;
  if (n == 0 || only == nullptr) return nullptr;
  if (node->children == 1) {  // no hash: the comparison itself answers
    if (only->dead) return nullptr;
    *common = CommonPages(key.data(), only->tokens, int32_t(std::min<int64_t>(n, only->pages)));
    return *common > 0 ? only : nullptr;
  }
  RadixNode* found = nullptr;
  table_.ForEach(EdgeHash(node, key.data()), [&](RadixNode* c) {
    if (c->parent != node) return false;
    *common = CommonPages(key.data(), c->tokens, int32_t(std::min<int64_t>(n, c->pages)));
    if (*common == 0) return false;
    found = c;
    return true;
  });
  return found;
}

RadixTree::Match RadixTree::Walk(RadixNode* from, RadixKey key) const {
  Match m{from, from->pages, 0};
  int32_t common = 0;
  while (m.in_node == m.node->pages) {
    RadixNode* child = FindChild(m.node, key.From(m.pages), &common);
    if (child == nullptr) break;
    m = {child, common, m.pages + common};
  }
  return m;
}

RadixNode* RadixTree::NewNode() {
  if (free_nodes_ == nullptr) {
    chunks_.push_back(std::make_unique<RadixNode[]>(kNodesPerChunk));
    for (size_t i = 0; i < kNodesPerChunk; ++i) {
      chunks_.back()[i].next = free_nodes_;
      free_nodes_ = &chunks_.back()[i];
    }
  }
  RadixNode* n = free_nodes_;
  free_nodes_ = n->next;
  n->next = nullptr;
  n->id = next_id_++;
  n->created = n->last_access = tick_;
  ++total_nodes_;
  return n;
}

void RadixTree::FreeNode(RadixNode* node) {
  ::operator delete(node->tokens);
  *node = RadixNode();
  node->next = free_nodes_;
  free_nodes_ = node;
  --total_nodes_;
}

// Gives the node a block of exactly `capacity` pages and moves what it has.
void RadixTree::Reserve(RadixNode* node, int32_t capacity) {
  if (capacity == node->capacity) return;
  const int64_t page = options_.page_tokens;
  auto* block = static_cast<int32_t*>(::operator new(size_t(capacity) * size_t(PageBytes() + 8)));
  int32_t* device = block + capacity * page;
  int32_t* host = device + capacity;
  if (node->tokens != nullptr) {
    std::memcpy(block, node->tokens, size_t(std::min(node->pages, capacity) * PageBytes()));
    std::memcpy(device, node->slots[0], size_t(node->resident[0]) * 4);
    std::memcpy(host, node->slots[1], size_t(node->resident[1]) * 4);
    ::operator delete(node->tokens);
  }
  node->tokens = block;
  node->slots[0] = device;
  node->slots[1] = host;
  node->capacity = capacity;
}

void RadixTree::LinkChild(RadixNode* parent, RadixNode* node) {
  node->parent = parent;
  node->prev = nullptr;
  node->next = parent->first_child;
  if (node->next != nullptr) node->next->prev = node;
  parent->first_child = node;
  ++parent->children;
}

void RadixTree::UnlinkChild(RadixNode* node) {
  (node->prev != nullptr ? node->prev->next : node->parent->first_child) = node->next;
  if (node->next != nullptr) node->next->prev = node->prev;
  --node->parent->children;
}

RadixNode* RadixTree::AddChild(RadixNode* parent, RadixKey key) {
  SLUICE_CHECK(!key.empty());
  RadixNode* n = NewNode();
  Reserve(n, int32_t(key.pages()));
  std::memcpy(n->tokens, key.data(), size_t(key.pages() * PageBytes()));
  n->pages = int32_t(key.pages());
  n->start = parent->end();
  n->dead = parent->dead;
  LinkChild(parent, n);
  n->edge_hash = EdgeHash(parent, n->tokens);
  if (!n->dead) table_.Insert(n->edge_hash, n);
  return n;
}

bool RadixTree::GrowsCheaply(const RadixNode& node, int64_t pages) const {
  constexpr int64_t kMovedPagesMax = 32;  // 8 KiB of tokens
  return node.pages + pages <= std::max<int64_t>(node.capacity, kMovedPagesMax);
}

void RadixTree::Extend(RadixNode* node, RadixKey key) {
  SLUICE_CHECK(!node->is_root() && node->children == 0, "node {} has {} children", node->id, node->children);
  const int32_t want = node->pages + int32_t(key.pages());
  if (want > node->capacity) Reserve(node, std::max(want, node->capacity + node->capacity / 2));
  std::memcpy(node->tokens + int64_t(node->pages) * options_.page_tokens, key.data(),
              size_t(key.pages() * PageBytes()));
  node->pages = want;
}

RadixNode* RadixTree::Split(RadixNode* node, int32_t pages) {
  SLUICE_CHECK(!node->is_root() && 0 < pages && pages < node->pages, "cut {} of {}", pages, node->pages);
  for (int t = 0; t < kTiers; ++t) SettleNode(node, t);
  const int64_t page = options_.page_tokens;
  RadixNode* up = NewNode();
  RadixNode* parent = node->parent;
  const int32_t rest = node->pages - pages;

  // The upper node takes the block (most cuts are near the tail), the lower one gets a block of its own.
  up->tokens = node->tokens;
  up->slots[0] = node->slots[0];
  up->slots[1] = node->slots[1];
  up->capacity = node->capacity;
  up->pages = pages;
  up->start = node->start;
  node->tokens = nullptr;
  node->capacity = 0;
  node->pages = 0;
  int32_t below[kTiers];
  for (int t = 0; t < kTiers; ++t) {
    const int32_t all = node->resident[t];
    up->resident[t] = std::min(all, pages);
    below[t] = all - up->resident[t];
    node->resident[t] = 0;
  }
  Reserve(node, rest);
  node->pages = rest;
  node->start = up->end();
  std::memcpy(node->tokens, up->tokens + pages * page, size_t(rest) * size_t(PageBytes()));
  for (int t = 0; t < kTiers; ++t) {
    std::memcpy(node->slots[t], up->slots[t] + up->resident[t], size_t(below[t]) * 4);
    node->resident[t] = below[t];
    up->lane_pages[t] = node->lane_pages[t];
    node->lane_pages[t] = {};
    for (int32_t i = 0; i < below[t]; ++i) {
      const auto lane = size_t(node->slots[t][i] % options_.lanes);
      ++node->lane_pages[t][lane];
      --up->lane_pages[t][lane];
    }
  }
  up->host_only = node->host_only;
  node->host_only = {};
  for (int32_t i = below[0]; i < below[1]; ++i) {
    const auto lane = size_t(node->slots[1][i] % options_.lanes);
    ++node->host_only[lane];
    --up->host_only[lane];
  }
  Reserve(up, pages);  // compact again
  if (Planted(Plant::kSplitLosesLock) && node->lock > 0) {
    --node->lock;
    --node->held[int(Tier::kDevice)];
  }

  // The upper node takes the place under the parent.
  if (!node->dead) table_.Replace(node->edge_hash, node, up);
  up->edge_hash = node->edge_hash;
  UnlinkChild(node);
  LinkChild(parent, up);
  LinkChild(up, node);
  node->edge_hash = EdgeHash(up, node->tokens);
  if (!node->dead) table_.Insert(node->edge_hash, node);

  up->dead = node->dead;
  up->hits = node->hits;
  up->priority = node->priority;
  up->created = node->created;
  up->last_access = node->last_access;
  up->host_ready = std::min(node->host_ready, pages);
  node->host_ready -= up->host_ready;
  up->stored = std::min(node->stored, pages);
  node->stored -= up->stored;
  up->from_storage = std::min(node->from_storage, pages);
  node->from_storage -= up->from_storage;
  if (node->digests != nullptr) {
    const int32_t all = node->digest_pages;
    up->digests = std::move(node->digests);
    up->digest_capacity = node->digest_capacity;
    up->digest_pages = std::min(all, pages);
    node->digest_capacity = node->digest_pages = 0;
    if (all > pages) {
      node->digests = std::make_unique<Digest256[]>(size_t(rest));
      node->digest_capacity = rest;
      node->digest_pages = all - pages;
      std::copy_n(up->digests.get() + pages, all - pages, node->digests.get());
    }
  }
  for (int t = 0; t < kTiers; ++t) {
    up->tier_children[t] = node->resident[t] > 0 ? 1 : 0;
    up->protected_children[t] = Protected(node, t) ? 1 : 0;
    // The parent's counts stand: the upper node is resident and protected exactly when the whole node was.
    // The only exception: nothing of the node was resident, and then nothing is.
    if (node->resident[t] == 0 && node->heap_at[t] >= 0) order(Tier(t)).Remove(node);
    Offer(up, Tier(t));
  }
  return up;
}

void RadixTree::CountSlot(RadixNode* node, int t, int32_t slot, int sign) {
  const auto lane = size_t(slot % options_.lanes);
  node->lane_pages[t][lane] += sign;
  cached_[t][lane] += sign;
  if (node->dead) dead_pages_[t] += sign;
  if (Protected(node, t)) protected_[t][lane] += sign;
}

// Page `at` of the node comes to or leaves a tier.
void RadixTree::CountHostOnly(RadixNode* node, Tier tier, int32_t at, int sign) {
  const bool other = at < node->resident[tier == Tier::kHost ? 0 : 1];
  if (other != (tier == Tier::kDevice)) return;  // on both tiers or on none, before and after
  node->host_only[size_t(node->slots[1][at] % options_.lanes)] += tier == Tier::kHost ? sign : -sign;
}

void RadixTree::AddResident(RadixNode* node, Tier tier, std::span<const int32_t> slots) {
  const int t = int(tier);
  if (slots.empty()) return;
  RadixNode* parent = node->parent;
  SLUICE_CHECK(parent->is_root() || parent->resident[t] == parent->pages,
               "parent {} has {} of {} pages in tier {}", parent->id, parent->resident[t], parent->pages, t);
  SLUICE_CHECK(node->resident[t] + int64_t(slots.size()) <= node->pages);
  if (node->resident[t] == 0) ++parent->tier_children[t];
  std::memcpy(node->slots[t] + node->resident[t], slots.data(), slots.size_bytes());
  for (int32_t s : slots) {
    CountSlot(node, t, s, +1);
    CountHostOnly(node, tier, node->resident[t]++, +1);
  }
  Offer(node, tier);
}

bool RadixTree::DropResident(RadixNode* node, Tier tier, int32_t n,
                             const std::function<void(int32_t)>& freed) {
  const int t = int(tier);
  SLUICE_CHECK(n > 0 && n <= node->resident[t] && node->held[t] == 0 && node->tier_children[t] == 0,
               "drop {} of {}: held {}, children {}", n, node->resident[t], node->held[t],
               node->tier_children[t]);
  SettleNode(node, t);
  RadixNode* parent = node->parent;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t slot = node->slots[t][--node->resident[t]];
    CountSlot(node, t, slot, -1);
    CountHostOnly(node, tier, node->resident[t], -1);
    freed(slot);
  }
  if (tier == Tier::kHost) {
    node->host_ready = std::min(node->host_ready, node->resident[t]);
    node->from_storage = std::min(node->from_storage, node->resident[t]);
  }
  if (node->resident[t] == 0) {
    order(tier).Remove(node);
    --parent->tier_children[t];
    Offer(parent, tier);
  }
  const int32_t keep = std::max(node->resident[0], node->resident[1]);
  if (keep == node->pages) return true;
  SLUICE_CHECK(node->children == 0, "node {} loses pages above {} children", node->id, node->children);
  node->pages = keep;
  node->stored = std::min(node->stored, keep);
  node->digest_pages = std::min(node->digest_pages, keep);
  if (keep > 0) {
    if (node->capacity > 2 * keep + 8) Reserve(node, keep);
    return true;
  }
  RemoveNode(node);
  return false;
}

void RadixTree::RemoveNode(RadixNode* node) {
  SLUICE_CHECK(node->children == 0 && node->held[0] == 0 && node->held[1] == 0 && node->lock == 0);
  for (int t = 0; t < kTiers; ++t) {
    SettleNode(node, t);
    order(Tier(t)).Remove(node);
    if (node->dirty_at[t] >= 0) {
      dirty_[t][size_t(node->dirty_at[t])] = nullptr;
      node->dirty_at[t] = -1;
    }
  }
  if (!node->dead) table_.Erase(node->edge_hash, node);
  RadixNode* parent = node->parent;
  UnlinkChild(node);
  FreeNode(node);
  for (int t = 0; t < kTiers; ++t) Offer(parent, Tier(t));
}

void RadixTree::Reap(RadixNode* node, const std::function<void(Tier, int32_t)>& freed) {
  while (!node->is_root() && node->dead && node->children == 0 && node->held[0] == 0 && node->held[1] == 0) {
    RadixNode* parent = node->parent;
    const int32_t device = node->resident[0], host = node->resident[1];
    bool alive = true;
    if (device > 0)
      alive = DropResident(node, Tier::kDevice, device, [&](int32_t s) { freed(Tier::kDevice, s); });
    if (alive && host > 0)
      alive = DropResident(node, Tier::kHost, host, [&](int32_t s) { freed(Tier::kHost, s); });
    SLUICE_CHECK(!alive);
    node = parent;
  }
  if (node->is_root() && node->children == 0 && node->held[0] == 0 && node->held[1] == 0) {
    for (int t = 0; t < kTiers; ++t) {
      if (node->dirty_at[t] >= 0) dirty_[t][size_t(node->dirty_at[t])] = nullptr;
    }
    const std::string name = *node->name_space;
    roots_.erase(name);
  }
}

void RadixTree::Kill(RadixNode* node, const std::function<void(Tier, int32_t)>& freed) {
  const bool root = node->is_root();
  std::vector<RadixNode*> all;
  if (root) {
    all = Children(node);
  } else {
    all.push_back(node);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    for (RadixNode* c = all[i]->first_child; c != nullptr; c = c->next) all.push_back(c);
  }
  for (RadixNode* n : all) {
    if (n->dead) continue;
    table_.Erase(n->edge_hash, n);
    n->dead = true;
    for (int t = 0; t < kTiers; ++t) dead_pages_[t] += n->resident[t];
  }
  std::vector<std::pair<RadixNode*, uint64_t>> ids;  // reaping a leaf may take its parents with it
  for (auto it = all.rbegin(); it != all.rend(); ++it) ids.emplace_back(*it, (*it)->id);
  for (auto [n, id] : ids) {
    if (n->id == id) Reap(n, freed);
  }
  if (root && ids.empty()) Reap(node, freed);
}

void RadixTree::TouchPath(RadixNode* node) {
  ++tick_;
  for (; !node->is_root(); node = node->parent) node->last_access = tick_;
}

EvictKey RadixTree::KeyOf(const RadixNode* n) const {
  switch (options_.policy) {
    case EvictionPolicy::kLru:
      return {n->last_access, int64_t(n->id)};
    case EvictionPolicy::kLfu:
      return {n->hits, n->last_access};
    case EvictionPolicy::kFifo:
      return {n->created, int64_t(n->id)};
    case EvictionPolicy::kMru:
      return {-n->last_access, int64_t(n->id)};
    case EvictionPolicy::kPriority:
      return {n->priority, n->last_access};
  }
  return {};
}

void RadixTree::Offer(RadixNode* node, Tier tier) {
  if (!Evictable(node, tier)) return;
  if (node->heap_at[int(tier)] < 0) {
    order(tier).Push(node, KeyOf(node));
  } else if (options_.policy == EvictionPolicy::kMru) {
    order(tier).Rekey(node, KeyOf(node));
  }
}

RadixNode* RadixTree::Victim(Tier tier) {
  Order& o = order(tier);
  while (!o.empty()) {
    RadixNode* n = o.top();
    if (!Evictable(n, tier)) {
      o.Remove(n);
      continue;
    }
    const EvictKey key = KeyOf(n);
    if (key == o.top_key()) return n;
    o.Rekey(n, key);
  }
  return nullptr;
}

void RadixTree::AddProtected(const RadixNode* node, int t, int sign) {
  for (int32_t lane = 0; lane < options_.lanes; ++lane) {
    protected_[t][size_t(lane)] += sign * node->lane_pages[t][size_t(lane)];
  }
}

void RadixTree::SettleNode(RadixNode* node, int t) {
  const bool now = node->held[t] > 0;
  if (now == node->counted_held[t]) return;
  bool before = Protected(node, t);
  node->counted_held[t] = now;
  for (RadixNode* n = node;;) {
    const bool after = Protected(n, t);
    if (after == before || n->is_root()) return;
    AddProtected(n, t, after ? 1 : -1);
    RadixNode* parent = n->parent;
    before = Protected(parent, t);
    parent->protected_children[t] += after ? 1 : -1;
    n = parent;
  }
}

void RadixTree::Settle(int t) {
  for (RadixNode* n : dirty_[t]) {
    if (n == nullptr) continue;
    n->dirty_at[t] = -1;
    SettleNode(n, t);
  }
  dirty_[t].clear();
}

Digest256 RadixTree::RootDigest(const Digest256& fingerprint, std::string_view name_space) {
  Hasher h;
  const Digest256 content = Planted(Plant::kKeyWithoutDtype) ? Digest256{} : fingerprint;
  h.AddFramed("sluice.kv.root.v1").Add(std::as_bytes(std::span(content))).AddFramed(name_space);
  return h.Finish();
}

const Digest256& RadixTree::Digest(RadixNode* node, int32_t i) {
  SLUICE_CHECK(i >= 0 && i < node->pages);
  std::vector<RadixNode*>
      path;  // from the deepest node that lacks digests up to the first whose parent is complete
  for (RadixNode* n = node;; n = n->parent) {
    const int32_t want = n == node ? i + 1 : n->pages;
    if (n->is_root() || n->digest_pages >= want) break;
    path.push_back(n);
  }
  for (auto it = path.rbegin(); it != path.rend(); ++it) {
    RadixNode* n = *it;
    const int32_t want = n == node ? i + 1 : n->pages;
    if (n->digest_capacity < want) {
      const int32_t capacity = std::max(want, std::min(n->pages, 2 * n->digest_capacity));
      auto bigger = std::make_unique<Digest256[]>(size_t(capacity));
      std::copy_n(n->digests.get(), n->digest_pages, bigger.get());
      n->digests = std::move(bigger);
      n->digest_capacity = capacity;
    }
    const RadixNode* p = n->parent;
    Digest256 d = n->digest_pages > 0 ? n->digests[size_t(n->digest_pages) - 1]
                  : p->is_root()      ? p->root_digest
                                      : p->digests[size_t(p->pages) - 1];
    for (; n->digest_pages < want; ++n->digest_pages) {
      const auto page = std::span(n->tokens + int64_t(n->digest_pages) * options_.page_tokens,
                                  size_t(options_.page_tokens));
      d = PageDigest(d, page);
      n->digests[size_t(n->digest_pages)] = d;
    }
  }
  return node->digests[size_t(i)];
}

std::vector<RadixNode*> RadixTree::Children(RadixNode* node) const {
  std::vector<RadixNode*> v;
  for (RadixNode* c = node->first_child; c != nullptr; c = c->next) v.push_back(c);
  return v;
}

std::vector<RadixNode*> RadixTree::Roots() const {
  std::vector<RadixNode*> v;
  for (const auto& [name, root] : roots_) v.push_back(&root->node);
  std::sort(v.begin(), v.end(), [](const RadixNode* a, const RadixNode* b) { return a->id < b->id; });
  return v;
}

void RadixTree::ForEach(const std::function<void(const RadixNode&)>& f) const {
  for (RadixNode* root : Roots()) {
    std::vector<const RadixNode*> todo = {root};
    while (!todo.empty()) {
      const RadixNode* n = todo.back();
      todo.pop_back();
      f(*n);
      for (const RadixNode* c = n->first_child; c != nullptr; c = c->next) todo.push_back(c);
    }
  }
}

}  // namespace sluice
