// The host tier: which pages are copied down, what copies are on their way, and what their end means.
#include <algorithm>

#include "base/plant.h"
#include "cache/kv_cache_impl.h"

namespace sluice {

int64_t RadixNode::*KvCacheImpl::SlotOf(OpKind kind) {
  switch (kind) {
    case OpKind::kBackup:
      return &RadixNode::backup_op;
    case OpKind::kLoad:
      return &RadixNode::load_op;
    case OpKind::kStore:
      return &RadixNode::store_op;
  }
  return nullptr;
}

// Copies read or write both tiers; storage only the host tier.
void KvCacheImpl::HoldSegment(const Segment& s, OpKind kind, int sign) {
  auto one = [&](Tier tier) {
    if (sign > 0) {
      tree_.Hold(s.node, tier);
    } else {
      tree_.Unhold(s.node, tier);
    }
  };
  if (!(kind == OpKind::kLoad && Planted(Plant::kLostLease))) one(Tier::kHost);
  if (kind != OpKind::kStore && !(kind == OpKind::kBackup && Planted(Plant::kWriteBackFreed)))
    one(Tier::kDevice);
}

void KvCacheImpl::QueueBackup(RadixNode* node) {
  if (!has_host() || node->backup_queued || node->dead || node->host_ready >= node->resident[0]) return;
  node->backup_queued = true;
  backup_queue_.push_back({node, node->id});
}

// Plans the node's unsaved pages after those of its ancestors. False: an ancestor or the node itself is under
// a backup now, ask again later. True with nothing added: no host room, or nothing to do.
bool KvCacheImpl::PlanBackup(RadixNode* node, int64_t op_id, Op* op, CopyPlan* plan) {
  std::vector<RadixNode*> chain;
  for (RadixNode* n = node; !n->is_root() && n->host_ready < n->pages; n = n->parent) {
    if (n->backup_op == op_id && n != node) break;  // saved by this very plan
    if (n->backup_op != 0) return false;
    if (n->host_ready >= n->resident[0]) return true;
    chain.push_back(n);
  }
  std::vector<int32_t> slots;
  std::vector<Segment> attached;
  for (auto it = chain.rbegin(); it != chain.rend(); ++it) {
    RadixNode* n = *it;
    const int32_t from = n->resident[1], to = n->resident[0];
    if (from != n->host_ready || n->load_op != 0) return false;
    if (!n->parent->is_root() && n->parent->resident[1] < n->parent->pages) return true;
    LaneCounts need{};
    for (int32_t i = from; i < to; ++i) ++need[size_t(n->slots[0][i] % lanes())];
    RadixNode* keep = from > 0 ? n : n->parent;  // the path's own host pages must not make the room
    tree_.Hold(keep, Tier::kHost);
    tree_.Hold(n, Tier::kDevice);
    const bool room = MakeRoom(Tier::kHost, need, true);
    tree_.Unhold(keep, Tier::kHost);
    tree_.Unhold(n, Tier::kDevice);
    if (!room) {
      stats_.backups_skipped += to - from;
      backup_blocked_ = true;
      return true;
    }
    slots.clear();
    if (options_.recorder != nullptr) attached.push_back({n, from, to});
    for (int32_t i = from; i < to; ++i) {
      const int32_t device = n->slots[0][i];
      const int32_t host = host_.Take(device % lanes());
      host_.Cache(host);
      slots.push_back(host);
      plan->pages.push_back({PageId(device), HostPageId(host)});
    }
    tree_.AddResident(n, Tier::kHost, slots);
    n->backup_op = op_id;
    op->segments.push_back({n, from, to});
    HoldSegment(op->segments.back(), OpKind::kBackup, +1);
    n->backup_queued = false;
  }
  for (const Segment& s : attached) {
    options_.recorder->BackupAttach(s.node->id, op_id,
                                    std::span(s.node->slots[0] + s.from, size_t(s.to - s.from)),
                                    std::span(s.node->slots[1] + s.from, size_t(s.to - s.from)));
  }
  return true;
}

void KvCacheImpl::TakeCopies(std::vector<CopyPlan>* loads, std::vector<CopyPlan>* backups) {
  for (CopyPlan& p : planned_loads_) loads->push_back(std::move(p));
  planned_loads_.clear();
  if (backup_queue_.empty()) return;
  CopyPlan plan;
  plan.id = next_id_++;
  plan.direction = CopyDirection::kDeviceToHost;
  Op op{OpKind::kBackup, {}};
  backup_blocked_ = false;
  for (size_t n = backup_queue_.size(); n > 0; --n) {
    const QueuedNode q = backup_queue_.front();
    backup_queue_.pop_front();
    if (!q.alive() || !q.node->backup_queued) continue;
    q.node->backup_queued = false;
    if (!q.node->dead && q.node->host_ready < q.node->resident[0] &&
        !PlanBackup(q.node, plan.id, &op, &plan)) {
      q.node->backup_queued = true;
      backup_queue_.push_back(q);
    }
  }
  if (plan.pages.empty()) return;
  stats_.backup_pages += int64_t(plan.pages.size());
  ops_[plan.id] = std::move(op);
  backups->push_back(std::move(plan));
}

void KvCacheImpl::OnCopiesDone(std::span<const int64_t> ids, std::span<const int64_t> failed) {
  for (int64_t id : ids) EndOp(id, true);
  for (int64_t id : failed) EndOp(id, false);
}

void KvCacheImpl::EndOp(int64_t id, bool ok) {
  const auto it = ops_.find(id);
  SLUICE_CHECK(it != ops_.end(), "copy {} is not on its way", id);
  const Op op = std::move(it->second);
  ops_.erase(it);
  something_happened_ = true;
  for (const Segment& s : op.segments) {
    s.node->*SlotOf(op.kind) = 0;
    HoldSegment(s, op.kind, -1);
  }
  if (!ok && op.kind == OpKind::kBackup) ++stats_.failed_backups;
  if (!ok && op.kind == OpKind::kLoad) ++stats_.failed_loads;

  std::vector<QueuedNode> nodes;  // reaping one may take others with it
  for (const Segment& s : op.segments) nodes.push_back({s.node, s.node->id});
  for (size_t i = op.segments.size(); i-- > 0;) {  // children before parents
    const Segment& s = op.segments[i];
    RadixNode* n = s.node;
    if (!nodes[i].alive()) continue;
    if (op.kind == OpKind::kBackup && options_.recorder != nullptr)
      options_.recorder->BackupCommit(n->id, id, ok, s.to - s.from);
    if (op.kind == OpKind::kBackup && ok) n->host_ready = s.to;
    if (op.kind == OpKind::kBackup && !ok && !n->dead) {
      // The host pages hold garbage and go; the device pages are as good as before. Somebody may be reading
      // earlier host pages of the node: its hold stays with them.
      if (n->held[1] > 0 && s.from > 0) SplitNode(n, s.from);
      SLUICE_CHECK(n->held[1] == 0 && n->tier_children[1] == 0,
                   "node {}: host pages without bytes are in use", n->id);
      EvictTail(n, Tier::kHost, s.to - s.from);
    }
    if (op.kind == OpKind::kLoad && !ok && !n->dead) {
      // The device pages hold garbage and sequences may be reading them: nobody else may, and their end frees
      // them.
      tree_.Kill(n, [this](Tier tier, int32_t slot) { FreeSlot(tier, slot); });
    }
    if (nodes[i].alive() && n->dead) Reap(n);
  }
  if (op.kind != OpKind::kBackup || !ok) return;
  for (const QueuedNode& q : nodes) {
    if (!q.alive() || q.node->dead) continue;
    QueueStore(q.node);
    if (options_.write_policy == WritePolicy::kWriteThrough) QueueBackup(q.node);  // it has grown meanwhile
  }
}

bool KvCacheImpl::Poll(Nanos now) {
  const bool storage = PollStorage(now);
  TopUpFreeRoom();
  const bool happened = something_happened_ || storage;
  something_happened_ = false;
  return happened;
}

}  // namespace sluice
