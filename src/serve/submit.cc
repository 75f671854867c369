// From a request's JSON to tokens in the engine: chat, completions, /generate; and the tokenizer's own
// endpoints.
#include <atomic>
#include <ctime>
#include <random>

#include "api/json_writer.h"
#include "base/digest.h"
#include "serve/app_server.h"

namespace sluice {
namespace {

// 64 random bits; the generator is seeded once a thread from the system.
uint64_t RandomBits() {
  thread_local std::mt19937_64 generator([] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }());
  return generator();
}

ApiError TooLong(std::string_view field, std::string text) {
  return {.message = fmt::format("{}: {}", field, text),
          .param = std::string(field),
          .code = "context_length_exceeded"};
}

}  // namespace

AnswerMeta AppServer::NewMeta(std::string_view prefix, const GenerationOptions& options) const {
  return {.id = options.rid.empty() ? fmt::format("{}{:016x}{:016x}", prefix, RandomBits(), RandomBits())
                                    : options.rid,
          .created = std::time(nullptr),
          .model = options_.model_name};
}

// A text of b bytes has at least b / max_token_bytes tokens: what cannot fit is refused before it is read.
std::optional<ApiError> AppServer::CheckTextBytes(std::string_view field, size_t bytes) const {
  const int64_t longest = std::max(1, tokenizer_->max_token_bytes());
  const int64_t tokens = int64_t(bytes) / longest;
  if (tokens <= options_.limits.context_length) return std::nullopt;
  return TooLong(
      field,
      fmt::format("{} bytes of text are at least {} tokens, more than the context of {} tokens; shorten it",
                  bytes, tokens, options_.limits.context_length));
}

std::optional<ApiError> AppServer::EncodePrompt(const PromptInput& input, std::string_view field,
                                                std::vector<int32_t>* ids) const {
  if (input.is_ids) {
    *ids = input.ids;
  } else {
    if (auto error = CheckTextBytes(field, input.text.size())) return error;
    const auto prefix = tokenizer_->PromptPrefix();
    ids->assign(prefix.begin(), prefix.end());
    const std::vector<int32_t> text = tokenizer_->Encode(input.text, /*allow_special=*/true);
    ids->insert(ids->end(), text.begin(), text.end());
  }
  if (ids->empty()) {
    return ApiError{.message = fmt::format("{}: the prompt has no tokens; send at least one", field),
                    .param = std::string(field)};
  }
  return std::nullopt;
}

std::optional<ApiError> AppServer::EncodeChat(const nlohmann::ordered_json& messages,
                                              const nlohmann::ordered_json& kwargs,
                                              bool add_generation_prompt, std::vector<int32_t>* ids,
                                              std::string_view prefill, bool* opens_reasoning) const {
  if (chat_template_ == nullptr) {
    return ApiError{.message = "this model has no chat template; use /v1/completions", .code = "unsupported"};
  }
  size_t bytes = 0;
  for (const auto& message : messages) {
    const auto content = message.find("content");
    if (content == message.end()) continue;
    if (content->is_string()) bytes += content->get_ref<const std::string&>().size();
    if (!content->is_array()) continue;
    for (const auto& part : *content) bytes += part.at("text").get_ref<const std::string&>().size();
  }
  if (auto error = CheckTextBytes("messages", bytes)) return error;
  auto prompt = chat_template_->Render(messages, kwargs, add_generation_prompt);
  if (!prompt.ok()) {
    ApiError error = ErrorFromStatus(prompt.status());
    error.http_status = 400;
    error.type = "invalid_request_error";
    error.param = "messages";
    return error;
  }
  if (opens_reasoning != nullptr) *opens_reasoning = PromptOpensReasoning(prompt->Text());
  if (!prefill.empty()) prompt->segments.push_back({.text = std::string(prefill), .from_template = false});
  *ids = tokenizer_->EncodeSegments(prompt->segments);
  if (ids->empty()) return ApiError{.message = "messages: the prompt has no tokens", .param = "messages"};
  return std::nullopt;
}

std::optional<ApiError> AppServer::Settle(GenerationOptions* options, size_t prompt_tokens,
                                          size_t index) const {
  const int64_t room = options_.limits.context_length - int64_t(prompt_tokens);
  if (room < 1) {
    return ApiError{.message = fmt::format(
                        "the prompt has {} tokens and the context {}: at most {} leave room for an answer; "
                        "shorten it",
                        prompt_tokens, options_.limits.context_length, options_.limits.context_length - 1),
                    .code = "context_length_exceeded"};
  }
  SamplingParams& s = options->sampling;
  s.max_tokens = int32_t(options->has_max_tokens ? std::min<int64_t>(s.max_tokens, room) : room);
  s.min_tokens = std::min(s.min_tokens, s.max_tokens);
  if (!options->has_seed) {
    s.seed = RandomBits();
  } else if (index > 0) {
    s.seed += 0x9E3779B97F4A7C15ull * index;  // prompts of one request do not share noise
  }
  if (options->timeout_s <= 0) options->timeout_s = options_.request_timeout_s;
  return std::nullopt;
}

