#include "transfer/transfer_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/random.h"
#include "kv/device_pool.h"

namespace sluice::transfer {
namespace {

// For random prefixes, chunks, owners and destinations: the union over chunks (and lanes) is the whole
// request's mapping, once.
TEST(TransferPlan, ChunksAndLanesTogetherEqualTheWholeRequest) {
  SeededStream random(7);
  for (int round = 0; round < 5000; ++round) {
    const int32_t lanes = int32_t(1 + random.Below(8));
    const int64_t prompt = int64_t(1 + random.Below(3000));
    const int32_t pages = int32_t(CeilDiv(prompt, kPageTokens));
    // A hit is whole pages and leaves at least one token to compute.
    const int64_t cached = int64_t(random.Below(uint64_t((prompt - 1) / kPageTokens + 1))) * kPageTokens;
    const int32_t first_page = int32_t(random.Below(uint64_t((prompt - 1) / kPageTokens + 1)));
    std::vector<PageId> source, destination;
    for (int32_t i = 0; i < pages; ++i) source.push_back(PageId(int32_t(random.Below(100000))));
    for (int32_t i = first_page; i < pages; ++i) destination.push_back(PageId(int32_t(random.Below(100000))));
    std::vector<PageMove> got;
    int64_t at = cached;
    while (at < prompt) {
      const int64_t end = std::min<int64_t>(prompt, at + 1 + int64_t(random.Below(700)));
      const PageSpan span = ChunkPages({at, end, at == cached, end == prompt}, first_page);
      for (int32_t lane = 0; lane < lanes; ++lane) {
        const auto moves = Moves(span, first_page, source, destination, lanes, lane);
        for (const PageMove& m : moves) ASSERT_EQ(PageOwner(m.from, lanes), lane);
        got.insert(got.end(), moves.begin(), moves.end());
      }
      at = end;
    }
    std::sort(got.begin(), got.end(),
              [](const PageMove& a, const PageMove& b) { return a.ordinal < b.ordinal; });
    ASSERT_EQ(got, Moves(RequestPages(prompt, first_page), first_page, source, destination, lanes, -1))
        << "prompt " << prompt << " cached " << cached << " first page " << first_page << " round " << round;
  }
}

TEST(TransferPlan, PartialPageGoesWithTheChunkThatFillsIt) {
  EXPECT_EQ(ChunkPages({0, 100, true, false}, 0), (PageSpan{0, 1}));
  EXPECT_EQ(ChunkPages({100, 130, false, false}, 0), (PageSpan{1, 2}));
  EXPECT_EQ(ChunkPages({130, 140, false, true}, 0), (PageSpan{2, 3}));
  EXPECT_EQ(ChunkPages({128, 192, true, true}, 0), (PageSpan{0, 3}))
      << "the cached prefix goes with the first chunk";
  EXPECT_EQ(ChunkPages({0, 64, true, false}, 3), (PageSpan{3, 3})) << "decode has these pages";
}

TEST(TransferPlan, LastGroupMayBeShort) {
  std::vector<LogicalLayer> layers;
  for (int32_t i = 0; i < 79; ++i) layers.push_back(LogicalLayer(i));
  const auto groups = LayerGroups(layers, 8);
  EXPECT_EQ(groups.size(), 10u);
  EXPECT_EQ(groups.back().size(), 7u);
}

}  // namespace
}  // namespace sluice::transfer
