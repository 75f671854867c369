// A bounded picture of the tree.
#include <algorithm>

#include "cache/kv_cache_impl.h"

namespace sluice {

CacheSketch KvCacheImpl::Sketch(size_t nodes_max, size_t pages_max) const {
  CacheSketch sketch;
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    TierCounts c;
    c.all = options_.pages_per_lane;
    c.free = device_.free(lane);
    c.cached = tree_.cached(Tier::kDevice, lane);
    c.leased = c.all - c.free - c.cached;
    sketch.lanes.push_back(c);
  }
  // The most recently used first, at most this many looked at.
  struct Waiting {
    const RadixNode* node;
    int32_t parent;
    bool operator<(const Waiting& other) const { return node->last_access < other.node->last_access; }
  };
  std::vector<Waiting> heap;
  size_t looked = 0;
  const auto add_children = [&](const RadixNode* node, int32_t index) {
    for (const RadixNode* c = node->first_child; c != nullptr && looked < 4 * nodes_max; c = c->next) {
      ++looked;
      if (c->dead) continue;
      heap.push_back({c, index});
      std::push_heap(heap.begin(), heap.end());
    }
  };
  for (const RadixNode* root : tree_.Roots()) add_children(root, -1);
  while (!heap.empty() && sketch.nodes.size() < nodes_max && pages_max > 0) {
    std::pop_heap(heap.begin(), heap.end());
    const Waiting next = heap.back();
    heap.pop_back();
    const RadixNode& n = *next.node;
    CacheSketch::Node out;
    out.id = n.id;
    out.parent = next.parent;
    out.start = n.start;
    out.lock = n.lock;
    out.hits = n.hits;
    const int32_t pages = int32_t(std::min<size_t>(size_t(n.pages), pages_max));
    for (int32_t i = 0; i < pages; ++i) {
      const int t = int(Tier::kDevice);
      out.pages += i < n.resident[t] ? char('0' + n.slots[t][i] % lanes()) : 'h';
    }
    pages_max -= size_t(pages);
    sketch.nodes.push_back(std::move(out));
    if (pages == n.pages) add_children(&n, int32_t(sketch.nodes.size()) - 1);
  }
  sketch.left_out = std::max<int64_t>(0, tree_.nodes() - int64_t(sketch.nodes.size()));
  return sketch;
}

}  // namespace sluice
