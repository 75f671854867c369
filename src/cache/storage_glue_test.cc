#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "cache/cache_fixture.h"
#include "storage/simulated_storage.h"

namespace sluice {
namespace {

using testing::CacheWorld;
using testing::MakeLayout;
using testing::Prompt;
using testing::Seq;
using testing::Small;

// One process: an engine's cache over a medium that outlives it. The executor's copies are not performed; the
// host pool gets a pattern instead, so that bytes can be followed to storage and back.
struct Process {
  Process(SimulatedMedium* medium, const KvLayout& layout,
          PrefetchPolicy policy = PrefetchPolicy::kWaitComplete,
          HostLayout order = HostLayout::kPageFirstDirect, StorageFaults faults = {}, int64_t host_pages = 64,
          int32_t lanes = 1)
      : host(HostPool::Make(layout, order, lanes, host_pages / lanes).value()) {
    StorageFormat format;
    format.content_fingerprint = layout.content_fingerprint();
    for (const KvPiece& p : layout.pieces()) format.piece_bytes.push_back(uint32_t(p.bytes));
    storage = std::make_unique<SimulatedStorage>(format, medium, &clock, 7, faults);
    CacheOptions o;
    o.lanes = lanes;
    o.pages_per_lane = 64 / lanes;
    o.host_pages_per_lane = host_pages / lanes;
    o.prefetch = policy;
    o.free_room_pages = 0;
    cache = std::make_unique<KvCacheImpl>(o, layout, host.get(), storage.get());
  }
  ~Process() {
    for (const std::string& m : cache->Audit()) ADD_FAILURE() << m;
    cache.reset();
  }

  // The host pages that a backup fills: byte b of the page of key number n.
  void Pump() {
    for (;;) {
      std::vector<CopyPlan> loads, backups;
      cache->TakeCopies(&loads, &backups);
      if (loads.empty() && backups.empty()) return;
      std::vector<int64_t> ids;
      for (const CopyPlan& p : backups) {
        for (const PagePair& pair : p.pages) {
          std::vector<std::span<std::byte>> spans;
          host->AppendSpans(pair.host, &spans);
          uint8_t b = 0;
          for (auto& s : spans) {
            for (std::byte& x : s) x = std::byte(b++ * 31 + pair.device.value);
          }
        }
        ids.push_back(p.id);
      }
      for (const CopyPlan& p : loads) {
        ids.push_back(p.id);
        loaded.insert(loaded.end(), p.pages.begin(), p.pages.end());
      }
      cache->OnCopiesDone(ids, {});
    }
  }
  void Settle() {
    for (int i = 0; i < 50; ++i) {
      clock.Advance(5'000'000);
      cache->Poll(clock.Now());
      Pump();
    }
  }
  // A whole turn; returns the hit and how long storage was waited for.
  CachedTokens Run(const std::vector<int32_t>& tokens, const std::string& ns = "", Nanos tick = 1'000'000) {
    SequenceKv s;
    const Nanos from = clock.Now();
    while (cache->Begin(&s, ns, tokens, clock.Now()) == BeginResult::kWaitStorage) {
      do {  // as the scheduler does: asks again once something has happened
        clock.Advance(tick);
        if (clock.Now() - from > 60'000'000'000) {
          ADD_FAILURE() << "waits for ever";
          return {};
        }
      } while (!cache->Poll(clock.Now()));
    }
    waited = clock.Now() - from;
    EXPECT_TRUE(s.active);
    EXPECT_TRUE(cache->Grow(&s, int64_t(tokens.size())));
    Pump();
    cache->Commit(&s, tokens, int64_t(tokens.size()), 0);
    const CachedTokens hit = s.hit;
    cache->Release(&s, tokens, true);
    Settle();
    return hit;
  }

