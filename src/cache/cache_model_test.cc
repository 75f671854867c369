// Random operations on the whole cache, with a slow obvious model beside it.
//
// The model's device is real memory in which every row of every layer holds a hash of (namespace, tokens up
// to the row, layer). Batches run later than they are planned, in order, and check every row that they read;
// copies end late, out of order, and fail; storage is slow and lies. After each operation: the audit walk,
// the partition, and what a map of prefixes says.
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <set>

#include "base/random.h"
#include "cache/cache_fixture.h"
#include "kv/page_copy.h"
#include "storage/simulated_storage.h"

namespace sluice {
namespace {

using testing::MakeLayout;
using testing::Small;
using Tokens = std::vector<int32_t>;
using Prefix = std::pair<std::string, Tokens>;

struct Knobs {
  int32_t lanes = 1;
  int64_t pages = 24, host_pages = 0;
  EvictionPolicy eviction = EvictionPolicy::kLru;
  WritePolicy write = WritePolicy::kWriteThrough;
  HostLayout order = HostLayout::kPageFirstDirect;
  PrefetchPolicy prefetch = PrefetchPolicy::kWaitComplete;
  bool storage = false;
  int depth = 1;  // batches submitted and not retired
  double copy_failures = 0.02;
};

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t s = a * 0x9E3779B97F4A7C15ull + b;
  s ^= s >> 29;
  s *= 0xBF58476D1CE4E5B9ull;
  return s ^ (s >> 32);
}

struct Batch {
  int64_t step;
  std::vector<CopyPlan> loads, backups;
  struct Rows {
    int seq;
    std::vector<PageId> pages;
    int64_t start, count;
    bool dropped;  // the sequence is gone: nobody cares for what is read
  };
  std::vector<Rows> rows;
};

struct Running {
  SequenceKv kv;
  Tokens tokens;
  std::string ns;
  std::vector<uint64_t> hashes;  // per position
  int64_t planned = 0;           // rows in submitted batches or computed
  bool begun = false;
};

class World {
 public:
  World(uint64_t seed, const Knobs& knobs)
      : k(knobs),
        random(seed),
        layout(MakeLayout(Small())),
        device(DevicePool::Make(layout, k.lanes, k.pages + 1).value()) {
    if (k.host_pages > 0) host = HostPool::Make(layout, k.order, k.lanes, k.host_pages).value();
    if (k.storage) {
      StorageFormat format;
      format.content_fingerprint = layout.content_fingerprint();
      for (const KvPiece& p : layout.pieces()) format.piece_bytes.push_back(uint32_t(p.bytes));
      StorageFaults faults;
      faults.slow = 0.1, faults.hang = 0.02, faults.hang_hold = 3'000'000'000, faults.refuse = 0.05,
      faults.error = 0.05;
      faults.full = 0.02, faults.lose = 0.05, faults.flip = 0.03, faults.truncate = 0.02, faults.swap = 0.02;
      faults.vanish = 0.03;
      storage = std::make_unique<SimulatedStorage>(format, &medium, &clock, seed + 1, faults);
    }
    CacheOptions o;
    o.lanes = k.lanes;
    o.pages_per_lane = k.pages;
    o.host_pages_per_lane = k.host_pages;
    o.eviction = k.eviction;
    o.write_policy = k.write;
    o.prefetch = k.prefetch;
    o.prefetch_min_tokens = 64;
    o.free_room_pages = random.Chance(0.5) ? 2 : 0;
    o.poison_on_free = true;
    o.poison_pool = device.get();
    cache = std::make_unique<KvCacheImpl>(o, layout, host.get(), storage.get());
  }

