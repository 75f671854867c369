#include "backends/cuda/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/cuda/device_features.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/scratch_plan.h"

namespace sluice::cuda {
namespace {

TEST(CudaBackend, NamesTheFlagAndTheRemedyWhereThereIsNoGpu) {
  const auto backend = MakeCudaBackend({});
  if (backend.ok()) {
    EXPECT_EQ((*backend)->info().device, "cuda");
    EXPECT_NE((*backend)->memory(), nullptr);
    return;
  }
  EXPECT_THAT(std::string(Message(backend.status())), testing::HasSubstr("--device c"));
}

TEST(CudaBackend, RefusesAnActivationTypeThatNoKernelHas) {
  const auto backend = MakeCudaBackend({.act = DType::kF16});
  ASSERT_FALSE(backend.ok());
  EXPECT_THAT(std::string(Message(backend.status())), testing::HasSubstr("float16"));
}

std::string Why(Feature feature, const DeviceFacts& facts) {
  return std::string(Message(CheckFeature(feature, facts)));
}

// What is missing refuses only what needs it, with both sides named.
TEST(DeviceFeatures, EachIsAskedForByItself) {
  const DeviceFacts hopper{.name = "H200", .driver = 13000, .runtime = 13000, .major = 9, .minor = 0};
  for (const Feature f : {Feature::kKernels, Feature::kPinnedHostPool})
    EXPECT_TRUE(CheckFeature(f, hopper).ok());

  DeviceFacts old_driver = hopper;
  old_driver.driver = 12020;
  EXPECT_TRUE(CheckFeature(Feature::kKernels, old_driver).ok());
  EXPECT_TRUE(CheckFeature(Feature::kPinnedHostPool, old_driver).ok());

  DeviceFacts ampere = hopper;
  ampere.name = "A100";
  ampere.major = 8;
  EXPECT_THAT(Why(Feature::kKernels, ampere),
              testing::AllOf(testing::HasSubstr("--device cuda"), testing::HasSubstr("9.0"),
                             testing::HasSubstr("8.0 (A100)"), testing::HasSubstr("--device cpu")));
  EXPECT_TRUE(CheckFeature(Feature::kPinnedHostPool, ampere).ok());

  DeviceFacts no_mapping = hopper;
  no_mapping.maps_host_memory = false;
  EXPECT_TRUE(CheckFeature(Feature::kKernels, no_mapping).ok());
  EXPECT_THAT(Why(Feature::kPinnedHostPool, no_mapping), testing::HasSubstr("--enable-hierarchical-cache"));
}

TEST(ScratchPlan, ScoresAreCutIntoWholeRowsThatFit) {
  EXPECT_EQ(ScorePiece(1 << 28, 131072, 4096), 512);
  EXPECT_EQ(ScorePiece(1 << 28, 131072, 100), 100);
  EXPECT_EQ(ScorePiece(131072 * 4, 131072, 4096), 1);
  EXPECT_EQ(ScorePiece(4, 131072, 4096), 1);  // never none
}

ops::Limits Glm5Limits(int64_t rows) {
  ops::Limits l;
  l.max_rows = rows;
  l.max_seqs = 64;
  l.max_context = 131072;
  l.max_pages = 64 * 2049;
  l.max_index_heads = 32;
  l.index_dim = 128;
  l.hidden = 6144;
  l.heads = 64;
  l.widest_input = 16384;
  l.experts = 256;
  l.expert_topk = 8;
  l.expert_intermediate = 2048;
  return l;
}

// What any forward within the limits takes is there: fewer rows may need more than all rows do.
TEST(ScratchPlan, HoldsEverySmallerBatch) {
  for (const bool fp8 : {false, true}) {
    const ScratchPlan plan = PlanScratch(Glm5Limits(4096), {false, fp8});
    EXPECT_GE(plan[kScores], 131072 * 4);
    for (int64_t rows = 1; rows <= 4096; rows = rows < 600 ? rows + 1 : rows + 97) {
      const int64_t pairs = rows * 8;
      const int tile = fp8 && pairs >= 256 * 64 ? 128 : 64;
      const int64_t sorted = MaxSortedRows(pairs, 256, tile);
      ASSERT_GE(plan[kSorted], sorted * 4) << rows;
      ASSERT_GE(plan[kTileGroup], (sorted / tile + 1) * 4) << rows;
      ASSERT_GE(plan[kExpertOut], pairs * 6144 * (fp8 ? 2 : 4)) << rows;
      ASSERT_GE(plan[kGateUp], tile == 64 ? sorted * 4096 * 4 : 0) << rows;
      if (fp8) {
        ASSERT_GE(plan[kInput8], sorted * 6144) << rows;
        ASSERT_GE(plan[kInputScale], RowScales(sorted, 6144) * 4) << rows;
        ASSERT_GE(plan[kExpert8], sorted * 2048) << rows;
        ASSERT_GE(plan[kExpertScale], RowScales(sorted, 2048) * 4) << rows;
      }
      ASSERT_GE(plan[kInput8], rows * 16384) << rows;
      ASSERT_GE(plan[kFullRows], std::min<int64_t>(MostWholePages(rows), 64 * 2049) * kBF16PageBytes) << rows;
    }
  }
}

}  // namespace
}  // namespace sluice::cuda
