// Begin, Grow, Commit, Release: the life of a sequence.
#include <algorithm>

#include "base/plant.h"
#include "cache/kv_cache_impl.h"
#include "kv/device_pool.h"

namespace sluice {
#ifdef SLUICE_PLANTS
namespace {
// The classic resume: the next turn starts where the last one ended, without asking whether that is still
// there.
struct KeptCursor {
  RadixNode* node = nullptr;
  std::string name_space;
  std::vector<int32_t> tokens;
} kept_cursor;
}  // namespace
#endif

std::string NamespaceKey(std::string_view salt, std::string_view adapter) {
  std::string key;
  auto add = [&](std::string_view tag, std::string_view value) {
    for (std::string_view part : {tag, value}) {
      for (int i = 0; i < 8; ++i) key.push_back(char(uint64_t(part.size()) >> (8 * i)));
      key.append(part);
    }
  };
  if (!salt.empty()) add("salt", salt);
  if (!adapter.empty()) add("adapter", adapter);
  return key;
}

std::unique_ptr<KvCache> MakeKvCache(const CacheOptions& options, const KvLayout& layout, HostPool* host,
                                     StorageBackend* storage) {
  return std::make_unique<KvCacheImpl>(options, layout, host, storage);
}

KvCacheImpl::KvCacheImpl(const CacheOptions& options, const KvLayout& layout, HostPool* host,
                         StorageBackend* storage)
    : options_(options),
      layout_(layout),
      host_pool_(host),
      storage_(storage),
      tree_({.page_tokens = int32_t(kPageTokens),
             .lanes = options.lanes,
             .policy = options.eviction,
             .fingerprint = layout.content_fingerprint()}),
      device_(options.lanes, options.pages_per_lane, 1),
      host_(options.lanes, options.host_pages_per_lane, 0),
      verify_random_(options.verify_seed) {
  SLUICE_CHECK(storage_ == nullptr || (host_pool_ != nullptr && has_host()), "storage needs a host tier");
#ifdef SLUICE_PLANTS
  kept_cursor = {};
#endif
  if (has_host()) {
    free_room_ = options_.free_room_pages >= 0 ? options_.free_room_pages : options_.pages_per_lane / 32;
  }
}

KvCacheImpl::~KvCacheImpl() = default;

void KvCacheImpl::FreeSlot(Tier tier, int32_t slot) {
  pool(tier).FreeCached(slot);
  if (tier == Tier::kDevice && options_.poison_on_free && options_.poison_pool != nullptr) {
    options_.poison_pool->Poison(PageId(slot));
  }
}

void KvCacheImpl::GiveBack(int32_t page) {
  if (last_submitted_ > last_retired_) {
    device_.Defer(page);
    deferred_.push_back({last_submitted_, page});
    return;
  }
  device_.FreeLeased(page);
  if (options_.poison_on_free && options_.poison_pool != nullptr) options_.poison_pool->Poison(PageId(page));
}

void KvCacheImpl::StepSubmitted(int64_t step) {
  SLUICE_CHECK(step > last_submitted_, "step {} after {}", step, last_submitted_);
  last_submitted_ = step;
}

void KvCacheImpl::StepRetired(int64_t step) {
  last_retired_ = std::max(last_retired_, step);
  while (!deferred_.empty() && deferred_.front().step <= last_retired_) {
    const int32_t page = deferred_.front().page;
    device_.Undefer(page);
    if (options_.poison_on_free && options_.poison_pool != nullptr)
      options_.poison_pool->Poison(PageId(page));
    deferred_.pop_front();
  }
}

void KvCacheImpl::Reap(RadixNode* node) {
  tree_.Reap(node, [this](Tier tier, int32_t slot) { FreeSlot(tier, slot); });
}

RadixNode* KvCacheImpl::SplitNode(RadixNode* node, int32_t pages) {
  RadixNode* up = tree_.Split(node, pages);
  SplitOp(&RadixNode::backup_op, up, node, pages);
  SplitOp(&RadixNode::load_op, up, node, pages);
  SplitOp(&RadixNode::store_op, up, node, pages);
  if (node->backup_queued) QueueBackup(up);
  return up;
}

void KvCacheImpl::SplitOp(int64_t RadixNode::*slot, RadixNode* up, RadixNode* low, int32_t pages) {
  const int64_t id = low->*slot;
  if (id == 0) return;
  Op& op = ops_.at(id);
  for (size_t i = 0; i < op.segments.size(); ++i) {
    if (op.segments[i].node != low) continue;
    const Segment s = op.segments[i];
    if (s.from >= pages) {
      op.segments[i] = {low, s.from - pages, s.to - pages};
      return;
    }
    const Segment upper{up, s.from, std::min(s.to, pages)};
    up->*slot = id;
    HoldSegment(upper, op.kind, +1);
    if (s.to > pages) {
      op.segments[i] = {low, 0, s.to - pages};
      op.segments.insert(op.segments.begin() + int64_t(i), upper);
    } else {
      op.segments[i] = upper;
      low->*slot = 0;
      HoldSegment({low, 0, 0}, op.kind, -1);
    }
    return;
  }
  SLUICE_CHECK(false, "op {} does not know node {}", id, low->id);
}

RadixNode* KvCacheImpl::NodeEndingAt(RadixNode* deepest, int64_t end) {
  RadixNode* n = deepest;
  while (!n->is_root() && n->start >= end) n = n->parent;
  if (n->is_root() || n->end() == end) return n;
  return SplitNode(n, int32_t(end - n->start));
}

KvCacheImpl::Hit KvCacheImpl::Measure(const RadixTree::Match& match) {
  Hit h{match, 0, match.pages};
  for (const RadixNode* n = match.node; !n->is_root(); n = n->parent) {
    if (n->resident[0] == 0) continue;
    const int32_t in = n == match.node ? match.in_node : n->pages;
    h.device = n->start + std::min(n->resident[0], in);
    break;
  }
  return h;
}

CachedTokens KvCacheImpl::Peek(std::string_view name_space, std::span<const int32_t> tokens) const {
  CachedTokens c;
  RadixNode* root = options_.enable_radix && !tokens.empty() ? tree_.FindRoot(name_space) : nullptr;
  if (root == nullptr) return c;
  const Hit h = Measure(tree_.Walk(root, Key(tokens.first(tokens.size() - 1))));
  c.device = int32_t(h.device * kPageTokens);
  c.host = int32_t((h.total - h.device) * kPageTokens);
  return c;
}

void KvCacheImpl::CountHit(RadixNode* node) {
  ++node->hits;
  if (options_.write_policy == WritePolicy::kWriteThroughSelective && node->hits == 2) QueueBackup(node);
}

BeginResult KvCacheImpl::Begin(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                               Nanos now) {
  SLUICE_CHECK(!seq->active && seq->pages.empty(), "Begin on a sequence that holds pages");
  SLUICE_CHECK(!tokens.empty());
  room_coming_ = false;
  seq->name_space = name_space;
  seq->cached = seq->computed = 0;
  seq->hit = {};
  seq->node = nullptr;
  seq->prefetch_put_off = false;
  if (!options_.enable_radix || seq->fresh) {
    seq->active = true;
    ++active_;
    fresh_active_ += seq->fresh ? 1 : 0;
    return BeginResult::kReady;
  }
  const std::span<const int32_t> may_hit = tokens.first(tokens.size() - 1);  // one token is always computed
  RadixNode* root = tree_.GetRoot(name_space);
  Hit hit = Measure(tree_.Walk(root, Key(may_hit)));
  if (storage_ != nullptr && seq->prefetch >= 0) {
    bool ask = seq->prefetch == 0, waits = false;
    if (seq->prefetch > 0) {
      std::optional<Arrival> early;
      waits = CheckPrefetch(seq, now, &early) == BeginResult::kWaitStorage;
      if (!waits) {
        root = tree_.GetRoot(name_space);  // inserting may have changed everything
        hit = Measure(tree_.Walk(root, Key(may_hit)));
        // An early prefetch found too little room, what it brought was evicted, or more may be stored by now.
        ask = early && (hit.total < early->stored_end || now - early->asked > options_.prefetch_stale);
      }
    }
    if (ask) {
      const bool again = seq->prefetch < 0;
      waits = StartPrefetch(seq, name_space, tokens, hit, now);
      stats_.prefetches_repeated += again && waits ? 1 : 0;
      if (!waits) seq->prefetch = -1;
    }
    if (waits) {
      Reap(root);
      return BeginResult::kWaitStorage;
    }
  }
#ifdef SLUICE_PLANTS
  if (Planted(Plant::kStaleCursor) && kept_cursor.node != nullptr && kept_cursor.name_space == name_space &&
      tokens.size() > kept_cursor.tokens.size() &&
      std::equal(kept_cursor.tokens.begin(), kept_cursor.tokens.end(), tokens.begin()))
    hit = Measure({kept_cursor.node, kept_cursor.node->pages, kept_cursor.node->end()});
#endif
  int64_t total = hit.total;
  if ((total - hit.device) * kPageTokens < options_.load_back_min_tokens) total = hit.device;
  RadixNode* end = NodeEndingAt(hit.match.node, total);
  if (total > hit.device) {
    const BeginResult r = PlanLoad(seq, end, hit.device, total);
    if (r == BeginResult::kNoRoom) {
      ++stats_.loads_waited;
      if (active_ > 0 || !ops_.empty() || !deferred_.empty() || !planned_loads_.empty()) {
        room_coming_ = room_coming_ || !deferred_.empty();
        Reap(root);
        return r;
      }
      // Nothing will ever make room for this load (its pages crowd one lane): compute instead.
      total = hit.device;
      end = NodeEndingAt(end, total);
    }
  }
  tree_.Lock(end);
  seq->node = end;
  seq->active = true;
  ++active_;
  seq->pages.resize(size_t(total));
  seq->hit.device = int32_t(hit.device * kPageTokens);
  int64_t from_storage = 0;
  tree_.TouchPath(end);
  for (RadixNode* n = end; !n->is_root(); n = n->parent) {
    for (int32_t i = 0; i < n->pages; ++i) seq->pages[size_t(n->start + i)] = PageId(n->slots[0][i]);
    if (n->end() > hit.device && n->from_storage > 0) {
      const auto skip = int32_t(std::max<int64_t>(0, hit.device - n->start));
      from_storage += std::max(0, n->from_storage - skip);
      n->from_storage = 0;  // from now on it is an ordinary host page
    }
    CountHit(n);
  }
  seq->hit.storage = int32_t(from_storage * kPageTokens);
  seq->hit.host = int32_t((total - hit.device - from_storage) * kPageTokens);
  seq->cached = seq->computed = total * kPageTokens;
  stats_.lookup_tokens += int64_t(tokens.size());
  stats_.hit_tokens_device += seq->hit.device;
  stats_.hit_tokens_host += seq->hit.host;
  stats_.hit_tokens_storage += seq->hit.storage;
  if (options_.recorder != nullptr) options_.recorder->Match(seq->label, tokens, seq->hit);
  if (options_.verify_share > 0 && total > 0) ChooseForVerification(*seq, tokens);
  return BeginResult::kReady;
}

// Device pages for host pages [device_pages, total_pages) of the path that ends with `end`, all or nothing.
BeginResult KvCacheImpl::PlanLoad(SequenceKv* seq, RadixNode* end, int64_t device_pages,
                                  int64_t total_pages) {
  std::vector<Segment> segments;
  LaneCounts need{};
  RadixNode* resident = end;  // the deepest node with device pages: eviction must not take it
  for (RadixNode* n = end; n->end() > device_pages; n = n->parent) {
    const auto from = int32_t(std::max<int64_t>(0, device_pages - n->start));
    SLUICE_CHECK(n->host_ready == n->pages && n->resident[0] == from, "node {} cannot be loaded from {}",
                 n->id, from);
    segments.push_back({n, from, n->pages});
    // A page is loaded to its host copy's lane.
    for (int32_t lane = 0; lane < lanes(); ++lane) need[size_t(lane)] += n->host_only[size_t(lane)];
    resident = from > 0 ? n : n->parent;
  }
  std::reverse(segments.begin(), segments.end());
  tree_.Hold(end, Tier::kHost);
  tree_.Hold(resident, Tier::kDevice);
  const bool room = MakeRoom(Tier::kDevice, need, false);
  tree_.Unhold(end, Tier::kHost);
  tree_.Unhold(resident, Tier::kDevice);
  if (!room) return BeginResult::kNoRoom;

  CopyPlan plan;
  plan.id = next_id_++;
  plan.direction = CopyDirection::kHostToDevice;
  plan.pages.reserve(size_t(total_pages - device_pages));
  std::vector<int32_t> slots;
  for (const Segment& s : segments) {
    slots.clear();
    for (int32_t i = s.from; i < s.to; ++i) {
      const int32_t host = s.node->slots[1][i];
      int32_t lane = host % lanes();
      if (Planted(Plant::kWrongLane) && device_.free((lane + 1) % lanes()) > 0) lane = (lane + 1) % lanes();
      const int32_t page = device_.Take(lane);
      device_.Cache(page);
      slots.push_back(page);
      plan.pages.push_back({PageId(page), HostPageId(host)});
    }
    tree_.AddResident(s.node, Tier::kDevice, slots);
    s.node->load_op = plan.id;
    HoldSegment(s, OpKind::kLoad, +1);
  }
  stats_.load_pages += int64_t(plan.pages.size());
  stats_.planning_page_visits += int64_t(plan.pages.size());
  if (options_.recorder != nullptr) {
    std::vector<int32_t> device, host;
    for (const PagePair& pair : plan.pages) {
      device.push_back(pair.device.value);
      host.push_back(pair.host.value);
    }
    options_.recorder->Load(seq->label, plan.id, device, host);
  }
  ops_[plan.id] = {OpKind::kLoad, std::move(segments)};
  planned_loads_.push_back(std::move(plan));
  return BeginResult::kReady;
}

int32_t KvCacheImpl::NextLane(const SequenceKv& seq) const {
  if (seq.pages.empty()) return int32_t(next_lane_ % lanes());
  return (seq.pages.back().value % lanes() + 1) % lanes();
}

// Lanes of the sequence's next `add` pages into lanes_: one after another, so that a sequence spreads over
// all of them. A lane that can give no more is passed over for the one with most room, so lanes that have
// drifted apart still serve.
void KvCacheImpl::ChooseLanes(const SequenceKv& seq, int64_t add, LaneCounts* need) {
  lanes_.resize(size_t(add));
  *need = {};
  const int32_t first = NextLane(seq);
  bool short_of = false;
  for (int64_t i = 0; i < add; ++i) {
    lanes_[size_t(i)] = int32_t((first + i) % lanes());
    short_of |= ++(*need)[size_t(lanes_[size_t(i)])] > device_.free(lanes_[size_t(i)]);
  }
  if (!short_of || lanes() == 1) return;
  LaneCounts room{};
  int64_t all = 0;
  for (int32_t lane = 0; lane < lanes(); ++lane)
    all += room[size_t(lane)] = device_.free(lane) + tree_.evictable(Tier::kDevice, lane);
  if (all < add) return;  // no choice of lanes serves
  *need = {};
  int32_t lane = first;
  for (int64_t i = 0; i < add; ++i) {
    if (room[size_t(lane)] == 0) {
      for (int32_t other = 0; other < lanes(); ++other)
        if (room[size_t(other)] > room[size_t(lane)]) lane = other;
      ++stats_.lanes_passed_over;
    }
    --room[size_t(lane)];
    ++(*need)[size_t(lane)];
    lanes_[size_t(i)] = lane;
    lane = (lane + 1) % lanes();
  }
}

bool KvCacheImpl::Grow(SequenceKv* seq, int64_t num_tokens) {
  SLUICE_CHECK(seq->active);
  room_coming_ = false;
  const int64_t add = CeilDiv(num_tokens, kPageTokens) - int64_t(seq->pages.size());
  if (add <= 0) return true;
  LaneCounts need;
  ChooseLanes(*seq, add, &need);
  if (!MakeRoom(Tier::kDevice, need, add <= 2)) {
    room_coming_ = room_coming_ || !deferred_.empty();
    return false;
  }
  if (seq->pages.empty()) ++next_lane_;
  for (const int32_t lane : lanes_) seq->pages.push_back(PageId(device_.Take(lane)));
  return true;
}

PageId KvCacheImpl::TakePage(SequenceKv* seq) {
  LaneCounts need;
  ChooseLanes(*seq, 1, &need);
  if (!MakeRoom(Tier::kDevice, need, true)) return PageId();
  return PageId(device_.Take(lanes_[0]));
}

void KvCacheImpl::Commit(SequenceKv* seq, std::span<const int32_t> tokens, int64_t computed,
                         int32_t priority) {
  SLUICE_CHECK(seq->active && computed >= seq->computed && computed <= int64_t(tokens.size()) &&
                   computed <= int64_t(seq->pages.size()) * kPageTokens,
               "computed {} after {}, {} tokens, {} pages", computed, seq->computed, tokens.size(),
               seq->pages.size());
  seq->computed = computed;
  const int64_t have = seq->cached / kPageTokens;
  int64_t full = computed / kPageTokens;
  if (Planted(Plant::kEarlyPublish))
    full = std::min(int64_t(tokens.size()) / kPageTokens, int64_t(seq->pages.size()));
  if (!options_.enable_radix || seq->fresh || full <= have) return;
  RadixNode* node = seq->node;
  SLUICE_CHECK(node->end() == have && node->lock > 0, "cursor at page {}, sequence at {}", node->end(), have);
  const RadixKey key = Key(tokens.first(size_t(full * kPageTokens)));
  int64_t swapped = 0;
  std::vector<int32_t> own;
  auto take_own = [&](int64_t from, int64_t to) -> std::span<const int32_t> {
    own.clear();
    for (int64_t i = from; i < to; ++i) {
      own.push_back(seq->pages[size_t(i)].value);
      device_.Cache(own.back());
    }
    return own;
  };
  for (int64_t at = have; at < full;) {
    int32_t common = 0;
    RadixNode* child = tree_.FindChild(node, key.From(at), &common);
    if (child == nullptr) {
      const bool mine = !node->is_root() && node->children == 0 && node->lock == (node == seq->node ? 1 : 0);
      if (mine && tree_.GrowsCheaply(*node, full - at)) {
        tree_.Extend(node, key.From(at));
      } else {
        node = tree_.AddChild(node, key.From(at));
        node->hits = 1;
      }
      tree_.AddResident(node, Tier::kDevice, take_own(at, full));
      at = full;
    } else {
      const int32_t on_device = std::min(common, child->resident[0]);
      swapped += on_device;
      for (int32_t i = 0; i < on_device; ++i) {  // the tree has it: same bytes, so ours goes
        PageId& mine = seq->pages[size_t(at + i)];
        GiveBack(mine.value);
        if (!Planted(Plant::kDuplicateAlias)) mine = PageId(child->slots[0][i]);
      }
      if (common > on_device) tree_.AddResident(child, Tier::kDevice, take_own(at + on_device, at + common));
      node = common < child->pages ? SplitNode(child, common) : child;
      at += common;
    }
    node->priority = std::max(node->priority, priority);
    if (options_.write_policy == WritePolicy::kWriteThrough ||
        (options_.write_policy == WritePolicy::kWriteThroughSelective && node->hits >= 2)) {
      QueueBackup(node);
    }
  }
  tree_.TouchPath(node);
  if (node != seq->node) {
    RadixNode* old = seq->node;
    tree_.Lock(node);
    tree_.Unlock(old);
    seq->node = node;
  }
  seq->cached = full * kPageTokens;
  if (options_.recorder != nullptr) {
    std::vector<int32_t> pages;
    for (int64_t i = have; i < full; ++i) pages.push_back(seq->pages[size_t(i)].value);
    options_.recorder->Insert(seq->label, node->id, tokens.first(size_t(full * kPageTokens)), have, pages,
                              swapped);
  }
}

void KvCacheImpl::Release(SequenceKv* seq, std::span<const int32_t> tokens, bool keep) {
  AbandonPrefetch(seq);
  if (!seq->active) return;
  if (keep) Commit(seq, tokens, seq->computed, 0);
  if (seq->fresh) {
    --fresh_active_;
    if (keep) CompareFresh(*seq, tokens);
  }
  for (size_t i = size_t(seq->cached / kPageTokens); i < seq->pages.size(); ++i)
    GiveBack(seq->pages[i].value);
  if (Planted(Plant::kDoubleFree) && int64_t(seq->pages.size()) * kPageTokens > seq->cached)
    GiveBack(seq->pages.back().value);
  seq->pages.clear();
#ifdef SLUICE_PLANTS
  if (Planted(Plant::kStaleCursor) && keep && seq->cached > 0)
    kept_cursor = {seq->node, seq->name_space, {tokens.begin(), tokens.begin() + seq->cached}};
#endif
  if (seq->node != nullptr) {
    RadixNode* node = seq->node;
    seq->node = nullptr;
    tree_.Unlock(node);
    Reap(node);
  }
  seq->active = false;
  seq->cached = seq->computed = 0;
  --active_;
}

bool KvCacheImpl::RoomComing() const { return room_coming_; }

}  // namespace sluice
