// Answers as JSON text and as event-stream records. Pure functions over plain values: no engine, no
// tokenizer, no socket.
//
// A record is "data: <json>\n\n" on one line. A choice gets exactly one record (or one answer) with a finish
// reason; an error is one record {"error":{...}} after which the stream ends.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/error.h"
#include "request/request.h"
#include "text/response_parser.h"

namespace sluice {

constexpr std::string_view kStreamDone = "data: [DONE]\n\n";

struct AnswerMeta {
  std::string id;       // "chatcmpl-...", "cmpl-...", or the rid
  int64_t created = 0;  // Unix seconds
  std::string model;
};

struct TokenAlternative {
  int32_t id = -1;
  std::string bytes;
  float logprob = 0;
};

struct TokenLogprob {
  int32_t id = -1;
  std::string bytes;        // raw bytes of the token
  bool has_logprob = true;  // false: the first token of a prompt
  float logprob = 0;
  std::vector<TokenAlternative> top;
  int64_t text_offset = 0;  // completions: characters before it
};

enum class StopMatch : uint8_t { kNone, kToken, kText };

struct Finish {
  FinishReason reason = FinishReason::kNone;  // kStop, kLength or kAbort
  StopMatch match = StopMatch::kNone;
  int32_t matched_token = -1;
  std::string matched_text;
  std::string abort_message;
  bool tool_calls = false;  // calls were sent: that is the reason a client sees for kStop and kLength
};

struct Usage {
  int64_t prompt = 0, completion = 0;
  CachedTokens cached;
  bool details = false;  // cached tokens by tier, drafted tokens
  int64_t drafted = 0, draft_kept = 0;
};

// What one choice adds to a stream.
struct ChoiceDelta {
  int32_t index = 0;
  std::string_view text;
  bool with_logprobs = false;
  std::span<const TokenLogprob> logprobs;
  const Finish* finish = nullptr;        // with the last record of the choice
  const Usage* usage = nullptr;          // continuous_usage_stats
  const ResponseEvent* event = nullptr;  // chat: in place of `text`, what a parser made of it
};

struct ToolCallAnswer {
  std::string id, name, arguments;
};

struct ChoiceAnswer {
  int32_t index = 0;
  std::string text;
  bool with_logprobs = false;
  bool with_top = false;  // completions: top_logprobs asked for (else null)
  std::vector<TokenLogprob> logprobs;
  Finish finish;
  std::string reasoning;  // chat
  std::vector<ToolCallAnswer> tool_calls;
};

// ---- OpenAI ----
// usage: with continuous_usage_stats, else null.
void AppendChatRole(const AnswerMeta& meta, int32_t index, const Usage* usage, std::string* out);
void AppendChatDelta(const AnswerMeta& meta, const ChoiceDelta& delta, std::string* out);
void AppendCompletionDelta(const AnswerMeta& meta, const ChoiceDelta& delta, bool with_top, std::string* out);
void AppendUsageRecord(const AnswerMeta& meta, bool chat, const Usage& usage, std::string* out);
void AppendErrorRecord(const ApiError& error, std::string* out);
std::string ChatBody(const AnswerMeta& meta, std::span<const ChoiceAnswer> choices, const Usage& usage);
std::string CompletionBody(const AnswerMeta& meta, std::span<const ChoiceAnswer> choices, const Usage& usage);

// ---- /generate ----
struct NativeAnswer {
  std::string id;
  int32_t index = 0;
  bool with_index = false;  // streams of several answers
  std::string_view text;    // all of it so far
  std::span<const int32_t> output_ids;
  Usage usage;  // of this answer alone
  const Finish* finish = nullptr;
  double e2e_latency_s = -1;  // < 0: left out
  bool with_logprobs = false, with_top = false, text_in_logprobs = false, with_input_logprobs = false;
  std::span<const TokenLogprob> input_logprobs, output_logprobs;
  int32_t spec_proposed = 0, spec_accepted = 0, spec_steps = 0;
};
void AppendNativeAnswer(const NativeAnswer& answer, std::string* json);  // one object

// A token's bytes as text; bytes that are no UTF-8 become U+FFFD.
std::string TokenText(std::string_view bytes);
// Characters of UTF-8 text.
int64_t CountCharacters(std::string_view text);

}  // namespace sluice
