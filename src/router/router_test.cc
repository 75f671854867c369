#include "router/router.h"

#include <gtest/gtest.h>

#include <map>

namespace sluice::router {
namespace {

std::vector<Candidate> Idle(int n) {
  std::vector<Candidate> c;
  for (int i = 0; i < n; ++i) c.push_back({i, 0});
  return c;
}

TEST(Policy, RoundRobinVisitsEveryWorkerInTurnAlsoWhenOneIsMissing) {
  auto p = *MakePolicy("round_robin", 1);
  std::vector<int> seen;
  for (int i = 0; i < 6; ++i) seen.push_back(int(p->Pick(Idle(3), "")));
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 0, 1, 2}));
  const std::vector<Candidate> without_one = {{0, 0}, {2, 0}};
  EXPECT_EQ(without_one[p->Pick(without_one, "")].worker, 0);
  EXPECT_EQ(without_one[p->Pick(without_one, "")].worker, 2);
}

TEST(Policy, EqualLoadsAreDrawnAtRandomBySeed) {
  for (const char* name : {"random", "power_of_two", "cache_aware"}) {
    auto p = *MakePolicy(name, 7);
    std::map<size_t, int> count;
    for (int i = 0; i < 300; ++i) ++count[p->Pick(Idle(3), "")];
    ASSERT_EQ(count.size(), 3u) << name;
    for (const auto& [worker, n] : count) EXPECT_GT(n, 50) << name << " worker " << worker;
  }
}

TEST(Policy, PowerOfTwoTakesTheLessLoaded) {
  auto p = *MakePolicy("power_of_two", 3);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(p->Pick({{0, 9}, {1, 2}}, ""), 1u);
}

TEST(Policy, CacheAwareFollowsThePrefixUntilTheLoadsAreFarApart) {
  auto p = *MakePolicy("cache_aware", 3);
  const std::string prompt(4000, 'x');
  const size_t first = p->Pick(Idle(3), prompt);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(p->Pick(Idle(3), prompt + std::to_string(i)), first);
  std::vector<Candidate> loaded = Idle(3);
  loaded[first].load = 100;
  EXPECT_NE(p->Pick(loaded, prompt), first);
  p->Forget(int(first));
  std::map<size_t, int> count;
  for (int i = 0; i < 60; ++i) {
    auto fresh = *MakePolicy("cache_aware", uint64_t(i));
    ++count[fresh->Pick(Idle(3), prompt)];
  }
  EXPECT_EQ(count.size(), 3u);
}

TEST(PrefixIndex, KeepsABoundAndMatchesWholeBlocksOnly) {
  PrefixIndex index(64);
  index.Insert(std::string(1000, 'a'), 1);
  EXPECT_EQ(index.Match(std::string(1000, 'a'), {0, 1}), (std::vector<size_t>{0, 896}));
  EXPECT_EQ(index.Match(std::string(100, 'a'), {0, 1}), (std::vector<size_t>{0, 0}));
  for (int i = 0; i < 1000; ++i) index.Insert(std::to_string(i) + std::string(500, 'b'), i % 3);
  EXPECT_LE(index.nodes(), 70u);
}

TEST(Router, RefusesALineThatNamesNoWholePair) {
  RouterOptions o;
  EXPECT_FALSE(Router::Start(o).ok());
  o.workers = {{WorkerSpec::Role::kPrefill, "127.0.0.1:1", 1}};
  EXPECT_NE(Message(Router::Start(o).status()).find("--decode"), std::string_view::npos);
  o.workers.push_back({WorkerSpec::Role::kWhole, "127.0.0.1:1", 0});
  EXPECT_FALSE(Router::Start(o).ok());
}

}  // namespace
}  // namespace sluice::router
