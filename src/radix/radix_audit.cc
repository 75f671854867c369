// The full invariant walk of radix_node.h, recomputing every count that the tree keeps.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "fmt/format.h"
#include "radix/radix_tree.h"

namespace sluice {
namespace {

struct Totals {
  std::array<int64_t, kMaxLanes> cached[kTiers] = {}, held[kTiers] = {};
  int64_t live = 0, all = 0, dead[kTiers] = {0, 0};
};

}  // namespace

std::vector<std::string> RadixTree::Audit() const {
  std::vector<std::string> bad;
  auto report = [&](const RadixNode& n, std::string what) {
    if (bad.size() < 50) bad.push_back(fmt::format("radix node {} at page {}: {}", n.id, n.start, what));
  };
  Totals totals;
  std::set<int32_t> seen[kTiers];
  std::map<const RadixNode*, std::array<bool, kTiers>> truly_protected;
  std::vector<const RadixNode*> order;
  ForEach([&](const RadixNode& n) { order.push_back(&n); });

  for (auto it = order.rbegin(); it != order.rend(); ++it) {  // children before parents
    const RadixNode& n = **it;
    std::array<bool, kTiers> prot = {};
    int32_t children = 0, tier_children[kTiers] = {0, 0};
    std::set<std::string> first_pages;
    for (const RadixNode* c = n.first_child; c != nullptr; c = c->next) {
      ++children;
      if (c->parent != &n) report(*c, "parent link");
      if (c->start != n.end()) report(*c, fmt::format("starts at {}, parent ends at {}", c->start, n.end()));
      if (n.dead && !c->dead) report(*c, "alive under a dead parent");
      std::string first(reinterpret_cast<const char*>(c->tokens), size_t(PageBytes()));
      if (!c->dead && !first_pages.insert(std::move(first)).second)
        report(*c, "sibling with the same first page");
      for (int t = 0; t < kTiers; ++t) {
        if (c->resident[t] > 0) {
          ++tier_children[t];
          if (!n.is_root() && n.resident[t] != n.pages)
            report(*c, fmt::format("in tier {} under an incomplete parent", t));
        }
        prot[size_t(t)] |= truly_protected[c][size_t(t)];
      }
    }
    if (children != n.children) report(n, fmt::format("{} children, counted {}", children, n.children));
    for (int t = 0; t < kTiers; ++t) {
      if (tier_children[t] != n.tier_children[t]) {
        report(n, fmt::format("{} children in tier {}, counted {}", tier_children[t], t, n.tier_children[t]));
      }
      if (n.held[t] < 0 || (t == 0 && n.lock > n.held[0]))
        report(n, fmt::format("held {} lock {}", n.held[t], n.lock));
      if (!n.is_root()) prot[size_t(t)] |= n.held[t] > 0;
    }
    truly_protected[&n] = prot;
    if (n.is_root()) {
      if (children == 0 && n.held[0] == 0 && n.held[1] == 0) report(n, "empty root kept");
      continue;
    }
    ++totals.all;
    totals.live += n.dead ? 0 : 1;
    if (n.pages <= 0 || n.pages > n.capacity || n.capacity > 2 * n.pages + 8) {
      report(n, fmt::format("{} pages in a block of {}: not compact", n.pages, n.capacity));
    }
    if (std::max(n.resident[0], n.resident[1]) != n.pages) {
      report(n, fmt::format("{} pages, resident {} and {}", n.pages, n.resident[0], n.resident[1]));
    }
    if (n.edge_hash != EdgeHash(n.parent, n.tokens)) report(n, "edge hash is stale");
    bool findable = false;
    table_.ForEach(n.edge_hash, [&](RadixNode* c) { return findable = c == &n; });
    if (findable == n.dead) report(n, n.dead ? "dead but still found" : "not found in the child table");
    if (n.host_ready > n.resident[1])
      report(n, fmt::format("{} host pages ready of {}", n.host_ready, n.resident[1]));
    for (int t = 0; t < kTiers; ++t) {
      totals.dead[t] += n.dead ? n.resident[t] : 0;
      std::array<int32_t, kMaxLanes> lanes = {};
      for (int32_t i = 0; i < n.resident[t]; ++i) {
        const int32_t slot = n.slots[t][i];
        const auto lane = size_t(slot % options_.lanes);
        ++lanes[lane];
        ++totals.cached[t][lane];
        totals.held[t][lane] += prot[size_t(t)] ? 1 : 0;
        if (!seen[t].insert(slot).second)
          report(n, fmt::format("slot {} of tier {} is in the tree twice", slot, t));
      }
      if (lanes != n.lane_pages[t]) report(n, fmt::format("lane counts of tier {}", t));
      if (Evictable(&n, Tier(t)) && n.heap_at[t] < 0)
        report(n, fmt::format("evictable in tier {} but not in the order", t));
      if (n.heap_at[t] >= 0 && options_.policy != EvictionPolicy::kMru) {
        const EvictKey key = orders_[size_t(t)].key_of(const_cast<RadixNode*>(&n));
        if (KeyOf(&n) < key) report(n, fmt::format("order key of tier {} is above the true key", t));
      }
    }
    std::array<int32_t, kMaxLanes> host_only = {};
    for (int32_t i = n.resident[0]; i < n.resident[1]; ++i)
      ++host_only[size_t(n.slots[1][i] % options_.lanes)];
    if (host_only != n.host_only) report(n, "lane counts of pages on the host alone");
    if (n.digest_pages > n.pages) report(n, fmt::format("{} digests of {} pages", n.digest_pages, n.pages));
  }
  const_cast<RadixTree*>(this)->Settle(0);
  const_cast<RadixTree*>(this)->Settle(1);
  for (int t = 0; t < kTiers; ++t) {
    if (totals.dead[t] != dead_pages_[t])
      bad.push_back(
          fmt::format("radix tier {}: {} dead pages (counted {})", t, totals.dead[t], dead_pages_[t]));
    for (int32_t lane = 0; lane < options_.lanes; ++lane) {
      const auto l = size_t(lane);
      if (totals.cached[t][l] != cached_[t][l] || totals.held[t][l] != protected_[t][l]) {
        bad.push_back(fmt::format("radix tier {} lane {}: {} cached (counted {}), {} protected (counted {})",
                                  t, lane, totals.cached[t][l], cached_[t][l], totals.held[t][l],
                                  protected_[t][l]));
      }
    }
  }
  if (totals.live != nodes() || totals.all != total_nodes_) {
    bad.push_back(fmt::format("radix: {} live nodes (counted {}), {} in all (counted {})", totals.live,
                              nodes(), totals.all, total_nodes_));
  }
  return bad;
}

}  // namespace sluice
