// Who stores which rows of a forward, and where each comes from: the table of a layer's hand-over between
// ranks.
//
// Ranks compute rows of pages that others own. In the exchange every rank brings its padded compute rows
// (equal sizes); gathered, they lie rank after rank. The owner of a page takes the rows of its pages out of
// them: SOURCE places count compute rows, dummies included; DESTINATION places are positions of valid rows.
// Dummy rows go nowhere, nor do rows that the pages hold already (BatchSeq::known).
//
// Built once per forward, used by every layer. Grows with the rows and the pages that the batch refers to.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "batch/forward_batch.h"
#include "batch/rank_split.h"
#include "cp/row_spaces.h"
#include "kv/kv_layout.h"

namespace sluice {

struct StoredRow {
  cp::GatheredRow source;
  int32_t local = 0;   // page of the owner's lane
  int32_t offset = 0;  // row in the page
};

// Where one page that a sequence's rows see lies.
struct PageRead {
  Rank owner;
  int32_t local = 0;
};

class RowExchange {
 public:
  // `split` is the plan of `batch` over `ranks`.
  void Plan(const ForwardBatch& batch, const RankSplit& split, int32_t ranks);

  int32_t rows_per_rank() const { return rows_per_rank_; }
  std::span<const StoredRow> stores(Rank owner) const { return stores_[size_t(owner.value)]; }

 private:
  int32_t rows_per_rank_ = 0;
  std::vector<std::vector<StoredRow>> stores_;  // [ranks]
};

// The pages that rows of a sequence (or of a rank's segment of it) see, in the order of positions: looked up
// through the sequence's own page list, whatever else the batch shares.
// `seqs` and `pages` are the batch's.
void PagesSeen(std::span<const BatchSeq> seqs, std::span<const PageId> pages, const BatchSeq& seq,
               int32_t ranks, std::vector<PageRead>* out);

// Bytes that cross ranks in one pass over some layers: rows put into other ranks' pages, and other ranks'
// pages that the rank's rows see, each once.
struct RankBytes {
  int64_t put = 0, got = 0;
};
// Of a row and of a page, in the layers [first, end).
struct LayerBytes {
  int64_t row = 0, page = 0;
};
LayerBytes BytesOfLayers(const KvLayout& layout, LogicalLayer first, LogicalLayer end);
// `seqs`: what the rank computes, over the batch's page lists.
RankBytes BytesOf(std::span<const BatchSeq> seqs, std::span<const PageId> pages, Rank rank, int32_t ranks,
                  const LayerBytes& bytes);
// Of all ranks, in every layer of the layout.
int64_t BytesBetweenRanks(const ForwardBatch& batch, const RankSplit& split, int32_t ranks,
                          const KvLayout& layout);

}  // namespace sluice
