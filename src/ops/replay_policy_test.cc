#include "ops/replay_policy.h"

#include <gtest/gtest.h>

namespace sluice::ops {
namespace {

ReplayKey KeyOf(int64_t rows) { return {rows}; }

TEST(ReplayPolicy, RecordsTheSecondComingInTheWarmUpAndOftenOnesLater) {
  ReplayPolicy policy(8, 5);
  std::optional<ReplayKey> evict;
  EXPECT_FALSE(policy.Comes(KeyOf(1), &evict));
  EXPECT_TRUE(policy.Comes(KeyOf(1), &evict));
  EXPECT_FALSE(policy.Comes(KeyOf(2), &evict));
  policy.WarmedUp();
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(policy.Comes(KeyOf(2), &evict)) << i;
  EXPECT_TRUE(policy.Comes(KeyOf(2), &evict));
  EXPECT_FALSE(evict.has_value());
  EXPECT_EQ(policy.recorded(), 2);
}

TEST(ReplayPolicy, TheOneThatWasNotReplayedForLongestGoesAndNoHotOneDoes) {
  ReplayPolicy policy(3, 2);
  std::optional<ReplayKey> evict;
  for (const int64_t rows : {1, 2, 3})
    for (int i = 0; i < 2; ++i) EXPECT_EQ(policy.Comes(KeyOf(rows), &evict), i == 1);
  policy.WarmedUp();
  for (const int64_t rows : {1, 2, 3}) policy.Replayed(KeyOf(rows));
  // All three were used just now.
  EXPECT_FALSE(policy.Comes(KeyOf(4), &evict));
  EXPECT_FALSE(policy.Comes(KeyOf(4), &evict));
  EXPECT_FALSE(evict.has_value());
  for (int i = 0; i < 3; ++i) policy.Replayed(KeyOf(1)), policy.Replayed(KeyOf(3));
  EXPECT_FALSE(policy.Comes(KeyOf(4), &evict));
  EXPECT_TRUE(policy.Comes(KeyOf(4), &evict));
  EXPECT_EQ(evict, KeyOf(2));
  EXPECT_EQ(policy.recorded(), 3);
  EXPECT_FALSE(policy.Comes(KeyOf(2), &evict)) << "it counts from the start";
}

TEST(ReplayPolicy, KeysThatComeOnceAreForgotten) {
  ReplayPolicy policy(4, 3);
  policy.WarmedUp();
  std::optional<ReplayKey> evict;
  for (int64_t rows = 0; rows < 1000; ++rows) EXPECT_FALSE(policy.Comes(KeyOf(rows), &evict));
  EXPECT_EQ(policy.recorded(), 0);
  // One among them that comes again and again is recorded all the same.
  bool recorded = false;
  for (int64_t rows = 2000; rows < 2100 && !recorded; ++rows) {
    EXPECT_FALSE(policy.Comes(KeyOf(rows), &evict));
    recorded = policy.Comes(KeyOf(7777), &evict);
  }
  EXPECT_TRUE(recorded);
}

TEST(ReplayPolicy, AFailedRecordingMakesRoom) {
  ReplayPolicy policy(1, 2);
  std::optional<ReplayKey> evict;
  policy.Comes(KeyOf(1), &evict);
  EXPECT_TRUE(policy.Comes(KeyOf(1), &evict));
  policy.Failed(KeyOf(1));
  EXPECT_EQ(policy.recorded(), 0);
  policy.Comes(KeyOf(2), &evict);
  EXPECT_TRUE(policy.Comes(KeyOf(2), &evict));
  EXPECT_FALSE(evict.has_value());
}

}  // namespace
}  // namespace sluice::ops
