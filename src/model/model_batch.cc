#include "model/model_batch.h"

#include <algorithm>

namespace sluice {

BatchTables::BatchTables(int64_t max_rows, int64_t max_seqs)
    : max_rows_(max_rows),
      max_seqs_(max_seqs),
      positions_(size_t(max_rows)),
      seq_of_row_(size_t(max_rows)),
      offset_(size_t(max_rows)),
      page_(size_t(max_rows)),
      row_begin_(size_t(max_seqs)),
      num_rows_(size_t(max_seqs)),
      page_begin_(size_t(max_seqs)) {}

StatusOr<ModelBatch> BatchTables::Build(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                                        std::span<const int32_t> tokens, int64_t vocab_size,
                                        int32_t slot_shift) {
  for (size_t r = 0; r < tokens.size(); ++r) {
    if (tokens[r] < 0 || tokens[r] >= vocab_size)
      return Internal("row {}: token {} is outside the vocabulary of {}", r, tokens[r], vocab_size);
  }
  ASSIGN_OR_RETURN(ModelBatch m, BuildRows(seqs, pages, int64_t(tokens.size()), slot_shift));
  m.tokens = tokens.data();
  return m;
}

StatusOr<ModelBatch> BatchTables::BuildRows(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                                            int64_t rows, int32_t slot_shift) {
  if (rows > max_rows_ || int64_t(seqs.size()) > max_seqs_) {
    return Internal("batch of {} rows and {} sequences exceeds the planned {} and {}", rows, seqs.size(),
                    max_rows_, max_seqs_);
  }
  ModelBatch m;
  int32_t next = 0;
  for (size_t s = 0; s < seqs.size(); ++s) {
    const BatchSeq& q = seqs[s];
    if (q.row_begin != next || q.num_rows < 1 || q.start < slot_shift || q.row_begin + q.num_rows > rows) {
      return Internal("sequence {}: rows [{}, {}) do not follow row {} of {}", s, q.row_begin,
                      q.row_begin + q.num_rows, next, rows);
    }
    next = q.row_begin + q.num_rows;
    const int64_t end = int64_t(q.start) + q.num_rows;
    if (q.num_pages < CeilDiv(end, kPageTokens) || q.page_begin < 0 ||
        size_t(q.page_begin) + size_t(q.num_pages) > pages.size()) {
      return Internal("sequence {}: {} pages from {} do not hold {} positions", s, q.num_pages, q.page_begin,
                      end);
    }
    row_begin_[s] = q.row_begin;
    num_rows_[s] = q.num_rows;
    page_begin_[s] = q.page_begin;
    for (int32_t i = 0; i < q.num_rows; ++i) {
      const size_t r = size_t(q.row_begin + i);
      const int32_t slot = q.start + i;
      positions_[r] = slot - slot_shift;
      seq_of_row_[r] = int32_t(s);
      page_[r] = i < q.known ? PageId() : pages[size_t(q.page_begin) + size_t(slot / kPageTokens)];
      offset_[r] = int32_t(slot % kPageTokens);
    }
    m.max_context = std::max(m.max_context, end - slot_shift);
  }
  if (next != rows) return Internal("rows [{}, {}) belong to no sequence", next, rows);
  m.rows = rows;
  m.positions = positions_.data();
  m.slots = {page_.data(), offset_.data()};
  m.seqs.rows = rows;
  m.seqs.seqs = int64_t(seqs.size());
  m.seqs.seq_of_row = seq_of_row_.data();
  m.seqs.positions = positions_.data();
  m.seqs.row_begin = row_begin_.data();
  m.seqs.num_rows = num_rows_.data();
  m.seqs.page_begin = page_begin_.data();
  m.seqs.pages = pages.data();
  m.seqs.slot_shift = slot_shift;
  m.seqs.max_context = m.max_context + slot_shift;
  m.seqs.num_pages = int64_t(pages.size());
  return m;
}

}  // namespace sluice