void AppServer::LaunchOrReject(std::optional<ApiError> error, AnswerForm form, GenerationSpec spec,
                               Nanos arrival, const std::shared_ptr<HttpExchange>& exchange) {
  if (error) {
    Generation::Reject(&context_, form, exchange.get(), *error,
                       error->code == "context_length_exceeded" ? "too_long" : "invalid");
    return;
  }
  for (size_t p = 0; p < spec.prompts.size(); ++p) {
    GenerationPrompt& prompt = spec.prompts[p];
    if (prompt.rid.empty()) prompt.rid = p == 0 ? spec.meta.id : fmt::format("{}-{}", spec.meta.id, p);
  }
  std::make_shared<Generation>(&context_, std::move(spec), exchange, arrival)->Launch();
}

std::optional<ApiError> AppServer::Bind(const ConstraintRequest& request, std::string_view field,
                                        std::shared_ptr<const TokenConstraint>* out) const {
  auto compiled = constraints_->Compile(request);
  if (!compiled.ok()) {
    return ApiError{.message = fmt::format("{}: {}", field, Message(compiled.status())),
                    .param = std::string(field),
                    .code = "unsupported_constraint"};
  }
  *out = *std::move(compiled);
  return std::nullopt;
}

std::optional<ApiError> AppServer::BindAnswer(const ConstraintSpec& spec,
                                              ConstraintRequest::Reasoning reasoning,
                                              std::shared_ptr<const TokenConstraint>* out) const {
  ConstraintRequest request{.text = spec.text, .whitespace = spec.whitespace, .reasoning = reasoning};
  switch (spec.kind) {
    case ConstraintSpec::Kind::kNone:
      return std::nullopt;
    case ConstraintSpec::Kind::kJsonObject:
      request.kind = ConstraintRequest::Kind::kJsonObject;
      break;
    case ConstraintSpec::Kind::kJsonSchema:
      request.kind = ConstraintRequest::Kind::kJsonSchema;
      break;
    case ConstraintSpec::Kind::kRegex:
      request.kind = ConstraintRequest::Kind::kRegex;
      break;
    case ConstraintSpec::Kind::kEbnf:
      request.kind = ConstraintRequest::Kind::kEbnf;
      break;
  }
  return Bind(request, spec.field, out);
}

std::optional<ApiError> AppServer::PrepareChat(ChatRequest* request, GenerationSpec* spec) const {
  GenerationPrompt prompt;
  const bool tools = !request->tools.empty() && request->tool_choice != ToolChoice::kNone;
  const bool forced =
      request->tool_choice == ToolChoice::kRequired || request->tool_choice == ToolChoice::kNamed;
  const ConstraintSpec& bound = request->options.constraint;
  if (forced && bound.kind != ConstraintSpec::Kind::kNone) {
    return ApiError{
        .message = fmt::format("tool_choice: a forced call and {} exclude each other; send one of them",
                               bound.field),
        .param = "tool_choice"};
  }
  if (tools && options_.tool_calls == ToolCallStyle::kNone) {
    return ApiError{.message =
                        "tools: how this model writes tool calls is not known; start the server with "
                        "--tool-call-parser",
                    .param = "tools",
                    .code = "unsupported"};
  }
  if (tools) request->template_kwargs["tools"] = request->tools;
  ChatFormat format;
  if (auto error = EncodeChat(request->messages, request->template_kwargs, request->add_generation_prompt,
                              &prompt.ids, request->prefill, &format.parser.starts_in_reasoning)) {
    return error;
  }
  if (auto error = Settle(&request->options, prompt.ids.size(), 0)) return error;
  format.parser.reasoning = request->separate_reasoning ? options_.reasoning : ReasoningStyle::kNone;
  format.parser.starts_in_reasoning &= request->prefill.empty();
  ConstraintRequest::Reasoning reasoning = ConstraintRequest::Reasoning::kNone;
  const auto off = [&](const char* name) {
    const auto it = request->template_kwargs.find(name);
    return it != request->template_kwargs.end() && *it == false;
  };
  if (options_.reasoning != ReasoningStyle::kNone && request->prefill.empty() &&
      (format.parser.starts_in_reasoning || !(off("enable_thinking") || off("thinking")))) {
    reasoning = format.parser.starts_in_reasoning ? ConstraintRequest::Reasoning::kOpen
                                                  : ConstraintRequest::Reasoning::kMayOpen;
  }
  if (forced) {
    ConstraintRequest call{.kind = ConstraintRequest::Kind::kToolCalls,
                           .tools = request->tools,
                           .style = options_.tool_calls,
                           .one_call = !request->parallel_tool_calls,
                           .reasoning = reasoning};
    if (request->tool_choice == ToolChoice::kNamed) {
      call.one_call = true;
      call.tools = nlohmann::ordered_json::array();
      for (const auto& tool : request->tools) {
        if (tool["function"]["name"] == request->tool_name) call.tools.push_back(tool);
      }
    }
    if (auto error = Bind(call, "tools", &prompt.constraint)) return error;
  } else if (auto error = BindAnswer(bound, reasoning, &prompt.constraint)) {
    return error;
  }
  if (tools) {
    format.parser.tools = options_.tool_calls;
    format.parser.declared_tools = std::move(request->tools);
  }
  format.one_call = !request->parallel_tool_calls;
  format.stream_reasoning = request->stream_reasoning;
  spec->chat = std::move(format);
  spec->stream = request->options.stream;
  spec->include_usage = request->options.include_usage;
  spec->continuous_usage = request->options.continuous_usage;
  spec->cached_details = request->options.cached_details;
  spec->logprobs = request->options.sampling.top_logprobs >= 0;
  prompt.options = std::move(request->options);
  spec->prompts.push_back(std::move(prompt));
  return std::nullopt;
}

