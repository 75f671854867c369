// Counts and the full walk: free + leased + cached = all, per lane and tier, and every page where its state
// says it is.
#include <algorithm>
#include <map>

#include "cache/kv_cache_impl.h"
#include "fmt/format.h"

namespace sluice {

CacheStats KvCacheImpl::Stats() const {
  CacheStats s = stats_;
  s.device = {device_.all(), device_.free_total(), device_.leased() + device_.deferred(), device_.cached()};
  s.host = {host_.all(), host_.free_total(), host_.leased(), host_.cached()};
  s.dead_pages_device = tree_.dead_pages(Tier::kDevice);
  s.nodes = tree_.nodes();
  s.page_bytes = layout_.page_bytes();
  s.deferred_pages = device_.deferred();
  s.reserved_host_pages = reserved_host_;
  s.awaited_host_pages = awaited_host_;
  s.pending_prefetches = int64_t(prefetches_.size());
  s.pending_stores = store_in_flight_;
  for (const auto& [id, op] : ops_) {
    s.pending_backups += op.kind == OpKind::kBackup ? 1 : 0;
    s.pending_loads += op.kind == OpKind::kLoad ? 1 : 0;
  }
  return s;
}

std::vector<std::string> KvCacheImpl::Audit() const {
  std::vector<std::string> bad = tree_.Audit();
  auto report = [&](std::string s) {
    if (bad.size() < 100) bad.push_back(std::move(s));
  };
  int64_t in_tree[kTiers] = {0, 0}, locks = 0;
  std::map<int64_t, int64_t> op_nodes;
  tree_.ForEach([&](const RadixNode& n) {
    locks += n.lock;
    for (int t = 0; t < kTiers; ++t) {
      const PagePool& p = t == 0 ? device_ : host_;
      in_tree[t] += n.resident[t];
      for (int32_t i = 0; i < n.resident[t]; ++i) {
        if (p.state(n.slots[t][i]) != PagePool::State::kCached) {
          report(fmt::format("tier {} page {} is in the tree, its state is {}", t, n.slots[t][i],
                             int(p.state(n.slots[t][i]))));
        }
      }
    }
    if (!n.dead && n.host_ready < n.resident[1] && (n.backup_op == 0 || n.host_ready >= n.resident[0])) {
      report(fmt::format("node {}: {} of {} host pages are complete and nothing fills the rest", n.id,
                         n.host_ready, n.resident[1]));
    }
    for (int64_t id : {n.backup_op, n.load_op, n.store_op}) {
      if (id == 0) continue;
      ++op_nodes[id];
      const auto it = ops_.find(id);
      const bool known =
          it != ops_.end() && std::any_of(it->second.segments.begin(), it->second.segments.end(),
                                          [&](const Segment& s) { return s.node == &n; });
      if (!known) report(fmt::format("node {} names op {}, which does not name it", n.id, id));
      if (n.held[1] == 0) report(fmt::format("node {} is under op {} but not held", n.id, id));
    }
  });
  for (const auto& [id, op] : ops_) {
    if (op_nodes[id] != int64_t(op.segments.size()))
      report(fmt::format("op {} names {} nodes, {} name it", id, op.segments.size(), op_nodes[id]));
    for (const Segment& s : op.segments) {
      const bool inside =
          s.from <= s.to && s.to <= (op.kind == OpKind::kStore ? s.node->host_ready : s.node->resident[0]);
      if (!inside) report(fmt::format("op {} covers [{}, {}) of node {}", id, s.from, s.to, s.node->id));
    }
  }
  for (int t = 0; t < kTiers; ++t) {
    const PagePool& p = t == 0 ? device_ : host_;
    std::array<int64_t, 5> count{};
    for (size_t i = 0; i < p.slots(); ++i) ++count[size_t(p.state(int32_t(i)))];
    if (count[1] != p.free_total() || count[2] != p.leased() || count[3] != p.cached() ||
        count[4] != p.deferred() || count[1] + count[2] + count[3] + count[4] != p.all()) {
      report(fmt::format("tier {}: states {} {} {} {} do not match counts {} {} {} {} of {}", t, count[1],
                         count[2], count[3], count[4], p.free_total(), p.leased(), p.cached(), p.deferred(),
                         p.all()));
    }
    if (p.cached() != in_tree[t])
      report(fmt::format("tier {}: {} pages cached, {} in the tree", t, p.cached(), in_tree[t]));
  }
  int64_t reserved = 0, kept = 0;
  for (const auto& [id, r] : prefetches_) {
    reserved += int64_t(r.pages.size());
    kept += std::count_if(r.pages.begin(), r.pages.end(), [](int32_t p) { return p >= 0; });
  }
  if (reserved != reserved_host_)
    report(fmt::format("{} host pages reserved, counted {}", reserved, reserved_host_));
  int64_t awaited = 0;
  for (const auto& [id, a] : arrivals_) awaited += a.pages;
  if (awaited != awaited_host_)
    report(fmt::format("{} host pages await their sequences, counted {}", awaited, awaited_host_));
  if (kept != host_.leased())
    report(fmt::format("{} host pages leased, prefetches hold {}", host_.leased(), kept));
  if (options_.enable_radix && locks != active_ - fresh_active_)
    report(fmt::format("{} locks for {} active sequences", locks, active_ - fresh_active_));
  if (int64_t(deferred_.size()) != device_.deferred()) {
    report(fmt::format("{} pages deferred, counted {}", deferred_.size(), device_.deferred()));
  }
  return bad;
}

}  // namespace sluice
