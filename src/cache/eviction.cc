// Room: exact deficits per lane, taken from the tails of what the policy gives up first.
#include <time.h>

#include <algorithm>

#include "base/plant.h"
#include "cache/kv_cache_impl.h"

namespace sluice {
namespace {

Nanos ThreadCpu() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return Nanos(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

// True when every lane has need[lane] free pages afterwards. Evicts exactly the deficits (a page of another
// lane goes only when it lies behind one that is needed). urgent: under write_back, pages without a copy are
// dropped rather than waited for.
bool KvCacheImpl::MakeRoom(Tier tier, const LaneCounts& need, bool urgent) {
  PagePool& p = pool(tier);
  LaneCounts deficit{};
  bool any = false, advice_missed = false;
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    const auto l = size_t(lane);
    deficit[l] = std::max<int64_t>(0, need[l] - p.free(lane));
    any |= deficit[l] > 0;
    advice_missed |= need[l] > 0 && p.free(lane) - need[l] < free_room_;
  }
  if (Planted(Plant::kLaneDeficitIgnored)) {
    int64_t wanted = 0;
    for (int32_t lane = 0; lane < lanes(); ++lane) wanted += need[size_t(lane)];
    any = any && wanted > p.free_total();
  }
  if (tier == Tier::kDevice && advice_missed && free_room_ > 0) ++stats_.free_room_misses;
  if (!any) return true;
  const Nanos began = ThreadCpu();  // not the wall's time: a thread that was put aside has planned nothing
  const bool room = Evict(tier, deficit, urgent);
  const Nanos took = ThreadCpu() - began;
  if (took > options_.slow_eviction) {
    ++stats_.slow_evictions;
    slow_warning_.Say("cache: planning an eviction took {} us, more than {} us", took / 1000,
                      options_.slow_eviction / 1000);
  }
  return room;
}

bool KvCacheImpl::Evict(Tier tier, LaneCounts deficit, bool urgent) {
  PagePool& p = pool(tier);
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    if (deficit[size_t(lane)] == 0 || tree_.evictable(tier, lane) >= deficit[size_t(lane)]) continue;
    ReportLaneDeficit(tier, lane, deficit);
    return false;
  }

