#include "batch/row_exchange.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/random.h"
#include "kv/device_pool.h"

namespace sluice {
namespace {

constexpr int64_t kPool = 4096;

// Sequences of a random batch; every second one shares the first pages of the one before it.
ForwardBatch RandomBatch(SeededStream& random, int32_t ranks, int sequences) {
  ForwardBatch b;
  int32_t next = ranks;
  std::vector<PageId> before;
  for (int i = 0; i < sequences; ++i) {
    BatchSeq s;
    s.slot = SlotId(i);
    s.decode = random.Chance(0.3);
    const auto prefix = int32_t(random.Below(5));
    s.start = prefix * 64 + (s.decode ? int32_t(random.Below(64)) : 0);
    s.cached = prefix * 64;
    s.num_rows = 1 + int32_t(random.Below(random.Chance(0.5) ? 9 : 150));
    s.row_begin = b.rows();
    s.page_begin = int32_t(b.pages.size());
    s.num_pages = int32_t(CeilDiv(s.start + s.num_rows, 64));
    std::vector<PageId> mine;
    for (int32_t p = 0; p < s.num_pages; ++p) {
      const bool share =
          i % 2 == 1 && p < prefix && p < int32_t(before.size()) && b.seqs.back().cached > p * 64;
      next += 1 + int32_t(random.Below(3));
      mine.push_back(share ? before[size_t(p)] : PageId(next));
    }
    b.pages.insert(b.pages.end(), mine.begin(), mine.end());
    b.tokens.resize(b.tokens.size() + size_t(s.num_rows), 1);
    b.seqs.push_back(s);
    before = mine;
  }
  return b;
}

TEST(RowExchange, EveryRowIsStoredOnceByItsPagesOwnerFromItsRanksPaddedPlace) {
  SeededStream random(11);
  RankSplit split;
  RowExchange exchange;
  for (int round = 0; round < 300; ++round) {
    const int32_t ranks = 1 + int32_t(random.Below(8));
    const ForwardBatch b = RandomBatch(random, ranks, 1 + int(random.Below(6)));
    ASSERT_TRUE(split.Plan(b, ranks, kPool).ok());
    exchange.Plan(b, split, ranks);
    ASSERT_EQ(exchange.rows_per_rank(), split.compute_rows_per_rank());
    // Place in the gathered buffers > the row there.
    std::map<int32_t, int32_t> row_at;
    for (int32_t r = 0; r < ranks; ++r)
      for (int32_t v = 0; v < split.part(Rank(r)).valid_rows(); ++v)
        row_at[r * exchange.rows_per_rank() + split.part(Rank(r)).compute_row[size_t(v)].value] =
            split.part(Rank(r)).batch_row[size_t(v)];
    std::set<std::pair<int32_t, int32_t>> places;
    int32_t stored = 0;
    for (int32_t r = 0; r < ranks; ++r)
      for (const StoredRow& row : exchange.stores(Rank(r))) {
        ++stored;
        ASSERT_TRUE(row_at.contains(row.source.value)) << "a dummy row is stored";
        const int32_t batch_row = row_at[row.source.value];
        const auto s = std::find_if(b.seqs.begin(), b.seqs.end(), [&](const BatchSeq& q) {
          return batch_row >= q.row_begin && batch_row < q.row_begin + q.num_rows;
        });
        const int32_t position = s->start + batch_row - s->row_begin;
        const PageId page = b.pages[size_t(s->page_begin + position / 64)];
        ASSERT_EQ(PageOwner(page, ranks), r);
        ASSERT_EQ(PageLocal(page, ranks), row.local);
        ASSERT_EQ(position % 64, row.offset);
        ASSERT_TRUE(places.insert({page.value, row.offset}).second) << "two rows at one place";
      }
    ASSERT_EQ(stored, b.rows());
  }
}

TEST(RowExchange, ReadsAreEachSequencesOwnPagesThoughTheBatchSharesSome) {
  SeededStream random(12);
  RankSplit split;
  std::vector<PageRead> reads;
  int shared = 0;
  for (int round = 0; round < 300; ++round) {
    const int32_t ranks = 2 + int32_t(random.Below(7));
    const ForwardBatch b = RandomBatch(random, ranks, 2 + int(random.Below(5)));
    ASSERT_TRUE(split.Plan(b, ranks, kPool).ok());
    shared += std::set<PageId>(b.pages.begin(), b.pages.end()).size() < b.pages.size();
    for (int32_t r = 0; r < ranks; ++r)
      for (size_t k = 0; k < split.part(Rank(r)).seqs.size(); ++k) {
        const BatchSeq& s = split.part(Rank(r)).seqs[k];
        PagesSeen(b.seqs, b.pages, s, ranks, &reads);
        ASSERT_EQ(int32_t(reads.size()), s.num_pages);
        for (int32_t p = 0; p < s.num_pages; ++p) {
          const PageId page = b.pages[size_t(s.page_begin + p)];
          ASSERT_EQ(reads[size_t(p)].owner.value, PageOwner(page, ranks));
          ASSERT_EQ(reads[size_t(p)].local, PageLocal(page, ranks));
        }
      }
  }
  EXPECT_GT(shared, 50);
}

}  // namespace
}  // namespace sluice
