// Speculation on the executor's side: what each slot has drafted, which draft rows are still to be written,
// and the passes of the draft layer after a step has sampled.
//
// The draft row of slot p (state at p - 1, token at p) is written when both are known for good:
//   extend rows   their followers' slots, KV only, in the step that computes them, from each rank's own rows
//   decode rows   a row that stood gives its follower's slot; kept as a pending state until the slot drafts
//                 again or, when nobody drafts, until its page is full: then KV only, many rows at once
// Slots that drafting itself writes beyond the last sampled token hold guesses; every one is written again
// from the model's own state before its page can be full. So a page whose last row is final has all its draft
// rows.
//
//   pending: slots [first, first + count), the last being that of the token just sampled
//
// Owned and called by one runner, after Forward and sampling of each step. Allocates only while it grows.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "exec/draft_layer.h"
#include "exec/draft_trust.h"
#include "kv/kv_layout.h"
#include "sampling/sampler.h"

namespace sluice {

class Drafter {
 public:
  // hidden: floats of a state. max_tokens: drafted tokens of a slot at most. `layer` and `sampler` outlive
  // the drafter.
  // share_selection: the passes of one draft take the index selection of the first (the checkpoint's
  // index_share_for_mtp_iteration).
  Drafter(int64_t hidden, DraftLayer* layer, Sampler* sampler, int32_t num_slots, int32_t max_tokens,
          int64_t max_rows, int64_t max_logits_rows, bool share_selection = false);

  void InitSlot(const SlotInit& init);
  // The batch with every start, position and drafted token filled in, without the rows of drafts that were
  // not worth one (their samples stay, as cut ones), and with page lists that end where the forward's rows
  // end. Valid until the next call.
  const ForwardBatch& Resolve(const ForwardBatch& batch);
  // After the samples of the step were drawn. `resolved` as Resolve returned it, `tokens` its rows' ids. Adds
  // the states that were asked for to the result's samples.
  Status AfterStep(const ForwardBatch& batch, const ForwardBatch& resolved, std::span<const int32_t> tokens,
                   StepResult* result);

  static int64_t SlotBytes(int64_t hidden, int32_t num_slots, int32_t max_tokens);

 private:
  struct Slot {
    int32_t position = -1;  // of the token sampled last
    int32_t first = 0, count = 0;
    int32_t drafted = 0;
    double chance = 1;  // that all drafts so far stand
  };
  float* Hidden(SlotId slot, int32_t i) {
    return &hidden_[(size_t(slot.value) * size_t(depth_) + size_t(i)) * size_t(width_)];
  }
  int32_t* Token(SlotId slot, int32_t i) { return &tokens_[size_t(slot.value) * size_t(depth_) + size_t(i)]; }
  int32_t* Drafted(SlotId slot, int32_t i) {
    return &drafted_[size_t(slot.value) * size_t(max_tokens_) + size_t(i)];
  }
  // Places the samples of `seq`, from *at on, which was planned as `planned`, `shift` positions further on.
  void ResolveSamples(const BatchSeq& planned, const BatchSeq& seq, int32_t shift, size_t* at);
  void LearnTrust(const ForwardBatch& resolved, const StepResult& result);
  // Decides whether the slot's newest draft, at `place`, is worth a row, and another one behind it.
  void Weigh(const ForwardBatch& batch, const SampleRow& row, int32_t place, float share);
  bool TriesAnyway();
  void KeepStates(const ForwardBatch& resolved, StepResult* result);
  Status FillExtends(const ForwardBatch& resolved, std::span<const int32_t> tokens);
  Status FillPending(const ForwardBatch& batch);
  Status Draft(const ForwardBatch& batch, const ForwardBatch& resolved, StepWork* work);
  bool AskReduced(size_t begin, size_t n);
  Status FlushRows(std::span<const PageId> pages);
  float* Share(SlotId slot, int32_t i) {
    return &shares_[size_t(slot.value) * size_t(max_tokens_) + size_t(i)];
  }
  BatchHidden StatesOf(size_t rows) const { return {states_.data(), int64_t(rows), width_}; }

  DraftLayer* const layer_;
  Sampler* const sampler_;
  const int32_t max_tokens_, depth_;  // depth: pending states of a slot at most
  const int64_t width_, max_rows_, max_logits_rows_;
  const bool share_selection_;
  std::vector<Slot> slots_;
  std::unique_ptr<float[]> hidden_;  // [slots, depth, hidden]; touched where used
  std::vector<int32_t> tokens_;      // [slots, depth]
  std::vector<int32_t> drafted_;     // [slots, max_tokens]
  std::vector<float> shares_;        // [slots, max_tokens] of the drafted tokens
  DraftTrust trust_;
  static constexpr int64_t kTryEvery = 24;
  int64_t tries_ = 0;
  ForwardBatch resolved_;
  // scratch of a step
  std::vector<int32_t> rows_, next_token_, row_tokens_, carried_;
  std::vector<float> states_;
  std::vector<BatchSeq> seqs_;
  std::vector<SampleRow> proposals_;
  std::vector<RowRequest> requests_;
  LogitsAnswers answers_;
};

}  // namespace sluice
