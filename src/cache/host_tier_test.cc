#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/cache_fixture.h"
#include "kv/page_copy.h"

namespace sluice {
namespace {

using testing::CacheWorld;
using testing::Concat;
using testing::Prompt;
using testing::Seq;

CacheOptions Tiers(int64_t device, int64_t host, WritePolicy write = WritePolicy::kWriteThrough) {
  CacheOptions o;
  o.pages_per_lane = device;
  o.host_pages_per_lane = host;
  o.write_policy = write;
  o.free_room_pages = 0;
  return o;
}

TEST(HostTier, EvictedPagesComeBackFromTheHost) {
  CacheWorld w(Tiers(8, 32));
  w.Run(Prompt(6 * 64));
  w.Run(Prompt(8 * 64, 1));  // pushes the first one out
  const CachedTokens hit = w.Run(Prompt(6 * 64 + 1));
  EXPECT_EQ(hit.device, 0);
  EXPECT_EQ(hit.host, 6 * 64);
  EXPECT_EQ(w.cache.Stats().load_pages, 6);
}

TEST(HostTier, DropDeviceKeepsTheHostCopiesAndTheNextTurnLoadsThem) {
  CacheWorld w(Tiers(32, 32));
  w.Run(Prompt(700));
  EXPECT_TRUE(w.cache.DropDevice());
  EXPECT_EQ(w.cache.Stats().device.cached, 0);
  EXPECT_EQ(w.Run(Prompt(700)).host, 640);
  EXPECT_EQ(w.Run(Prompt(700)).device, 640);
}

TEST(HostTier, DropDeviceUnderWriteBackWritesFirst) {
  CacheWorld w(Tiers(32, 32, WritePolicy::kWriteBack));
  w.Run(Prompt(700));
  EXPECT_EQ(w.cache.Stats().backup_pages, 0);
  EXPECT_FALSE(w.cache.DropDevice());  // copies are planned
  EXPECT_EQ(w.Pump(), 10);
  EXPECT_TRUE(w.cache.DropDevice());
  EXPECT_EQ(w.cache.Stats().device.cached, 0);
  EXPECT_EQ(w.Run(Prompt(700)).host, 640);
}

TEST(HostTier, WriteThroughSelectiveWaitsForTheSecondUse) {
  CacheWorld w(Tiers(32, 32, WritePolicy::kWriteThroughSelective));
  w.Run(Prompt(300));
  EXPECT_EQ(w.cache.Stats().backup_pages, 0);
  w.Run(Prompt(300));
  EXPECT_EQ(w.cache.Stats().backup_pages, 4);
  w.Run(Prompt(300));
  EXPECT_EQ(w.cache.Stats().backup_pages, 4);
}

TEST(HostTier, WriteBackWritesWhatIsAboutToGoAndFreesItOnlyAfterTheCopy) {
  CacheWorld w(Tiers(8, 32, WritePolicy::kWriteBack));
  w.Run(Prompt(6 * 64));
  Seq s;
  s.tokens = Prompt(6 * 64, 1);
  ASSERT_EQ(w.cache.Begin(&s.kv, "", s.tokens, 0), BeginResult::kReady);
  EXPECT_FALSE(w.cache.Grow(&s.kv, 6 * 64));
  EXPECT_TRUE(w.cache.RoomComing());
  EXPECT_EQ(w.cache.Stats().device.cached, 6);
  std::vector<CopyPlan> loads, backups;
  w.cache.TakeCopies(&loads, &backups);
  ASSERT_EQ(backups.size(), 1u);
  EXPECT_FALSE(w.cache.Grow(&s.kv, 6 * 64));  // the copy still reads the pages
  EXPECT_EQ(w.cache.Stats().device.cached, 6);
  const int64_t ids[] = {backups[0].id};
  w.cache.OnCopiesDone(ids, {});
  EXPECT_TRUE(w.cache.Grow(&s.kv, 6 * 64));
  EXPECT_EQ(w.cache.Stats().dropped_unwritten, 0);
  w.End(s);
  EXPECT_EQ(w.cache.Peek("", Prompt(6 * 64 + 1)).total(), 6 * 64);
}

TEST(HostTier, ALoadThatFitsEvictsNothing) {
  CacheWorld w(Tiers(20, 64));
  w.Run(Prompt(8 * 64));      // A
  w.Run(Prompt(20 * 64, 1));  // fills the pool, A is on the host only
  EXPECT_EQ(w.cache.Stats().device.free, 0);
  // Free room as the top-up would leave it: exactly what A needs.
  Seq filler = w.Start(Prompt(8 * 64, 2));
  w.End(filler, false);
  ASSERT_EQ(w.cache.Stats().device.free, 8);
  const int64_t evicted = w.cache.Stats().evicted_pages_device;
  Seq a;
  a.tokens = Prompt(8 * 64 + 1);
  ASSERT_EQ(w.cache.Begin(&a.kv, "", a.tokens, 0), BeginResult::kReady);
  EXPECT_EQ(a.kv.hit.host, 8 * 64);
  EXPECT_EQ(w.cache.Stats().evicted_pages_device, evicted);
  EXPECT_EQ(w.cache.Stats().loads_waited, 0);
  w.Pump();
  w.End(a);
}

TEST(HostTier, ALoadEvictsExactlyItsDeficitAndNeverItsOwnPath) {
  CacheWorld w(Tiers(12, 64));
  w.Run(Prompt(12 * 64));    // A: all of the pool
  w.Run(Prompt(9 * 64, 1));  // B takes the tail of A away: A keeps 3 pages on the device
  ASSERT_EQ(w.cache.Peek("", Prompt(12 * 64 + 1)).device, 3 * 64);
  const int64_t evicted = w.cache.Stats().evicted_pages_device;
  Seq a;
  a.tokens = Prompt(12 * 64 + 1);
  ASSERT_EQ(w.cache.Begin(&a.kv, "", a.tokens, 0), BeginResult::kReady);
  EXPECT_EQ(a.kv.hit.device, 3 * 64);
  EXPECT_EQ(a.kv.hit.host, 9 * 64);
  EXPECT_EQ(w.cache.Stats().evicted_pages_device - evicted, 9);
  EXPECT_EQ(w.cache.Stats().deficit_evictions, evicted + 9);
  w.Pump();
  w.End(a);
}

TEST(HostTier, FreeRoomIsToppedUpBetweenStepsFromPagesWithACopy) {
  CacheOptions o = Tiers(16, 64);
  o.free_room_pages = 4;
  CacheWorld w(o);
  w.Run(Prompt(16 * 64));
  EXPECT_EQ(w.cache.Stats().device.free, 0);
  w.cache.Poll(0);
  EXPECT_EQ(w.cache.Stats().device.free, 4);
  EXPECT_EQ(w.cache.Stats().deficit_evictions, 0);
  EXPECT_EQ(w.cache.Peek("", Prompt(16 * 64 + 1)).total(), 16 * 64);
  w.cache.Poll(0);
  EXPECT_EQ(w.cache.Stats().device.free, 4);
}

TEST(HostTier, FreeRoomNeverCostsAPageWithoutACopy) {
  CacheOptions o = Tiers(16, 64, WritePolicy::kWriteThroughSelective);
  o.free_room_pages = 4;
  CacheWorld w(o);
  w.Run(Prompt(16 * 64));
  w.cache.Poll(0);
  EXPECT_EQ(w.cache.Stats().device.cached, 16);
}

TEST(HostTier, PagesUnderABackupAreNotEvicted) {
  CacheWorld w(Tiers(8, 32));
  Seq s = w.Start(Prompt(6 * 64));
  w.Compute(s);
  w.End(s);
  std::vector<CopyPlan> loads, backups;
  w.cache.TakeCopies(&loads, &backups);
  ASSERT_EQ(backups.size(), 1u);
  EXPECT_EQ(w.cache.AvailablePages(), 2);
  Seq t;
  t.tokens = Prompt(4 * 64, 1);
  ASSERT_EQ(w.cache.Begin(&t.kv, "", t.tokens, 0), BeginResult::kReady);
  EXPECT_FALSE(w.cache.Grow(&t.kv, 4 * 64));
  const int64_t ids[] = {backups[0].id};
  w.cache.OnCopiesDone(ids, {});
  EXPECT_TRUE(w.cache.Grow(&t.kv, 4 * 64));
  w.End(t);
}

TEST(HostTier, ASplitUnderACopyKeepsBothHalvesHeld) {
  CacheWorld w(Tiers(16, 32));
  Seq s = w.Start(Prompt(6 * 64));
  w.Compute(s);
  w.End(s);
  std::vector<CopyPlan> loads, backups;
  w.cache.TakeCopies(&loads, &backups);
  ASSERT_EQ(backups.size(), 1u);
  auto other = Prompt(6 * 64);
  for (size_t i = 3 * 64; i < other.size(); ++i) other[i] = -1;
  Seq t = w.Start(other);  // shares three pages: cuts the node under the copy
  EXPECT_EQ(t.kv.hit.device, 3 * 64);
  w.CheckAudit();
  w.End(t, false);
  EXPECT_EQ(w.cache.AvailablePages(), 16 - 6);
  const int64_t ids[] = {backups[0].id};
  w.cache.OnCopiesDone(ids, {});
  EXPECT_EQ(w.cache.AvailablePages(), 16);
  EXPECT_TRUE(w.cache.DropDevice());
  EXPECT_EQ(w.cache.Peek("", Prompt(6 * 64 + 1)).host, 6 * 64);
}

TEST(HostTier, RecomputedPagesTakeTheirPlaceAboveTheHostCopy) {
  CacheOptions o = Tiers(32, 32);
  o.load_back_min_tokens = 1 << 20;  // never worth loading
  CacheWorld w(o);
  w.Run(Prompt(300));
  ASSERT_TRUE(w.cache.DropDevice());
  EXPECT_EQ(w.Run(Prompt(300)).total(), 0);
  EXPECT_EQ(w.cache.Stats().device.cached, 4);
  EXPECT_EQ(w.cache.Stats().host.cached, 4);
  EXPECT_EQ(w.cache.Stats().backup_pages, 4);  // the copies were there already
  EXPECT_EQ(w.Run(Prompt(300)).device, 256);
}

TEST(HostTier, AFailedLoadIsLostForItsSequencesAndForgotten) {
  CacheWorld w(Tiers(16, 32));
  w.Run(Prompt(300));
  ASSERT_TRUE(w.cache.DropDevice());
  Seq a, b;
  a.tokens = b.tokens = Prompt(300);
  ASSERT_EQ(w.cache.Begin(&a.kv, "", a.tokens, 0), BeginResult::kReady);
  ASSERT_EQ(w.cache.Begin(&b.kv, "", b.tokens, 0), BeginResult::kReady);
  EXPECT_EQ(b.kv.hit.device, 256);  // the pages are there already as far as later batches can tell
  Seq other = w.Start(Prompt(100, 7));
  std::vector<CopyPlan> loads, backups;
  w.cache.TakeCopies(&loads, &backups);
  ASSERT_EQ(loads.size(), 1u);
  const int64_t ids[] = {loads[0].id};
  w.cache.OnCopiesDone({}, ids);
  EXPECT_TRUE(w.cache.Lost(a.kv));
  EXPECT_TRUE(w.cache.Lost(b.kv));
  EXPECT_FALSE(w.cache.Lost(other.kv));
  EXPECT_EQ(w.cache.Peek("", Prompt(300)).total(), 0);
  w.End(a, false);
  w.CheckAudit();
  w.End(b, false);
  w.End(other, false);
  EXPECT_EQ(w.cache.Stats().device.free, 16);
}

TEST(HostTier, AFailedBackupLeavesTheDeviceCopyAndFreesTheHostPages) {
  CacheWorld w(Tiers(16, 32));
  Seq s = w.Start(Prompt(300));
  w.Compute(s);
  std::vector<CopyPlan> loads, backups;
  w.cache.TakeCopies(&loads, &backups);
  const int64_t ids[] = {backups.at(0).id};
  w.cache.OnCopiesDone({}, ids);
  EXPECT_EQ(w.cache.Stats().host.free, 32);
  w.End(s);
  EXPECT_EQ(w.Run(Prompt(300)).device, 256);
}

TEST(HostTier, AFullHostTierGivesUpItsOldestPages) {
  CacheWorld w(Tiers(8, 8));
  for (int32_t i = 0; i < 4; ++i) w.Run(Prompt(6 * 64, i));
  EXPECT_LE(w.cache.Stats().host.cached, 8);
  EXPECT_GT(w.cache.Stats().evicted_pages_host, 0);
  EXPECT_EQ(w.cache.Peek("", Prompt(6 * 64 + 1, 3)).total(), 6 * 64);
  EXPECT_EQ(w.cache.Peek("", Prompt(6 * 64 + 1, 0)).total(), 0);
}

TEST(HostTier, LoadsUseTheLaneOfTheHostPage) {
  CacheOptions o = Tiers(8, 16);
  o.lanes = 4;
  CacheWorld w(o);
  w.Run(Prompt(10 * 64));
  ASSERT_TRUE(w.cache.DropDevice());
  Seq s;
  s.tokens = Prompt(10 * 64 + 1);
  ASSERT_EQ(w.cache.Begin(&s.kv, "", s.tokens, 0), BeginResult::kReady);
  std::vector<CopyPlan> loads, backups;
  w.cache.TakeCopies(&loads, &backups);
  ASSERT_EQ(loads.size(), 1u);
  ASSERT_EQ(loads[0].pages.size(), 10u);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(loads[0].pages[i].device, s.kv.pages[i]);  // the order of the positions
    EXPECT_EQ(loads[0].pages[i].device.value % 4, loads[0].pages[i].host.value % 4);
  }
  const int64_t ids[] = {loads[0].id};
  w.cache.OnCopiesDone(ids, {});
  w.End(s);
}

// What moves per token is the layout's number: no index byte of a layer that reuses another's set, every
// latent row.
TEST(HostTier, CopiedBytesPerTokenAreTheLayoutsInBothDirections) {
  for (const bool draft : {false, true}) {
    for (const bool shared : {false, true}) {
      ModelConfig m = testing::Small();
      if (!shared) m.index.computes = {true, true, true};
      const KvLayout layout = testing::MakeLayout(m, DType::kF8E4M3, DType::kF8E4M3, draft);
      const int64_t by_hand =
          64 * (3 + draft) * (32 + 4 + 16) + (shared ? 2 + draft : 3 + draft) * (64 * 16 + 64 * 4);
      auto device = DevicePool::Make(layout, 1, 8).value();
      auto host = HostPool::Make(layout, HostLayout::kLayerPageFirst, 1, 8).value();
      CopyPlan plan{
          1, CopyDirection::kDeviceToHost, {{PageId(1), HostPageId(0)}, {PageId(4), HostPageId(3)}}};
      EXPECT_EQ(CopyPages(plan, *device, *host, -1).bytes, 2 * by_hand);
      plan.direction = CopyDirection::kHostToDevice;
      EXPECT_EQ(CopyPages(plan, *device, *host, -1).bytes, 2 * by_hand);
      EXPECT_EQ(layout.page_bytes(), by_hand);
    }
  }
}

}  // namespace
}  // namespace sluice
