#include "cache/kv_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <regex>

#include "cache/cache_fixture.h"
#include "storage/simulated_storage.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using testing::MakeLayout;
using ::testing::Not;
using testing::Prompt;
using testing::Small;

struct Recorded {
  VirtualClock clock;
  std::vector<std::string> lines;
  KvRecorder recorder;
  explicit Recorded(KvRecordLimits limits = {})
      : recorder(
            &clock, [this](const std::string& l) { lines.push_back(l); }, limits) {}
};

// A cache with all tiers that writes records, over a storage that outlives it.
struct World {
  World(SimulatedMedium* medium, KvRecorder* recorder, VirtualClock* clock)
      : clock(clock),
        layout(MakeLayout(Small())),
        host(HostPool::Make(layout, HostLayout::kPageFirstDirect, 1, 64).value()) {
    StorageFormat format;
    format.content_fingerprint = layout.content_fingerprint();
    for (const KvPiece& p : layout.pieces()) format.piece_bytes.push_back(uint32_t(p.bytes));
    storage = std::make_unique<SimulatedStorage>(format, medium, clock, 7, StorageFaults{});
    CacheOptions o;
    o.pages_per_lane = 64;
    o.host_pages_per_lane = 64;
    o.prefetch = PrefetchPolicy::kWaitComplete;
    o.free_room_pages = 0;
    o.recorder = recorder;
    cache = std::make_unique<KvCacheImpl>(o, layout, host.get(), storage.get());
  }
  void Settle() {
    for (int i = 0; i < 30; ++i) {
      clock->Advance(10'000'000);
      cache->Poll(clock->Now());
      std::vector<CopyPlan> loads, backups;
      cache->TakeCopies(&loads, &backups);
      for (const auto* list : {&loads, &backups}) {
        for (const CopyPlan& p : *list) {
          const int64_t ids[] = {p.id};
          cache->OnCopiesDone(ids, {});
        }
      }
    }
  }
  CachedTokens Run(const std::string& name, const std::vector<int32_t>& tokens) {
    SequenceKv s;
    s.label = name;
    while (cache->Begin(&s, "", tokens, clock->Now()) == BeginResult::kWaitStorage) {
      clock->Advance(1'000'000);
      cache->Poll(clock->Now());
    }
    EXPECT_TRUE(cache->Grow(&s, int64_t(tokens.size())));
    Settle();
    cache->Commit(&s, tokens, int64_t(tokens.size()), 0);
    const CachedTokens hit = s.hit;
    cache->Release(&s, tokens, true);
    Settle();
    return hit;
  }
  VirtualClock* clock;
  KvLayout layout;
  std::unique_ptr<HostPool> host;
  std::unique_ptr<SimulatedStorage> storage;
  std::unique_ptr<KvCacheImpl> cache;
};

struct Source {
  int64_t l1 = 0, l2 = 0, l3 = 0, computed = 0;
  bool operator==(const Source&) const = default;
};

// What somebody who has only the log knows about each request.
std::map<std::string, Source> ReadLog(const std::vector<std::string>& lines) {
  std::map<std::string, Source> found;
  const std::regex match("kv (\\S+) match: .* l1 (\\d+), l2 (\\d+), l3 (\\d+), to compute (\\d+).*");
  for (const std::string& line : lines) {
    std::smatch m;
    if (std::regex_match(line, m, match))
      found[m[1]] = {std::stoll(m[2]), std::stoll(m[3]), std::stoll(m[4]), std::stoll(m[5])};
  }
  return found;
}

TEST(KvRecord, TheLogAloneTellsWhichTierTheRowsCameFrom) {
  SimulatedMedium medium;
  Recorded r;
  {
    World w(&medium, &r.recorder, &r.clock);
    w.Run("computed", Prompt(700));
    w.Run("from-l1", Prompt(700));
    ASSERT_TRUE(w.cache->DropDevice());
    w.Run("from-l2", Prompt(700));
  }
  {
    World w(&medium, &r.recorder, &r.clock);
    w.Run("from-l3", Prompt(700));
    auto longer = Prompt(700);
    for (int32_t i = 0; i < 100; ++i) longer.push_back(-i);
    w.Run("from-l1-and-computed", longer);
  }
  const auto found = ReadLog(r.lines);
  EXPECT_EQ(found.at("computed"), (Source{0, 0, 0, 700}));
  EXPECT_EQ(found.at("from-l1"), (Source{640, 0, 0, 60}));
  EXPECT_EQ(found.at("from-l2"), (Source{0, 640, 0, 60}));
  EXPECT_EQ(found.at("from-l3"), (Source{0, 0, 640, 60}));
  EXPECT_EQ(found.at("from-l1-and-computed"), (Source{640, 0, 0, 160}));
}

