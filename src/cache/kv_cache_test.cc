#include "cache/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "cache/cache_fixture.h"

namespace sluice {
namespace {

using testing::CacheWorld;
using testing::Concat;
using testing::Prompt;
using testing::Seq;

CacheOptions DeviceOnly(int64_t pages, int32_t lanes = 1) {
  CacheOptions o;
  o.lanes = lanes;
  o.pages_per_lane = pages;
  return o;
}

TEST(KvCache, TheSamePromptHitsWholePagesAndLeavesOneTokenToCompute) {
  CacheWorld w(DeviceOnly(32));
  EXPECT_EQ(w.Run(Prompt(200)).total(), 0);
  EXPECT_EQ(w.Run(Prompt(200)).total(), 192);
  EXPECT_EQ(w.Run(Prompt(192)).total(), 128);  // a whole number of pages, but not the last token
  EXPECT_EQ(w.Run(Prompt(193)).total(), 192);
  auto shares100 = Prompt(200);
  for (size_t i = 100; i < 200; ++i) shares100[i] = -int32_t(i) - 1;
  EXPECT_EQ(w.Run(shares100).total(), 64);
}

TEST(KvCache, PrefixesOfACachedPromptHitAtPageEdges) {
  CacheWorld w(DeviceOnly(64));
  w.Run(Prompt(700));
  const std::pair<int64_t, int64_t> cases[] = {{1, 0},     {63, 0},    {64, 0},    {65, 64},
                                               {127, 64},  {128, 64},  {255, 192}, {256, 192},
                                               {257, 256}, {699, 640}, {700, 640}, {701, 640}};
  for (auto [n, hit] : cases) {
    for (int again = 0; again < 2; ++again) {
      EXPECT_EQ(w.Run(Prompt(n)).total(), hit) << n;
    }
  }
  auto changed = Prompt(700);
  changed.back() += 1;
  EXPECT_EQ(w.Run(changed).total(), 640);
}

TEST(KvCache, AbortedWorkPublishesOnlyComputedFullPages) {
  CacheWorld w(DeviceOnly(64));
  Seq s = w.Start(Prompt(700));
  w.Compute(s, 256);
  w.Compute(s, 300);  // the second chunk ended early
  w.End(s);
  EXPECT_EQ(w.cache.Peek("", Prompt(700)).total(), 256);
  EXPECT_EQ(w.Run(Prompt(700)).total(), 256);
}

TEST(KvCache, AFailedStepPublishesNothingMore) {
  CacheWorld w(DeviceOnly(64));
  Seq s = w.Start(Prompt(300));
  w.Compute(s, 128);
  w.End(s, /*keep=*/false);
  EXPECT_EQ(w.cache.Peek("", Prompt(300)).total(), 128);
  EXPECT_EQ(w.cache.Stats().device.leased, 0);
}

TEST(KvCache, SaltsDoNotShare) {
  CacheWorld w(DeviceOnly(256));
  const auto p = Prompt(20 * 64);
  const std::string a = NamespaceKey("a", ""), b = NamespaceKey("b", "");
  w.Run(p, a);
  EXPECT_EQ(w.Run(p, b).total(), 0);
  EXPECT_EQ(w.Run(p, NamespaceKey("", "")).total(), 0);
  EXPECT_EQ(w.Run(p, NamespaceKey("", "a")).total(), 0);
  EXPECT_EQ(w.Run(p, NamespaceKey(std::string(10000, 'x'), "")).total(), 0);
  EXPECT_EQ(w.Run(p, a).total(), 19 * 64);
}

TEST(KvCache, NamespaceKeysNeverCollideAcrossFields) {
  std::set<std::string> keys;
  const std::string values[] = {"", "a", "b", "ab", "salt", "adapter", std::string("a\0b", 3)};
  for (const auto& salt : values) {
    for (const auto& adapter : values) EXPECT_TRUE(keys.insert(NamespaceKey(salt, adapter)).second);
  }
}

TEST(KvCache, TwoComputingTheSamePagesShareTheTreesCopy) {
  CacheWorld w(DeviceOnly(32));
  Seq a = w.Start(Prompt(300)), b = w.Start(Prompt(300));
  EXPECT_NE(a.kv.pages, b.kv.pages);
  w.Compute(a, 256);
  const auto before = b.kv.pages;
  w.Compute(b, 256);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(a.kv.pages[i], b.kv.pages[i]);
  EXPECT_EQ(b.kv.pages[4], before[4]);  // the partial tail stays its own
  EXPECT_EQ(w.cache.Stats().device.cached, 4);
  EXPECT_EQ(w.cache.Stats().device.leased, 2);
  w.End(a);
  w.End(b);
}

TEST(KvCache, PagesGivenBackWaitForTheStepsThatMayReadThem) {
  CacheWorld w(DeviceOnly(8));
  Seq a = w.Start(Prompt(130)), b = w.Start(Prompt(130));
  w.cache.StepSubmitted(1);
  w.cache.StepSubmitted(2);  // planned ahead, uses b's own pages
  w.Compute(a, 130);
  w.Compute(b, 130);
  w.cache.StepRetired(1);
  EXPECT_EQ(w.cache.Stats().deferred_pages, 2);
  EXPECT_EQ(w.cache.Stats().device.free, 2);
  Seq c;
  c.tokens = Prompt(4 * 64, 5);
  ASSERT_EQ(w.cache.Begin(&c.kv, "", c.tokens, 0), BeginResult::kReady);
  EXPECT_FALSE(w.cache.Grow(&c.kv, 4 * 64));
  EXPECT_TRUE(w.cache.RoomComing());
  w.cache.StepRetired(2);
  EXPECT_EQ(w.cache.Stats().deferred_pages, 0);
  EXPECT_TRUE(w.cache.Grow(&c.kv, 4 * 64));
  for (Seq* s : {&a, &b, &c}) w.End(*s);
}

TEST(KvCache, AGrowingLeafStaysFewNodesAndChunksAreNotCopiedAgain) {
  CacheWorld w(DeviceOnly(128));
  Seq s = w.Start(Prompt(64));
  for (int64_t n = 64; n <= 64 * 100; n += 64) {
    s.tokens = Prompt(n);
    ASSERT_TRUE(w.cache.Grow(&s.kv, n));
    w.Compute(s);
  }
  EXPECT_LE(w.cache.Stats().nodes, 4);  // an answer grows page by page: nodes of up to 42 pages
  w.End(s);
  EXPECT_EQ(w.Run(Prompt(64 * 100 + 1)).total(), 64 * 100);
  // Chunks of more pages than are worth moving become nodes of their own.
  CacheWorld chunked(DeviceOnly(256));
  Seq c = chunked.Start(Prompt(64 * 40));
  for (int64_t n = 64 * 40; n <= 64 * 200; n += 64 * 40) {
    c.tokens = Prompt(n);
    ASSERT_TRUE(chunked.cache.Grow(&c.kv, n));
    chunked.Compute(c);
  }
  EXPECT_EQ(chunked.cache.Stats().nodes, 5);
  chunked.End(c);
  EXPECT_EQ(chunked.Run(Prompt(64 * 200 + 1)).total(), 64 * 200);
}

TEST(KvCache, EvictionTakesExactlyTheDeficit) {
  CacheWorld w(DeviceOnly(10));
  w.Run(Prompt(8 * 64));
  EXPECT_EQ(w.cache.Stats().device.cached, 8);
  Seq s = w.Start(Prompt(5 * 64, 1));
  EXPECT_EQ(w.cache.Stats().evicted_pages_device, 3);
  EXPECT_EQ(w.cache.Stats().device.cached, 5);
  EXPECT_EQ(w.cache.Peek("", Prompt(8 * 64)).total(), 5 * 64);
  w.End(s);
}

TEST(KvCache, NoRoomChangesNothing) {
  CacheWorld w(DeviceOnly(10));
  Seq a = w.Start(Prompt(6 * 64));
  w.Compute(a);
  w.Run(Prompt(2 * 64, 3));
  Seq b;
  b.tokens = Prompt(6 * 64, 1);
  ASSERT_EQ(w.cache.Begin(&b.kv, "", b.tokens, 0), BeginResult::kReady);
  EXPECT_EQ(w.cache.AvailablePages(), 4);
  EXPECT_FALSE(w.cache.Grow(&b.kv, 6 * 64));
  EXPECT_FALSE(w.cache.RoomComing());
  EXPECT_TRUE(b.kv.pages.empty());
  EXPECT_EQ(w.cache.Stats().evicted_pages_device, 0);
  EXPECT_TRUE(w.cache.Grow(&b.kv, 4 * 64));
  w.End(a);
  w.End(b);
}

TEST(KvCache, RetractedSequenceFindsItsPagesAgain) {
  CacheWorld w(DeviceOnly(32));
  Seq s = w.Start(Prompt(500));
  w.Compute(s);
  w.End(s);  // retracted
  Seq again = w.Start(Prompt(501));
  EXPECT_EQ(again.kv.hit.total(), 448);
  w.End(again);
}

TEST(KvCache, FlushEmptiesOnlyWhenNobodyIsActive) {
  CacheWorld w(DeviceOnly(32));
  Seq s = w.Start(Prompt(200));
  w.Compute(s);
  EXPECT_FALSE(w.cache.Flush());
  EXPECT_EQ(w.cache.Stats().device.cached, 3);
  w.End(s);
  EXPECT_TRUE(w.cache.Flush());
  EXPECT_EQ(w.cache.Stats().device.free, 32);
  EXPECT_EQ(w.cache.Stats().nodes, 0);
  EXPECT_EQ(w.Run(Prompt(200)).total(), 0);
}

TEST(KvCache, WithoutRadixNothingIsShared) {
  CacheOptions o = DeviceOnly(16);
  o.enable_radix = false;
  CacheWorld w(o);
  EXPECT_EQ(w.Run(Prompt(300)).total(), 0);
  EXPECT_EQ(w.Run(Prompt(300)).total(), 0);
  EXPECT_EQ(w.cache.Stats().device.free, 16);
}

TEST(KvCache, PagesOfASequenceGoRoundTheLanes) {
  CacheWorld w(DeviceOnly(8, 4));
  Seq s = w.Start(Prompt(10 * 64));
  for (size_t i = 1; i < s.kv.pages.size(); ++i) {
    EXPECT_EQ(s.kv.pages[i].value % 4, (s.kv.pages[i - 1].value + 1) % 4);
  }
  for (const PageId p : s.kv.pages) EXPECT_GE(p.value / 4, 1);  // scratch pages are never given
  w.Compute(s);
  w.End(s);
  Seq t = w.Start(Prompt(64, 9)), u = w.Start(Prompt(64, 10));
  EXPECT_NE(t.kv.pages[0].value % 4, u.kv.pages[0].value % 4);  // short prompts do not crowd one lane
  w.End(t);
  w.End(u);
}

TEST(KvCache, ADeficitOfOneLaneEvictsWhatThatLaneNeeds) {
  CacheWorld w(DeviceOnly(4, 2));
  // One-page prompts alternate lanes: fill both lanes with four each.
  for (int i = 0; i < 8; ++i) w.Run(Prompt(64, i + 1));
  EXPECT_EQ(w.cache.Stats().device.cached, 8);
  Seq s = w.Start(Prompt(64, 100));  // needs one page of one lane: one page goes
  EXPECT_EQ(w.cache.Stats().evicted_pages_device, 1);
  Seq t = w.Start(Prompt(64, 101));
  EXPECT_EQ(w.cache.Stats().evicted_pages_device, 2);
  w.End(s);
  w.End(t);
}

TEST(KvCache, ForkTakesAPageOfItsOwnForTheTail) {
  CacheWorld w(DeviceOnly(16));
  Seq a = w.Start(Prompt(100));
  w.Compute(a);
  Seq b;
  b.tokens = Prompt(100);
  ASSERT_EQ(w.cache.Begin(&b.kv, "", b.tokens, 0), BeginResult::kReady);
  EXPECT_EQ(b.kv.pages.size(), 1u);
  const PageId tail = w.cache.TakePage(&b.kv);
  ASSERT_TRUE(tail.valid());
  EXPECT_NE(tail, a.kv.pages[1]);
  b.kv.pages.push_back(tail);
  w.Compute(b, 100);
  w.End(b);
  w.End(a);
  EXPECT_EQ(w.cache.Stats().device.leased, 0);
}

}  // namespace
}  // namespace sluice
