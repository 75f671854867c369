// The cache with its host and storage tiers, driven as a scheduler and an executor would, at their worst:
// batches run late, copies are made anywhere between their plan and their acknowledgement, fail, and are
// acknowledged in any order; storage is slow, fails and lies; processes come and go over one storage with
// other topologies, layouts and models.
//
// Beside it a model that is too simple to be wrong: a set of the prefixes that were ever final, and which of
// them storage may still have. Rows are fingerprints (fingerprint.h), so whatever the model misses shows in
// what a batch reads.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>

#include "base/check.h"
#include "base/random.h"
#include "cache/kv_cache.h"
#include "kv/page_copy.h"
#include "sim/fingerprint.h"
#include "sim/report.h"
#include "storage/simulated_storage.h"

namespace sluice::sim {
namespace {

using Tokens = std::vector<int32_t>;

struct Running {
  int64_t id = 0;
  SequenceKv kv;
  Tokens tokens;
  std::string ns;
  std::vector<uint64_t> chain;  // per position
  int64_t planned = 0;          // rows in submitted batches, or final
  bool begun = false;
};

struct Rows {
  int64_t seq = 0;
  std::vector<PageId> pages;
  std::vector<uint64_t> chain;  // of [0, start + count)
  Tokens tokens;
  int64_t start = 0, count = 0;
};

struct Batch {
  int64_t step = 0;
  std::vector<CopyPlan> loads, backups;
  std::vector<Rows> rows;
};

// A copy that was made or will be made before its acknowledgement.
struct Ack {
  CopyPlan plan;
  bool made = false, ok = true;
};

class TiersWorld {
 public:
  TiersWorld(uint64_t seed, bool trace) : journal_(trace), random_(seed), seed_(seed) {
    use_storage_ = random_.Chance(0.6);
    use_host_ = use_storage_ || random_.Chance(0.7);
    copy_failures_ = random_.Chance(0.3) ? 0.03 : 0;
    depth_ = int(random_.Below(3));
    if (use_storage_) {
      medium_.capacity_objects = random_.Chance(0.3) ? 10 + random_.Below(30) : 0;
      if (random_.Chance(0.7)) faults_ = RandomFaults();
    }
    StartProcess();
  }

  SeedReport Run() {
    const int64_t operations = 80 + int64_t(random_.Below(320));
    for (int64_t i = 0; i < operations && !journal_.failed(); ++i) {
      Operation();
      Check(i % 4 == 0);
      journal_.CountEvent();
    }
    if (!journal_.failed()) WindDown();
    return std::move(journal_.report());
  }

 private:
  StorageFaults RandomFaults() {
    StorageFaults f;
    const auto sometimes = [&](double p) { return random_.Chance(0.4) ? p : 0.0; };
    f.slow = sometimes(0.1);
    f.hang = sometimes(0.03);
    f.hang_hold = 3'000'000'000;
    f.refuse = sometimes(0.1);
    f.error = sometimes(0.08);
    f.full = sometimes(0.05);
    f.lose = sometimes(0.08);
    f.flip = sometimes(0.05);
    f.truncate = sometimes(0.05);
    f.swap = sometimes(0.05);
    f.vanish = sometimes(0.05);
    return f;
  }