TEST(KvRecord, EveryStepOfAPagesLifeIsThere) {
  SimulatedMedium medium;
  Recorded r;
  World w(&medium, &r.recorder, &r.clock);
  w.Run("first", Prompt(300));
  ASSERT_TRUE(w.cache->DropDevice());
  w.Run("second", Prompt(300));
  const std::string log = fmt::format("{}", fmt::join(r.lines, "\n"));
  EXPECT_THAT(log, HasSubstr("kv first match: 300 tokens #"));
  EXPECT_THAT(log, HasSubstr("kv first insert: 256 tokens #"));
  EXPECT_THAT(log, HasSubstr("kv first backup "));
  EXPECT_THAT(log, HasSubstr(" attach: device 4 pages 1..4 #"));
  EXPECT_THAT(log, HasSubstr(" commit: 4 pages"));
  EXPECT_THAT(log, HasSubstr("kv first evict l1: 4 pages "));
  EXPECT_THAT(log, HasSubstr("kv second load "));
}

TEST(KvRecord, WithoutARecorderNothingIsWritten) {
  SimulatedMedium medium;
  Recorded r;
  World w(&medium, nullptr, &r.clock);
  w.Run("first", Prompt(300));
  w.Run("second", Prompt(300));
  EXPECT_TRUE(r.lines.empty());
}

TEST(KvRecord, TokensAndTextOfClientsStayOut) {
  Recorded r;
  const std::vector<int32_t> tokens = {123456, 123457};
  r.recorder.Match("a\nkv forged match: 1 tokens\x1b[2J" + std::string(500, 'x'), tokens, {});
  ASSERT_EQ(r.lines.size(), 1u);
  EXPECT_THAT(r.lines[0], Not(HasSubstr("123456")));
  EXPECT_THAT(r.lines[0], Not(HasSubstr("\n")));
  EXPECT_THAT(r.lines[0], Not(HasSubstr("\x1b")));
  EXPECT_LT(r.lines[0].size(), 256u);
}

TEST(KvRecord, TransfersNameTheChunkWhatARankKeepsAndWhereItGoes) {
  Recorded r;
  const std::vector<int32_t> kept = {4, 8}, destination = {31, 7};
  r.recorder.SendChunk("room-5", 128, 300, 2, 4, 1, kept, destination);
  r.recorder.Reserve("room-5", 2, destination);
  ASSERT_EQ(r.lines.size(), 2u);
  EXPECT_THAT(r.lines[0],
              HasSubstr("kv room-5 send: tokens [128, 300) register pages [2, 4) of the prompt; rank 1 "
                        "owns 2 pages 4..8 #"));
  EXPECT_THAT(r.lines[0], HasSubstr("to 2 pages 31..7 #"));
  EXPECT_THAT(r.lines[1], HasSubstr("reserve: from page 2 of the prompt on: 2 pages 31..7 #"));
}

TEST(KvRecord, LoadKeepsWithinTheBoundAndSaysWhatIsMissing) {
  Recorded r({.burst = 50, .per_second = 10});
  std::vector<int32_t> pages(10000);
  for (int i = 0; i < 100000; ++i) r.recorder.Evict(uint64_t(i), "l1", pages);
  EXPECT_EQ(r.lines.size(), 50u);
  EXPECT_EQ(r.recorder.left_out(), 100000 - 50);
  r.clock.Advance(1'000'000'000);
  for (int i = 0; i < 1000; ++i) r.recorder.Insert("r", uint64_t(i), pages, 0, pages, 0);
  EXPECT_EQ(r.lines.size(), 60u);
  EXPECT_THAT(r.lines[50], HasSubstr("(99950 records left out before)"));
  for (const std::string& line : r.lines) EXPECT_LT(line.size(), 256u);
}

}  // namespace
}  // namespace sluice
