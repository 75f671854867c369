#include "comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/base_sink.h>

#include <mutex>
#include <thread>

#include "base/log.h"
#include "base/random.h"

namespace sluice {
namespace {

template <typename F>
void OnRanks(std::vector<std::unique_ptr<Communicator>>& comms, F f) {
  std::vector<std::thread> threads;
  for (auto& c : comms) threads.emplace_back([&f, &c] { f(*c); });
  for (auto& t : threads) t.join();
}

TEST(ThreadCommunicator, FenceMakesPutsVisibleInEveryRound) {
  for (const WaitMode wait : {WaitMode::kBlock, WaitMode::kYield, WaitMode::kSpin})
    for (const int32_t ranks : {1, 2, 3, 4, 8}) {
      auto comms = MakeThreadCommunicators(ranks, {.wait = wait});
      std::vector<std::vector<int64_t>> arena(ranks, std::vector<int64_t>(ranks, -1));
      std::atomic<int> wrong{0};
      OnRanks(comms, [&](Communicator& c) {
        for (int64_t round = 0; round < 200; ++round) {
          const int64_t mine = round * 100 + c.rank().value;
          for (int32_t p = 0; p < c.size(); ++p)
            c.Put(Rank(p), &mine, sizeof(mine), &arena[p][c.rank().value]);
          c.Fence();
          for (int32_t p = 0; p < c.size(); ++p)
            if (arena[c.rank().value][p] != round * 100 + p) ++wrong;
          c.Fence();  // reads of this round before writes of the next
        }
      });
      EXPECT_EQ(wrong, 0);
      EXPECT_EQ(comms[0]->stats().bytes_put, 200 * 8 * (ranks - 1)) << "a rank's own bytes do not count";
    }
}

TEST(ThreadCommunicator, AllGatherKeepsRankOrderThoughRanksArriveInAnyOrder) {
  auto comms = MakeThreadCommunicators(4, {});
  std::atomic<int> wrong{0};
  OnRanks(comms, [&](Communicator& c) {
    SeededStream random(uint64_t(c.rank().value) + 1);
    std::vector<int32_t> all(4 * 3);
    for (int32_t round = 0; round < 100; ++round) {
      if (random.Chance(0.2)) std::this_thread::yield();
      const int32_t mine[3] = {round, c.rank().value, round * c.rank().value};
      c.AllGather(mine, sizeof(mine), all.data());
      for (int32_t r = 0; r < 4; ++r)
        if (all[r * 3] != round || all[r * 3 + 1] != r || all[r * 3 + 2] != round * r) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(comms[2]->stats().bytes_gathered, 100 * 12 * 3);
}

// Keeps the warnings.
class Warnings final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  bool any() const { return any_; }
  std::string all() {
    std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  void sink_it_(const spdlog::details::log_msg& m) override {
    if (m.level != spdlog::level::warn) return;
    all_ += std::string(m.payload.data(), m.payload.size()) + "\n";
    any_ = true;
  }
  void flush_() override {}
  std::string all_;
  std::atomic<bool> any_{false};
};

TEST(ThreadCommunicator, AWaitingRankSaysForWhomItWaits) {
  const auto warnings = std::make_shared<Warnings>();
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", warnings));
  auto comms = MakeThreadCommunicators(4, {.patience = std::chrono::milliseconds(20)});
  OnRanks(comms, [&](Communicator& c) {
    c.Fence();
    while (c.rank().value == 2 && !warnings->any()) std::this_thread::yield();
    c.Fence();
  });
  spdlog::set_default_logger(before);
  EXPECT_THAT(warnings->all(), ::testing::HasSubstr(" has waited 20 ms at fence 1 for rank 2\n"));
}

TEST(ThreadCommunicator, SpinsOnlyWhenEveryThreadHasACore) {
  EXPECT_EQ(WaitModeFor(2, 1, 4), WaitMode::kSpin);
  EXPECT_EQ(WaitModeFor(2, 1, 2), WaitMode::kYield);
  EXPECT_EQ(WaitModeFor(8, 2, 16), WaitMode::kYield);
  EXPECT_EQ(WaitModeFor(8, 1, 2), WaitMode::kBlock);
}

}  // namespace
}  // namespace sluice