  // A process with the topology, layout and model of its own; only the storage medium outlives it.
  void StartProcess() {
    lanes_ = 1 + int32_t(random_.Below(3));
    const int64_t pages = 8 + int64_t(random_.Below(20));
    const DType latent = random_.Chance(0.5) ? DType::kBF16 : DType::kF8E4M3;
    const DType index = random_.Chance(0.5) ? DType::kBF16 : DType::kF8E4M3;
    identity_ = random_.Below(2);
    layout_ = std::make_unique<KvLayout>(SimLayout(latent, index, random_.Chance(0.3), identity_));
    model_ = Mix(identity_ + 1, (uint64_t(latent) << 8 | uint64_t(index)) + layout_->pieces().size() * 65536);
    device_ = DevicePool::Make(*layout_, lanes_, pages / lanes_ + 1).value();
    rows_ = std::make_unique<FingerprintRows>(device_.get());
    const int64_t host_pages = use_host_ ? 3 + int64_t(random_.Below(60)) : 0;
    if (use_host_)
      host_ =
          HostPool::Make(*layout_, HostLayout(random_.Below(4)), lanes_, CeilDiv(host_pages, lanes_)).value();
    if (use_storage_) {
      StorageFormat format;
      format.content_fingerprint = layout_->content_fingerprint();
      for (const KvPiece& p : layout_->pieces()) format.piece_bytes.push_back(uint32_t(p.bytes));
      storage_ = std::make_unique<SimulatedStorage>(format, &medium_, &clock_, random_.Next(), faults_);
    }
    CacheOptions o;
    o.lanes = lanes_;
    o.pages_per_lane = pages / lanes_;
    o.host_pages_per_lane = use_host_ ? CeilDiv(host_pages, lanes_) : 0;
    o.eviction = EvictionPolicy(random_.Below(5));
    o.write_policy = WritePolicy(random_.Below(3));
    o.prefetch = PrefetchPolicy(random_.Below(3));
    o.prefetch_min_tokens = 64;
    o.free_room_pages = random_.Chance(0.5) ? int64_t(random_.Below(3)) : 0;
    o.poison_on_free = true;
    o.poison_pool = device_.get();
    cache_ = MakeKvCache(o, *layout_, host_.get(), storage_.get());
    for (auto& [chain, known] : known_) known.local = false;
    journal_.Trace(clock_.Now(), "process: {} lanes, {} + {} pages, model {}, policies {} {} {}", lanes_,
                   pages, host_pages, model_, int(o.eviction), int(o.write_policy), int(o.prefetch));
  }

  void KillProcess() {
    CountCoverage();
    cache_.reset();
    storage_.reset();
    host_.reset();
    running_.clear();
    batches_.clear();
    next_ = {};
    acks_.clear();
    remembered_.clear();
    step_ = 0;
    StartProcess();
    journal_.Cover("restarts");
  }

