// The storage tier seen from the cache: pages go there after their backup, and come back as host pages before
// a prompt begins.
//
// A prefetch reserves host pages, owns them until storage has let go of them, and ends by its own deadline
// whoever still waits. Whatever storage does wrong is a miss from that page on.
#include <algorithm>
#include <utility>

#include "cache/kv_cache_impl.h"
#include "kv/host_pool.h"

namespace sluice {
namespace {
constexpr int64_t kExistsPages = 4096;  // asked in one batch
constexpr size_t kGetPages = 32;     // per batch: enough to fill a device queue, small enough to stop early
constexpr int kGetBatches = 8;       // in flight per prefetch
constexpr int64_t kStorePages = 64;  // per batch
constexpr int64_t kStorePagesInFlight = 512;
constexpr size_t kStoreQueueNodes = 4096;  // beyond: storage cannot keep up, pages stay unstored
constexpr size_t kCompletionsPerPoll = 64;
}  // namespace

StorageItem KvCacheImpl::ItemFor(const Digest256& key, int32_t host_page) const {
  StorageItem item;
  item.key = key;
  host_pool_->AppendSpans(HostPageId(host_page), &item.spans);
  return item;
}

void KvCacheImpl::QueueStore(RadixNode* node) {
  if (storage_ == nullptr || node->dead || node->stored >= node->host_ready) return;
  if (store_queue_.size() >= kStoreQueueNodes) {
    stats_.stores_skipped += node->host_ready - node->stored;
    return;
  }
  store_queue_.push_back({node, node->id});
}

void KvCacheImpl::PlanStores() {
  for (size_t n = store_queue_.size(); n > 0 && store_in_flight_ < kStorePagesInFlight; --n) {
    const QueuedNode q = store_queue_.front();
    store_queue_.pop_front();
    RadixNode* node = q.node;
    if (!q.alive() || node->dead || node->stored >= node->host_ready) continue;
    if (node->store_op != 0) {
      store_queue_.push_back(q);
      continue;
    }
    const int32_t from = node->stored;
    const auto to = int32_t(std::min<int64_t>(node->host_ready, from + kStorePages));
    StorageBatch batch;
    batch.op = StorageOp::kPut;
    for (int32_t i = from; i < to; ++i)
      batch.items.push_back(ItemFor(tree_.Digest(node, i), node->slots[1][i]));
    const StatusOr<StorageTicket> ticket = storage_->Submit(std::move(batch));
    if (!ticket.ok()) {  // busy: this page set may come again with its next hit, serving does not wait
      ++stats_.storage_errors;
      stats_.stores_skipped += to - from;
      continue;
    }
    const int64_t id = next_id_++;
    node->store_op = id;
    node->stored = to;
    Op& op = ops_[id];
    op.kind = OpKind::kStore;
    op.segments.push_back({node, from, to});
    HoldSegment(op.segments.back(), OpKind::kStore, +1);
    tickets_[*ticket] = {Ticket::Kind::kStore, id, 0, size_t(to - from)};
    store_in_flight_ += to - from;
    if (node->stored < node->host_ready) store_queue_.push_back(q);
  }
}

bool KvCacheImpl::PollStorage(Nanos now) {
  if (storage_ == nullptr) return false;
  bool happened = false;
  completions_.clear();
  storage_->Poll(&completions_, kCompletionsPerPoll);
  for (const StorageCompletion& c : completions_) {
    const auto it = tickets_.find(c.ticket);
    SLUICE_CHECK(it != tickets_.end(), "storage completed ticket {} which is not in flight", c.ticket);
    const Ticket t = it->second;
    tickets_.erase(it);
    happened = true;
    for (StorageOutcome o : c.outcomes) CountFailure(o);
    if (t.kind == Ticket::Kind::kDelete) continue;
    if (t.kind == Ticket::Kind::kStore) {
      store_in_flight_ -= int64_t(t.count);
      const int64_t ok = std::count(c.outcomes.begin(), c.outcomes.end(), StorageOutcome::kOk);
      stats_.storage_write_bytes += ok * layout_.page_bytes();
      EndOp(t.owner, true);
      continue;
    }
    PrefetchRecord& r = prefetches_.at(t.owner);
    --r.in_flight;
    if (t.kind == Ticket::Kind::kExists) {
      OnExists(t.owner, r, c.outcomes);
    } else {
      for (size_t i = 0; i < t.count; ++i) {
        const bool ok = i < c.outcomes.size() && c.outcomes[i] == StorageOutcome::kOk;
        r.got[t.first + i] = ok ? 1 : 2;
        if (ok) stats_.storage_read_bytes += layout_.page_bytes();
      }
      const bool lost =
          std::find(r.got.begin() + int64_t(t.first), r.got.begin() + int64_t(t.first + t.count), 2) !=
          r.got.begin() + int64_t(t.first + t.count);
      if (lost) r.next_get = r.pages.size();  // nothing behind a lost page can be used
      PumpGets(t.owner, r);
    }
    EndPrefetchIfDrained(t.owner);
  }
  std::vector<int64_t> late, drained;
  for (auto& [id, r] : prefetches_) {
    // Whoever waits for it asks again, also when storage says nothing.
    if (now >= r.deadline && !std::exchange(r.told_late, true)) happened = true;
    if (!r.stopped && now >= r.hard_deadline) late.push_back(id);
    if (!r.stopped && r.in_flight == 0) drained.push_back(id);
  }
  std::sort(drained.begin(), drained.end());
  for (int64_t id : drained) EndPrefetchIfDrained(id);
  std::sort(late.begin(), late.end());
  for (int64_t id : late) {
    if (!prefetches_.contains(id)) continue;
    ++stats_.prefetch_timeouts;
    StopPrefetch(id, prefetches_.at(id));
    EndPrefetchIfDrained(id);
    happened = true;
  }
  PlanStores();
  return happened;
}

void KvCacheImpl::CountFailure(StorageOutcome outcome) {
  switch (outcome) {
    case StorageOutcome::kError:
    case StorageOutcome::kTimeout:
      ++stats_.storage_errors;
      storage_error_warning_.Say("cache: storage {} does not answer as it should; its pages are computed",
                                 storage_->Describe());
      break;
    case StorageOutcome::kCorrupt:
      ++stats_.storage_errors;
      storage_corrupt_warning_.Say("cache: storage {} holds a damaged object; its page is computed",
                                   storage_->Describe());
      break;
    case StorageOutcome::kFull:
      ++stats_.stores_skipped;
      storage_full_warning_.Say("cache: storage {} is full; pages are not stored", storage_->Describe());
      break;
    default:
      break;
  }
}

void KvCacheImpl::Prefetch(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                           Nanos now) {
  if (storage_ == nullptr || !options_.enable_radix || seq->prefetch != 0 || seq->active || tokens.empty())
    return;
  const bool put_off = reserved_host_ + awaited_host_ >= MaxReserved();
  if (put_off && !seq->prefetch_put_off) ++stats_.prefetches_put_off;
  seq->prefetch_put_off = put_off;
  if (put_off) return;
  RadixNode* root = tree_.GetRoot(name_space);
  const Hit hit = Measure(tree_.Walk(root, Key(tokens.first(tokens.size() - 1))));
  // What is too short now may be longer when the sequence begins: the upper tiers go on evicting.
  if (StartPrefetch(seq, name_space, tokens, hit, now)) prefetches_.at(seq->prefetch).early = true;
  Reap(root);
}

bool KvCacheImpl::StartPrefetch(SequenceKv* seq, std::string_view name_space, std::span<const int32_t> tokens,
                                const Hit& hit, Nanos now) {
  const int64_t may_hit = (int64_t(tokens.size()) - 1) / kPageTokens,
                want = std::min(may_hit - hit.total, kExistsPages);
  if (want * kPageTokens < std::max(options_.prefetch_min_tokens, kPageTokens)) return false;
  PrefetchRecord r;
  r.name_space = name_space;
  r.tokens.assign(tokens.begin(), tokens.begin() + (hit.total + want) * kPageTokens);
  r.start = hit.total;
  RadixNode* node = hit.match.node;
  Digest256 digest =
      hit.total == 0 ? tree_.GetRoot(name_space)->root_digest : tree_.Digest(node, hit.match.in_node - 1);
  StorageBatch batch;
  batch.op = StorageOp::kExists;
  for (int64_t i = 0; i < want; ++i) {
    digest = PageDigest(
        digest, std::span(r.tokens).subspan(size_t((r.start + i) * kPageTokens), size_t(kPageTokens)));
    r.keys.push_back(digest);
    batch.items.push_back({digest, {}});
  }
  const Nanos by_size = options_.prefetch_timeout_per_ki * (want * kPageTokens) / 1024;
  r.begun = now;
  r.hard_deadline = now + options_.prefetch_timeout_max;
  switch (options_.prefetch) {
    case PrefetchPolicy::kBestEffort:
      r.deadline = now + options_.best_effort_base + want * options_.best_effort_per_page;
      break;
    case PrefetchPolicy::kTimeout:
      r.deadline = now + options_.prefetch_timeout_base + by_size;
      break;
    case PrefetchPolicy::kWaitComplete:
      r.deadline = r.hard_deadline;
      break;
  }
  r.deadline = std::min(r.deadline, r.hard_deadline);
  batch.deadline = r.deadline;
  const StatusOr<StorageTicket> ticket = storage_->Submit(std::move(batch));
  if (!ticket.ok()) {
    ++stats_.storage_errors;
    return false;
  }
  // What comes back hangs below the matched path, which must then be complete on the host.
  for (RadixNode* n = node; !n->is_root(); n = n->parent) QueueBackup(n);
  r.in_flight = 1;
  const int64_t id = next_id_++;
  tickets_[*ticket] = {Ticket::Kind::kExists, id, 0, size_t(want)};
  prefetches_[id] = std::move(r);
  ++stats_.prefetches;
  if (options_.recorder != nullptr) options_.recorder->Prefetch(seq->label, tokens, hit.total, want);
  seq->prefetch = id;
  return true;
}

void KvCacheImpl::OnExists(int64_t id, PrefetchRecord& r, const std::vector<StorageOutcome>& outcomes) {
  r.asked = true;
  if (r.stopped) return;
  size_t n = 0;
  while (n < outcomes.size() && n < r.keys.size() && outcomes[n] == StorageOutcome::kOk) ++n;
  r.stored = int64_t(n);
  int64_t taken = reserved_host_ + awaited_host_;
  if (!r.early) {  // its sequence's turn has come: what those behind it hold does not count
    taken = 0;
    for (const auto& [other, o] : prefetches_) taken += o.early ? 0 : int64_t(o.pages.size());
  }
  n = std::min(n, size_t(std::max<int64_t>(0, MaxReserved() - taken)));
  // The longest prefix whose pages find room, lane by lane.
  const RadixNode* root = tree_.FindRoot(r.name_space);
  int32_t lane = int32_t(next_lane_++ % lanes());
  if (root != nullptr && r.start > 0) {
    const auto m = tree_.Walk(const_cast<RadixNode*>(root), Key(r.tokens).Slice(0, r.start));
    if (m.pages == r.start) {  // goes on where the path's lanes end
      const RadixNode* last = m.node;
      const int t = last->resident[0] >= m.in_node ? 0 : 1;
      lane = (last->slots[t][m.in_node - 1] % lanes() + 1) % lanes();
    }
  }
  LaneCounts need{};
  for (size_t i = 0; i < n; ++i) ++need[size_t((lane + int64_t(i)) % lanes())];
  while (n > 0 && !MakeRoom(Tier::kHost, need, true)) {
    const size_t fewer = n / 2;
    for (size_t i = fewer; i < n; ++i) --need[size_t((lane + int64_t(i)) % lanes())];
    n = fewer;
  }
  for (size_t i = 0; i < n; ++i) r.pages.push_back(host_.Take(int32_t((lane + int64_t(i)) % lanes())));
  r.got.assign(n, 0);
  reserved_host_ += int64_t(n);
  PumpGets(id, r);
}

void KvCacheImpl::PumpGets(int64_t id, PrefetchRecord& r) {
  while (!r.stopped && r.next_get < r.pages.size() && r.in_flight < kGetBatches) {
    StorageBatch batch;
    batch.op = StorageOp::kGet;
    batch.deadline = r.deadline;
    const size_t first = r.next_get, count = std::min(kGetPages, r.pages.size() - first);
    for (size_t i = first; i < first + count; ++i) batch.items.push_back(ItemFor(r.keys[i], r.pages[i]));
    const StatusOr<StorageTicket> ticket = storage_->Submit(std::move(batch));
    if (!ticket.ok()) {
      if (r.in_flight > 0) return;  // its completion tries again
      ++stats_.storage_errors;
      r.next_get = r.pages.size();
      return;
    }
    tickets_[*ticket] = {Ticket::Kind::kGet, id, first, count};
    ++r.in_flight;
    r.next_get = first + count;
  }
}

void KvCacheImpl::StopPrefetch(int64_t id, PrefetchRecord& r) {
  if (r.stopped) return;
  r.stopped = true;
  for (const auto& [ticket, t] : tickets_) {
    const bool read = t.kind == Ticket::Kind::kExists || t.kind == Ticket::Kind::kGet;
    if (read && t.owner == id) storage_->Cancel(ticket);
  }
  if (!r.abandoned) InsertPrefetched(r);
}

// Whether the fetched pages could hang below their path now. False while the path's own backup is on its way.
bool KvCacheImpl::PathOnHost(const PrefetchRecord& r) const {
  if (r.start == 0 || r.pages.empty()) return true;
  RadixNode* root = tree_.FindRoot(r.name_space);
  if (root == nullptr) return true;  // lost: nothing to wait for
  const RadixTree::Match m = tree_.Walk(root, Key(r.tokens).Slice(0, r.start));
  if (m.pages < r.start) return true;
  for (const RadixNode* n = m.node; !n->is_root(); n = n->parent) {
    const int32_t pages = n == m.node ? m.in_node : n->pages;
    if (n->host_ready < pages) return n->backup_op == 0 && !n->backup_queued;
  }
  return true;
}

// What is over by itself or has been stopped, once storage holds none of its pages any more.
void KvCacheImpl::EndPrefetchIfDrained(int64_t id) {
  const auto it = prefetches_.find(id);
  if (it == prefetches_.end() || it->second.in_flight > 0) return;
  PrefetchRecord& r = it->second;
  if (!r.stopped) {
    if (!r.asked || r.next_get < r.pages.size() || !PathOnHost(r)) return;
    r.stopped = true;
    const int64_t brought = r.abandoned ? 0 : InsertPrefetched(r);
    if (r.early && !r.abandoned) {
      const auto lost = std::find(r.got.begin(), r.got.end(), 2) - r.got.begin();
      if (lost < int64_t(r.got.size())) r.stored = lost;
      arrivals_[id] = {brought, r.start + r.stored, r.begun};
      awaited_host_ += brought;
    }
  }
  for (int32_t page : r.pages) {
    if (page >= 0) host_.FreeLeased(page);
  }
  reserved_host_ -= int64_t(r.pages.size());
  prefetches_.erase(it);
}

// The complete head of what was fetched becomes host-only pages of the tree. Returns their number.
int64_t KvCacheImpl::InsertPrefetched(PrefetchRecord& r) {
  int64_t have = 0;
  while (have < int64_t(r.got.size()) && r.got[size_t(have)] == 1) ++have;
  if (have == 0) return 0;
  RadixNode* root = tree_.GetRoot(r.name_space);
  const RadixKey key = Key(r.tokens).Slice(0, r.start + have);
  const RadixTree::Match m = tree_.Walk(root, key);
  // Others may have computed some of it meanwhile, or the path may be gone or (yet) without a host copy: then
  // it cannot hang here.
  if (m.pages < r.start || m.pages >= r.start + have) return Reap(root), 0;
  RadixNode* parent = NodeEndingAt(m.node, m.pages);
  if (!parent->is_root() && (parent->host_ready < parent->pages || parent->resident[1] < parent->pages))
    return Reap(root), 0;
  RadixNode* node = tree_.AddChild(parent, key.From(m.pages));
  std::vector<int32_t> slots;
  for (int64_t i = m.pages - r.start; i < have; ++i) {
    slots.push_back(r.pages[size_t(i)]);
    host_.Cache(slots.back());
    r.pages[size_t(i)] = -1;
  }
  tree_.AddResident(node, Tier::kHost, slots);
  node->host_ready = node->stored = node->from_storage = node->pages;
  node->hits = 1;
  tree_.TouchPath(node);
  stats_.prefetch_pages += node->pages;
  return node->pages;
}

std::optional<KvCacheImpl::Arrival> KvCacheImpl::TakeArrival(int64_t prefetch) {
  const auto it = arrivals_.find(prefetch);
  if (it == arrivals_.end()) return std::nullopt;
  const Arrival a = it->second;
  arrivals_.erase(it);
  awaited_host_ -= a.pages;
  return a;
}

// *arrival: of an early prefetch that is over.
BeginResult KvCacheImpl::CheckPrefetch(SequenceKv* seq, Nanos now, std::optional<Arrival>* arrival) {
  const auto it = prefetches_.find(seq->prefetch);
  if (it == prefetches_.end()) {
    *arrival = TakeArrival(seq->prefetch);
    seq->prefetch = -1;
    return BeginResult::kReady;
  }
  if (!it->second.stopped && now < it->second.deadline) return BeginResult::kWaitStorage;
  const int64_t id = seq->prefetch;
  seq->prefetch = -1;
  if (!it->second.stopped) {
    ++stats_.prefetch_timeouts;
    StopPrefetch(id, it->second);
    EndPrefetchIfDrained(id);
  }
  return BeginResult::kReady;
}

void KvCacheImpl::AbandonPrefetch(SequenceKv* seq) {
  const auto it = seq->prefetch > 0 ? prefetches_.find(seq->prefetch) : prefetches_.end();
  if (seq->prefetch > 0) TakeArrival(std::exchange(seq->prefetch, 0));
  if (it == prefetches_.end()) return;
  const int64_t id = it->first;
  it->second.abandoned = true;
  StopPrefetch(id, it->second);
  EndPrefetchIfDrained(id);
}

bool KvCacheImpl::SetStorage(StorageBackend* storage, std::optional<PrefetchPolicy> policy) {
  SLUICE_CHECK(storage == nullptr || (host_pool_ != nullptr && has_host()), "storage needs a host tier");
  if (active_ > 0) return false;
  store_queue_.clear();
  if (!tickets_.empty() || !prefetches_.empty()) return false;
  storage_ = storage;
  if (policy) options_.prefetch = *policy;
  std::vector<RadixNode*> nodes;
  tree_.ForEach([&](const RadixNode& n) { nodes.push_back(const_cast<RadixNode*>(&n)); });
  for (RadixNode* n : nodes) {
    n->stored = 0;
    if (!n->is_root()) QueueStore(n);
  }
  return true;
}

Status KvCacheImpl::ClearStorage() {
  if (storage_ == nullptr) return Unsupported("there is no storage tier to clear");
  return storage_->Clear();
}

}  // namespace sluice
