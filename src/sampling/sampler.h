// Turns rows of logits into tokens.
//
// The token at position p is a pure function of (the logits at p, the slot's history, seed, choice, p): noise
// comes from a counter, never from a stream, so batch neighbours, retraction, chunking or another engine
// change nothing.
//
// Order of what is applied, on a copy when anything is:
//   repetition penalty (prompt and output tokens: x > 0 ? x / r : x * r) > frequency and presence penalty
//   (output tokens) > logit_bias > stop ids masked while min_tokens is not reached > the
//   constraint's mask (which may call for an end before min_tokens) > temperature > top_k >
//   top_p > min_p > one draw. temperature 0: the highest value, lowest id of a tie. top_k <= 0 or >=
//   vocabulary: off. top_k keeps the k highest (ties: lowest ids). top_p keeps the shortest run of highest
//   tokens whose share of what top_k left reaches top_p, at least one. min_p keeps tokens with at least min_p
//   times the probability of the highest.
// Logprobs (natural log) are those of the model: log-softmax of the raw logits, before all of the above.
//
// Owns per-slot state. One thread (the executor's). Sampling allocates nothing once a slot's history has
// grown, except the list of top logprobs when it is asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/forward_batch.h"
#include "sampling/row_math.h"
#include "sampling/token_history.h"

namespace sluice {

class Sampler {
 public:
  Sampler(int32_t vocab_size, int32_t num_slots);

  void InitSlot(const SlotInit& init);
  // The token last sampled for the slot; -1 after InitSlot.
  int32_t LastToken(SlotId slot) const { return slots_[size_t(slot.value)].last_token; }
  // Fills *out for one row of logits [vocab] and, when row.sample, records the token in the slot. Unusable
  // logits (NaN, +inf or nothing but -inf, raw or after penalties and masks) set out->status and leave the
  // slot as it was.
  void Sample(const SampleRow& row, const float* logits, SampledToken* out);

  // The token that Sample would choose for these logits, without recording it: how drafts are proposed. The
  // slot's history is that of the tokens recorded so far. -1: unusable logits. share (may be null): what the
  // logits as they are give the token of the probability.
  int32_t Propose(const SampleRow& row, const float* logits, float* share = nullptr);

  // The same for a row of which only a ReducedRow is there, with the same results. TakesReduced: nothing that
  // the row needs takes more (logprobs, penalties, bias, masks). RequestFor: what to reduce it to; place and
  // near are the caller's. False: what came does not settle the token, and nothing was done: the whole row is
  // needed.
  bool TakesReduced(const SampleRow& row) const;
  RowRequest RequestFor(const SampleRow& row) const;
  bool SampleReduced(const SampleRow& row, const ReducedRow& reduced, const RowCandidate* candidates,
                     SampledToken* out);
  bool ProposeReduced(const SampleRow& row, const ReducedRow& reduced, const RowCandidate* candidates,
                      int32_t* token, float* share);

  int32_t vocab_size() const { return vocab_; }

 private:
  struct Slot {
    int32_t last_token = -1;
    bool track_tokens = false;
    TokenHistory history;
    std::vector<std::pair<int32_t, float>> logit_bias;
    std::vector<int32_t> stop_token_ids;
    std::unique_ptr<ConstraintState> constraint;
    int32_t tokens_left = 0;  // that may still come; for the constraint
  };
  struct Candidate {
    float weight;
    int32_t token;
  };

  // `raw` is the scan of `logits`. Unusable after penalties and masks: -1.
  int32_t Choose(const SampleRow& row, Slot* slot, const float* logits, const RowScan& raw);
  // Null when the row needs no change, else the changed copy in work_.
  const float* Adjust(const SampleRow& row, Slot* slot, const float* logits);
  void Record(int32_t token, Slot* slot);
  void ApplyConstraint(const SampleRow& row, Slot* slot, const float* logits);
  int32_t Draw(const SampleRow& row, const float* x, float max);
  int32_t DrawAmongAll(double uniform) const;
  int32_t DrawFiltered(const SampleRow& row, double uniform);
  bool TopK(const SampleRow& row) const { return row.top_k > 0 && row.top_k < vocab_; }
  bool Filters(const SampleRow& row) const { return TopK(row) || row.top_p < 1.0f || row.min_p > 0.0f; }
  // Of candidates_, which holds every token of a weight above 0 and not below `complete`. total: of all
  // weights, when top_p needs it. token -1: those that it holds do not settle it.
  Candidate DrawCandidate(const SampleRow& row, double uniform, double total, float complete);
  // Weights below it cannot be kept, if `total` is the sum of all.
  float Floor(const SampleRow& row, double total) const;
  Candidate ChooseReduced(const SampleRow& row, const ReducedRow& reduced, const RowCandidate* candidates);
  void Clear(const SampleRow& row, SampledToken* out) const;
  void FillLogprobs(const SampleRow& row, const float* logits, float max, SampledToken* out);

  const int32_t vocab_;
  std::vector<Slot> slots_;
  std::vector<float> work_;            // [vocab] adjusted logits
  std::vector<float> weights_;         // [vocab]
  std::vector<Candidate> candidates_;  // capacity vocab
};

// Uniform in [0, 1) with 53 bits for (seed, choice, position).
double UniformAt(uint64_t seed, int32_t choice, int32_t position);

}  // namespace sluice
