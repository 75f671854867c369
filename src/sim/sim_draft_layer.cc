#include "sim/sim_draft_layer.h"

#include <cstring>

#include "sim/sim_executor.h"

namespace sluice::sim {

void SimDraftLayer::Write(PageId page, int64_t slot, uint64_t chain, int32_t token) {
  for (int piece = 0; piece < rows_->pieces(); ++piece)
    if (IsDraftPiece(piece)) rows_->Write(piece, page, slot % kPageTokens, chain, token, slot);
}

void SimDraftLayer::FinalHidden(std::span<const int32_t> batch_rows, float* out) {
  for (size_t i = 0; i < batch_rows.size(); ++i)
    std::memcpy(out + int64_t(i) * kStateFloats, &chains_[size_t(batch_rows[i])], sizeof(uint64_t));
}

Status SimDraftLayer::FillDraft(const ForwardBatch& batch, std::span<const int32_t> next_token) {
  for (const BatchSeq& seq : batch.seqs) {
    for (int32_t i = 0; i < seq.num_rows; ++i) {
      const int32_t row = seq.row_begin + i, token = next_token[size_t(row)];
      if (token < 0) break;
      const int64_t slot = seq.start + i + 1;
      Write(batch.pages[size_t(seq.page_begin + slot / kPageTokens)], slot,
            NextInChain(chains_[size_t(row)], token), token);
    }
  }
  return OkStatus();
}

Status SimDraftLayer::DraftRows(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                                std::span<const int32_t> tokens, BatchHidden hidden, bool kv_only,
                                std::span<const int32_t>) {
  draft_chains_.resize(tokens.size());
  for (const BatchSeq& seq : seqs) {
    const auto page = [&](int64_t slot) { return pages[size_t(seq.page_begin + slot / kPageTokens)]; };
    for (int32_t i = 0; i < seq.num_rows; ++i) {
      const size_t row = size_t(seq.row_begin + i);
      uint64_t before;
      std::memcpy(&before, hidden.at(cp::GlobalRow(int32_t(row))), sizeof(before));
      draft_chains_[row] = NextInChain(before, tokens[row]);
      Write(page(seq.start + i), seq.start + i, draft_chains_[row], tokens[row]);
    }
    if (!kv_only) ReadBack(seq, pages, draft_chains_[size_t(seq.row_begin)], tokens[size_t(seq.row_begin)]);
  }
  return OkStatus();
}

// Attention: every slot before, back to 1, one chain. A sequence that finds no row to go on from leaves the
// others of the pass alone.
void SimDraftLayer::ReadBack(const BatchSeq& seq, std::span<const PageId> pages, uint64_t chain,
                             int32_t token) {
  for (int64_t slot = seq.start - 1; slot >= 1; --slot) {
    const PageId page = pages[size_t(seq.page_begin + slot / kPageTokens)];
    for (int piece = 0; piece < rows_->pieces(); ++piece) {
      if (!IsDraftPiece(piece)) continue;
      uint64_t c;
      int32_t t;
      const bool whole = rows_->Read(piece, page, slot % kPageTokens, slot, &c, &t);
      // Lost with a step or a load that failed; so is this sequence, and its drafts mean nothing.
      if (c == kLostChain && t == kLostToken) return;
      if (whole && NextInChain(c, token) == chain) {
        if (piece + 1 == rows_->pieces() || !IsDraftPiece(piece + 1)) chain = c, token = t;
        continue;
      }
      journal_->Violation("drafting at {}: slot {} of {} holds {}", seq.start, slot, seq.slot.value,
                          whole ? "another sequence's draft row, or a rejected one" : "no draft row");
      return;
    }
  }
  journal_->Cover("draft_rows_read", seq.start);
}

const float* SimDraftLayer::DraftLogits(std::span<const int32_t> rows) {
  logits_.resize(rows.size() * kVocab);
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint64_t chain = draft_chains_[size_t(rows[i])];
    LogitsOf(Mix(chain, 99) % 5 < 3 ? chain : Mix(chain, 5), &row_logits_);
    std::copy(row_logits_.begin(), row_logits_.end(), logits_.begin() + long(i) * kVocab);
  }
  return logits_.data();
}

void SimDraftLayer::DraftHidden(std::span<const int32_t> rows, float* out) {
  for (size_t i = 0; i < rows.size(); ++i)
    std::memcpy(out + int64_t(i) * kStateFloats, &draft_chains_[size_t(rows[i])], sizeof(uint64_t));
}

}  // namespace sluice::sim
