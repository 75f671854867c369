#include "cp/split.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

namespace sluice::cp {
namespace {

// One request's rows on each rank: (segment, valid, compute, token_begin) without offsets that depend on the
// batch.
void ExpectSameSegments(const CpPlan& batch, int32_t request, const CpPlan& alone) {
  for (int32_t r = 0; r < batch.ranks; ++r) {
    std::vector<Segment> mine;
    for (const Segment& s : batch.rank[r].segments)
      if (s.request == request) mine.push_back(s);
    ASSERT_EQ(mine.size(), alone.rank[r].segments.size());
    for (size_t i = 0; i < mine.size(); ++i) {
      const Segment& a = alone.rank[r].segments[i];
      EXPECT_EQ(mine[i].index, a.index);
      EXPECT_EQ(mine[i].valid, a.valid);
      EXPECT_EQ(mine[i].compute, a.compute);
      EXPECT_EQ(mine[i].token_begin, a.token_begin);
    }
  }
}

void CheckPlan(const std::vector<int32_t>& lengths, int32_t ranks) {
  auto made = PlanSplit(lengths, ranks);
  ASSERT_TRUE(made.ok());
  const CpPlan& p = *made;
  const int32_t total = std::accumulate(lengths.begin(), lengths.end(), 0);
  ASSERT_EQ(p.total_tokens(), total);
  std::vector<int> seen(total, 0);
  int32_t valid_total = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    const RankPlan& rank = p.rank[r];
    ASSERT_EQ(int32_t(rank.global_of_row.size()), p.rows_per_rank) << "collectives need equal sizes";
    int32_t row = 0, valid = 0;
    for (const Segment& s : rank.segments) {
      ASSERT_EQ(s.row_begin.value, row);
      ASSERT_EQ(s.valid_begin.value, valid);
      ASSERT_LE(s.valid, s.compute);
      ASSERT_EQ(SegmentRank(ranks, s.index).value, r);
      for (int32_t i = 0; i < s.compute; ++i) {
        const GlobalRow g = rank.global_of_row[row + i];
        ASSERT_EQ(g.valid(), i < s.valid) << "no valid row after the segment's padded part begins";
        if (!g.valid()) continue;
        ++seen[g.value];
        ASSERT_EQ(p.gathered_of_global[g.value].value, r * p.rows_per_rank + row + i);
      }
      row += s.compute;
      valid += s.valid;
    }
    ASSERT_EQ(row, p.rows_per_rank);
    ASSERT_EQ(valid, rank.valid_rows);
    valid_total += valid;
  }
  ASSERT_EQ(valid_total, total);
  for (int n : seen) ASSERT_EQ(n, 1);
  for (size_t b = 0; b < lengths.size(); ++b) {
    const RowLocation last = LastToken(p, int32_t(b));
    ASSERT_EQ(p.rank[last.rank.value].global_of_row[last.row.value].value,
              p.request_begin[b].value + lengths[b] - 1);
  }
}

TEST(Split, IsABijectionForEveryLengthUpToFortyAndEightRanks) {
  for (int32_t ranks = 1; ranks <= 8; ++ranks)
    for (int32_t a = 1; a <= 40; ++a) {
      CheckPlan({a}, ranks);
      for (int32_t b = 1; b <= 40; ++b) CheckPlan({a, b}, ranks);
    }
}

TEST(Split, IsABijectionForTriples) {
  for (int32_t ranks = 1; ranks <= 8; ++ranks)
    for (int32_t a = 1; a <= 40; ++a)
      for (int32_t b = 1; b <= 40; ++b)
        for (int32_t c = 1; c <= 40; ++c) CheckPlan({a, b, c}, ranks);
}

TEST(Split, PlanOfABatchIsThePlansOfItsRequests) {
  for (int32_t ranks = 1; ranks <= 8; ++ranks)
    for (int32_t a = 1; a <= 40; a += 3)
      for (int32_t b = 1; b <= 40; ++b) {
        const std::vector<int32_t> lengths = {a, b, 7};
        const auto batch = PlanSplit(lengths, ranks);
        for (int32_t i = 0; i < 3; ++i) {
          const int32_t one = lengths[i];
          ExpectSameSegments(*batch, i, *PlanSplit({&one, 1}, ranks));
        }
      }
}

TEST(Split, TinyExtendsKeepEveryRankInTheCollective) {
  const int32_t three = 3;
  const auto p = PlanSplit({&three, 1}, 8);
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p->rows_per_rank, 2);
  EXPECT_EQ(LastToken(*p, 0).rank.value, 2) << "segment 2 holds the last token and is rank 2's early one";
}

TEST(Split, ZigzagGivesRankZeroTheFirstAndTheLastSegment) {
  const int32_t n = 64;
  const auto p = PlanSplit({&n, 1}, 4);
  EXPECT_EQ(p->rank[0].segments[0].index, 0);
  EXPECT_EQ(p->rank[0].segments[1].index, 7);
  EXPECT_EQ(p->rank[3].segments[0].index, 3);
  EXPECT_EQ(p->rank[3].segments[1].index, 4);
  EXPECT_EQ(CausalLength(p->rank[0].segments[1], 100), 164);
  EXPECT_EQ(LastToken(*p, 0).rank.value, 0);
}

TEST(Split, RerangeRestoresTokenOrderAndDropsDummies) {
  for (int32_t ranks : {1, 2, 3, 4, 8}) {
    const std::vector<int32_t> lengths = {1, 17, 5, 40};
    const auto p = PlanSplit(lengths, ranks);
    std::vector<int32_t> src(size_t(ranks) * p->rows_per_rank, -7), dst(p->total_tokens(), -1);
    for (int32_t r = 0; r < ranks; ++r)
      for (int32_t i = 0; i < p->rows_per_rank; ++i)
        if (p->rank[r].global_of_row[i].valid())
          src[size_t(r) * p->rows_per_rank + i] = p->rank[r].global_of_row[i].value;
    Rerange(*p, reinterpret_cast<const std::byte*>(src.data()), 4, reinterpret_cast<std::byte*>(dst.data()));
    for (int32_t i = 0; i < p->total_tokens(); ++i) EXPECT_EQ(dst[i], i);
  }
}

TEST(Split, RefusesImpossibleInputWithTheValuesNamed) {
  const int32_t zero = 0, one = 1;
  EXPECT_NE(Message(PlanSplit({&zero, 1}, 2).status()).find("0 new tokens"), std::string_view::npos);
  EXPECT_NE(Message(PlanSplit({&one, 1}, 0).status()).find("0 ranks"), std::string_view::npos);
}

}  // namespace
}  // namespace sluice::cp
