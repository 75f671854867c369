// Lanes: what each rank's share of the pools holds, and that uneven lanes still serve.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "base/random.h"
#include "cache/cache_fixture.h"
#include "kv/page_copy.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"

namespace sluice {
namespace {

using testing::CacheWorld;
using testing::Prompt;
using testing::Seq;

CacheOptions Lanes(int32_t lanes, int64_t per_lane, int64_t host_per_lane = 0) {
  CacheOptions o;
  o.lanes = lanes;
  o.pages_per_lane = per_lane;
  o.host_pages_per_lane = host_per_lane;
  o.free_room_pages = 0;
  return o;
}

// The lines of the log while it lives.
class LogLines {
 public:
  LogLines() : sink_(std::make_shared<Sink>()), before_(spdlog::default_logger()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", sink_));
  }
  ~LogLines() { spdlog::set_default_logger(before_); }
  const std::vector<std::string>& all() const { return sink_->lines; }

 private:
  struct Sink final : spdlog::sinks::base_sink<std::mutex> {
    void sink_it_(const spdlog::details::log_msg& m) override {
      lines.emplace_back(m.payload.data(), m.payload.size());
    }
    void flush_() override {}
    std::vector<std::string> lines;
  };
  const std::shared_ptr<Sink> sink_;
  const std::shared_ptr<spdlog::logger> before_;
};

// Tokens that are resident at once when conversations of one page are put in until something has to go.
int64_t TokensThatFit(CacheWorld& w) {
  int64_t n = 0;
  while (w.cache.Stats().evicted_pages_device == 0) w.Run(Prompt(64, int32_t(n++)));
  return w.cache.Stats().device.cached * kPageTokens;
}

TEST(Lanes, TokensThatFitAPerRankBudgetGrowWithTheRanksInBothTiers) {
  const KvLayout layout = testing::MakeLayout(testing::Small());
  for (const int64_t budget : {int64_t(100'000), int64_t(1'000'003)}) {  // bytes of one rank, in each tier
    const int64_t pages = budget / layout.page_bytes() - 1, host_pages = budget / layout.page_bytes();
    int64_t one = 0, one_host = 0, one_bytes = 0, one_host_bytes = 0;
    for (const int32_t ranks : {1, 2, 4, 8}) {
      const auto device = DevicePool::Make(layout, ranks, pages + 1).value();
      const auto host = HostPool::Make(layout, HostLayout::kLayerFirst, ranks, host_pages).value();
      // Byte for byte: N ranks reserve N times what one does, and that is the budget less than a page, with
      // each slab rounded up to a page of the machine.
      if (ranks == 1) one_bytes = device->reserved_bytes(), one_host_bytes = host->reserved_bytes();
      EXPECT_EQ(device->reserved_bytes(), ranks * one_bytes);
      EXPECT_EQ(host->reserved_bytes(), ranks * one_host_bytes);
      EXPECT_LE(one_bytes, budget + 4096 * int64_t(layout.pieces().size()));
      EXPECT_LE(one_host_bytes, budget);
      EXPECT_GT(std::min(one_bytes, one_host_bytes), budget - layout.page_bytes());
      CacheWorld w(Lanes(ranks, pages, host_pages), host.get());
      const int64_t fit = TokensThatFit(w);
      while (w.cache.Stats().evicted_pages_host == 0)
        w.Run(Prompt(64, -1 - int32_t(w.cache.Stats().lookup_tokens)));
      const int64_t fit_host = w.cache.Stats().host.cached * kPageTokens;
      EXPECT_EQ(fit, device->tokens());
      EXPECT_EQ(fit_host, host->tokens());
      if (ranks == 1) {
        one = fit, one_host = fit_host;
        continue;
      }
      EXPECT_NEAR(double(fit), double(ranks * one), 0.02 * double(ranks * one) + double(ranks * kPageTokens));
      EXPECT_NEAR(double(fit_host), double(ranks * one_host),
                  0.02 * double(ranks * one_host) + double(ranks * kPageTokens));
    }
  }
}

// One lane full of pages that somebody holds, the others empty: who comes next is served from the others.
TEST(Lanes, ASequenceStartsAndGrowsWhenItsNextLanesAreFull) {
  for (const int32_t lanes : {2, 3, 8}) {
    CacheWorld w(Lanes(lanes, 8));
    // One-page sequences start on one lane after another; those that are not on lane 0 end at once.
    std::vector<Seq> held;
    for (int32_t i = 0; i < 8 * lanes; ++i) {
      Seq s = w.Start(Prompt(40, i));
      if (s.kv.pages[0].value % lanes == 0) {
        held.push_back(std::move(s));
      } else {
        w.End(s, false);
      }
    }
    ASSERT_EQ(held.size(), 8u);
    ASSERT_EQ(w.cache.AvailablePages(), 8 * (lanes - 1));
    Seq s = w.Start(Prompt(64 * 8 * (lanes - 1), 99));
    EXPECT_EQ(w.cache.AvailablePages(), 0);
    for (const PageId p : s.kv.pages) EXPECT_NE(p.value % lanes, 0);
    EXPECT_GT(w.cache.Stats().lanes_passed_over, 0);
    w.Compute(s);
    w.CheckAudit();
    Seq t;
    t.tokens = Prompt(10, 100);
    ASSERT_EQ(w.cache.Begin(&t.kv, "", t.tokens, 0), BeginResult::kReady);
    EXPECT_FALSE(w.cache.Grow(&t.kv, 10)) << "nothing is left on any lane";
    w.End(s);
    EXPECT_TRUE(w.cache.Grow(&t.kv, 10)) << "what is cached makes room";
    w.End(t);
    for (Seq& h : held) w.End(h);
  }
}

// Random work over lanes that are kept uneven on purpose: whenever a page is free or can be, a sequence gets
// it.
TEST(Lanes, WhateverTheSkewAGrowthThatFitsAllLanesTogetherSucceeds) {
  SeededStream random(20);
  for (int round = 0; round < 20; ++round) {
    const int32_t lanes = 2 + int32_t(random.Below(7));
    CacheWorld w(Lanes(lanes, 6));
    std::vector<Seq> running;
    int64_t grown = 0;
    for (int i = 0; i < 300; ++i) {
      if (!running.empty() && random.Chance(0.45)) {
        // Ends preferably what has least on lane 0, so that lane 0 stays full.
        size_t which = 0, least = SIZE_MAX;
        for (size_t k = 0; k < running.size(); ++k) {
          size_t on = 0;
          for (const PageId p : running[k].kv.pages) on += p.value % lanes == 0;
          if (on < least) least = on, which = k;
        }
        w.End(running[which], random.Chance(0.3));
        running.erase(running.begin() + long(which));
        continue;
      }
      Seq s;
      s.tokens = Prompt(1 + int64_t(random.Below(64 * 7)), int32_t(i + 1000 * round));
      ASSERT_EQ(w.cache.Begin(&s.kv, "", s.tokens, 0), BeginResult::kReady);
      const int64_t need = CeilDiv(int64_t(s.tokens.size()), kPageTokens);
      const bool fits = need <= w.cache.AvailablePages();
      ASSERT_EQ(w.cache.Grow(&s.kv, int64_t(s.tokens.size())), fits) << need << " pages, lanes " << lanes;
      if (!fits) {
        w.End(s, false);
        continue;
      }
      ++grown;
      w.Compute(s);
      running.push_back(std::move(s));
    }
    EXPECT_GT(grown, 50);
    for (Seq& s : running) w.End(s);
  }
}

TEST(Lanes, PlanningReadsOwnersFromTheNodesAndLooksAtNoPageThatStays) {
  for (const int32_t lanes : {1, 4, 8}) {
    CacheWorld w(Lanes(lanes, 16, 64));
    SeededStream random(7);
    for (int i = 0; i < 400; ++i)
      w.Run(Prompt(64 * (1 + int64_t(random.Below(12))), int32_t(random.Below(30))));
    const CacheStats s = w.cache.Stats();
    EXPECT_GT(s.load_pages, 0);
    EXPECT_GT(s.evicted_pages_device, 0);
    EXPECT_LE(s.planning_page_visits, s.evicted_pages_device + s.evicted_pages_host + s.load_pages);
  }
}

TEST(Lanes, ALoadWhoseLaneStaysShortIsCountedEachTimeAndSaidOnce) {
  CacheWorld w(Lanes(2, 4, 32));
  w.Run(Prompt(2 * 64));     // one page on each lane, backed up
  w.Run(Prompt(8 * 64, 1));  // pushes it out of the device tier
  ASSERT_EQ(w.cache.Peek("", Prompt(129)).host, 128);
  // Hold all of lane 1.
  std::vector<Seq> held;
  for (int32_t i = 0; i < 8; ++i) {
    Seq s = w.Start(Prompt(40, 10 + i));
    if (s.kv.pages[0].value % 2 == 1) {
      held.push_back(std::move(s));
    } else {
      w.End(s, false);
    }
  }
  ASSERT_EQ(held.size(), 4u);
  Seq t;
  t.tokens = Prompt(129);
  Seq large;  // than both lanes: ordinary load, no deficit of one
  large.tokens = Prompt(9 * 64, 99);
  {
    LogLines log;
    for (int i = 1; i <= 5; ++i) {
      EXPECT_EQ(w.cache.Begin(&t.kv, "", t.tokens, 0), BeginResult::kNoRoom);
      EXPECT_EQ(w.cache.Stats().lane_deficits, i);
    }
    EXPECT_EQ(w.cache.Begin(&large.kv, "", large.tokens, 0), BeginResult::kReady);
    EXPECT_FALSE(w.cache.Grow(&large.kv, 9 * 64));
    EXPECT_EQ(w.cache.Stats().lane_deficits, 5);
    ASSERT_EQ(log.all().size(), 1u);
    EXPECT_EQ(log.all()[0], "cache: lane 1 is 1 device pages short, 4 pages of all lanes could be free");
  }
  w.End(large, false);
  for (Seq& h : held) w.End(h, false);
  EXPECT_EQ(w.cache.Begin(&t.kv, "", t.tokens, 0), BeginResult::kReady);
  EXPECT_EQ(t.kv.hit.host, 128);
  w.Pump();
  w.End(t);
}

TEST(CacheWarnings, SlowEvictionsAreAllCountedAndRarelySaid) {
  for (const bool slow : {true, false}) {
    CacheOptions o = Lanes(2, 4);
    o.slow_eviction = slow ? -1 : Nanos{3600} * 1'000'000'000;  // no time at all is longer than -1
    CacheWorld w(o);
    LogLines log;
    for (int32_t i = 0; i < 12; ++i) w.Run(Prompt(4 * 64, i));
    EXPECT_EQ(w.cache.Stats().evicted_pages_device, 10 * 4);
    EXPECT_EQ(w.cache.Stats().slow_evictions, slow ? 10 : 0);
    ASSERT_EQ(log.all().size(), slow ? 1u : 0u);
    for (const std::string& line : log.all())
      EXPECT_THAT(line, ::testing::StartsWith("cache: planning an eviction took "));
  }
}

// Cannot happen while the order holds every node that the counts take for evictable; here one is missing.
TEST(CacheWarnings, AnEvictionThatFreesLessThanItsCountsPromisedIsCountedAndSaidOnce) {
  CacheWorld w(Lanes(1, 4));
  for (int32_t i = 0; i < 4; ++i) w.Run(Prompt(64, i));
  RadixTree& tree = w.cache.tree_for_test();
  RadixNode* lost = tree.Victim(Tier::kDevice);
  tree.SetAside(lost, Tier::kDevice);
  LogLines log;
  Seq s;
  s.tokens = Prompt(4 * 64, 9);
  ASSERT_EQ(w.cache.Begin(&s.kv, "", s.tokens, 0), BeginResult::kReady);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(w.cache.Grow(&s.kv, 4 * 64));
  EXPECT_EQ(w.cache.Stats().short_evictions, 3);
  EXPECT_EQ(w.cache.Stats().evicted_pages_device, 3);
  ASSERT_EQ(log.all().size(), 1u);
  EXPECT_EQ(log.all()[0], "cache: an eviction freed 3 of 4 device pages");
  tree.Offer(lost, Tier::kDevice);
  EXPECT_TRUE(w.cache.Grow(&s.kv, 4 * 64));
  w.End(s, false);
}

// Eight conversations take turns in pools that hold three of them, over four lanes; acknowledgements of
// copies come late and in any order, and some turns are aborted. What is decided follows from what was asked
// and acknowledged alone.
std::vector<int64_t> Decisions(uint64_t seed, int turns, int* waited) {
  CacheWorld w(Lanes(4, 10, 15));
  SeededStream random(seed);
  std::vector<int64_t> log;
  std::vector<std::pair<int64_t, int>> pending;  // copy id, turns until it is acknowledged
  const auto pump = [&](bool all) {
    std::vector<CopyPlan> loads, backups;
    w.cache.TakeCopies(&loads, &backups);
    for (const auto* list : {&loads, &backups})
      for (const CopyPlan& p : *list) {
        pending.emplace_back(p.id, list == &loads ? 0 : int(random.Below(5)));
        for (const PagePair& pair : p.pages) {
          EXPECT_EQ(pair.device.value % 4, pair.host.value % 4) << "a page's tiers are on one lane";
          log.push_back(pair.device.value * 1000 + pair.host.value);
        }
      }
    for (size_t i = pending.size(); i-- > 0;) {
      if (!all && pending[i].second-- > 0) continue;
      const int64_t ids[] = {pending[i].first};
      w.cache.OnCopiesDone(ids, {});
      pending.erase(pending.begin() + long(i));
    }
  };
  for (int turn = 0; turn < turns; ++turn) {
    Seq s;
    s.tokens = Prompt(12 * 64, turn % 8);
    int tries = 0;
    while (w.cache.Begin(&s.kv, "", s.tokens, w.now) != BeginResult::kReady ||
           !w.cache.Grow(&s.kv, int64_t(s.tokens.size()))) {
      if (s.kv.active) w.End(s, false);
      EXPECT_FALSE(pending.empty()) << "nothing is on its way and nobody else holds a page";
      if (++tries > 10 || pending.empty()) return log;
      pump(true);
    }
    *waited += tries > 0;
    for (const PageId p : s.kv.pages) log.push_back(p.value);
    pump(false);
    if (random.Chance(0.2)) {
      w.End(s, false);  // aborted in the middle
    } else {
      w.Compute(s);
      w.End(s);
    }
    pump(false);
    w.cache.Poll(w.now += 1'000'000);
    if (turn % 50 == 0) w.CheckAudit();
  }
  pump(true);
  pump(true);
  EXPECT_GT(w.cache.Stats().load_pages, 0);
  EXPECT_GT(w.cache.Stats().evicted_pages_host, 0);
  return log;
}

TEST(Lanes, DecisionsFollowFromOneOwnersStateWhateverTheCopiesDelays) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    int waited = 0, waited_again = 0;
    const auto first = Decisions(seed, 400, &waited);
    EXPECT_GT(first.size(), 4000u);
    EXPECT_EQ(first, Decisions(seed, 400, &waited_again)) << "the same seed replays the same schedule";
    EXPECT_EQ(waited, waited_again);
  }
}

}  // namespace
}  // namespace sluice
