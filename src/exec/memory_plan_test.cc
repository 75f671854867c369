#include "exec/memory_plan.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

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

TEST(MemoryPlan, ADeviceWithMemoryOfItsOwnTakesAllOfTheRest) {
  MemoryInputs in = Inputs();
  in.host_tier = true;
  in.separate_host_bytes = 100 * kGiB;
  const MemoryPlan plan = PlanMemory(in).value();
  const int64_t rest = 16 * kGiB - in.weight_bytes - in.staging_bytes;
  EXPECT_LE(plan.device_bytes(), rest);
  EXPECT_GT(plan.device_bytes(), rest - 2 * in.page_bytes);
  EXPECT_NEAR(double(plan.host_bytes()), 2.0 * double(rest), 4 << 20);
}

// 20 GiB, 0.8 of them in the budget: 4 are left, 2 of them may hold scores.
TEST(MemoryPlan, IndexScoresGetWholeRowsOfWhatTheBudgetLeaves) {
  MemoryInputs in = Inputs();
  in.separate_host_bytes = kGiB;
  EXPECT_EQ(PlanMemory(in)->score_bytes, 0);  // where they take no memory of their own
  in.score_row_bytes = 131072 * 4;
  in.score_rows = 4096;
  EXPECT_EQ(PlanMemory(in)->score_bytes, 256 << 20);  // 512 rows: no piece is larger
  in.score_rows = 100;
  EXPECT_EQ(PlanMemory(in)->score_bytes, 100 * in.score_row_bytes);  // a step has no more
  in.score_rows = 4096;
  in.fraction = 0.995;  // 0.1 GiB is left, half of it for scores
  const int64_t left = in.free_bytes - int64_t(double(in.free_bytes) * in.fraction);
  EXPECT_EQ(PlanMemory(in)->score_bytes, left / 2 / in.score_row_bytes * in.score_row_bytes);
  in.lanes = 4;
  EXPECT_EQ(PlanMemory(in)->score_bytes, left / 2 / 4 / in.score_row_bytes * in.score_row_bytes);
  in.fraction = 1.0;  // nothing is left: one row at a time
  EXPECT_EQ(PlanMemory(in)->score_bytes, in.score_row_bytes);
  // What an explicit pool size takes beyond the budget is not left.
  in.fraction = 0.5;
  in.lanes = 1;
  in.max_total_tokens =
      (in.free_bytes - in.weight_bytes - in.staging_bytes - (64 << 20)) / in.page_bytes * 64;
  const MemoryPlan explicit_pool = PlanMemory(in).value();
  EXPECT_LE(explicit_pool.weight_bytes + explicit_pool.staging_bytes + explicit_pool.device_bytes() +
                explicit_pool.score_bytes,
            in.free_bytes);
  EXPECT_LE(explicit_pool.score_bytes, 32 << 20);
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

// One budget a rank: N ranks hold N times the tokens, in both tiers, up to a page a lane.
TEST(MemoryPlan, TokensGrowWithTheRanksForAGivenBudgetOfEach) {
  for (const int64_t budget : {64 * kGiB / 1000, kGiB, 3 * kGiB + 12345}) {
    MemoryInputs in = Inputs();
    in.weight_bytes = in.staging_bytes = 0;
    in.fraction = 1;
    in.page_bytes = 123457;
    in.context_length = int64_t(1) << 40;
    in.host_tier = true;
    in.free_bytes = 2 * budget;
    in.host_gb_per_rank = double(budget) / 1e9 / 2;
    const MemoryPlan one = PlanMemory(in).value();
    for (const int32_t ranks : {2, 4, 8}) {
      in.lanes = ranks;
      in.free_bytes = ranks * 2 * budget;
      const MemoryPlan plan = PlanMemory(in).value();
      EXPECT_NEAR(double(plan.device_tokens()), double(ranks * one.device_tokens()),
                  0.02 * double(ranks * one.device_tokens()) + double(ranks * kPageTokens));
      EXPECT_EQ(plan.host_tokens(), ranks * one.host_tokens());
      EXPECT_LE(plan.device_bytes() + plan.host_bytes(), in.free_bytes);
    }
  }
}

// All ranks, all tiers, index and draft rows: one number. Never more than the budget, or refused before
// anything is reserved.
TEST(MemoryPlan, OneBudgetHoldsEverythingOfAllRanksOrIsRefused) {
  constexpr int64_t kLimit = 2 * kGiB;
  for (const int32_t ranks : {1, 4}) {
    for (const double gb : {0.1, 1.0, 4.0, 0.0}) {
      MemoryInputs in = Inputs();
      in.free_bytes = kLimit;
      in.weight_bytes = 100 << 20;
      in.staging_bytes = 50 << 20;
      in.lanes = ranks;
      in.host_tier = true;
      in.host_gb_per_rank = gb;
      const auto plan = PlanMemory(in);
      const bool impossible = double(ranks) * gb * 1e9 > double(kLimit);
      ASSERT_EQ(plan.ok(), !impossible) << ranks << " ranks, " << gb << " GB: " << plan.status();
      if (impossible) {
        EXPECT_THAT(std::string(plan.status().message()), ::testing::HasSubstr("--hicache-size"));
        continue;
      }
      EXPECT_LE(plan->weight_bytes + plan->staging_bytes + plan->device_bytes() + plan->host_bytes(),
                kLimit + ranks * in.page_bytes);
    }
    MemoryInputs in = Inputs();  // a page less one byte holds no page
    in.lanes = ranks;
    in.host_tier = true;
    in.host_gb_per_rank = double(in.page_bytes - 1) / 1e9;
    EXPECT_THAT(std::string(PlanMemory(in).status().message()), ::testing::HasSubstr("none fits"));
  }
}

// A machine of 24 GiB and 64 cores, as /proc and /sys tell it to a process of the group /a/b.
class FakeMachine {
 public:
  FakeMachine() {
    std::string pattern = (std::filesystem::temp_directory_path() / "sluice-machine-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    Write("/proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\n");
  }
  ~FakeMachine() { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void Limit(const std::string& folder, bool unified, int64_t limit, int64_t use, int64_t inactive) const {
    const std::string at = "/sys/fs/cgroup" + folder;
    const std::string most = limit < 0 ? (unified ? "max" : "9223372036854771712") : std::to_string(limit);
    Write(at + (unified ? "/memory.max" : "/memory.limit_in_bytes"), most + "\n");
    Write(at + (unified ? "/memory.current" : "/memory.usage_in_bytes"), std::to_string(use) + "\n");
    Write(at + "/memory.stat", std::string("anon 5\n") +
                                   (unified ? "inactive_file " : "total_inactive_file ") +
                                   std::to_string(inactive) + "\n");
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

TEST(FreeMemory, IsTheMachinesWithoutALimit) {
  const FakeMachine m;
  EXPECT_EQ(FreeMemoryBytes(m.root()), 24 * kGiB);
  m.Write("/proc/self/cgroup", "0::/a/b\n");
  m.Limit("/a/b", true, -1, kGiB, 0);
  EXPECT_EQ(FreeMemoryBytes(m.root()), 24 * kGiB);
}

TEST(FreeMemory, IsTheLeastRestOfAnyGroupOnTheWayToTheRoot) {
  for (const bool unified : {true, false}) {
    const FakeMachine m;
    const std::string top = unified ? "" : "/memory";
    m.Write("/proc/self/cgroup", unified ? "0::/a/b\n" : "7:cpuset:/x\n4:memory:/a/b\n0::/\n");
    m.Limit(top + "/a/b", unified, 2 * kGiB, kGiB / 2, 0);
    EXPECT_EQ(FreeMemoryBytes(m.root()), 3 * kGiB / 2) << unified;
    m.Limit(top + "/a/b", unified, 2 * kGiB, kGiB / 2, kGiB / 4);  // what the kernel can take back is free
    EXPECT_EQ(FreeMemoryBytes(m.root()), 7 * kGiB / 4) << unified;
    m.Limit(top + "/a", unified, 4 * kGiB, 3 * kGiB, 0);  // neighbours in the parent's group have taken more
    EXPECT_EQ(FreeMemoryBytes(m.root()), kGiB) << unified;
    m.Limit(top + "/a", unified, 4 * kGiB, 5 * kGiB, 0);
    EXPECT_EQ(FreeMemoryBytes(m.root()), 0) << unified;
  }
}

TEST(FreeMemory, IsFoundWhereAContainerSeesOnlyItsOwnGroup) {
  for (const bool unified : {true, false}) {
    const FakeMachine m;  // the path is the host's, the mounted hierarchy begins with the container's group
    m.Write("/proc/self/cgroup", unified ? "0::/docker/1234\n" : "4:memory:/docker/1234\n");
    m.Limit(unified ? "" : "/memory", unified, 2 * kGiB, kGiB, 0);
    EXPECT_EQ(FreeMemoryBytes(m.root()), kGiB) << unified;
  }
}

TEST(Cores, AreBoundedByTheLeastQuotaOfAnyGroup) {
  const int all = AvailableCores(FakeMachine().root());
  const FakeMachine unified;
  unified.Write("/proc/self/cgroup", "0::/a/b\n");
  unified.Write("/sys/fs/cgroup/a/cpu.max", "100000 100000\n");
  unified.Write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(AvailableCores(unified.root()), 1);
  const FakeMachine named;
  named.Write("/proc/self/cgroup", "3:cpuset:/other\n1:cpu,cpuacct:/a/b\n");
  named.Write("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "50000\n");
  named.Write("/sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(AvailableCores(named.root()), 1);
  named.Write("/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(AvailableCores(named.root()), all);
}

TEST(MemoryPlan, ThisMachineHasMemoryAndCores) {
  EXPECT_GT(FreeMemoryBytes(), 1 << 20);
  EXPECT_LT(FreeMemoryBytes(), int64_t(1) << 50);
  EXPECT_GE(AvailableCores(), 1);
}

}  // namespace
}  // namespace sluice
