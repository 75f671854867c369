#include "batch/rank_split.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/random.h"
#include "kv/kv_layout.h"

namespace sluice {
namespace {

struct SeqSpec {
  int32_t start, rows;
  bool decode;
  int32_t cached = 0;
};

ForwardBatch Batch(const std::vector<SeqSpec>& specs, int32_t first_page = 100) {
  ForwardBatch b;
  int32_t slot = 0, page = first_page;
  for (const SeqSpec& spec : specs) {
    BatchSeq s;
    s.slot = SlotId(slot++);
    s.row_begin = b.rows();
    s.num_rows = spec.rows;
    s.start = spec.start;
    s.cached = spec.cached;
    s.decode = spec.decode;
    s.page_begin = int32_t(b.pages.size());
    s.num_pages = int32_t(CeilDiv(spec.start + spec.rows, kPageTokens));
    for (int32_t i = 0; i < s.num_pages; ++i) b.pages.push_back(PageId(page++));
    b.tokens.resize(b.tokens.size() + size_t(spec.rows), 1);
    b.seqs.push_back(s);
  }
  return b;
}

constexpr int64_t kPool = 1000;

TEST(RankSplit, EveryRowRunsOnceWithItsOwnPositionAndPages) {
  SeededStream random(3);
  for (int round = 0; round < 400; ++round) {
    std::vector<SeqSpec> specs;
    const int n = int(1 + random.Below(5));
    for (int i = 0; i < n; ++i) {
      const bool decode = random.Chance(0.4);
      specs.push_back(
          {int32_t(random.Below(500)), int32_t(decode ? 1 + random.Below(4) : 1 + random.Below(90)), decode});
    }
    const int32_t ranks = int32_t(1 + random.Below(8));
    const ForwardBatch b = Batch(specs);
    RankSplit split;
    ASSERT_TRUE(split.Plan(b, ranks, kPool).ok());
    std::map<int32_t, int> seen;
    for (int32_t r = 0; r < ranks; ++r) {
      const RankPart& part = split.part(Rank(r));
      std::set<int32_t> places;
      int32_t row = 0;
      for (const BatchSeq& s : part.seqs) {
        ASSERT_EQ(s.row_begin, row);
        const BatchSeq& whole = b.seqs[size_t(s.slot.value)];
        ASSERT_EQ(s.page_begin, whole.page_begin);
        ASSERT_LE(s.num_pages, whole.num_pages);
        for (int32_t i = 0; i < s.num_rows; ++i) {
          const int32_t batch_row = part.batch_row[size_t(row + i)];
          ++seen[batch_row];
          ASSERT_EQ(s.start + i, whole.start + batch_row - whole.row_begin) << "the row's absolute position";
          ASSERT_EQ(split.Where(batch_row).rank.value, r);
          ASSERT_EQ(split.Where(batch_row).row, row + i);
          const int32_t place = part.compute_row[size_t(row + i)].value;
          ASSERT_LT(place, split.compute_rows_per_rank());
          ASSERT_TRUE(places.insert(place).second) << "two rows at one place of the padded buffer";
        }
        if (whole.decode) {
          ASSERT_EQ(r, HomeRank(whole.slot, ranks).value);
        }
        row += s.num_rows;
      }
    }
    ASSERT_EQ(int32_t(seen.size()), b.rows());
    for (const auto& [batch_row, count] : seen) ASSERT_EQ(count, 1);
  }
}

TEST(RankSplit, RowsThatThePagesHoldStayTheFirstOfTheRequest) {
  ForwardBatch b = Batch({{127, 38, false, 128}});
  b.seqs[0].known = 1;  // position 127: its cached prefix reaches past the first row by that row
  RankSplit split;
  ASSERT_TRUE(split.Plan(b, 4, kPool).ok());
  int32_t known = 0;
  for (int32_t r = 0; r < 4; ++r)
    for (const BatchSeq& s : split.part(Rank(r)).seqs) {
      known += s.known;
      EXPECT_EQ(s.known, s.start == 127 ? 1 : 0);
    }
  EXPECT_EQ(known, 1);
  b.seqs[0].known = 0;
  EXPECT_FALSE(split.Plan(b, 4, kPool).ok());
}

TEST(RankSplit, PlanOfABatchIsThePlansOfItsRequests) {
  const ForwardBatch both = Batch({{128, 37, false, 128}, {0, 5, false}});
  RankSplit split;
  ASSERT_TRUE(split.Plan(both, 4, kPool).ok());
  for (int which = 0; which < 2; ++which) {
    ForwardBatch one = both;
    one.seqs = {both.seqs[size_t(which)]};
    one.seqs[0].row_begin = 0;
    one.tokens.resize(size_t(one.seqs[0].num_rows));
    RankSplit alone;
    ASSERT_TRUE(alone.Plan(one, 4, kPool).ok());
    for (int32_t r = 0; r < 4; ++r) {
      std::vector<BatchSeq> mine;
      for (const BatchSeq& s : split.part(Rank(r)).seqs)
        if (s.slot == one.seqs[0].slot) mine.push_back(s);
      ASSERT_EQ(mine.size(), alone.part(Rank(r)).seqs.size());
      for (size_t i = 0; i < mine.size(); ++i) {
        EXPECT_EQ(mine[i].start, alone.part(Rank(r)).seqs[i].start);
        EXPECT_EQ(mine[i].num_rows, alone.part(Rank(r)).seqs[i].num_rows);
      }
    }
  }
}

// One test a forward mode: who is split, and who needs no page plan.
TEST(RankSplit, PrefillIsSplitAndValidated) {
  ForwardBatch b = Batch({{0, 100, false}});
  RankSplit split;
  ASSERT_TRUE(split.Plan(b, 2, kPool).ok());
  EXPECT_EQ(split.mode(), ForwardMode::kPrefill);
  EXPECT_TRUE(split.split());
  b.pages[1] = b.pages[0];
  EXPECT_FALSE(split.Plan(b, 2, kPool).ok());
}
TEST(RankSplit, DecodeAndVerifyRunAtHomeAndCarryNoPagePlan) {
  ForwardBatch b = Batch({{70, 1, true}, {90, 4, true}, {10, 2, true}});
  b.seqs[0].cached = 3;  // would break the page plan's rules, which do not apply
  RankSplit split;
  ASSERT_TRUE(split.Plan(b, 2, kPool).ok());
  EXPECT_EQ(split.mode(), ForwardMode::kDecode);
  EXPECT_FALSE(split.split());
  EXPECT_EQ(split.part(Rank(0)).valid_rows(), 3);
  EXPECT_EQ(split.part(Rank(1)).valid_rows(), 4);
}
TEST(RankSplit, MixedBatchesHoldBoth) {
  const ForwardBatch b = Batch({{70, 1, true}, {0, 8, false}});
  RankSplit split;
  ASSERT_TRUE(split.Plan(b, 2, kPool).ok());
  EXPECT_EQ(split.mode(), ForwardMode::kMixed);
  EXPECT_EQ(split.part(Rank(0)).valid_rows(), 5);
  EXPECT_EQ(split.part(Rank(1)).valid_rows(), 4);
}
TEST(RankSplit, IdleHasNoRows) {
  RankSplit split;
  ASSERT_TRUE(split.Plan(ForwardBatch{}, 4, kPool).ok());
  EXPECT_EQ(split.mode(), ForwardMode::kIdle);
  EXPECT_EQ(split.compute_rows_per_rank(), 0);
}

TEST(RankSplit, ATinyExtendAfterALongPrefixStaysSplit) {
  const ForwardBatch b = Batch({{12800, 3, false, 12800}});
  RankSplit split;
  ASSERT_TRUE(split.Plan(b, 8, kPool).ok());
  EXPECT_TRUE(split.split());
  EXPECT_EQ(split.compute_rows_per_rank(), 2);
}

TEST(PagePlan, EachBrokenRuleIsNamedWithItsValues) {
  std::vector<PageId> scratch;
  const ForwardBatch good = Batch({{128, 40, false, 128}});
  ASSERT_TRUE(ValidatePagePlan(good, good.seqs[0], 2, kPool, &scratch).ok());
  const auto expect = [&](auto change, const char* words) {
    ForwardBatch b = good;
    change(b);
    const Status s = ValidatePagePlan(b, b.seqs[0], 2, kPool, &scratch);
    EXPECT_FALSE(s.ok()) << words;
    EXPECT_NE(Message(s).find(words), std::string_view::npos) << s;
  };
  expect([](ForwardBatch& b) { b.pages[2] = b.pages[0]; }, "page 100 is listed twice");
  expect([](ForwardBatch& b) { b.seqs[0].num_pages = 2; }, "2 pages for 168 positions, 3 needed");
  expect([](ForwardBatch& b) { b.pages[0] = PageId(1); }, "local page 0 of lane 1");
  expect([](ForwardBatch& b) { b.pages[0] = PageId(2000); },
         "local page 1000 of lane 0, which holds [1, 1000)");
  expect([](ForwardBatch& b) { b.seqs[0].cached = 100; }, "prefix of 100 tokens does not end on a page");
  expect([](ForwardBatch& b) { b.seqs[0].cached = 192; }, "reaches past the first row at 128");
  expect([](ForwardBatch& b) { b.seqs[0].row_begin = 5; }, "rows [5, 45) of a batch of 40");
  expect([](ForwardBatch& b) { b.seqs[0].page_begin = 1; }, "pages [1, 4) of a batch that lists 3");
  expect([](ForwardBatch& b) { b.seqs[0].num_rows = 0; }, "0 rows");
}

TEST(RankSplit, TablesGrowWithTheBatchsPagesAndNotWithThePool) {
  std::vector<SeqSpec> specs;
  for (int i = 0; i < 10; ++i) specs.push_back({99840, 160, false, 99840});
  const ForwardBatch b = Batch(specs, 10);
  RankSplit split;
  ASSERT_TRUE(split.Plan(b, 8, 40000).ok());
  const int64_t lists = int64_t(b.pages.size() * sizeof(PageId));
  std::printf("10 requests of 100k tokens: page lists %ld bytes, lists + tables %ld bytes\n", long(lists),
              long(lists + split.table_bytes()));
  EXPECT_LE(lists + split.table_bytes(), 4 * lists);
}

}  // namespace
}  // namespace sluice
