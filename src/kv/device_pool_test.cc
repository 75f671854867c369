#include "kv/device_pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "kv/layout_fixture.h"

namespace sluice {
namespace {

using testing::MakeLayout;
using testing::Small;

TEST(DevicePool, EveryPieceOfEveryPageIsItsOwnMemory) {
  const KvLayout layout = MakeLayout(Small(), DType::kF8E4M3, DType::kF8E4M3, true);
  auto pool = DevicePool::Make(layout, 3, 5).value();
  EXPECT_EQ(pool->usable_pages(), 12);
  EXPECT_EQ(pool->tokens(), 12 * 64);
  std::map<std::byte*, int64_t> blocks;
  for (int32_t page = 0; page < 15; ++page) {
    for (const KvPiece& piece : layout.pieces()) {
      EXPECT_TRUE(blocks.emplace(pool->Piece(piece, PageId(page)), piece.bytes).second);
    }
  }
  std::byte* end = nullptr;
  for (const auto& [at, bytes] : blocks) {
    EXPECT_GE(at, end);
    end = at + bytes;
  }
  EXPECT_LE(end - blocks.begin()->first, pool->reserved_bytes());
}

TEST(DevicePool, OwnerAndLocalIndexFollowThePageNumber) {
  const KvLayout layout = MakeLayout(Small());
  auto pool = DevicePool::Make(layout, 4, 8).value();
  EXPECT_EQ(PageOwner(PageId(13), 4), 1);
  EXPECT_EQ(PageLocal(PageId(13), 4), 3);
  EXPECT_EQ(pool->Latent(LogicalLayer(2), PageId(13)),
            pool->LatentSlab(LogicalLayer(2), 1) + 3 * layout.latent_page_bytes());
  EXPECT_EQ(pool->Index(LogicalLayer(2), PageId(13)),
            pool->IndexSlab(LogicalLayer(2), 1) + 3 * layout.index_page_bytes());
}

TEST(DevicePool, PoisonTouchesOnePageOnly) {
  const KvLayout layout = MakeLayout(Small(), DType::kF32, DType::kF32);
  auto pool = DevicePool::Make(layout, 1, 4).value();
  pool->Poison(PageId(2));
  for (const KvPiece& piece : layout.pieces()) {
    float first, last;
    std::memcpy(&first, pool->Piece(piece, PageId(2)), 4);
    std::memcpy(&last, pool->Piece(piece, PageId(2)) + piece.bytes - 4, 4);
    EXPECT_TRUE(std::isnan(first) && std::isnan(last));
    std::memcpy(&last, pool->Piece(piece, PageId(1)) + piece.bytes - 4, 4);
    std::memcpy(&first, pool->Piece(piece, PageId(3)), 4);
    EXPECT_EQ(first, 0.0f);
    EXPECT_EQ(last, 0.0f);
  }
}

TEST(DevicePool, RefusesSizesThatCannotWork) {
  const KvLayout layout = MakeLayout(Small());
  EXPECT_EQ(DevicePool::Make(layout, 1, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DevicePool::Make(layout, 8, int64_t(1) << 29).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice
