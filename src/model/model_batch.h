// One forward's rows and index tables, built once per batch and used by every layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "batch/forward_batch.h"
#include "ops/backend.h"

namespace sluice {

// Views of arrays that live until the forward is done.
struct ModelBatch {
  int64_t rows = 0;
  const int32_t* tokens = nullptr;     // [rows] ids, resolved
  const int32_t* positions = nullptr;  // [rows]
  ops::RowSlots slots;                 // where each row's KV goes; page < 0: nowhere
  ops::SeqTables seqs;
  int64_t max_context = 0;  // largest position + 1
  int32_t staged = -1;      // where ModelBuffers::Stage has put all of it but the tokens
};

// Turns a ForwardBatch into tables. Memory is reserved once; Build allocates nothing. Used by one thread.
class BatchTables {
 public:
  BatchTables(int64_t max_rows, int64_t max_seqs);

  // tokens: [rows], all resolved to ids. The views in the result point into this object, `batch` and
  // `tokens`. slot_shift 1 is for the draft layer: a row of slot p has position p - 1; REQUIRES start >= 1
  // then. Errors (Internal): more rows or sequences than reserved, rows of no sequence, too few pages, ids
  // outside the vocabulary.
  StatusOr<ModelBatch> Build(const ForwardBatch& batch, std::span<const int32_t> tokens, int64_t vocab_size,
                             int32_t slot_shift = 0) {
    return Build(batch.seqs, batch.pages, tokens, vocab_size, slot_shift);
  }
  // The same before the tokens are known: `tokens` of the result is null, for whoever knows them.
  StatusOr<ModelBatch> BuildRows(std::span<const BatchSeq> seqs, std::span<const PageId> pages, int64_t rows,
                                 int32_t slot_shift = 0);
  // The same for a rank's part of a batch: its sequences (segments) over the batch's page lists.
  StatusOr<ModelBatch> Build(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                             std::span<const int32_t> tokens, int64_t vocab_size, int32_t slot_shift = 0);

 private:
  int64_t max_rows_, max_seqs_;
  std::vector<int32_t> positions_, seq_of_row_, offset_;    // [max_rows]
  std::vector<PageId> page_;                                // [max_rows]
  std::vector<int32_t> row_begin_, num_rows_, page_begin_;  // [max_seqs]
};

}  // namespace sluice