  const bool write_first = tier == Tier::kDevice && options_.write_policy == WritePolicy::kWriteBack &&
                           has_host() && !urgent && !backup_blocked_;
  auto short_of = [&] {
    return std::any_of(deficit.begin(), deficit.end(), [](int64_t d) { return d > 0; });
  };
  auto take = [&](RadixNode* n) {  // the shortest tail that serves the deficits, all of it if they stay
    int32_t pages = 0;
    for (int32_t i = n->resident[int(tier)]; i > 0 && short_of(); --i, ++pages) {
      int64_t& d = deficit[size_t(p.lane(n->slots[int(tier)][i - 1]))];
      d = std::max<int64_t>(0, d - 1);
    }
    stats_.planning_page_visits += pages;
    return pages;
  };
  int64_t asked = 0;
  for (int32_t lane = 0; lane < lanes(); ++lane) asked += deficit[size_t(lane)];
  int64_t evicted = 0, written = 0;
  aside_.clear();
  size_t useless = 0;
  while (short_of()) {
    RadixNode* n = tree_.Victim(tier);
    if (n == nullptr) break;
    bool useful = lanes() == 1;
    for (int32_t lane = 0; lane < lanes() && !useful; ++lane) {
      useful = deficit[size_t(lane)] > 0 && n->lane_pages[int(tier)][size_t(lane)] > 0;
    }
    if (!useful) {  // nothing of a short lane in it; its parents may have some, so it comes back if the
                    // others do not do
      tree_.SetAside(n, tier);
      aside_.push_back(n);
      ++useless;
      continue;
    }
    if (write_first && n->host_ready < n->resident[0]) {
      QueueBackup(n);
      written += n->resident[0] - n->host_ready;
      tree_.SetAside(n, tier);
      aside_.push_back(n);
      continue;
    }
    const int32_t pages = take(n);
    SLUICE_CHECK(pages > 0);
    if (tier == Tier::kDevice && options_.write_policy == WritePolicy::kWriteBack) {
      stats_.dropped_unwritten +=
          std::max(0, n->resident[0] - std::max(n->host_ready, n->resident[0] - pages));
    }
    evicted += pages;
    EvictTail(n, tier, pages);
  }
  for (RadixNode* n : aside_) tree_.Offer(n, tier);
  if (short_of() && written == 0 && useless > 0) {
    // Leaves without a page of the short lanes hide parents that have some: take them from the order's top.
    while (short_of()) {
      RadixNode* n = tree_.Victim(tier);
      if (n == nullptr) break;
      const int32_t pages = take(n);
      evicted += pages;
      EvictTail(n, tier, pages);
    }
  }
  if (tier == Tier::kDevice) stats_.deficit_evictions += evicted;
  if (short_of()) {
    room_coming_ = room_coming_ || written > 0;
    if (written == 0 && tier == Tier::kDevice) {
      ++stats_.short_evictions;
      short_warning_.Say("cache: an eviction freed {} of {} device pages", evicted, asked);
    }
    return false;
  }
  return true;
}

// A shortage of all lanes is ordinary load, and so is a full host tier; one device lane that is short while
// others have room is worth a word.
void KvCacheImpl::ReportLaneDeficit(Tier tier, int32_t lane, const LaneCounts& deficit) {
  int64_t spare = 0, wanted = 0;
  for (int32_t l = 0; l < lanes(); ++l) {
    spare += pool(tier).free(l) + tree_.evictable(tier, l);
    wanted += deficit[size_t(l)];
  }
  if (tier != Tier::kDevice || lanes() == 1 || spare < wanted) return;
  ++stats_.lane_deficits;
  deficit_warning_.Say("cache: lane {} is {} device pages short, {} pages of all lanes could be free", lane,
                       deficit[size_t(lane)] - tree_.evictable(tier, lane), spare);
}

void KvCacheImpl::EvictTail(RadixNode* node, Tier tier, int32_t pages) {
  RadixNode* parent = node->parent;
  if (options_.recorder != nullptr) {
    const int32_t* end = node->slots[int(tier)] + node->resident[int(tier)];
    options_.recorder->Evict(node->id, tier == Tier::kDevice ? "l1" : "l2", std::span(end - pages, end));
  }
  (tier == Tier::kDevice ? stats_.evicted_pages_device : stats_.evicted_pages_host) += pages;
  if (!tree_.DropResident(node, tier, pages, [&](int32_t slot) { FreeSlot(tier, slot); })) Reap(parent);
}

// Between steps: keeps some device pages free, so that the next hit finds room without evicting. Only pages
// with a complete host copy go; under write_back the others get one first.
void KvCacheImpl::TopUpFreeRoom() {
  if (free_room_ == 0 || !has_host()) return;
  constexpr int kNodesPerPoll = 16;  // bounds the time of one call
  aside_.clear();
  for (int i = 0; i < kNodesPerPoll; ++i) {
    LaneCounts deficit{};
    bool any = false;
    for (int32_t lane = 0; lane < lanes(); ++lane) {
      deficit[size_t(lane)] = std::max<int64_t>(0, free_room_ - device_.free(lane));
      any |= deficit[size_t(lane)] > 0;
    }
    RadixNode* n = any ? tree_.Victim(Tier::kDevice) : nullptr;
    if (n == nullptr) break;
    int32_t pages = 0;
    for (int32_t j = n->resident[0]; j > 0; --j, ++pages) {
      if (std::all_of(deficit.begin(), deficit.end(), [](int64_t x) { return x == 0; })) break;
      int64_t& d = deficit[size_t(device_.lane(n->slots[0][j - 1]))];
      d = std::max<int64_t>(0, d - 1);
    }
    stats_.planning_page_visits += n->host_ready >= n->resident[0] ? pages : 0;
    const bool clean = n->host_ready >= n->resident[0];
    if (clean) {
      EvictTail(n, Tier::kDevice, pages);
      continue;
    }
    if (options_.write_policy == WritePolicy::kWriteBack && !backup_blocked_) QueueBackup(n);
    tree_.SetAside(n, Tier::kDevice);
    aside_.push_back(n);
  }
  for (RadixNode* n : aside_) tree_.Offer(n, Tier::kDevice);
}

int64_t KvCacheImpl::AvailablePages() const {
  auto& tree = const_cast<RadixTree&>(tree_);
  int64_t pages = 0;
  for (int32_t lane = 0; lane < lanes(); ++lane)
    pages += device_.free(lane) + tree.evictable(Tier::kDevice, lane);
  return pages;
}

bool KvCacheImpl::Flush() {
  if (active_ > 0) return false;
  while (!prefetches_.empty()) {
    bool left = false;
    for (auto& [id, r] : prefetches_) {
      if (!r.abandoned) {
        r.abandoned = left = true;
        StopPrefetch(id, r);
        break;  // the map may have changed
      }
    }
    if (!left) break;
  }
  for (RadixNode* root : tree_.Roots()) {
    tree_.Kill(root, [this](Tier tier, int32_t slot) { FreeSlot(tier, slot); });
  }
  backup_queue_.clear();
  store_queue_.clear();
  dropping_ = backup_blocked_ = false;
  return true;
}

bool KvCacheImpl::DropDevice() {
  if (active_ > 0) return false;
  if (!dropping_ && has_host()) {
    dropping_ = true;
    std::vector<RadixNode*> unsaved;
    tree_.ForEach([&](const RadixNode& n) {
      if (!n.is_root() && !n.dead && n.host_ready < n.resident[0])
        unsaved.push_back(const_cast<RadixNode*>(&n));
    });
    for (RadixNode* n : unsaved) QueueBackup(n);
  }
  for (const auto& [id, op] : ops_) {
    if (op.kind != OpKind::kStore) return false;
  }
  if (!backup_queue_.empty()) return false;
  dropping_ = false;
  while (RadixNode* n = tree_.Victim(Tier::kDevice)) EvictTail(n, Tier::kDevice, n->resident[0]);
  return true;
}

}  // namespace sluice
