// Typed requests and their parsers. A parser allocates nothing that grows with a number in the body, checks
// every range so that NaN fails, and reports the first problem with field, value, limit and remedy.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/error.h"
#include "nlohmann/json.hpp"
#include "request/request.h"

namespace sluice {

// What a server accepts. The numbers are part of the API's documentation.
struct ApiLimits {
  int32_t vocab_size = 0;  // token ids are below this
  int64_t context_length = 0;
  int32_t stops_max = 4;  // OpenAI's limit; /generate: native_stops_max
  int32_t native_stops_max = 64;
  size_t stop_bytes_max = 1024;
  int32_t n_max = 128;
  int32_t prompts_max = 256;   // in one request
  int32_t choices_max = 1024;  // prompts x n
  size_t logit_bias_max = 1024;
  size_t stop_token_ids_max = 64;
  int32_t top_logprobs_max = 20;
  int32_t native_top_logprobs_max = 128;
  size_t salt_bytes_max = 256;  // cache_salt, extra_key
  size_t name_bytes_max = 256;  // model, rid, user
  double timeout_s_max = 86400;
  size_t template_values_max = 100000;  // JSON values in messages, tools and chat_template_kwargs
  size_t tools_max = 1024, tool_name_bytes_max = 256;
};

// Values of sampling fields that the client did not send.
struct SamplingDefaults {
  float temperature = 1, top_p = 1, min_p = 0, repetition_penalty = 1;
  int32_t top_k = -1;
};

struct PromptInput {
  bool is_ids = false;
  std::string text;
  std::vector<int32_t> ids;
};

// What an answer is bound to: at most one of the fields that say so.
struct ConstraintSpec {
  enum class Kind : uint8_t { kNone, kJsonObject, kJsonSchema, kRegex, kEbnf } kind = Kind::kNone;
  std::string text;         // schema as JSON text, pattern or grammar
  std::string field;        // where it stood
  bool whitespace = false;  // JSON: any white space, not just a space behind ':' and ','
};

// What every generating request has.
struct GenerationOptions {
  SamplingParams sampling;  // seed only when has_seed; max_tokens only when has_max_tokens
  bool has_max_tokens = false, has_seed = false;
  std::vector<std::string> stop;  // none is empty
  bool trim_stop = true;          // cut the stop string or stop token out of the answer
  bool skip_special_tokens = true;
  bool stream = false, include_usage = false, continuous_usage = false;
  ConstraintSpec constraint;
  bool cached_details = false;  // return_cached_tokens_details
  std::string model, rid, cache_salt, extra_key, user;
  int32_t priority = 0;
  double timeout_s = 0;  // 0: none
  // Prefill and decode in two servers: prompt p of the request meets in room + p.
  bool has_room = false;
  int64_t room = 0;
  std::string bootstrap_host;
  int32_t bootstrap_port = 0;
};

enum class ToolChoice : uint8_t { kAuto, kNone, kRequired, kNamed };

struct ChatRequest {
  GenerationOptions options;
  nlohmann::ordered_json tools = nlohmann::ordered_json::array();  // OpenAI form, checked
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string tool_name;  // with kNamed
  bool parallel_tool_calls = true;
  bool separate_reasoning = true, stream_reasoning = true;
  std::string prefill;              // the answer begins with this text, which is part of the prompt
  nlohmann::ordered_json messages;  // roles and contents checked
  nlohmann::ordered_json template_kwargs = nlohmann::ordered_json::object();
  bool add_generation_prompt = true;
};

struct CompletionRequest {
  GenerationOptions options;
  std::vector<PromptInput> prompts;  // at least one
  bool echo = false;
};

struct NativeRequest {  // POST /generate
  std::vector<PromptInput> inputs;
  bool batch = false;                      // the input was a list: the answer is one too
  bool named_each = false;                 // rid was a list
  std::vector<GenerationOptions> options;  // one per input
  bool return_logprob = false;
  int32_t logprob_start = -1;  // -1: no prompt logprobs
  bool text_in_logprobs = false;
  bool incremental = false;  // stream what is new instead of all so far
};

struct TokenizeRequest {
  std::optional<nlohmann::ordered_json> messages;  // else prompts
  nlohmann::ordered_json template_kwargs = nlohmann::ordered_json::object();
  bool add_generation_prompt = true;
  std::vector<std::string> prompts;
  bool batch = false;
  bool add_special_tokens = true;  // what the model wants before a plain prompt
  bool return_token_strings = false;
};

struct DetokenizeRequest {
  std::vector<std::vector<int32_t>> tokens;
  bool batch = false;
  bool skip_special_tokens = true;
};

struct AbortRequest {
  std::string rid;
  bool abort_all = false;
};

// Each returns the error, or nullopt with *out filled.
std::optional<ApiError> ParseChat(std::string_view body, const ApiLimits&, const SamplingDefaults&,
                                  ChatRequest* out);
// POST /v1/messages (Anthropic's form), brought into the form of a chat request. count_only: /count_tokens,
// where max_tokens is not needed.
std::optional<ApiError> ParseMessages(std::string_view body, const ApiLimits&, const SamplingDefaults&,
                                      bool count_only, ChatRequest* out);
std::optional<ApiError> ParseCompletion(std::string_view body, const ApiLimits&, const SamplingDefaults&,
                                        CompletionRequest* out);
std::optional<ApiError> ParseNative(std::string_view body, const ApiLimits&, const SamplingDefaults&,
                                    NativeRequest* out);
std::optional<ApiError> ParseTokenize(std::string_view body, const ApiLimits&, TokenizeRequest* out);
std::optional<ApiError> ParseDetokenize(std::string_view body, const ApiLimits&, DetokenizeRequest* out);
std::optional<ApiError> ParseAbort(std::string_view body, const ApiLimits&, AbortRequest* out);

}  // namespace sluice
