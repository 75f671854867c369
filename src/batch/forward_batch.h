// One step's work as plain data: what the scheduler hands to the executor, and what comes back. No request,
// no tree.
//
// Rows are tokens to compute, sequence by sequence. A sequence's KV of positions [0, start + num_rows) lies
// in its pages: position p is row p % 64 of pages[page_begin + p / 64]. The executor writes rows [start,
// start + num_rows) of every layer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "base/token_constraint.h"
#include "kv/copy_plan.h"

namespace sluice {

// A token id >= 0, or a reference to the token that an earlier, perhaps unfinished, step samples for a slot.
constexpr int32_t TokenFromSlot(SlotId slot) { return -1 - slot.value; }

struct BatchSeq {
  SlotId slot;            // per-sequence state in the executor (last token, penalties)
  int32_t row_begin = 0;  // first row of this sequence in the batch
  int32_t num_rows = 0;
  int32_t start = 0;       // absolute position of the first row
  int32_t page_begin = 0;  // into ForwardBatch::pages
  int32_t num_pages = 0;   // ceil((start + num_rows) / 64)
  int32_t cached = 0;      // tokens whose pages are shared through the cache: whole pages, not past start
  bool decode = false;     // one new token of a running sequence (or verify rows)
  // --- with a draft layer only; else all 0 (exec/drafter.h says what the executor makes of them)
  int32_t known = 0;        // leading rows that the pages hold already: computed for their state, not stored
  int32_t verify = 0;       // decode: the last `verify` rows are tokens that the slot has drafted
  int32_t draft_next = 0;   // tokens to draft once this step has sampled; num_pages reaches past their rows
  int32_t next_token = -1;  // the token after the last row, when it is known
};
// While an earlier step of the sequence may still reject drafts, `start` of a decode (and the position of its
// samples) is the greatest that it can be; the executor knows the real one.

// How one logits row becomes a token. Everything that the token depends on is here or in the slot's state, so
// that it is a pure function of (logits, seed, choice, position).
struct SampleRow {
  SlotId slot;
  int32_t row = 0;           // batch row whose hidden state is used
  int32_t position = 0;      // position of the token to be sampled (row position + 1)
  float temperature = 1.0f;  // 0: greedy, lowest id wins a tie
  float top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = -1;  // -1: off
  float presence_penalty = 0, frequency_penalty = 0, repetition_penalty = 1;
  uint64_t seed = 0;
  int32_t choice = 0;
  int32_t top_logprobs = -1;   // -1: none; 0: of the sampled token only; n: n best besides
  bool suppress_stop = false;  // min_tokens not reached: stop ids are masked
  int32_t stop_from = 0;       // first position where they are not
  int32_t run_left =
      0;  // verification: samples after this one that stand only if its token is the drafted one
  int32_t expected = -1;  // with run_left: the drafted token (filled by the executor)
  bool hash_logits = false;
  bool jump = false;        // say which tokens the constraint forces behind the sampled one
  bool sample = true;       // false: logits are wanted (prompt logprobs, goldens) but no token
  int32_t logprob_of = -1;  // with sample == false: report the logprob of this token
  bool keep_state = false;  // the result carries the state that the draft layer starts from
  bool cut = false;         // its draft was not worth a row: no token is drawn (set by the executor)
};

// Work on an executor slot before the forward: reset for a new sequence, with what sampling needs of its
// history.
struct SlotInit {
  SlotId slot;
  std::vector<int32_t> prompt_tokens;  // for repetition penalty; may be empty when no penalty is on
  std::vector<int32_t> output_tokens;  // already produced (after a retraction)
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> stop_token_ids;                // masked while suppress_stop
  bool track_tokens = false;                          // penalties are on
  std::shared_ptr<const TokenConstraint> constraint;  // continues behind output_tokens
  int32_t tokens_left = 0;
  bool more =
      false;  // no reset: output_tokens are further tokens of the slot, kept without having been sampled
  // A prompt that another instance computed: the state before `draft_slot`, whose token is `draft_token`.
  std::vector<float> draft_state;
  int32_t draft_slot = -1, draft_token = -1;
};

// A fork copies the partial tail page of a prompt before its first write (n > 1).
struct PageCopy {
  PageId from, to;
};

struct ForwardBatch {
  int64_t step = 0;
  std::vector<int32_t> tokens;  // [rows]; see TokenFromSlot
  std::vector<BatchSeq> seqs;
  std::vector<PageId> pages;  // page lists of the sequences, one after another
  std::vector<SampleRow> samples;
  std::vector<SlotInit> slot_inits;
  std::vector<PageCopy> page_copies;  // before the forward
  std::vector<CopyPlan> loads;        // host to device; layer L is read only when it is loaded
  std::vector<CopyPlan> backups;      // device to host; of pages final before this step
  // Drafting: a draft less likely to stand than draft_keep gets no row in the next step, and a pass that
  // makes a further one must be expected to bring draft_pass beyond that. 0: as many as are planned.
  float draft_keep = 0, draft_pass = 0;
  int32_t rows() const { return int32_t(tokens.size()); }
  // Nothing to compute and nothing to copy.
  bool empty() const {
    return tokens.empty() && samples.empty() && page_copies.empty() && loads.empty() && backups.empty();
  }
  // Keeps the capacity of every list, so that a reused batch allocates nothing.
  void Clear() {
    step = 0;
    tokens.clear();
    seqs.clear();
    pages.clear();
    samples.clear();
    slot_inits.clear();
    page_copies.clear();
    loads.clear();
    backups.clear();
    draft_keep = draft_pass = 0;
  }
};

// Joins the logits hashes of a request's steps, in order, into one.
constexpr uint64_t JoinLogitsHash(uint64_t all, uint64_t next) {
  uint64_t z = (all ^ next) + 0x9E3779B97F4A7C15ull + (all << 6) + (all >> 2);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

struct TopLogprob {
  int32_t token;
  float logprob;
};

struct SampledToken {
  SlotId slot;
  int32_t token = -1;  // -1 with an ok status: not drawn, an earlier token of the run differed from its draft
  float logprob = 0;   // of `token` (or of SampleRow::logprob_of), natural log, before temperature
  std::vector<TopLogprob> top;  // SampleRow::top_logprobs entries, best first
  uint64_t logits_hash = 0;
  std::vector<int32_t> forced;  // SampleRow::jump: what must follow `token`, in order
  std::vector<float> state;     // with SampleRow::keep_state: [hidden]
  bool cut = false;             // token is -1: its draft had no row
  Status status;                // NaN or all -inf logits: this request fails alone
};

// A sequence whose rows of the step cannot be trusted (NaN, a failed verification): it fails alone.
struct FailedSlot {
  SlotId slot;
  Status status;
};

// What a step did and how long it took. ns 0: not measured, or it did something besides decoding.
struct StepWork {
  int32_t rows = 0;                          // of the model
  int32_t drafting = 0;                      // sequences for which tokens were drafted
  int32_t draft_passes = 0, draft_rows = 0;  // of the draft layer with its head; rows of all of them
  int64_t ns = 0;
  int32_t draft_most = 0;  // tokens planned to be drafted for one of them at most; 0: not told
};

struct StepResult {
  int64_t step = 0;
  StepWork work;
  Status status;                      // of the whole step; an error ends all its sequences
  std::vector<SampledToken> samples;  // in the order of ForwardBatch::samples
  std::vector<FailedSlot> failed_slots;
  std::vector<int64_t> copies_done;  // CopyPlan ids
  std::vector<int64_t> copies_failed;
};

}  // namespace sluice
