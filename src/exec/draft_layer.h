// The passes of the draft layer that a step needs once its rows are computed and its tokens drawn.
//
// The states it takes come in two row spaces (batch/hidden_rows.h): FillDraft reads each rank's own rows
// where the forward left them, before anything is gathered, DraftRows takes rows of the whole batch. Both
// overwrite the forward's residual stream: FinalHidden and FillDraft come first. Called by one thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/reduced_row.h"
#include "batch/forward_batch.h"
#include "batch/hidden_rows.h"

namespace sluice {

// What came of rows of logits that stayed where they are: one of each for a request.
struct LogitsAnswers {
  const ReducedRow* reduced = nullptr;
  const RowCandidate* candidates = nullptr;  // [requests, kMostCandidates]
};

class DraftLayer {
 public:
  virtual ~DraftLayer() = default;

  // State after the final norm of rows of the last forward's batch: out [batch_rows.size(), hidden].
  virtual void FinalHidden(std::span<const int32_t> batch_rows, float* out) = 0;
  // Stores the draft rows that follow from the last forward's extend rows: a row of position p with
  // next_token[row] >= 0 gives the draft row of slot p + 1. A sequence's rows without a next token are its
  // last ones. The batch's page lists must reach slot p + 1.
  virtual Status FillDraft(const ForwardBatch& batch, std::span<const int32_t> next_token) = 0;
  // Row r of a sequence is slot start + r, made from tokens[r] and the state before it, `hidden` in the order
  // of seqs. kv_only: nothing but the KV is made. carried: for each row the row of the DraftRows before whose
  // index selection it takes; empty: each makes its own.
  virtual Status DraftRows(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                           std::span<const int32_t> tokens, BatchHidden hidden, bool kv_only,
                           std::span<const int32_t> carried = {}) = 0;
  // Of rows of the last DraftRows (not kv_only): logits [rows.size(), vocab], valid until the next call, and
  // the states that a further pass takes.
  virtual const float* DraftLogits(std::span<const int32_t> rows) = 0;
  virtual void DraftHidden(std::span<const int32_t> rows, float* out) = 0;
  // Whether logits lie where they can be reduced. Then, in the place of DraftLogits: the answers to requests
  // about `rows` (place: an index into them), valid until the next call, and the logits of one of the rows.
  virtual bool Reduces() const { return false; }
  virtual LogitsAnswers ReduceDraft(std::span<const int32_t> /*rows*/,
                                    std::span<const RowRequest> /*requests*/) {
    return {};
  }
  virtual const float* FetchLogits(int32_t /*place*/) { return nullptr; }
};

}  // namespace sluice