  ~World() {
    while (!seqs.empty()) Drop(int(seqs.size()) - 1, true);
    while (!batches.empty()) Retire();
    for (int i = 0; i < 2000 && (Busy() || i < 3); ++i) {
      clock.Advance(100'000'000);
      cache->Poll(clock.Now());
      Submit();
      Retire();
      Acknowledge(true);
    }
    Check();
    const CacheStats s = cache->Stats();
    EXPECT_EQ(s.device.leased, 0);
    EXPECT_EQ(s.host.leased, 0);
    EXPECT_EQ(s.reserved_host_pages, 0);
    EXPECT_TRUE(cache->Flush());
    EXPECT_EQ(cache->Stats().device.free, cache->Stats().device.all);
    EXPECT_EQ(cache->Stats().host.free, cache->Stats().host.all);
    cache.reset();
  }

  void Step() {
    switch (random.Below(10)) {
      case 0:
      case 1:
        Arrive();
        break;
      case 2:
      case 3:
      case 4:
        Plan();
        Submit();
        break;
      case 5:
      case 6:
        Retire();
        break;
      case 7:
        if (!seqs.empty() && random.Chance(0.6)) Drop(int(random.Below(seqs.size())), random.Chance(0.7));
        break;
      case 8:
        clock.Advance(Nanos(random.Below(20'000'000)));
        cache->Poll(clock.Now());
        break;
      default:
        Rare();
    }
    Check();
  }

  int64_t rows_checked = 0, hits = 0, storage_hits = 0, host_hits = 0;

 private:
  bool Busy() const {
    const CacheStats s = cache->Stats();
    return s.pending_backups + s.pending_loads + s.pending_prefetches + s.pending_stores > 0;
  }

  void Rare() {
    if (random.Chance(0.1)) {
      const bool idle = Active() == 0;
      EXPECT_EQ(cache->Flush(), idle);
      if (idle) known.clear();
    } else if (random.Chance(0.2)) {
      cache->DropDevice();
    }
  }
  int Active() const {
    int n = 0;
    for (const auto& s : seqs) n += s.kv.active ? 1 : 0;
    return n;
  }

  void Arrive() {
    if (seqs.size() >= 6) return;
    Running s;
    s.ns = random.Chance(0.8) ? "a" : "b";
    // Prompts share prefixes: a walk over a small graph of 32-token words.
    const int64_t words = 1 + int64_t(random.Below(12));
    int32_t state = 0;
    for (int64_t w = 0; w < words; ++w) {
      state = state * 3 + int32_t(random.Below(random.Chance(0.25) ? 3 : 1));
      for (int i = 0; i < 32; ++i) s.tokens.push_back(state % 97 + i);
    }
    for (uint64_t tail = random.Below(32); tail > 0; --tail) s.tokens.push_back(int32_t(tail));
    Hash(s);
    if (random.Chance(0.3)) cache->Prefetch(&s.kv, s.ns, s.tokens, clock.Now());
    seqs.push_back(std::move(s));
  }
  static void Hash(Running& s) {
    uint64_t h = s.hashes.empty() ? std::hash<std::string>()(s.ns) : s.hashes.back();
    for (size_t i = s.hashes.size(); i < s.tokens.size(); ++i)
      s.hashes.push_back(h = Mix(h, uint64_t(s.tokens[i]) + 1));
  }

  void Know(const Running& s) {
    for (int64_t p = 1; p <= s.kv.cached / kPageTokens; ++p) {
      known.insert({s.ns, Tokens(s.tokens.begin(), s.tokens.begin() + p * kPageTokens)});
    }
  }

  void TryBegin(Running& s) {
    const CacheStats before = cache->Stats();
    const CachedTokens peek = cache->Peek(s.ns, s.tokens);
    const BeginResult r = cache->Begin(&s.kv, s.ns, s.tokens, clock.Now());
    if (r != BeginResult::kReady) {
      EXPECT_FALSE(s.kv.active);
      EXPECT_TRUE(s.kv.pages.empty());
      return;
    }
    const CacheStats after = cache->Stats();
    const int64_t hit = s.kv.hit.total();
    EXPECT_LT(hit, int64_t(s.tokens.size()));
    EXPECT_EQ(hit % kPageTokens, 0);
    EXPECT_EQ(hit, s.kv.computed);
    EXPECT_EQ(int64_t(s.kv.pages.size()), hit / kPageTokens);
    EXPECT_GE(hit, peek.device);
    if (s.kv.hit.storage == 0 && after.prefetch_pages == before.prefetch_pages) {
      EXPECT_LE(hit, peek.total());
    }
    hits += hit, storage_hits += s.kv.hit.storage, host_hits += s.kv.hit.host;
    // Eviction inside a load takes exactly the deficit (one lane: counted in pages).
    if (k.lanes == 1 && !k.storage) {
      const int64_t need = (s.kv.hit.host) / kPageTokens;
      EXPECT_EQ(after.evicted_pages_device - before.evicted_pages_device,
                std::max<int64_t>(0, need - before.device.free));
    }
    s.begun = true;
    s.planned = s.kv.computed;
    Know(s);  // after a flush, storage may still have what the map forgot
  }

