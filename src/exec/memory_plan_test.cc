#include "exec/memory_plan.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sluice {
namespace {

constexpr int64_t kGiB = int64_t(1) << 30;

MemoryInputs Inputs() {
  MemoryInputs in;
  in.free_bytes = 20 * kGiB;
  in.weight_bytes = kGiB;
  in.staging_bytes = kGiB / 4;
  in.page_bytes = 1 << 20;
  in.max_running = 64;
  in.context_length = 131072;
  return in;
}

TEST(MemoryPlan, DeviceTakesHalfOfTheRestAndHostTheOtherHalf) {
  MemoryInputs in = Inputs();
  in.host_tier = true;
  const MemoryPlan plan = PlanMemory(in).value();
  const int64_t rest = 16 * kGiB - in.weight_bytes - in.staging_bytes;
  EXPECT_NEAR(double(plan.device_bytes()), double(rest) / 2, 2 << 20);
  EXPECT_LE(plan.weight_bytes + plan.staging_bytes + plan.device_bytes() + plan.host_bytes(),
            plan.budget_bytes);
  EXPECT_NEAR(double(plan.host_bytes()), double(rest) / 2, 4 << 20);  // ratio 2 is clipped
}

TEST(MemoryPlan, DeviceIsNoLargerThanWhatCanRun) {
  MemoryInputs in = Inputs();
  in.max_running = 4;
  in.context_length = 1000;
  in.host_tier = true;
  const MemoryPlan plan = PlanMemory(in).value();
  EXPECT_EQ(plan.device_pages_per_lane, CeilDiv(4000, 64));
  EXPECT_EQ(plan.host_pages_per_lane, 2 * plan.device_pages_per_lane);
}

TEST(MemoryPlan, AnythingWithoutExplicitSizesStarts) {
  MemoryInputs in = Inputs();
  in.free_bytes = 1;
  in.host_tier = true;
  for (const int32_t lanes : {1, 3, 8}) {
    in.lanes = lanes;
    const auto plan = PlanMemory(in);
    ASSERT_TRUE(plan.ok());
    EXPECT_GE(plan->device_pages_per_lane, 1);
    EXPECT_GE(plan->host_pages_per_lane, 1);
  }
}

TEST(MemoryPlan, ExplicitSizesThatDoNotFitAreRefusedWithNumbers) {
  MemoryInputs in = Inputs();
  in.max_total_tokens = 100000;
  EXPECT_EQ(PlanMemory(in)->device_pages_per_lane, CeilDiv(100000, 64));
  in.max_total_tokens = 10'000'000;
  EXPECT_THAT(std::string(PlanMemory(in).status().message()),
              ::testing::HasSubstr("--max-total-tokens 10000000"));
  in.max_total_tokens = 0;
  in.host_tier = true;
  in.host_gb_per_rank = 5;
  EXPECT_EQ(PlanMemory(in)->host_pages_per_lane, int64_t(5e9) / (1 << 20));
  in.host_gb_per_rank = 500;
  EXPECT_EQ(PlanMemory(in).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemoryPlan, ThisMachineHasMemoryAndCores) {
  EXPECT_GT(FreeMemoryBytes(), 1 << 20);
  EXPECT_LT(FreeMemoryBytes(), int64_t(1) << 50);
  EXPECT_GE(AvailableCores(), 1);
}

}  // namespace
}  // namespace sluice
