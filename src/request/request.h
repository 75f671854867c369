// What enters the engine and what comes out of it; immutable input, a bounded channel for the output.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "base/token_constraint.h"

namespace sluice {

// Validated by api/ before it gets here; the engine trusts the ranges.
struct SamplingParams {
  int32_t max_tokens = 128;
  int32_t min_tokens = 0;
  float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f;
  int32_t top_k = -1;
  float presence_penalty = 0, frequency_penalty = 0, repetition_penalty = 1;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> stop_token_ids;  // besides the model's own eos ids
  bool ignore_eos = false;
  uint64_t seed = 0;  // always set: random when the client sent none
  int32_t n = 1;
  int32_t top_logprobs = -1;          // -1: no logprobs; 0: sampled token only
  int32_t prompt_logprobs_from = -1;  // -1: none; else logprobs of prompt tokens from this position on
  bool hash_logits = false;
  std::shared_ptr<const TokenConstraint> constraint;  // null: any token may come
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kError };

struct CachedTokens {
  int32_t device = 0, host = 0, storage = 0;
  int32_t total() const { return device + host + storage; }
};

struct TokenOut {
  int32_t token = -1;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};

// One message from the engine about one choice of one request. Exactly one with finish != kNone ends each
// choice.
struct OutputEvent {
  int32_t choice = 0;
  std::vector<TokenOut>
      tokens;  // newly kept tokens; an eos or stop token that ends the choice is the last one
  FinishReason finish = FinishReason::kNone;
  int32_t matched_stop_token = -1;  // the stop token id when finish == kStop
  Status error;                     // with kError, or the reason of kAbort
  CachedTokens cached;              // valid from the first event on
  // With each choice's first event, when asked for; entry 0 is position prompt_logprobs_from. Nothing comes
  // before position 0: its entry has the token and no logprob (0).
  std::vector<TokenOut> prompt_logprobs;
  uint64_t logits_hash = 0;  // with the last event, when asked for
  // With the last event. steps: those that verified drafts; accepted: tokens they kept besides the sampled
  // ones; first_accepted: steps whose first draft stood.
  int32_t spec_proposed = 0, spec_accepted = 0, spec_steps = 0, spec_first_accepted = 0;
};

// Receives a request's events in order, on the engine thread; must return at once and never block (hand over
// and wake).
class OutputChannel {
 public:
  virtual ~OutputChannel() = default;
  virtual void Push(OutputEvent event) = 0;
};

// A request that one instance prefills and another decodes: the room where they meet.
struct RemoteRoom {
  bool active = false;
  uint64_t room = 0;
  std::string host;  // of the prefill instance's bootstrap port
  int32_t port = 0;
};

struct Request {
  RequestId id;                 // unique in the process, given by NextRequestId()
  std::string rid;              // the client's or a generated name, for abort and logs
  std::vector<int32_t> prompt;  // at least one token
  SamplingParams sampling;
  std::string cache_salt;  // namespace; "" = default
  std::string adapter;     // lora or similar; part of the namespace
  int32_t priority = 0;
  Nanos deadline = 0;  // 0: none
  std::shared_ptr<OutputChannel> output;
  // Set by the engine on its own requests: computes the prompt without the cache and compares the rows with
  // those that this (framed) namespace has. Counted nowhere.
  std::optional<std::string> verify_name_space;
  RemoteRoom remote;
};

RequestId NextRequestId();

}  // namespace sluice