  // Builds the next batch: rows of running sequences.
  void Plan() {
    if (int(batches.size()) > k.depth) Retire();
    Batch& b = next;
    for (size_t i = 0; i < seqs.size(); ++i) {
      Running& s = seqs[i];
      if (!s.begun) {
        if (!random.Chance(0.6)) continue;
        TryBegin(s);
        if (!s.begun) continue;
      }
      int64_t upto = int64_t(s.tokens.size());
      if (s.planned >= upto) {  // decode: its token was sampled by the batch before
        if (upto > 700) continue;
        s.tokens.push_back(int32_t(random.Below(3)));
        Hash(s);
        ++upto;
      }
      const int64_t to = std::min(upto, s.planned + 1 + int64_t(random.Below(150)));
      const CacheStats before = cache->Stats();
      const int64_t add = CeilDiv(to, kPageTokens) - int64_t(s.kv.pages.size());
      if (!cache->Grow(&s.kv, to)) {
        EXPECT_EQ(cache->Stats().device.leased, before.device.leased);
        continue;
      }
      if (k.lanes == 1 && k.write != WritePolicy::kWriteBack) {
        EXPECT_EQ(cache->Stats().evicted_pages_device - before.evicted_pages_device,
                  std::max<int64_t>(0, add - before.device.free));
      }
      b.rows.push_back({int(i), s.kv.pages, s.planned, to - s.planned, false});
      s.planned = to;
    }
  }

  void Submit() {
    cache->TakeCopies(&next.loads, &next.backups);
    if (next.rows.empty() && next.loads.empty() && next.backups.empty()) return;
    next.step = ++step;
    cache->StepSubmitted(step);
    batches.push_back(std::move(next));
    next = Batch();
  }

  // Executes the oldest batch and gives its result to the cache.
  void Retire() {
    if (batches.empty()) return;
    Batch b = std::move(batches.front());
    batches.pop_front();
    std::vector<int64_t> done, failed;
    for (const CopyPlan& p : b.loads) Copy(p, &done, &failed);
    const bool backups_first = random.Chance(0.5);
    if (backups_first) {
      for (const CopyPlan& p : b.backups) Copy(p, &done, &failed);
    }
    std::set<int> bad;
    for (const Batch::Rows& r : b.rows) {
      if (!r.dropped) Execute(r, &bad);
    }
    if (!backups_first) {
      for (const CopyPlan& p : b.backups) Copy(p, &done, &failed);
    }
    cache->StepRetired(b.step);
    // Acknowledgements may come later and in another order than the copies were made.
    std::vector<std::pair<int64_t, bool>> acks;
    for (int64_t id : done) acks.emplace_back(id, true);
    for (int64_t id : failed) acks.emplace_back(id, false);
    for (auto a : acks)
      pending_acks.insert(pending_acks.begin() + int64_t(random.Below(pending_acks.size() + 1)), a);
    const bool all = !failed.empty();  // a failure must be known before its step's result is used
    Acknowledge(all);
    for (const Batch::Rows& r : b.rows) {
      if (r.dropped) continue;
      Running& s = seqs[size_t(r.seq)];
      if (!s.kv.active || cache->Lost(s.kv)) continue;
      EXPECT_EQ(bad.count(r.seq), 0u) << "a sequence read foreign rows and was not reported as lost";
      cache->Commit(&s.kv, s.tokens, r.start + r.count, 0);
      Know(s);
    }
    for (size_t i = 0; i < seqs.size(); ++i) {
      if (seqs[i].kv.active && cache->Lost(seqs[i].kv)) Drop(int(i), false);
    }
  }

