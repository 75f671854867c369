#include "kv/host_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "base/random.h"
#include "kv/layout_fixture.h"
#include "kv/page_copy.h"

namespace sluice {
namespace {

using testing::MakeLayout;
using testing::Small;

constexpr HostLayout kAll[] = {HostLayout::kLayerFirst, HostLayout::kPageFirst, HostLayout::kPageFirstDirect,
                               HostLayout::kLayerPageFirst};

void FillPage(const DevicePool& pool, PageId page, uint64_t seed) {
  SeededStream random(seed);
  for (const KvPiece& piece : pool.layout().pieces()) {
    for (int64_t i = 0; i < piece.bytes; ++i) pool.Piece(piece, page)[i] = std::byte(random.Next());
  }
}

std::vector<std::byte> ReadPage(const DevicePool& pool, PageId page) {
  std::vector<std::byte> bytes;
  for (const KvPiece& piece : pool.layout().pieces()) {
    bytes.insert(bytes.end(), pool.Piece(piece, page), pool.Piece(piece, page) + piece.bytes);
  }
  return bytes;
}

class HostPoolLayouts : public ::testing::TestWithParam<HostLayout> {};

TEST_P(HostPoolLayouts, EveryByteOfEveryPageHasOnePlaceInsideTheBudget) {
  for (int32_t lanes : {1, 3}) {
    const KvLayout layout = MakeLayout(Small(), DType::kF8E4M3, DType::kF8E4M3, true);
    auto pool = HostPool::Make(layout, GetParam(), lanes, 4).value();
    EXPECT_EQ(pool->reserved_bytes(), layout.page_bytes() * 4 * lanes);
    std::vector<uint8_t> used(pool->memory().size(), 0);
    std::vector<std::span<std::byte>> spans;
    for (int32_t page = 0; page < 4 * lanes; ++page) pool->AppendSpans(HostPageId(page), &spans);
    for (const auto& span : spans) {
      for (const std::byte& b : span) {
        const int64_t at = &b - pool->memory().data();
        ASSERT_TRUE(at >= 0 && at < int64_t(used.size()));
        ASSERT_EQ(used[size_t(at)]++, 0);
      }
    }
    for (uint8_t u : used) ASSERT_EQ(u, 1);
  }
}

TEST_P(HostPoolLayouts, PagesComeBackWithTheSameBytesAndReadTheSameInStorageOrder) {
  for (DType index : {DType::kBF16, DType::kF8E4M3}) {
    const KvLayout layout = MakeLayout(Small(), DType::kF8E4M3, index, true);
    auto device = DevicePool::Make(layout, 2, 8).value();
    auto host = HostPool::Make(layout, GetParam(), 2, 8).value();
    CopyPlan down{1, CopyDirection::kDeviceToHost, {}}, up{2, CopyDirection::kHostToDevice, {}};
    for (int32_t p = 2; p < 8; ++p) {
      FillPage(*device, PageId(p), uint64_t(p));
      const HostPageId h(2 * (5 - p / 2) + p % 2);  // same lane, reversed order
      ASSERT_EQ(h.value % 2, p % 2);
      down.pages.push_back({PageId(p), h});
      up.pages.push_back({PageId(p + 6), h});
    }
    for (int32_t lane : {0, 1}) CopyPages(down, *device, *host, lane);
    for (LogicalLayer layer : layout.layers()) CopyLayer(up, layer, *device, *host, -1);
    for (size_t i = 0; i < up.pages.size(); ++i) {
      const auto want = ReadPage(*device, down.pages[i].device);
      EXPECT_EQ(ReadPage(*device, up.pages[i].device), want);
      std::vector<std::span<std::byte>> spans;
      host->AppendSpans(up.pages[i].host, &spans);
      std::vector<std::byte> got;
      for (const auto& s : spans) got.insert(got.end(), s.begin(), s.end());
      EXPECT_EQ(got, want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, HostPoolLayouts, ::testing::ValuesIn(kAll),
                         [](const auto& param) { return std::string(Name(param.param)); });

TEST(PageCopy, NeighbouringPagesBecomeOneCopyPerPiece) {
  const KvLayout layout = MakeLayout(Small());
  const auto pieces = int64_t(layout.pieces().size());
  auto device = DevicePool::Make(layout, 1, 32).value();
  CopyPlan plan{1, CopyDirection::kDeviceToHost, {}};
  for (int32_t p : {3, 4, 5, 6}) plan.pages.push_back({PageId(p), HostPageId(p + 4)});
  plan.pages.push_back({PageId(9), HostPageId(11)});   // host neighbour only
  plan.pages.push_back({PageId(10), HostPageId(20)});  // device neighbour only
  const int64_t bytes = 6 * layout.page_bytes();
  for (HostLayout order : {HostLayout::kLayerFirst, HostLayout::kLayerPageFirst}) {
    auto host = HostPool::Make(layout, order, 1, 32).value();
    const CopyCount n = CopyPages(plan, *device, *host, -1);
    EXPECT_EQ(n.copies, 3 * pieces);
    EXPECT_EQ(n.bytes, bytes);
  }
  auto direct = HostPool::Make(layout, HostLayout::kPageFirstDirect, 1, 32).value();
  EXPECT_EQ(CopyPages(plan, *device, *direct, -1).copies, 6 * pieces);
  auto tokens = HostPool::Make(layout, HostLayout::kPageFirst, 1, 32).value();
  const CopyCount n = CopyPages(plan, *device, *tokens, -1);
  EXPECT_EQ(n.copies, 6 * 64 * pieces);
  EXPECT_EQ(n.bytes, bytes);
}

TEST(PageCopy, ALayerMovesOnlyItsOwnPieces) {
  const KvLayout layout = MakeLayout(Small(), DType::kF8E4M3, DType::kF8E4M3);
  auto device = DevicePool::Make(layout, 1, 4).value();
  auto host = HostPool::Make(layout, HostLayout::kLayerPageFirst, 1, 4).value();
  CopyPlan plan{1, CopyDirection::kHostToDevice, {{PageId(1), HostPageId(2)}}};
  EXPECT_EQ(CopyLayer(plan, LogicalLayer(1), *device, *host, -1).bytes, layout.latent_page_bytes());
  EXPECT_EQ(CopyLayer(plan, LogicalLayer(2), *device, *host, -1).bytes,
            layout.latent_page_bytes() + layout.index_page_bytes());
}

TEST(HostLayout, OnlyTheLegalPairsAreTaken) {
  std::map<std::string, int> legal;
  for (HostLayout l : kAll) {
    EXPECT_EQ(ParseHostLayout(Name(l)).value(), l);
    for (const char* io : {"direct", "kernel", "gds"}) {
      const Status s = CheckHostLayout(l, io);
      legal[std::string(Name(l)) + "+" + io] = s.ok();
      if (!s.ok()) {
        EXPECT_NE(Message(s).find("legal pairs"), std::string_view::npos);
      }
    }
  }
  const std::map<std::string, int> want = {
      {"layer_first+direct", 1},       {"layer_first+kernel", 1},       {"layer_first+gds", 0},
      {"page_first+direct", 0},        {"page_first+kernel", 1},        {"page_first+gds", 0},
      {"page_first_direct+direct", 1}, {"page_first_direct+kernel", 0}, {"page_first_direct+gds", 0},
      {"layer_page_first+direct", 1},  {"layer_page_first+kernel", 0},  {"layer_page_first+gds", 0}};
  EXPECT_EQ(legal, want);
  EXPECT_FALSE(ParseHostLayout("page_head").ok());
}

TEST(HostPool, OneBudgetCoversAllComponentsOfAllLanes) {
  const KvLayout dense = MakeLayout(testing::Glm5(), DType::kF8E4M3, DType::kF8E4M3);
  const KvLayout shared = MakeLayout(testing::Glm5(4, 3), DType::kF8E4M3, DType::kF8E4M3);
  const int64_t gib = int64_t(1) << 30;
  EXPECT_EQ(HostPool::PagesPerLane(dense, 1, gib), gib / (61464 * 64));
  EXPECT_EQ(HostPool::PagesPerLane(shared, 1, gib), gib / (53940 * 64));
  EXPECT_EQ(HostPool::PagesPerLane(shared, 4, gib), gib / (53940 * 64 * 4));
  EXPECT_EQ(HostPool::PagesPerLane(dense, 1, 61464 * 64 - 1), 0);
  EXPECT_FALSE(HostPool::Make(dense, HostLayout::kLayerFirst, 1, 0).ok());
}

}  // namespace
}  // namespace sluice
