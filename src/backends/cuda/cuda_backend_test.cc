#include "backends/cuda/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/cuda/cublaslt_gemm.h"
#include "backends/cuda/device_features.h"
#include "backends/cuda/gemm_choice.h"
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

// Without a device, or without the library, it says what was looked for and what was there.
TEST(CublasLt, SaysWhatIsRequiredAndWhatWasFound) {
  std::string why;
  const auto library = CublasLtGemm::Open(&why);
  if (library != nullptr) {
    EXPECT_FALSE(library->version().empty());
    return;
  }
  EXPECT_THAT(why, testing::StartsWith("required cuBLASLt 12.9.0 or newer, found "));
  EXPECT_THAT(why, testing::HasSubstr("pip install nvidia-cublas"));
}

TEST(CublasLt, TakesRowsByFourAndAlignedOperands) {
  alignas(16) std::byte memory[32] = {};
  const auto* scale = reinterpret_cast<const float*>(memory);
  const BlockScaledProduct good{4096, 2624, 6144, memory, scale, memory, scale, memory, 2752, Out::kF32};
  EXPECT_TRUE(CublasLtGemm::Fits(good));
  const auto refused = [&](auto change) {
    BlockScaledProduct p = good;
    change(p);
    return !CublasLtGemm::Fits(p);
  };
  EXPECT_TRUE(refused([](auto& p) { p.rows = 4093; }));
  EXPECT_TRUE(refused([](auto& p) { p.rows = 0; }));
  EXPECT_TRUE(refused([](auto& p) { p.k = 6208; }));
  EXPECT_TRUE(refused([](auto& p) { p.n = 2632; }));
  EXPECT_TRUE(refused([](auto& p) { p.y_ld = 2754; }));
  EXPECT_TRUE(refused([&](auto& p) { p.y = memory + 8; }));
}

// The faster of both, as measured at the shapes of GLM-5 (docs/kernels/NOTES.md).
TEST(GemmChoice, IsWhatWasMeasuredToBeFaster) {
  const auto named = [](int64_t n) {
    std::string who;
    for (const int64_t rows : {64, 128, 256, 512, 1024, 2048, 4096})
      who += CublasLtIsFaster(rows, n, 132) ? 'L' : 'o';
    return who;
  };
  EXPECT_EQ(named(2624), "ooLLoLL");
  EXPECT_EQ(named(4096), "ooLLLLL");
  EXPECT_EQ(named(6144), "ooLoLLL");
  EXPECT_EQ(named(16384), "oLLLLLL");
  EXPECT_EQ(named(24576), "oLLLLLL");
}

TEST(GemmChoice, TilesOf256ColumnsWhereTheyTakeAWaveLess) {
  EXPECT_EQ(PlanE4M3(4096, 4096, 132).columns, 256);
  EXPECT_EQ(PlanE4M3(512, 16384, 132).columns, 256);
  EXPECT_EQ(PlanE4M3(4096, 6144, 132).columns, 192);
  EXPECT_EQ(PlanE4M3(4096, 16384, 132).columns, 192);
  EXPECT_EQ(PlanE4M3(4096, 2624, 132).columns, 192);
}

TEST(CublasLt, ScalesOfAWeightAreByBlocksOf128AndRowsOfFours) {
  EXPECT_EQ(BlockScaleLd(6144), 48);
  EXPECT_EQ(BlockScaleLd(640), 8);
  EXPECT_EQ(BlockScales(2624, 640), 21 * 8);
}

}  // namespace
}  // namespace sluice::cuda