  void Acknowledge(bool all) {
    while (!pending_acks.empty() && (all || random.Chance(0.8))) {
      const auto [id, ok] = pending_acks.back();
      pending_acks.pop_back();
      const int64_t ids[] = {id};
      cache->OnCopiesDone(ok ? std::span<const int64_t>(ids) : std::span<const int64_t>(),
                          ok ? std::span<const int64_t>() : std::span<const int64_t>(ids));
    }
  }

  void Copy(const CopyPlan& p, std::vector<int64_t>* done, std::vector<int64_t>* failed) {
    for (const PagePair& pair : p.pages) EXPECT_EQ(pair.device.value % k.lanes, pair.host.value % k.lanes);
    const bool fail = random.Chance(k.copy_failures);
    if (!fail) {
      CopyPages(p, *device, *host, -1);
      done->push_back(p.id);
      return;
    }
    for (const PagePair& pair : p.pages) {  // half a copy: garbage
      if (p.direction == CopyDirection::kHostToDevice) device->Poison(pair.device);
    }
    failed->push_back(p.id);
  }

  uint64_t* Row(const KvPiece& piece, PageId page, int64_t row) {
    return reinterpret_cast<uint64_t*>(device->Piece(piece, page) + row * (piece.bytes / kPageTokens));
  }
  void Execute(const Batch::Rows& r, std::set<int>* bad) {
    const Running& s = seqs[size_t(r.seq)];
    for (const KvPiece& piece : layout.pieces()) {
      const uint64_t layer = uint64_t(piece.layer.value * 2 + int(piece.component));
      for (int64_t p = 0; p < r.start; ++p) {
        ++rows_checked;
        if (*Row(piece, r.pages[size_t(p / kPageTokens)], p % kPageTokens) == Mix(s.hashes[size_t(p)], layer))
          continue;
        if (!cache->Lost(s.kv)) bad->insert(r.seq);
        break;
      }
      for (int64_t p = r.start; p < r.start + r.count; ++p) {
        *Row(piece, r.pages[size_t(p / kPageTokens)], p % kPageTokens) = Mix(s.hashes[size_t(p)], layer);
      }
    }
  }

  void Drop(int i, bool keep) {
    Running& s = seqs[size_t(i)];
    if (cache->Lost(s.kv)) keep = false;
    cache->Release(&s.kv, s.tokens, keep);
    auto forget = [&](Batch& b) {
      for (Batch::Rows& r : b.rows) {
        if (r.seq == i) r.dropped = true;
        if (r.seq > i) --r.seq;
      }
    };
    for (Batch& b : batches) forget(b);
    for (size_t j = next.rows.size(); j-- > 0;) {  // not submitted yet: planned rows just go
      if (next.rows[j].seq == i) next.rows.erase(next.rows.begin() + int64_t(j));
    }
    forget(next);
    seqs.erase(seqs.begin() + i);
  }

  void Check() {
    for (const std::string& m : cache->Audit()) ADD_FAILURE() << m;
    const CacheStats s = cache->Stats();
    for (const TierCounts& t : {s.device, s.host}) EXPECT_EQ(t.free + t.leased + t.cached, t.all);
    int64_t own = 0;
    for (const Running& r : seqs) own += int64_t(r.kv.pages.size()) - r.kv.cached / kPageTokens;
    EXPECT_EQ(s.device.leased, own + s.deferred_pages);
    // Every cached device page is reachable through exactly one committed prefix.
    int64_t dead = 0, resident = 0;
    cache->tree_for_test().ForEach([&](const RadixNode& n) { dead += n.dead ? n.resident[0] : 0; });
    for (auto it = known.begin(); it != known.end();) {
      Tokens ask = it->second;
      ask.push_back(0);
      const CachedTokens c = cache->Peek(it->first, ask);
      const auto n = int64_t(it->second.size());
      resident += c.device == n ? 1 : 0;
      ++it;
    }
    EXPECT_EQ(resident + dead, s.device.cached);
  }

