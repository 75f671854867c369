// What a byte budget holds, by hand: one token count for every component on every tier, whatever the index
// schedule.
#include <numeric>

#include "exec/memory_plan.h"
#include "gtest/gtest.h"
#include "kv/device_pool.h"
#include "kv/host_pool.h"
#include "kv/layout_fixture.h"
#include "kv/page_copy.h"

namespace sluice {
namespace {

constexpr int64_t kGiB = int64_t(1) << 30;

struct Budget {
  int64_t device_tokens, host_tokens;
};

// 78 layers of 656 bytes a token, an index row of 132 bytes on each layer that selects, and the draft layer's
// both.
int64_t TokenBytesByHand(bool shared, bool draft) {
  return 78 * 656 + (shared ? 21 : 78) * 132 + (draft ? 656 + 132 : 0);
}

Budget CheckPools(bool shared, bool draft, int32_t lanes) {
  const ModelConfig model = shared ? testing::Glm5(4, 3) : testing::Glm5();
  const KvLayout layout = testing::MakeLayout(model, DType::kF8E4M3, DType::kF8E4M3, draft);
  const int64_t page = 64 * TokenBytesByHand(shared, draft);
  EXPECT_EQ(layout.page_bytes(), page);

  MemoryInputs in;
  in.free_bytes = 40 * kGiB;
  in.fraction = 0.75;
  in.weight_bytes = 4 * kGiB;
  in.staging_bytes = kGiB;
  in.page_bytes = layout.page_bytes();
  in.lanes = lanes;
  in.max_running = 1 << 20;
  in.context_length = 1 << 20;
  in.host_tier = true;
  in.host_ratio = 1000;
  const MemoryPlan plan = PlanMemory(in).value();
  const int64_t rest = 30 * kGiB - 5 * kGiB;
  const int64_t device_pages =
      rest / 2 / (page * lanes) - 1;  // and one page a lane that takes what nobody reads
  const int64_t host_pages = (rest - (device_pages + 1) * lanes * page) / (page * lanes);
  EXPECT_EQ(plan.device_pages_per_lane, device_pages);
  EXPECT_EQ(plan.host_pages_per_lane, host_pages);
  EXPECT_LE(plan.weight_bytes + plan.staging_bytes + plan.device_bytes() + plan.host_bytes(), 30 * kGiB);

  // The same number of pages for target, index and draft: the last page of each piece lies inside.
  const auto device = DevicePool::Make(layout, lanes, device_pages + 1).value();
  int64_t bytes = 0;
  const auto last = int32_t((device_pages + 1) * lanes - 1);
  const std::byte* base = device->Piece(layout.pieces()[0], PageId(0));
  for (const KvPiece& piece : layout.pieces()) {
    bytes += piece.bytes * (device_pages + 1) * lanes;
    EXPECT_LE(device->Piece(piece, PageId(last)) + piece.bytes - base, device->reserved_bytes());
  }
  EXPECT_EQ(bytes, plan.device_bytes());
  EXPECT_GE(device->reserved_bytes(), bytes);  // each piece of a lane begins on a memory page
  EXPECT_LT(device->reserved_bytes(), bytes + int64_t(layout.pieces().size()) * lanes * 4096);
  for (const HostLayout order : {HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                 HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst}) {
    const auto host = HostPool::Make(layout, order, lanes, host_pages).value();
    EXPECT_EQ(host->reserved_bytes(), host_pages * lanes * page);
    EXPECT_EQ(host->tokens(), plan.host_tokens());
    std::vector<std::span<std::byte>> object;  // what storage gets of a page
    host->AppendSpans(HostPageId(int32_t(host_pages * lanes - 1)), &object);
    EXPECT_EQ(std::accumulate(object.begin(), object.end(), int64_t(0),
                              [](int64_t n, const auto& s) { return n + int64_t(s.size()); }),
              page);
  }
  return {plan.device_tokens(), plan.host_tokens()};
}

TEST(Budget, EveryTierHoldsTheTokensComputedByHand) {
  for (const int32_t lanes : {1, 4}) {
    for (const bool draft : {false, true}) {
      const Budget dense = CheckPools(false, draft, lanes), shared = CheckPools(true, draft, lanes);
      EXPECT_GT(shared.device_tokens, dense.device_tokens);
      EXPECT_GT(shared.host_tokens, dense.host_tokens);
      // 61,464 bytes a token against 53,940 without the draft layer: 13.9% more tokens.
      EXPECT_NEAR(double(shared.device_tokens) / double(dense.device_tokens),
                  double(TokenBytesByHand(false, draft)) / double(TokenBytesByHand(true, draft)), 1e-3);
    }
  }
}

TEST(Budget, CopiesMoveTheSameBytesATokenAndNoIndexByteOfAReusingLayer) {
  for (const bool draft : {false, true}) {
    const KvLayout layout = testing::MakeLayout(testing::Glm5(4, 3), DType::kF8E4M3, DType::kF8E4M3, draft);
    const auto device = DevicePool::Make(layout, 1, 4).value();
    for (const HostLayout order : {HostLayout::kLayerFirst, HostLayout::kPageFirst,
                                   HostLayout::kPageFirstDirect, HostLayout::kLayerPageFirst}) {
      const auto host = HostPool::Make(layout, order, 1, 4).value();
      for (const CopyDirection direction : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
        const CopyPlan plan{1, direction, {{PageId(1), HostPageId(3)}, {PageId(2), HostPageId(0)}}};
        EXPECT_EQ(CopyPages(plan, *device, *host, -1).bytes, 2 * 64 * TokenBytesByHand(true, draft));
        int64_t by_layer = 0;
        for (const LogicalLayer layer : layout.layers()) {
          const int64_t moved = CopyLayer(plan, layer, *device, *host, -1).bytes;
          const bool selects = layer.value < 2 || (layer.value - 2) % 4 == 0;
          EXPECT_EQ(moved, 2 * 64 * (656 + (selects ? 132 : 0))) << "layer " << layer.value;
          by_layer += moved;
        }
        EXPECT_EQ(by_layer, 2 * 64 * TokenBytesByHand(true, draft));
      }
    }
  }
}

}  // namespace
}  // namespace sluice
