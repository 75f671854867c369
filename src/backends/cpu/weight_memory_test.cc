#include "backends/cpu/weight_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace sluice::cpu {
namespace {

TEST(WeightMemory, PiecesAreAlignedZeroedAndApart) {
  WeightMemory memory;
  std::vector<std::pair<std::shared_ptr<std::byte>, int64_t>> pieces;
  const int64_t sizes[] = {1, 4096, 5000, 3 << 20, 40 << 20, 30 << 20, 100 << 20, 64};
  for (const int64_t bytes : sizes) {
    auto piece = memory.Take(bytes);
    ASSERT_TRUE(piece.ok()) << piece.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(piece->get()) % WeightMemory::kAlign, 0u);
    EXPECT_EQ(piece->get()[0], std::byte{0});
    EXPECT_EQ(piece->get()[bytes - 1], std::byte{0});
    piece->get()[0] = piece->get()[bytes - 1] = std::byte{7};
    pieces.emplace_back(*std::move(piece), bytes);
  }
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 1; i < pieces.size(); ++i)
    EXPECT_LE(pieces[i - 1].first.get() + pieces[i - 1].second, pieces[i].first.get());
}

TEST(WeightMemory, SmallPiecesShareAMappingOfHugePages) {
  WeightMemory memory;
  const auto first = memory.Take(300 << 10).value(), second = memory.Take(300 << 10).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.get()) % WeightMemory::kHugePage, 0u);
  EXPECT_EQ(second.get() - first.get(), 300 << 10);
}

TEST(WeightMemory, APieceOutlivesTheMemoryItCameFrom) {
  std::shared_ptr<std::byte> piece;
  {
    WeightMemory memory;
    piece = memory.Take(10000).value();
    (void)memory.Take(WeightMemory::kMapping).value();
  }
  std::fill_n(piece.get(), 10000, std::byte{3});
  EXPECT_EQ(piece.get()[9999], std::byte{3});
}

}  // namespace
}  // namespace sluice::cpu