  void Operation() {
    switch (random_.Below(12)) {
      case 0:
      case 1:
        Arrive();
        break;
      case 2:
      case 3:
      case 4:
        Plan();
        break;
      case 5:
      case 6:
      case 7:
        Retire();
        break;
      case 8:
        if (!running_.empty() && random_.Chance(0.6))
          Drop(random_.Below(running_.size()), random_.Chance(0.7));
        break;
      case 9:
        clock_.Advance(Nanos(random_.Below(random_.Chance(0.1) ? 3'000'000'000 : 20'000'000)));
        Poll();
        break;
      case 10:
        Acknowledge(false);
        break;
      default:
        Rare();
    }
  }

  void Rare() {
    if (random_.Chance(0.25)) {
      const bool active =
          std::any_of(running_.begin(), running_.end(), [](const auto& r) { return r->kv.active; });
      if (cache_->Flush() != !active)
        journal_.Violation("flush with{} active sequence", active ? " an" : "out an");
      if (!active) {
        for (auto& [chain, known] : known_) known.local = false;
        journal_.Cover("flushes");
        // Flushed and cleared: what was stored before must not come back.
        if (use_storage_ && random_.Chance(0.7)) ClearStorage();
      }
    } else if (random_.Chance(0.3)) {
      journal_.Cover("drops_of_the_device_tier", cache_->DropDevice());
    } else if (use_storage_ && random_.Chance(0.15)) {
      ClearStorage();
    } else if (random_.Chance(0.08)) {
      KillProcess();
    }
  }

  void ClearStorage() {
    (void)storage_->Clear();
    journal_.Trace(clock_.Now(), "storage cleared");
    journal_.Cover("storage_clears");
    // What is in a tier here may be stored again at any time, and so may what is on its way.
    if (storage_->Stats().in_flight != 0 || Busy()) return;
    // A prefetch may have brought pages to the host tier that no sequence has used yet; clearing the storage
    // leaves them.
    for (auto& [ns, tokens] : corpus_) {
      for (const uint64_t h : ResidentPages(ns, tokens, true))
        if (const auto it = known_.find(h); it != known_.end() && it->second.stored) it->second.local = true;
    }
    for (auto& [chain, known] : known_)
      if (!known.local) known.stored = false;
  }

  void Arrive() {
    if (running_.size() >= 6) return;
    auto s = std::make_unique<Running>();
    s->id = next_id_++;
    s->ns = random_.Chance(0.8) ? "a" : "b";
    if (!corpus_.empty() && random_.Chance(0.5)) {  // goes on from an earlier one, perhaps of another process
      const auto& [ns, tokens] = corpus_[random_.Below(corpus_.size())];
      s->ns = ns;
      s->tokens.assign(tokens.begin(), tokens.begin() + long(random_.Below(tokens.size() + 1)));
    }
    // A walk over a small graph of 32-token words; words differ at their start or only at their end.
    int32_t state = 0;
    for (uint64_t words = random_.Below(s->tokens.empty() ? 16 : 6) + (s->tokens.empty() ? 1 : 0); words > 0;
         --words) {
      state = state * 3 + int32_t(random_.Below(random_.Chance(0.25) ? 3 : 1));
      for (int i = 0; i < 32; ++i) s->tokens.push_back(state % 97 % 2 != 0 && i < 31 ? i : state % 97 + i);
    }
    for (uint64_t tail = random_.Below(32); tail > 0; --tail) s->tokens.push_back(int32_t(tail));
    if (s->tokens.empty()) s->tokens.push_back(1);
    Extend(s.get());
    if (random_.Chance(0.3)) cache_->Prefetch(&s->kv, s->ns, s->tokens, clock_.Now());
    journal_.Trace(clock_.Now(), "sequence {} arrives: {} tokens in {}", s->id, s->tokens.size(), s->ns);
    running_.push_back(std::move(s));
  }

  void Extend(Running* s) {
    uint64_t h = s->chain.empty() ? Mix(NamespaceRoot(s->ns), model_) : s->chain.back();
    for (size_t i = s->chain.size(); i < s->tokens.size(); ++i)
      s->chain.push_back(h = NextInChain(h, s->tokens[i]));
  }

  void Know(const Running& s) {
    for (int64_t p = 1; p <= s.kv.cached / kPageTokens; ++p)
      known_[s.chain[size_t(p * kPageTokens - 1)]] = {true, true};
    if (s.kv.cached > 0) Remember(s);
  }
  void Remember(const Running& s) {
    AddMaximal(&remembered_, s);
    AddMaximal(&corpus_, s);
  }
  static void AddMaximal(std::vector<std::pair<std::string, Tokens>>* list, const Running& s) {
    Tokens t(s.tokens.begin(), s.tokens.begin() + s.kv.cached);
    for (auto& [ns, old] : *list) {
      if (ns != s.ns) continue;
      if (old.size() >= t.size() && std::equal(t.begin(), t.end(), old.begin())) return;
      if (old.size() < t.size() && std::equal(old.begin(), old.end(), t.begin())) {
        old = std::move(t);
        return;
      }
    }
    list->emplace_back(s.ns, std::move(t));
  }

  bool TryBegin(Running* s) {
    const BeginResult r = cache_->Begin(&s->kv, s->ns, s->tokens, clock_.Now());
    if (r != BeginResult::kReady) {
      if (s->kv.active || !s->kv.pages.empty())
        journal_.Violation("Begin without success holds {} pages", s->kv.pages.size());
      journal_.Cover(r == BeginResult::kNoRoom ? "begin_no_room" : "begin_waits_for_storage");
      return false;
    }
    const int64_t hit = s->kv.hit.total();
    if (hit >= int64_t(s->tokens.size()) || hit % kPageTokens != 0 || hit != s->kv.computed ||
        int64_t(s->kv.pages.size()) != hit / kPageTokens)
      journal_.Violation("a hit of {} tokens of {}, {} computed, {} pages", hit, s->tokens.size(),
                         s->kv.computed, s->kv.pages.size());
    for (int64_t p = 0; p < hit / kPageTokens && !journal_.failed(); ++p) {
      const auto it = known_.find(s->chain[size_t((p + 1) * kPageTokens - 1)]);
      const bool from_storage = p * kPageTokens >= s->kv.hit.device + s->kv.hit.host;
      if (it == known_.end() || (!it->second.local && !it->second.stored))
        journal_.Violation("sequence {} hits page {} which nothing can have", s->id, p);
      else if (from_storage && !it->second.stored)
        journal_.Violation("sequence {} hits page {} in storage, which was cleared", s->id, p);
    }
    journal_.Trace(clock_.Now(), "sequence {} begins: hit {} + {} + {}", s->id, s->kv.hit.device,
                   s->kv.hit.host, s->kv.hit.storage);
    journal_.Cover("hit_tokens_device", s->kv.hit.device);
    journal_.Cover("hit_tokens_host", s->kv.hit.host);
    journal_.Cover("hit_tokens_storage", s->kv.hit.storage);
    s->begun = true;
    s->planned = s->kv.computed;
    Know(*s);
    return true;
  }

  void Plan() {
    if (random_.Chance(0.8)) {
      clock_.Advance(Nanos(random_.Below(3'000'000)));
      Poll();
    }
    while (int(batches_.size()) > depth_) Retire();
    for (auto& s : running_) {
      if (s->kv.prefetch_put_off) cache_->Prefetch(&s->kv, s->ns, s->tokens, clock_.Now());
      if (!s->begun && (!random_.Chance(0.6) || !TryBegin(s.get()))) continue;
      auto upto = int64_t(s->tokens.size());
      if (s->planned >= upto) {  // decode
        if (upto > 700 || random_.Chance(0.3)) continue;
        s->tokens.push_back(int32_t(random_.Below(3)));
        Extend(s.get());
        ++upto;
      }
      const int64_t to = std::min(upto, s->planned + 1 + int64_t(random_.Below(150)));
      const int64_t leased = cache_->Stats().device.leased;
      if (!cache_->Grow(&s->kv, to)) {
        if (cache_->Stats().device.leased != leased)
          journal_.Violation("Grow without success changed the leases");
        journal_.Cover("grow_no_room");
        continue;
      }
      Rows r{s->id,
             s->kv.pages,
             {s->chain.begin(), s->chain.begin() + to},
             {s->tokens.begin(), s->tokens.begin() + to},
             s->planned,
             to - s->planned};
      next_.rows.push_back(std::move(r));
      s->planned = to;
    }
    cache_->TakeCopies(&next_.loads, &next_.backups);
    if (next_.rows.empty() && next_.loads.empty() && next_.backups.empty()) return;
    next_.step = ++step_;
    cache_->StepSubmitted(step_);
    journal_.Trace(clock_.Now(), "step {}: {} sequences, {} loads, {} backups", step_, next_.rows.size(),
                   next_.loads.size(), next_.backups.size());
    batches_.push_back(std::exchange(next_, {}));
  }

  // Runs the oldest batch and hands its result to the cache.
  void Retire() {
    if (batches_.empty()) return;
    Batch b = std::move(batches_.front());
    batches_.pop_front();
    std::vector<int64_t> failed_loads;
    for (CopyPlan& plan : b.loads) {
      const bool ok = !random_.Chance(copy_failures_);
      if (ok)
        Copy(plan);
      else
        for (const PagePair& pair : plan.pages) device_->Poison(pair.device);
      acks_.insert(acks_.begin() + long(random_.Below(acks_.size() + 1)), {plan, true, ok});
      if (!ok) failed_loads.push_back(plan.id);
    }
    // A backup reads its pages at any time from here to its acknowledgement.
    for (CopyPlan& plan : b.backups) {
      const bool now = random_.Chance(0.5);
      if (now) Copy(plan);
      acks_.insert(acks_.begin() + long(random_.Below(acks_.size() + 1)),
                   {plan, now, !random_.Chance(copy_failures_)});
    }
    std::set<int64_t> misread;
    for (const Rows& r : b.rows)
      if (!Execute(r)) misread.insert(r.seq);
    cache_->StepRetired(b.step);
    Acknowledge(!failed_loads.empty());  // a failed load is known before its step's result is used
    for (const Rows& r : b.rows) {
      Running* s = Find(r.seq);
      if (s == nullptr) continue;
      const bool lost = cache_->Lost(s->kv);
      if (misread.contains(r.seq) && !lost)
        journal_.Violation("step {}: sequence {} read foreign rows", b.step, r.seq);
      if (lost) continue;
      const int64_t upto = r.start + r.count;
      cache_->Commit(&s->kv, s->tokens, upto, 0);
      if (s->kv.computed > upto)
        journal_.Violation("sequence {} has {} final rows, {} were computed", s->id, s->kv.computed, upto);
      Know(*s);
    }
    for (size_t i = running_.size(); i-- > 0;) {
      if (!running_[i]->kv.active || !cache_->Lost(running_[i]->kv)) continue;
      journal_.Cover("sequences_lost_with_a_load");
      Drop(i, false);
    }
  }

  Running* Find(int64_t id) {
    for (auto& s : running_)
      if (s->id == id) return s.get();
    return nullptr;
  }

  void Copy(const CopyPlan& plan) {
    for (const PagePair& pair : plan.pages)
      if (pair.device.value % lanes_ != pair.host.value % lanes_)
        journal_.Violation("a copy between device page {} and host page {} of another lane",
                           pair.device.value, pair.host.value);
    CopyPages(plan, *device_, *host_, -1);
  }

  void Acknowledge(bool all) {
    while (!acks_.empty() && (all || random_.Chance(0.7))) {
      Ack a = std::move(acks_.back());
      acks_.pop_back();
      if (!a.made && a.ok) Copy(a.plan);
      const int64_t ids[] = {a.plan.id};
      const std::span<const int64_t> one(ids), none;
      cache_->OnCopiesDone(a.ok ? one : none, a.ok ? none : one);
      journal_.Cover("copies_failed", !a.ok);
      journal_.Trace(clock_.Now(), "copy {} {}", a.plan.id, a.ok ? "done" : "failed");
    }
  }

  // Reads every row before the new ones in every piece, then writes those; false when a row is not what it
  // must be.
  bool Execute(const Rows& r) {
    bool right = true;
    for (int piece = 0; piece < rows_->pieces(); ++piece) {
      for (int64_t p = 0; p < r.start && right; ++p) {
        right = rows_->Is(piece, r.pages[size_t(p / kPageTokens)], p % kPageTokens, r.chain[size_t(p)],
                          r.tokens[size_t(p)], p);
        if (!right) journal_.Trace(clock_.Now(), "sequence {}: row {} of piece {} is wrong", r.seq, p, piece);
      }
      for (int64_t p = r.start; p < r.start + r.count; ++p)
        rows_->Write(piece, r.pages[size_t(p / kPageTokens)], p % kPageTokens, r.chain[size_t(p)],
                     r.tokens[size_t(p)], p);
    }
    journal_.Cover("rows_checked", r.start * rows_->pieces());
    return right;
  }

  void Drop(size_t i, bool keep) {
    Running& s = *running_[i];
    if (s.kv.active && cache_->Lost(s.kv)) keep = false;
    journal_.Trace(clock_.Now(), "sequence {} leaves{}", s.id, keep ? "" : ", nothing kept");
    cache_->Release(&s.kv, s.tokens, keep);
    if (s.kv.active) journal_.Violation("a released sequence is active");
    running_.erase(running_.begin() + long(i));
  }

  void Poll() { cache_->Poll(clock_.Now()); }

  bool Busy() const {
    const CacheStats s = cache_->Stats();
    return s.pending_backups + s.pending_loads + s.pending_prefetches + s.awaited_host_pages +
               s.pending_stores + s.deferred_pages >
           0;
  }

  void Check(bool deep) {
    const CacheStats s = cache_->Stats();
    for (const auto& [name, t] : {std::pair("device", s.device), std::pair("host", s.host)})
      if (t.free + t.leased + t.cached != t.all || t.free < 0 || t.leased < 0 || t.cached < 0)
        journal_.Violation("{}: {} free + {} leased + {} cached != {}", name, t.free, t.leased, t.cached,
                           t.all);
    int64_t own = 0;
    std::map<int32_t, std::pair<uint64_t, bool>> seen;  // page > (prefix it holds, owned)
    for (const auto& r : running_) {
      own += int64_t(r->kv.pages.size()) - r->kv.cached / kPageTokens;
      for (size_t p = 0; p < r->kv.pages.size(); ++p) {
        const bool owned = int64_t(p) * kPageTokens >= r->kv.cached;
        const uint64_t prefix = owned ? 0 : r->chain[(p + 1) * kPageTokens - 1];
        const auto [it, fresh] = seen.insert({r->kv.pages[p].value, {prefix, owned}});
        if (!fresh && (owned || it->second.second || it->second.first != prefix))
          journal_.Violation("page {} is in two places", r->kv.pages[p].value);
      }
    }
    if (s.device.leased != own + s.deferred_pages)
      journal_.Violation("{} pages leased, sequences own {} and {} are deferred", s.device.leased, own,
                         s.deferred_pages);
    if (!deep) return;
    for (const std::string& m : cache_->Audit()) journal_.Violation("audit: {}", m);
    // Every cached device page is reachable through exactly one final prefix.
    std::set<uint64_t> resident;
    for (auto& [ns, tokens] : remembered_) {
      const std::vector<uint64_t> pages = ResidentPages(ns, tokens, false);
      resident.insert(pages.begin(), pages.end());
    }
    if (int64_t(resident.size()) != s.device.cached - s.dead_pages_device)
      journal_.Violation("{} device pages are cached, {} of them dead, {} final prefixes reach one",
                         s.device.cached, s.dead_pages_device, resident.size());
    // Dead ones wait for a copy to end, or for a sequence that a failed load has taken its rows from.
    const bool lost = std::any_of(running_.begin(), running_.end(),
                                  [&](const auto& r) { return r->kv.active && cache_->Lost(r->kv); });
    if (s.dead_pages_device > 0 && !lost && !Busy())
      journal_.Violation("{} dead device pages are kept for nobody", s.dead_pages_device);
  }

  // The ends of the pages of this prefix that are in the device tier, or (lower) in that or the host tier.
  std::vector<uint64_t> ResidentPages(const std::string& ns, Tokens& tokens, bool lower) {
    tokens.push_back(0);  // a whole prompt is never a hit
    const CachedTokens c = cache_->Peek(ns, tokens);
    tokens.pop_back();
    std::vector<uint64_t> pages;
    uint64_t h = Mix(NamespaceRoot(ns), model_);
    for (int64_t i = 0; i < c.device + (lower ? c.host : 0); ++i) {
      h = NextInChain(h, tokens[size_t(i)]);
      if ((i + 1) % kPageTokens == 0) pages.push_back(h);
    }
    return pages;
  }

  // Everything leaves; what is on its way ends; nothing may stay behind.
  void WindDown() {
    while (!running_.empty()) Drop(running_.size() - 1, true);
    while (!batches_.empty()) Retire();
    for (int i = 0; i < 400 && (Busy() || i < 3); ++i) {
      clock_.Advance(200'000'000);
      Poll();
      Plan();
      Retire();
      Acknowledge(true);
    }
    Check(true);
    const CacheStats s = cache_->Stats();
    if (s.device.leased + s.host.leased + s.reserved_host_pages != 0 || Busy())
      journal_.Violation("after the end {} device pages and {} host pages are leased, {} reserved",
                         s.device.leased, s.host.leased, s.reserved_host_pages);
    if (!cache_->Flush()) journal_.Violation("an idle cache refuses to flush");
    const CacheStats e = cache_->Stats();
    if (e.device.free != e.device.all || e.host.free != e.host.all)
      journal_.Violation("after a flush {} of {} device pages and {} of {} host pages are free",
                         e.device.free, e.device.all, e.host.free, e.host.all);
    CountCoverage();
  }

  void CountCoverage() {
    const CacheStats s = cache_->Stats();
    for (const auto& [name, n] :
         {std::pair("evicted_pages_device", s.evicted_pages_device),
          std::pair("evicted_pages_host", s.evicted_pages_host), std::pair("backup_pages", s.backup_pages),
          std::pair("load_pages", s.load_pages), std::pair("prefetch_pages", s.prefetch_pages),
          std::pair("prefetch_timeouts", s.prefetch_timeouts),
          std::pair("prefetches_put_off", s.prefetches_put_off),
          std::pair("prefetches_repeated", s.prefetches_repeated),
          std::pair("storage_errors", s.storage_errors), std::pair("failed_loads", s.failed_loads),
          std::pair("failed_backups", s.failed_backups), std::pair("dropped_unwritten", s.dropped_unwritten)})
      journal_.Cover(name, n);
    if (storage_ == nullptr) return;
    const StorageStats t = storage_->Stats();
    journal_.Cover("storage_corrupt_found", t.corrupt);
    journal_.Cover("storage_timeouts", t.timeouts);
    journal_.Cover("storage_full", t.full);
    journal_.Cover("storage_cancelled", t.cancelled);
  }

  struct Known {
    bool local = false, stored = false;
  };

  Journal journal_;
  SeededStream random_;
  const uint64_t seed_;
  VirtualClock clock_;
  SimulatedMedium medium_;
  StorageFaults faults_;
  bool use_host_ = false, use_storage_ = false;
  double copy_failures_ = 0;
  int depth_ = 0;

  int32_t lanes_ = 1;
  uint64_t identity_ = 0, model_ = 0;
  std::unique_ptr<KvLayout> layout_;
  std::unique_ptr<DevicePool> device_;
  std::unique_ptr<FingerprintRows> rows_;
  std::unique_ptr<HostPool> host_;
  std::unique_ptr<SimulatedStorage> storage_;
  std::unique_ptr<KvCache> cache_;

  std::vector<std::unique_ptr<Running>> running_;
  std::deque<Batch> batches_;
  Batch next_;
  std::deque<Ack> acks_;
  std::map<uint64_t, Known> known_;                         // chain at the end of a page
  std::vector<std::pair<std::string, Tokens>> remembered_;  // maximal final prefixes of this process
  std::vector<std::pair<std::string, Tokens>> corpus_;      // and of all processes
  int64_t next_id_ = 1, step_ = 0;
};

}  // namespace

SeedReport RunTiersSeed(uint64_t seed, bool trace) { return TiersWorld(seed, trace).Run(); }

}  // namespace sluice::sim
