// What the scheduler knows of a request: one group per request, one sequence per choice that has started.
//
//   waiting ──admit──> running ──stop, length, abort, error──> leaving ──> gone
//      ^                 │  ^
//      │                 │  └─ attach pages ── forking (a further choice: its first token is being sampled)
//      └── retracting <──┘ pages ran out
//
//   waiting ──admit──> receiving ──pages filled──> running   (a request that another instance prefills)
//
// Positions of a running sequence:
//   [0 .. computed) rows final     [computed .. planned) rows in submitted batches
//   [0 .. tokens.size()) tokens known here; `pending` more are being sampled by submitted batches
// Jump-ahead: tokens that a constraint forces are kept as soon as they are known, and computed like a piece
// of a prompt. The one that a submitted batch samples meanwhile is an echo: `tokens` has it, `pending` does
// not. With speculation `planned` and `pending` count every drafted row and token of submitted batches as if
// it stood; Commit takes back those that did not. A sequence leaves pages and slot only when in_flight == 0:
// no submitted or prepared batch refers to them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "batch/forward_batch.h"
#include "cache/kv_cache.h"
#include "request/request.h"

namespace sluice {

enum class SeqState : uint8_t { kWaiting, kReceiving, kRunning, kForking, kRetracting, kLeaving };

struct Sequence;

struct RequestGroup {
  Request request;
  std::string name_space;
  int64_t arrival = 0;     // order of arrival, unique
  int32_t max_new = 0;     // output tokens at most: the request's limit, the context and the pool
  int32_t answer_max = 0;  // the same of the whole answer, where another instance goes on behind max_new
  int32_t spawned = 1;     // choices [0, spawned) have or had a sequence
  int32_t unfinished = 1;  // choices without a final event
  bool admitted_once = false;
  CachedTokens cached;  // of the first admission
  FinishReason worst = FinishReason::kNone;
  std::vector<Sequence*> sequences;  // live ones
  std::vector<TokenOut> prompt_logprobs;
  std::vector<int32_t> stop_ids;  // that end a choice, sorted: eos (unless ignored) and the request's own

  int32_t prompt_len() const { return int32_t(request.prompt.size()); }
  bool verification() const { return request.verify_name_space.has_value(); }
  int32_t choices() const { return request.sampling.n; }
  bool wants_prompt_logprobs() const { return request.sampling.prompt_logprobs_from >= 0; }
  // Number of prompt tokens that have a logprob entry when scoring is complete.
  int32_t scored_tokens() const {
    return wants_prompt_logprobs() ? std::max(0, prompt_len() - request.sampling.prompt_logprobs_from) : 0;
  }
  bool scored() const { return int32_t(prompt_logprobs.size()) >= scored_tokens(); }
};

struct Sequence {
  RequestGroup* group = nullptr;
  int32_t choice = 0;
  SeqState state = SeqState::kWaiting;
  SlotId slot;
  SequenceKv kv;
  std::vector<int32_t> tokens;  // prompt, then kept output
  int32_t planned = 0;
  int32_t computed = 0;
  int32_t committed = 0;  // `computed` as the cache last heard it
  int32_t pending = 0;
  int32_t in_flight = 0;  // submitted batches and prepared page copies that refer to pages or slot
  bool sampled_in_slot =
      false;           // a step of this admission samples for the slot: the last token may be a reference
  int32_t echoes = 0;  // of the tokens being sampled, those that are kept already: they were forced
  std::vector<int32_t> untold;  // kept tokens that no step samples: its slot hears of them with their rows
  bool failed = false;          // its own rows cannot be trusted: nothing of it enters the cache
  bool state_missing = false;   // the first rows stand on a hit whose last hidden state the draft layer needs
  bool first_event_sent = false;
  bool wait_storage = false;
  bool wait_room = false;          // prefill: decode has not reserved pages yet
  bool held = false;               // another instance may read or write its pages: one more in_flight
  bool init_slot = false;          // its slot is set up with its next rows
  std::vector<float> first_state;  // of the slot's set-up: the prompt was computed elsewhere
  uint64_t logits_hash = 0;
  int32_t drafts = 0;  // tokens that the slot has drafted once all submitted steps have run
  int32_t spec_runs = 0, spec_proposed = 0, spec_accepted = 0, spec_first_accepted = 0;

  int32_t produced() const { return int32_t(tokens.size()) - group->prompt_len(); }
  int32_t length() const { return int32_t(tokens.size()) + pending; }  // tokens known or being sampled
  int32_t rows_left() const { return length() - planned; }
  bool decoding() const { return sampled_in_slot && rows_left() == 1; }
  bool ended() const { return state == SeqState::kLeaving; }
};

// A step touches hundreds of sequences once each: what it needs of the next ones is fetched while it works on
// one.
inline void PrefetchSequence(const Sequence* s) {
  const char* at = reinterpret_cast<const char*>(s);
  for (size_t offset = 0; offset < sizeof(Sequence); offset += 64) __builtin_prefetch(at + offset);
}
inline void PrefetchLists(const Sequence& s) {
  __builtin_prefetch(s.group);
  __builtin_prefetch(s.tokens.data() + s.tokens.size(), 1);
  for (size_t i = 0; i < s.kv.pages.size() && i < 256; i += 16) __builtin_prefetch(s.kv.pages.data() + i);
}

}  // namespace sluice
