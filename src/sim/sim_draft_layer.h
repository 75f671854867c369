// The draft layer's stand-in: the product's Drafter drives it. A state is the chain of its position, so the
// draft row of slot p proves that it was made from the state at p - 1 and the token at p. Its guesses are
// right about as often as not, by the chain alone.
#pragma once

#include <vector>

#include "exec/draft_layer.h"
#include "sim/fingerprint.h"
#include "sim/report.h"

namespace sluice::sim {

constexpr int64_t kStateFloats = 2;  // a chain
constexpr int32_t kVocab = 64, kEos = 63;
constexpr uint64_t kLostChain =
    0x10571057;  // of rows that a failed step or load left: who reads them is lost too
constexpr int32_t kLostToken = -7;

class SimDraftLayer final : public DraftLayer {
 public:
  SimDraftLayer(const FingerprintRows* rows, Journal* journal) : rows_(rows), journal_(journal) {}

  // Chains of the batch's rows, by row; called before the drafter runs.
  void SetChains(const std::vector<uint64_t>& chains) { chains_ = chains; }

  void FinalHidden(std::span<const int32_t> batch_rows, float* out) override;
  Status FillDraft(const ForwardBatch& batch, std::span<const int32_t> next_token) override;
  Status DraftRows(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                   std::span<const int32_t> tokens, BatchHidden hidden, bool kv_only,
                   std::span<const int32_t> carried) override;
  const float* DraftLogits(std::span<const int32_t> rows) override;
  void DraftHidden(std::span<const int32_t> rows, float* out) override;

  bool IsDraftPiece(int piece) const { return rows_->layer(piece).value == SimModel().num_layers; }

 private:
  void Write(PageId page, int64_t slot, uint64_t chain, int32_t token);
  // Reads what a draft row with this chain and token stands on.
  void ReadBack(const BatchSeq& seq, std::span<const PageId> pages, uint64_t chain, int32_t token);

  const FingerprintRows* rows_;
  Journal* journal_;
  std::vector<uint64_t> chains_, draft_chains_;
  std::vector<float> logits_, row_logits_;
};

}  // namespace sluice::sim
