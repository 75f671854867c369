#include "batch/row_exchange.h"

#include <algorithm>

#include "base/plant.h"
#include "kv/device_pool.h"

namespace sluice {

void RowExchange::Plan(const ForwardBatch& batch, const RankSplit& split, int32_t ranks) {
  rows_per_rank_ = split.compute_rows_per_rank();
  stores_.resize(size_t(ranks));
  for (auto& s : stores_) s.clear();
  int32_t valid_before = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    const RankPart& part = split.part(Rank(r));
    const int32_t base = Planted(Plant::kValidSourceOffset) ? valid_before : r * rows_per_rank_;
    for (size_t k = 0; k < part.seqs.size(); ++k) {
      const BatchSeq& s = part.seqs[k];
      int32_t rows = s.num_rows;
      if (Planted(Plant::kDummyRowWritten)) rows = part.compute_of_seq[k];
      for (int32_t i = s.known; i < rows; ++i) {
        const int32_t position = s.start + i, index = position / int32_t(kPageTokens);
        if (index >= s.num_pages) break;
        const int32_t valid = s.row_begin + i;
        const int32_t place =
            Planted(Plant::kPaddingAsSuffix) ? valid : part.compute_row[size_t(s.row_begin)].value + i;
        const PageId page = batch.pages[size_t(s.page_begin + index)];
        const int32_t owner = Planted(Plant::kWrongOwnerSpace) ? index % ranks : PageOwner(page, ranks);
        stores_[size_t(owner)].push_back(
            {cp::GatheredRow(base + place), PageLocal(page, ranks), position % int32_t(kPageTokens)});
      }
    }
    valid_before += part.valid_rows();
  }
}

void PagesSeen(std::span<const BatchSeq> seqs, std::span<const PageId> pages, const BatchSeq& s,
               int32_t ranks, std::vector<PageRead>* out) {
  out->clear();
  for (int32_t p = 0; p < s.num_pages; ++p) {
    const PageId page = pages[size_t(s.page_begin + p)];
    if (Planted(Plant::kBatchInverse)) {
      // Asks which request of the batch has the page: the last one that lists it.
      const auto last = std::find(pages.rbegin(), pages.rend(), page);
      const auto at = int32_t(pages.rend() - last) - 1;
      const auto owner = std::find_if(seqs.begin(), seqs.end(), [&](const BatchSeq& q) {
        return at >= q.page_begin && at < q.page_begin + q.num_pages;
      });
      if (owner != seqs.end() && owner->slot != s.slot) continue;
    }
    out->push_back({Rank(PageOwner(page, ranks)), PageLocal(page, ranks)});
  }
}

RankBytes BytesOf(const ForwardBatch& batch, const RankSplit& split, Rank rank, int32_t ranks,
                  const KvLayout& layout) {
  const int64_t row_bytes = layout.latent_row_bytes() * int64_t(layout.latent_layers().size()) +
                            layout.index_page_bytes() / kPageTokens * int64_t(layout.index_layers().size());
  const RankPart& part = split.part(rank);
  int64_t put_rows = 0, got_pages = 0;
  for (size_t i = 0; i < part.seqs.size(); ++i) {
    const BatchSeq& s = part.seqs[i];
    for (int32_t k = 0; k < s.num_rows; ++k)
      put_rows +=
          PageOwner(batch.pages[size_t(s.page_begin + (s.start + k) / kPageTokens)], ranks) != rank.value;
    // A sequence's later segment on this rank sees all that the earlier one saw, and more.
    const bool later = std::any_of(part.seqs.begin() + long(i) + 1, part.seqs.end(),
                                   [&](const BatchSeq& o) { return o.slot == s.slot; });
    if (later) continue;
    for (int32_t p = 0; p < s.num_pages; ++p)
      got_pages += PageOwner(batch.pages[size_t(s.page_begin + p)], ranks) != rank.value;
  }
  return {put_rows * row_bytes, got_pages * layout.page_bytes()};
}

int64_t BytesBetweenRanks(const ForwardBatch& batch, const RankSplit& split, int32_t ranks,
                          const KvLayout& layout) {
  int64_t bytes = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    const RankBytes b = BytesOf(batch, split, Rank(r), ranks, layout);
    bytes += b.put + b.got;
  }
  return bytes;
}

}  // namespace sluice
