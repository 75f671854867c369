#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "cache/cache_fixture.h"
#include "kv/device_pool.h"
#include "storage/simulated_storage.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using testing::MakeLayout;
using testing::Prompt;
using testing::Seq;
using testing::Small;

// A cache over real memory; "computing" writes rows that follow from the tokens alone.
struct Verified {
  explicit Verified(double share, StorageBackend* storage = nullptr, HostPool* host = nullptr)
      : layout(MakeLayout(Small())), pool(DevicePool::Make(layout, 1, 33).value()) {
    CacheOptions o;
    o.pages_per_lane = 32;
    o.host_pages_per_lane = host != nullptr ? host->pages_per_lane() : 0;
    o.verify_share = share;
    o.verify_pool = pool.get();
    o.bad_page = [this](const std::string& e) { evidence.push_back(e); };
    cache = std::make_unique<KvCacheImpl>(o, layout, host, storage);
  }
  ~Verified() {
    for (const std::string& m : cache->Audit()) ADD_FAILURE() << m;
  }
  CachedTokens Run(const std::vector<int32_t>& tokens, bool fresh = false) {
    SequenceKv s;
    s.fresh = fresh;
    EXPECT_EQ(cache->Begin(&s, "", tokens, 0), BeginResult::kReady);
    EXPECT_TRUE(cache->Grow(&s, int64_t(tokens.size())));
    for (size_t p = size_t(s.computed / kPageTokens); p < s.pages.size(); ++p)
      for (const KvPiece& piece : layout.pieces())
        std::memset(pool->Piece(piece, s.pages[p]), tokens[p * 64] + piece.layer.value, size_t(piece.bytes));
    if (fresh) pages = s.pages;
    cache->Commit(&s, tokens, int64_t(tokens.size()), 0);
    const CachedTokens hit = s.hit;
    cache->Release(&s, tokens, true);
    return hit;
  }
  // Runs what was chosen, as the engine does when it is idle.
  int Verify() {
    int jobs = 0;
    for (VerifyJob job; cache->TakeVerification(&job); ++jobs) EXPECT_EQ(Run(job.tokens, true).total(), 0);
    return jobs;
  }
  KvLayout layout;
  std::unique_ptr<DevicePool> pool;
  std::unique_ptr<KvCacheImpl> cache;
  std::vector<std::string> evidence;
  std::vector<PageId> pages;
};

TEST(VerifyCache, EqualRowsAreCountedAndNothingElseHappens) {
  Verified v(1);
  v.Run(Prompt(300));
  EXPECT_EQ(v.Verify(), 0);  // no hit
  EXPECT_EQ(v.Run(Prompt(300)).device, 256);
  EXPECT_EQ(v.Verify(), 1);
  EXPECT_EQ(v.cache->Stats().verified_pages, 4);
  EXPECT_EQ(v.cache->Stats().verify_differences, 0);
  EXPECT_EQ(v.cache->Stats().device.leased, 0);
  EXPECT_EQ(v.cache->Stats().device.cached, 4);
  EXPECT_EQ(v.Run(Prompt(300)).device, 256);
}

TEST(VerifyCache, OneWrongBitIsReportedWithItsPlaceAndDropsThePageAndWhatFollows) {
  Verified v(1);
  v.Run(Prompt(300));
  const KvPiece& piece = v.layout.pieces()[1];
  v.pool->Piece(piece, PageId(3))[17] ^= std::byte{4};  // pages 1 to 4 hold the prompt: this is its third
  EXPECT_EQ(v.Run(Prompt(300)).device, 256);
  EXPECT_EQ(v.Verify(), 1);
  EXPECT_EQ(v.cache->Stats().verified_pages, 2);
  EXPECT_EQ(v.cache->Stats().verify_differences, 1);
  ASSERT_EQ(v.evidence.size(), 1u);
  EXPECT_THAT(v.evidence[0], HasSubstr("cached page 2 of a prompt (device page 3)"));
  EXPECT_THAT(v.evidence[0], HasSubstr("1 of "));
  EXPECT_THAT(v.evidence[0], HasSubstr("first at byte 17"));
  EXPECT_EQ(v.Run(Prompt(300)).device, 128);
  EXPECT_EQ(v.Verify(), 1);  // what was computed again is right
  EXPECT_EQ(v.cache->Stats().verify_differences, 1);
}

TEST(VerifyCache, ABadPageLeavesStorageToo) {
  SimulatedMedium medium;
  VirtualClock clock;
  const KvLayout layout = MakeLayout(Small());
  auto host = HostPool::Make(layout, HostLayout::kPageFirstDirect, 1, 32).value();
  StorageFormat format;
  format.content_fingerprint = layout.content_fingerprint();
  for (const KvPiece& p : layout.pieces()) format.piece_bytes.push_back(uint32_t(p.bytes));
  SimulatedStorage storage(format, &medium, &clock, 7, StorageFaults{});
  Verified v(1, &storage, host.get());
  const auto settle = [&] {
    for (int i = 0; i < 30; ++i) {
      clock.Advance(10'000'000);
      v.cache->Poll(clock.Now());
      std::vector<CopyPlan> loads, backups;
      v.cache->TakeCopies(&loads, &backups);
      for (const CopyPlan& p : backups) {
        const int64_t ids[] = {p.id};
        v.cache->OnCopiesDone(ids, {});
      }
    }
  };
  v.Run(Prompt(200));
  settle();
  ASSERT_EQ(medium.objects.size(), 3u);
  v.pool->Piece(v.layout.pieces()[0], PageId(2))[0] ^= std::byte{1};
  v.Run(Prompt(200));
  EXPECT_EQ(v.Verify(), 1);
  settle();
  EXPECT_EQ(v.cache->Stats().verify_differences, 1);
  EXPECT_EQ(medium.objects.size(), 1u);
  EXPECT_EQ(v.cache->Peek("", Prompt(200)).total(), 64);
}

TEST(VerifyCache, AShareOfHitsIsChosenAndTheQueueIsBounded) {
  Verified all(1), some(0.25), none(0);
  for (Verified* v : {&all, &some, &none}) {
    v->Run(Prompt(300));
    for (int i = 0; i < 100; ++i) v->Run(Prompt(300));
  }
  EXPECT_EQ(all.Verify(), 16);
  EXPECT_EQ(all.cache->Stats().verify_skipped, 84);
  const int chosen = some.Verify() + int(some.cache->Stats().verify_skipped);
  EXPECT_GT(chosen, 10);
  EXPECT_LT(chosen, 45);
  EXPECT_EQ(none.Verify(), 0);
}

TEST(VerifyCache, AHitThatIsGoneByThenIsSkipped) {
  Verified v(1);
  v.Run(Prompt(300));
  v.Run(Prompt(300));
  ASSERT_TRUE(v.cache->Flush());
  EXPECT_EQ(v.Verify(), 1);
  EXPECT_EQ(v.cache->Stats().verify_skipped, 1);
  EXPECT_EQ(v.cache->Stats().verify_differences, 0);
}

}  // namespace
}  // namespace sluice
