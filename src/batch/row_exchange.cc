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

LayerBytes BytesOfLayers(const KvLayout& layout, LogicalLayer first, LogicalLayer end) {
  LayerBytes bytes;
  for (const LogicalLayer layer : layout.latent_layers()) {
    if (layer.value < first.value || layer.value >= end.value) continue;
    bytes.row += layout.latent_row_bytes();
    bytes.page += layout.latent_page_bytes();
    if (!layout.IndexSlot(layer).valid()) continue;
    bytes.row += layout.index_page_bytes() / kPageTokens;
    bytes.page += layout.index_page_bytes();
  }
  return bytes;
}

RankBytes BytesOf(std::span<const BatchSeq> seqs, std::span<const PageId> pages, Rank rank, int32_t ranks,
                  const LayerBytes& bytes) {
  int64_t put_rows = 0, got_pages = 0;
  for (size_t i = 0; i < seqs.size(); ++i) {
    const BatchSeq& s = seqs[i];
    for (int32_t k = 0; k < s.num_rows; ++k)
      put_rows += PageOwner(pages[size_t(s.page_begin + (s.start + k) / kPageTokens)], ranks) != rank.value;
    // A sequence's later segment on this rank sees all that the earlier one saw, and more.
    const bool later = std::any_of(seqs.begin() + long(i) + 1, seqs.end(),
                                   [&](const BatchSeq& o) { return o.slot == s.slot; });
    if (later) continue;
    for (int32_t p = 0; p < s.num_pages; ++p)
      got_pages += PageOwner(pages[size_t(s.page_begin + p)], ranks) != rank.value;
  }
  return {put_rows * bytes.row, got_pages * bytes.page};
}

int64_t BytesBetweenRanks(const ForwardBatch& batch, const RankSplit& split, int32_t ranks,
                          const KvLayout& layout) {
  const LayerBytes all =
      BytesOfLayers(layout, LogicalLayer(0), LogicalLayer(layout.latent_layers().back().value + 1));
  int64_t bytes = 0;
  for (int32_t r = 0; r < ranks; ++r) {
    const RankBytes b = BytesOf(split.part(Rank(r)).seqs, batch.pages, Rank(r), ranks, all);
    bytes += b.put + b.got;
  }
  return bytes;
}

}  // namespace sluice