void AppServer::Chat(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  const Nanos arrival = clock_->Now();
  ChatRequest request;
  GenerationSpec spec{.form = AnswerForm::kChat};
  auto error = ParseChat(http.body, options_.limits, options_.defaults, &request);
  if (!error) spec.meta = NewMeta("chatcmpl-", request.options);
  if (!error) error = PrepareChat(&request, &spec);
  LaunchOrReject(std::move(error), AnswerForm::kChat, std::move(spec), arrival, exchange);
}

void AppServer::Messages(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  const Nanos arrival = clock_->Now();
  ChatRequest request;
  GenerationSpec spec{.form = AnswerForm::kMessages};
  auto error = ParseMessages(http.body, options_.limits, options_.defaults, /*count_only=*/false, &request);
  if (!error) spec.meta = NewMeta("msg_", request.options);
  if (!error && !request.options.model.empty()) spec.meta.model = request.options.model;
  if (!error) error = PrepareChat(&request, &spec);
  LaunchOrReject(std::move(error), AnswerForm::kMessages, std::move(spec), arrival, exchange);
}

void AppServer::CountTokens(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  ChatRequest request;
  std::vector<int32_t> ids;
  auto error = ParseMessages(http.body, options_.limits, options_.defaults, /*count_only=*/true, &request);
  if (!error && !request.tools.empty() && request.tool_choice != ToolChoice::kNone) {
    request.template_kwargs["tools"] = request.tools;
  }
  if (!error) error = EncodeChat(request.messages, request.template_kwargs, true, &ids, request.prefill);
  if (error) {
    exchange->Respond(sluice::ErrorResponse(*error, context_.retry_after_s, AnswerForm::kMessages));
  } else {
    exchange->Respond({.body = TokenCountBody(int64_t(ids.size()))});
  }
}

void AppServer::Completions(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  const Nanos arrival = clock_->Now();
  CompletionRequest request;
  GenerationSpec spec{.form = AnswerForm::kCompletion};
  auto error = ParseCompletion(http.body, options_.limits, options_.defaults, &request);
  for (size_t p = 0; p < request.prompts.size() && !error; ++p) {
    const std::string field = request.prompts.size() > 1 ? fmt::format("prompt[{}]", p) : "prompt";
    GenerationPrompt prompt{.options = request.options};
    error = EncodePrompt(request.prompts[p], field, &prompt.ids);
    if (!error) error = Settle(&prompt.options, prompt.ids.size(), p);
    if (!error) {
      error = BindAnswer(prompt.options.constraint, ConstraintRequest::Reasoning::kNone, &prompt.constraint);
    }
    if (error) break;
    if (request.echo) {
      prompt.echo_text = request.prompts[p].is_ids
                             ? tokenizer_->Decode(prompt.ids, request.options.skip_special_tokens)
                             : std::move(request.prompts[p].text);
    }
    spec.prompts.push_back(std::move(prompt));
  }
  if (!error) {
    spec.meta = NewMeta("cmpl-", request.options);
    spec.stream = request.options.stream;
    spec.include_usage = request.options.include_usage;
    spec.continuous_usage = request.options.continuous_usage;
    spec.cached_details = request.options.cached_details;
    spec.echo = request.echo;
    spec.logprobs = request.options.sampling.top_logprobs >= 0;
    spec.top_logprobs = request.options.sampling.top_logprobs > 0;
    spec.prompt_logprobs_from = request.echo && spec.logprobs ? 0 : -1;
  }
  LaunchOrReject(std::move(error), AnswerForm::kCompletion, std::move(spec), arrival, exchange);
}