 public:
  Knobs k;
  SeededStream random;
  VirtualClock clock;
  KvLayout layout;
  std::unique_ptr<DevicePool> device;
  std::unique_ptr<HostPool> host;
  SimulatedMedium medium;
  std::unique_ptr<SimulatedStorage> storage;
  std::unique_ptr<KvCacheImpl> cache;
  std::vector<Running> seqs;
  std::deque<Batch> batches;
  Batch next;
  std::deque<std::pair<int64_t, bool>> pending_acks;
  std::set<Prefix> known;
  int64_t step = 0;
};

struct Outcome {
  int64_t rows = 0, hits = 0, host_hits = 0, storage_hits = 0, evicted = 0, loads = 0, backups = 0, lost = 0;
};

// CACHE_MODEL_SEEDS=1000 in the environment makes this the long search (each case runs that many seeds).
Outcome RunSeeds(uint64_t from, uint64_t to, int steps, Knobs knobs) {
  Outcome o;
  if (const char* n = std::getenv("CACHE_MODEL_SEEDS")) to = from + std::strtoull(n, nullptr, 10);
  for (uint64_t seed = from; seed < to && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Knobs k = knobs;
    k.lanes = 1 + int32_t(seed % 3);
    k.pages = 18 / k.lanes;
    k.host_pages = knobs.host_pages / k.lanes;
    k.depth = int(seed / 3 % 2);
    k.eviction = EvictionPolicy(seed % 5);
    k.order = HostLayout(seed % 4);
    World w(seed, k);
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) w.Step();
    const CacheStats s = w.cache->Stats();
    o.rows += w.rows_checked, o.hits += w.hits, o.host_hits += w.host_hits, o.storage_hits += w.storage_hits;
    o.evicted += s.evicted_pages_device, o.loads += s.load_pages, o.backups += s.backup_pages;
    o.lost += s.failed_loads;
  }
  return o;
}

TEST(CacheModel, DeviceTierAlone) {
  const Outcome o = RunSeeds(0, 20, 300, {.host_pages = 0});
  EXPECT_GT(o.rows, 100000);
  EXPECT_GT(o.hits, 1000);
  EXPECT_GT(o.evicted, 100);
}

TEST(CacheModel, WriteThrough) {
  const Outcome o = RunSeeds(0, 20, 500, {.host_pages = 60, .write = WritePolicy::kWriteThrough});
  EXPECT_GT(o.host_hits, 1000);
  EXPECT_GT(o.loads, 20);
  EXPECT_GT(o.lost, 0);
}

TEST(CacheModel, WriteThroughSelective) {
  const Outcome o = RunSeeds(100, 120, 300, {.host_pages = 40, .write = WritePolicy::kWriteThroughSelective});
  EXPECT_GT(o.backups, 50);
}

TEST(CacheModel, WriteBack) {
  const Outcome o = RunSeeds(200, 220, 300, {.host_pages = 60, .write = WritePolicy::kWriteBack});
  EXPECT_GT(o.host_hits, 100);
}

TEST(CacheModel, FullHostTier) { RunSeeds(300, 320, 300, {.host_pages = 9}); }

TEST(CacheModel, SlowFailingLyingStorage) {
  for (PrefetchPolicy p :
       {PrefetchPolicy::kWaitComplete, PrefetchPolicy::kBestEffort, PrefetchPolicy::kTimeout}) {
    const Outcome o = RunSeeds(400 + uint64_t(p) * 10, 410 + uint64_t(p) * 10, 400,
                               {.host_pages = 12, .prefetch = p, .storage = true});
    EXPECT_GT(o.storage_hits, 0);
  }
}

}  // namespace
}  // namespace sluice