  VirtualClock clock;
  std::unique_ptr<HostPool> host;
  std::unique_ptr<SimulatedStorage> storage;
  std::unique_ptr<KvCacheImpl> cache;
  std::vector<PagePair> loaded;
  Nanos waited = 0;
};

std::vector<std::byte> PageBytes(const HostPool& host, HostPageId page) {
  std::vector<std::span<std::byte>> spans;
  host.AppendSpans(page, &spans);
  std::vector<std::byte> bytes;
  for (const auto& s : spans) bytes.insert(bytes.end(), s.begin(), s.end());
  return bytes;
}

// What a process leaves there that has served one prompt.
void LeaveInStorage(SimulatedMedium* medium, const KvLayout& layout, int64_t tokens) {
  Process first(medium, layout);
  first.Run(Prompt(tokens));
}

TEST(StorageGlue, ARestartedEngineHitsWithTheSameBytesInAnyHostLayoutAndLaneCount) {
  const KvLayout layout = MakeLayout(Small(), DType::kF8E4M3, DType::kF8E4M3);
  SimulatedMedium medium;
  {
    Process first(&medium, layout);
    first.Run(Prompt(700));
    EXPECT_EQ(first.cache->Stats().storage_write_bytes, 10 * layout.page_bytes());
  }
  EXPECT_EQ(medium.objects.size(), 10u);
  std::vector<std::vector<std::byte>> bytes;
  for (const HostLayout order : {HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst,
                                 HostLayout::kPageFirst, HostLayout::kLayerFirst}) {
    for (const int32_t lanes : {1, 4}) {
      Process again(&medium, layout, PrefetchPolicy::kWaitComplete, order, {}, 64, lanes);
      const CachedTokens hit = again.Run(Prompt(700));
      EXPECT_EQ(hit.storage, 640);
      EXPECT_EQ(hit.total(), 640);
      ASSERT_EQ(again.loaded.size(), 10u);
      std::vector<std::vector<std::byte>> now;
      for (const PagePair& p : again.loaded) now.push_back(PageBytes(*again.host, p.host));
      if (bytes.empty()) bytes = now;
      EXPECT_EQ(now, bytes);
      EXPECT_EQ(again.Run(Prompt(700)).device, 640);  // and it is counted as storage only once
    }
  }
}

TEST(StorageGlue, AnotherIdentityMisses) {
  SimulatedMedium medium;
  const KvLayout layout = MakeLayout(Small());
  LeaveInStorage(&medium, layout, 700);
  KvLayoutOptions other = layout.options();
  other.model_identity[0] = 1;
  KvLayoutOptions numerics = layout.options();
  numerics.numerics_class = "another";
  for (const KvLayout& l :
       {KvLayout::Make(Small(), other).value(), KvLayout::Make(Small(), numerics).value(),
        MakeLayout(Small(), DType::kF32), MakeLayout(Small(), DType::kBF16, DType::kBF16, true)}) {
    Process again(&medium, l);
    EXPECT_EQ(again.Run(Prompt(700)).total(), 0);
  }
  Process salted(&medium, layout);
  EXPECT_EQ(salted.Run(Prompt(700), NamespaceKey("s", "")).total(), 0);
}

// put, exists and get name the same object for any (tokens, salt, adapter, dtype), and different ones never
// meet.
TEST(StorageGlue, OneKeyPerIdentityOverManyRandomSets) {
  SeededStream random(1);
  std::set<Digest256> keys;
  for (int i = 0; i < 10000; ++i) {
    Digest256 fingerprint{};
    fingerprint[0] = uint8_t(random.Below(4));
    const std::string ns = NamespaceKey(std::to_string(random.Below(20)), std::to_string(random.Below(3)));
    std::vector<int32_t> tokens(64);
    for (int32_t& t : tokens) t = int32_t(random.Next());
    RadixTree a({.fingerprint = fingerprint}), b({.lanes = 4, .fingerprint = fingerprint});
    RadixNode* in_a = a.AddChild(a.GetRoot(ns), RadixKey(tokens, 64));
    RadixNode* in_b = b.AddChild(b.GetRoot(ns), RadixKey(tokens, 64));
    const Digest256 key = a.Digest(in_a, 0);
    EXPECT_EQ(key, b.Digest(in_b, 0));
    EXPECT_EQ(key, PageDigest(RadixTree::RootDigest(fingerprint, ns), tokens));
    EXPECT_TRUE(keys.insert(key).second);
    const int32_t slot = 1;
    a.AddResident(in_a, Tier::kDevice, std::span(&slot, 1));
    b.AddResident(in_b, Tier::kDevice, std::span(&slot, 1));
  }
}

TEST(StorageGlue, APageThatIsBadIsAMissFromThereOn) {
  const KvLayout layout = MakeLayout(Small());
  for (int page = 0; page < 10; ++page) {
    SimulatedMedium medium;
    LeaveInStorage(&medium, layout, 700);
    Digest256 key = RadixTree::RootDigest(layout.content_fingerprint(), "");
    const auto tokens = Prompt(700);
    for (int i = 0; i <= page; ++i) key = PageDigest(key, std::span(tokens).subspan(size_t(i) * 64, 64));
    auto it = medium.objects.find({layout.content_fingerprint(), key});
    ASSERT_NE(it, medium.objects.end());
    it->second.back() ^= std::byte(1);
    Process again(&medium, layout);
    const CachedTokens hit = again.Run(tokens);
    EXPECT_EQ(hit.total(), page * 64);
    EXPECT_EQ(again.cache->Stats().storage_errors, 1);
    EXPECT_EQ(again.cache->Stats().reserved_host_pages, 0);
  }
}

TEST(StorageGlue, HangingStorageHoldsNobodyBeyondItsPolicy) {
  const KvLayout layout = MakeLayout(Small());
  SimulatedMedium medium;
  LeaveInStorage(&medium, layout, 700);
  StorageFaults hang;
  hang.hang = 1;
  struct Case {
    PrefetchPolicy policy;
    Nanos least, most;
  };
  for (const Case& c : {Case{PrefetchPolicy::kBestEffort, 50'000'000, 120'000'000},
                        Case{PrefetchPolicy::kTimeout, 2'000'000'000, 2'200'000'000},
                        Case{PrefetchPolicy::kWaitComplete, 30'000'000'000, 30'100'000'000}}) {
    Process again(&medium, layout, c.policy, HostLayout::kPageFirstDirect, hang);
    EXPECT_EQ(again.Run(Prompt(700), "", 10'000'000).total(), 0);
    EXPECT_GE(again.waited, c.least);
    EXPECT_LE(again.waited, c.most);
    EXPECT_EQ(again.cache->Stats().prefetch_timeouts, 1);
    again.clock.Advance(120'000'000'000);  // storage lets go at last
    again.cache->Poll(again.clock.Now());
    EXPECT_EQ(again.cache->Stats().pending_prefetches, 0);
    EXPECT_EQ(again.cache->Stats().host.leased, 0);
  }
}

TEST(StorageGlue, AFailedBackupTakesNoRowsFromASequenceWhoseEarlierPagesAreBeingStored) {
  SimulatedMedium medium;
  const KvLayout layout = MakeLayout(Small());
  Process p(&medium, layout);
  std::vector<int32_t> tokens = Prompt(256);
  SequenceKv s;
  ASSERT_EQ(p.cache->Begin(&s, "", tokens, 0), BeginResult::kReady);
  ASSERT_TRUE(p.cache->Grow(&s, 256));
  p.cache->Commit(&s, tokens, 256, 0);
  p.Pump();
  p.cache->Poll(p.clock.Now());
  ASSERT_EQ(p.cache->Stats().pending_stores, 4);
  tokens = Prompt(512);  // the leaf grows in place
  ASSERT_TRUE(p.cache->Grow(&s, 512));
  p.cache->Commit(&s, tokens, 512, 0);
  std::vector<CopyPlan> loads, backups;
  p.cache->TakeCopies(&loads, &backups);
  ASSERT_EQ(backups.size(), 1u);
  ASSERT_EQ(backups[0].pages.size(), 4u);
  const int64_t ids[] = {backups[0].id};
  p.cache->OnCopiesDone({}, ids);
  EXPECT_FALSE(p.cache->Lost(s));
  EXPECT_EQ(p.cache->Stats().host.cached, 4);
  EXPECT_EQ(p.cache->Stats().dead_pages_device, 0);
  p.cache->Release(&s, tokens, true);
  p.Settle();
  EXPECT_EQ(p.Run(Prompt(513)).device, 512);
}

TEST(StorageGlue, AnAbandonedPrefetchGivesItsReservationBack) {
  const KvLayout layout = MakeLayout(Small());
  SimulatedMedium medium;
  LeaveInStorage(&medium, layout, 700);
  StorageFaults slow;
  slow.delay_min = slow.delay_max = 50'000'000;
  Process again(&medium, layout, PrefetchPolicy::kWaitComplete, HostLayout::kPageFirstDirect, slow);
  SequenceKv s;
  const auto tokens = Prompt(700);
  EXPECT_EQ(again.cache->Begin(&s, "", tokens, again.clock.Now()), BeginResult::kWaitStorage);
  again.clock.Advance(60'000'000);
  again.cache->Poll(again.clock.Now());  // existence known, reads on their way
  EXPECT_EQ(again.cache->Stats().reserved_host_pages, 10);
  again.cache->Release(&s, tokens, false);
  EXPECT_EQ(s.prefetch, 0);
  again.Settle();
  EXPECT_EQ(again.cache->Stats().reserved_host_pages, 0);
  EXPECT_EQ(again.cache->Stats().pending_prefetches, 0);
}

TEST(StorageGlue, ReservationsTakeAtMostHalfTheHostTier) {
  const KvLayout layout = MakeLayout(Small());
  SimulatedMedium medium;
  LeaveInStorage(&medium, layout, 40 * 64);
  Process again(&medium, layout, PrefetchPolicy::kWaitComplete, HostLayout::kPageFirstDirect, {}, 32);
  EXPECT_EQ(again.Run(Prompt(40 * 64)).storage, 16 * 64);
}

// A queue that is longer than the host tier: each of its prompts still gets all that storage has, whether its
// prefetch was put off, found too little room, or was evicted before its turn.
TEST(StorageGlue, EveryPromptOfALongQueueGetsWhatStorageHas) {
  const KvLayout layout = MakeLayout(Small());
  for (const bool ask_again : {true, false}) {
    SimulatedMedium medium;
    std::vector<std::vector<int32_t>> prompts;
    for (int32_t i = 0; i < 24; ++i) prompts.push_back(Prompt(300 + 64 * (i % 5), i));
    {
      Process p(&medium, layout);
      for (const auto& t : prompts) p.Run(t);
    }
    Process p(&medium, layout, PrefetchPolicy::kWaitComplete, HostLayout::kPageFirstDirect, {}, 16);
    std::vector<SequenceKv> s(prompts.size());
    const auto ask = [&](size_t from) {
      for (size_t i = from; i < s.size(); ++i) {
        if (s[i].prefetch == 0) p.cache->Prefetch(&s[i], "", prompts[i], p.clock.Now());
        if (i % 8 != 0) continue;  // some come at once, some later
        p.clock.Advance(2'000'000);
        p.cache->Poll(p.clock.Now());
      }
    };
    ask(0);
    EXPECT_LE(p.cache->Stats().reserved_host_pages + p.cache->Stats().awaited_host_pages, 8);
    EXPECT_GT(p.cache->Stats().prefetches_put_off, 0);
    for (size_t i = 0; i < s.size(); ++i) {
      while (p.cache->Begin(&s[i], "", prompts[i], p.clock.Now()) == BeginResult::kWaitStorage) {
        p.clock.Advance(1'000'000);
        p.cache->Poll(p.clock.Now());
      }
      // A rest of less than 256 tokens is not asked for.
      const int64_t full = (int64_t(prompts[i].size()) - 1) / 64;
      EXPECT_GT(s[i].hit.storage, std::min<int64_t>(full, 8) * 64 - 256) << i;
      ASSERT_TRUE(p.cache->Grow(&s[i], int64_t(prompts[i].size())));
      p.Pump();
      p.cache->Commit(&s[i], prompts[i], int64_t(prompts[i].size()), 0);
      p.cache->Release(&s[i], prompts[i], true);
      p.Settle();
      if (ask_again) ask(i + 1);
    }
    EXPECT_EQ(p.cache->Stats().awaited_host_pages, 0);
    EXPECT_EQ(p.cache->Stats().reserved_host_pages, 0);
  }
}

TEST(StorageGlue, WhatWasEvictedBeforeItsTurnIsFetchedAgain) {
  const KvLayout layout = MakeLayout(Small());
  SimulatedMedium medium;
  LeaveInStorage(&medium, layout, 700);
  Process p(&medium, layout, PrefetchPolicy::kWaitComplete, HostLayout::kPageFirstDirect, {}, 24);
  SequenceKv s;
  p.cache->Prefetch(&s, "", Prompt(700), p.clock.Now());
  p.Settle();
  EXPECT_EQ(p.cache->Stats().awaited_host_pages, 10);
  for (int32_t i = 1; i < 6; ++i) p.Run(Prompt(700, i));  // their backups push it out
  EXPECT_LT(p.cache->Peek("", Prompt(700)).host, 640);
  while (p.cache->Begin(&s, "", Prompt(700), p.clock.Now()) == BeginResult::kWaitStorage) {
    p.clock.Advance(1'000'000);
    p.cache->Poll(p.clock.Now());
  }
  EXPECT_EQ(s.hit.storage, 640);
  EXPECT_EQ(p.cache->Stats().prefetches_repeated, 1);
  EXPECT_EQ(p.cache->Stats().awaited_host_pages, 0);
  p.Pump();
  p.cache->Release(&s, Prompt(700), true);
  p.Settle();
}

TEST(StorageGlue, WhatIsStoredWhileAPromptWaitsIsFetchedAtItsTurn) {
  const KvLayout layout = MakeLayout(Small());
  SimulatedMedium medium;
  Process other(&medium, layout);
  other.Run(Prompt(320));
  Process p(&medium, layout);
  SequenceKv s;
  p.cache->Prefetch(&s, "", Prompt(1000), p.clock.Now());
  p.Settle();
  EXPECT_EQ(p.cache->Peek("", Prompt(1000)).host, 320);
  other.Run(Prompt(1000));
  p.clock.Advance(2'000'000'000);
  while (p.cache->Begin(&s, "", Prompt(1000), p.clock.Now()) == BeginResult::kWaitStorage) {
    p.clock.Advance(1'000'000);
    p.cache->Poll(p.clock.Now());
  }
  EXPECT_EQ(s.hit.storage, 960);
  p.Pump();
  p.cache->Release(&s, Prompt(1000), true);
  p.Settle();
}

TEST(StorageGlue, ShortPromptsDoNotAsk) {
  const KvLayout layout = MakeLayout(Small());
  SimulatedMedium medium;
  LeaveInStorage(&medium, layout, 700);
  Process again(&medium, layout);
  EXPECT_EQ(again.Run(Prompt(256)).total(), 0);
  EXPECT_EQ(again.cache->Stats().prefetches, 0);
}

}  // namespace
}  // namespace sluice