void AppServer::Generate(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  const Nanos arrival = clock_->Now();
  NativeRequest request;
  GenerationSpec spec{.form = AnswerForm::kNative};
  auto error = ParseNative(http.body, options_.limits, options_.defaults, &request);
  for (size_t p = 0; p < request.inputs.size() && !error; ++p) {
    const std::string_view name = request.inputs[p].is_ids ? "input_ids" : "text";
    GenerationPrompt prompt{.options = std::move(request.options[p])};
    error = EncodePrompt(request.inputs[p],
                         request.batch ? fmt::format("{}[{}]", name, p) : std::string(name), &prompt.ids);
    if (!error) error = Settle(&prompt.options, prompt.ids.size(), p);
    if (!error) {
      error = BindAnswer(prompt.options.constraint, ConstraintRequest::Reasoning::kNone, &prompt.constraint);
    }
    if (error) break;
    if (request.batch && p > 0)
      prompt.rid = prompt.options.rid;  // names of their own, if the client gave a list
    spec.prompts.push_back(std::move(prompt));
  }
  if (!error) {
    const GenerationOptions& first = spec.prompts[0].options;
    spec.own_names = request.named_each;
    for (size_t p = 1; p < spec.prompts.size(); ++p) {
      if (spec.prompts[p].rid == first.rid)
        spec.prompts[p].rid.clear();  // one name for all: told apart by number
    }
    spec.meta = NewMeta("", first);
    spec.stream = first.stream;
    spec.cached_details = first.cached_details;
    spec.batch = request.batch;
    spec.logprobs = request.return_logprob;
    spec.top_logprobs = first.sampling.top_logprobs > 0;
    spec.text_in_logprobs = request.text_in_logprobs;
    spec.incremental = request.incremental;
    spec.prompt_logprobs_from = request.return_logprob ? request.logprob_start : -1;
  }
  LaunchOrReject(std::move(error), AnswerForm::kNative, std::move(spec), arrival, exchange);
}

void AppServer::Tokenize(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  TokenizeRequest request;
  auto error = ParseTokenize(http.body, options_.limits, &request);
  std::vector<std::vector<int32_t>> lists;
  if (!error && request.messages) {
    lists.emplace_back();
    error = EncodeChat(*request.messages, request.template_kwargs, request.add_generation_prompt, &lists[0]);
  }
  for (const std::string& text : request.prompts) {
    const auto prefix = request.add_special_tokens ? tokenizer_->PromptPrefix() : std::span<const int32_t>();
    lists.emplace_back(prefix.begin(), prefix.end());
    const std::vector<int32_t> ids = tokenizer_->Encode(text, /*allow_special=*/true);
    lists.back().insert(lists.back().end(), ids.begin(), ids.end());
  }
  if (error) return exchange->Respond(Refusal(*error));
  std::string out;
  JsonWriter w(&out);
  const auto ids = [&](const std::vector<int32_t>& list) {
    w.Array();
    for (const int32_t id : list) w.Int(id);
    w.End();
  };
  const auto strings = [&](const std::vector<int32_t>& list) {
    w.Array();
    for (const int32_t id : list) w.Text(TokenText(tokenizer_->TokenBytes(id)));
    w.End();
  };
  w.Object().Key("tokens");
  if (request.batch) {
    w.Array();
    for (const auto& list : lists) ids(list);
    w.End().Key("count").Array();
    for (const auto& list : lists) w.Int(int64_t(list.size()));
    w.End();
  } else {
    ids(lists[0]);
    w.Key("count").Int(int64_t(lists[0].size()));
  }
  w.Key("max_model_len").Int(options_.limits.context_length);
  if (request.return_token_strings) {
    w.Key("token_strs");
    if (request.batch) {
      w.Array();
      for (const auto& list : lists) strings(list);
      w.End();
    } else {
      strings(lists[0]);
    }
  }
  w.End();
  exchange->Respond({.body = std::move(out)});
}

void AppServer::Detokenize(HttpRequest& http, const std::shared_ptr<HttpExchange>& exchange) {
  DetokenizeRequest request;
  if (auto error = ParseDetokenize(http.body, options_.limits, &request))
    return exchange->Respond(Refusal(*error));
  std::string out;
  JsonWriter w(&out);
  w.Object();
  for (std::string_view key : {"text", "prompt"}) {  // SGLang's name and vLLM's
    w.Key(key);
    if (request.batch) w.Array();
    for (const auto& list : request.tokens) w.Text(tokenizer_->Decode(list, request.skip_special_tokens));
    if (request.batch) w.End();
  }
  w.End();
  exchange->Respond({.body = std::move(out)});
}

}  // namespace sluice
