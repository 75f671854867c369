#include "exec/rank_pages.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kv/layout_fixture.h"

namespace sluice {
namespace {

std::unique_ptr<RankPages> MakePages(const DevicePool& pool, const RankPagesOptions& options,
                                     Communicator& comm) {
  auto fetch = MakeThreadCommunicators(options.ranks, {});
  return RankPages::Make(pool, options, comm, std::move(fetch[size_t(comm.rank().value)])).value();
}

uint8_t Pattern(PageId page, int64_t at) { return uint8_t(page.value * 37 + at * 11 + at / 251); }

struct Step {
  std::vector<BatchSeq> seqs;
  std::vector<PageId> pages;
  int32_t rows = 0;
  void Add(int32_t start, int32_t num_rows, std::vector<PageId> list, bool decode) {
    BatchSeq s;
    s.slot = SlotId(int32_t(seqs.size()));
    s.row_begin = rows;
    s.num_rows = num_rows;
    s.start = start;
    s.decode = decode;
    s.page_begin = int32_t(pages.size());
    s.num_pages = int32_t(list.size());
    pages.insert(pages.end(), list.begin(), list.end());
    rows += num_rows;
    seqs.push_back(s);
  }
};

// One decode row at position 130 on rank 0 of 2; the other rank owns the second page and the last.
TEST(RankPages, ADecodeRowGoesToItsOwnerAndOnlyWhatItSelectedComesBack) {
  const KvLayout layout = testing::MakeLayout(testing::Small(), DType::kF8E4M3, DType::kF8E4M3);
  const auto pool = DevicePool::Make(layout, 2, 8).value();
  for (int32_t p = 2; p < 16; ++p)
    for (const KvPiece& piece : layout.pieces())
      for (int64_t i = 0; i < piece.bytes; ++i)
        pool->Piece(piece, PageId(p))[i] = std::byte(Pattern(PageId(p), i));
  const auto comms = MakeThreadCommunicators(2, {});
  const auto rank =
      MakePages(*pool, {.ranks = 2, .max_rows = 100, .buffer_bytes = 1 << 20, .topk = 64}, *comms[0]);

  Step step;
  step.Add(130, 1, {PageId(2), PageId(3), PageId(5)}, true);
  const std::vector<int32_t> prefix = {130};
  RankPass pass;
  pass.batch = pass.seqs = step.seqs;
  pass.pages = step.pages;
  pass.prefix = prefix;
  pass.first = LogicalLayer(0);
  pass.last = LogicalLayer(2);
  ModelBatch batch;
  batch.rows = 1;
  ASSERT_TRUE(rank->Begin(pass, &batch).ok());
  EXPECT_EQ(batch.seqs.pages[0], PageId(2)) << "the lane's own page is read where it lies";
  const int64_t latent_row = layout.latent_row_bytes(), index_row = layout.index_dim() + 4;
  int64_t got = 0, put = 0;
  for (int32_t l = 0; l < 3; ++l) {
    const LogicalLayer layer(l);
    const bool index = layout.IndexSlot(layer).valid();
    const ops::OwnBlocks latents = rank->Own(KvComponent::kLatent, layer),
                         keys = rank->Own(KvComponent::kIndex, layer);
    EXPECT_EQ(latents.lane, 0) << "no other lane can be reached";
    const auto block = [&](const ops::OwnBlocks& own, PageId id, int64_t bytes) {
      EXPECT_GE(id.value, own.first);
      return own.base + (id.value - own.first) * bytes;
    };
    std::byte* staged =
        block(latents, batch.slots.page[0], layout.latent_page_bytes()) + batch.slots.offset[0] * latent_row;
    std::memset(staged, 0xA0 + l, size_t(latent_row));
    std::byte* key = block(keys, batch.slots.page[0], layout.index_page_bytes());
    if (index) {
      std::memset(key + batch.slots.offset[0] * layout.index_dim(), 0xB0 + l, size_t(layout.index_dim()));
      std::memset(key + 64 * layout.index_dim() + batch.slots.offset[0] * 4, 0xC0 + l, 4);
    }
    rank->Ready(layer);
    const std::byte* page = pool->Latent(layer, PageId(5));
    EXPECT_EQ(page[2 * latent_row], std::byte(0xA0 + l));
    EXPECT_EQ(page[3 * latent_row - 1], std::byte(0xA0 + l));
    EXPECT_EQ(page[3 * latent_row], std::byte(Pattern(PageId(5), 3 * latent_row)));
    put += latent_row;
    if (index) {
      const std::byte* stored = pool->Index(layer, PageId(5));
      EXPECT_EQ(stored[2 * layout.index_dim()], std::byte(0xB0 + l));
      EXPECT_EQ(stored[64 * layout.index_dim() + 8], std::byte(0xC0 + l));
      for (const int32_t i : {1, 2})
        EXPECT_EQ(std::memcmp(block(keys, batch.seqs.pages[i], layout.index_page_bytes()),
                              pool->Index(layer, step.pages[size_t(i)]), size_t(layout.index_page_bytes())),
                  0);
      put += index_row;
      got += 2 * layout.index_page_bytes();
    }
    std::vector<int32_t> selected(64, -1);
    const std::vector<int32_t> chosen = {0, 64, 65, 70, 128, 130};
    std::copy(chosen.begin(), chosen.end(), selected.begin());
    const int32_t count = int32_t(chosen.size());
    rank->Fetch(layer, selected.data(), &count);
    rank->Fetch(layer, selected.data(), &count);  // nothing is fetched twice
    const std::byte* second = block(latents, batch.seqs.pages[1], layout.latent_page_bytes());
    const std::byte* last = block(latents, batch.seqs.pages[2], layout.latent_page_bytes());
    for (const int32_t row : {0, 1, 6})
      EXPECT_EQ(std::memcmp(second + row * latent_row, pool->Latent(layer, PageId(3)) + row * latent_row,
                            size_t(latent_row)),
                0);
    for (const int32_t row : {0, 2})
      EXPECT_EQ(std::memcmp(last + row * latent_row, page + row * latent_row, size_t(latent_row)), 0);
    EXPECT_EQ(second[3 * latent_row + 1], std::byte(0)) << "a row that nobody selected has come";
    got += 5 * latent_row;
  }
  rank->End();
  const CommStats& moved = comms[0]->stats();
  EXPECT_EQ(moved.bytes_put, put);
  EXPECT_EQ(moved.bytes_got + rank->fetched().bytes_got, got);
  EXPECT_EQ(rank->pages_in_place(), 0);
}

TEST(RankPages, PagesWithoutRoomAreReadInPlaceAndCounted) {
  const KvLayout layout = testing::MakeLayout(testing::Small());
  const auto pool = DevicePool::Make(layout, 2, 8).value();
  const auto comms = MakeThreadCommunicators(2, {});
  const auto rank = MakePages(*pool, {.ranks = 2, .max_rows = 100, .buffer_bytes = 1, .topk = 64}, *comms[0]);
  Step step;
  step.Add(191, 1, {PageId(3), PageId(5), PageId(2)}, true);
  RankPass pass;
  pass.batch = pass.seqs = step.seqs;
  pass.pages = step.pages;
  pass.first = pass.last = LogicalLayer(1);
  ModelBatch batch;
  batch.rows = 1;
  ASSERT_TRUE(rank->Begin(pass, &batch).ok());
  EXPECT_GE(batch.seqs.pages[0].value, rank->Own(KvComponent::kLatent, LogicalLayer(1)).first);
  EXPECT_EQ(batch.seqs.pages[1], PageId(5));
  EXPECT_EQ(batch.seqs.pages[2], PageId(2));
  EXPECT_EQ(rank->Own(KvComponent::kLatent, LogicalLayer(1)).lane, -1);
  rank->Ready(LogicalLayer(1));
  rank->End();
  EXPECT_EQ(rank->pages_in_place(), 1);
  EXPECT_EQ(comms[0]->stats().bytes_got, layout.latent_page_bytes())
      << "what is read in place crosses ranks too";
}

TEST(RankPages, TablesGrowWithTheBatchsPagesAndNotWithThePool) {
  const KvLayout layout = testing::MakeLayout(testing::Small());
  const auto pool = DevicePool::Make(layout, 8, 5000).value();
  const auto comms = MakeThreadCommunicators(8, {});
  const auto rank =
      MakePages(*pool, {.ranks = 8, .max_rows = 400, .buffer_bytes = 1 << 20, .topk = 64}, *comms[3]);
  ForwardBatch b;
  int32_t page = 10;
  for (int i = 0; i < 10; ++i) {
    BatchSeq s;
    s.slot = SlotId(i);
    s.row_begin = b.rows();
    s.num_rows = 160;
    s.start = s.cached = 99840;
    s.page_begin = int32_t(b.pages.size());
    s.num_pages = 1563;
    for (int32_t p = 0; p < s.num_pages; ++p) b.pages.push_back(PageId(page++));
    b.tokens.resize(b.tokens.size() + 160, 1);
    b.seqs.push_back(s);
  }
  RankSplit split;
  ASSERT_TRUE(split.Plan(b, 8, 5000).ok());
  const RankPart& part = split.part(Rank(3));
  RankPass pass;
  pass.batch = b.seqs;
  pass.seqs = part.seqs;
  pass.pages = b.pages;
  pass.places = part.compute_row;
  pass.prefix = part.prefix_of_seq;
  pass.first = pass.last = LogicalLayer(0);
  ModelBatch batch;
  batch.rows = part.valid_rows();
  ASSERT_TRUE(rank->Begin(pass, &batch).ok());
  rank->End();
  const int64_t lists = int64_t(b.pages.size() * sizeof(PageId));
  std::printf(
      "10 requests of 100k tokens: page lists %ld bytes; of one rank, lists + split + its own list %ld "
      "bytes\n",
      long(lists), long(lists + split.table_bytes() + rank->table_bytes()));
  EXPECT_LE(lists + split.table_bytes() + rank->table_bytes(), 4 * lists);
}

}  // namespace
}  // namespace sluice
