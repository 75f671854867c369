#include <algorithm>
#include <limits>

#include "api/generation_config.h"
#include "api/parse_options.h"
#include "api/requests.h"

namespace sluice {

namespace dom = simdjson::dom;
using namespace api_internal;  // NOLINT: the other half of this parser

namespace {

// An id prompt is checked here; a text prompt that becomes no token is refused after tokenising.
void RefuseEmptyIds(FieldReader& f, std::string_view name, const std::vector<PromptInput>& prompts,
                    bool batch) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    const bool empty = prompts[i].is_ids ? prompts[i].ids.empty() : prompts[i].text.empty();
    if (empty) {
      f.Fail(batch ? fmt::format("{}[{}]", name, i) : std::string(name),
             "the prompt is empty; send at least one token");
    }
  }
}

}  // namespace

std::optional<ApiError> ParseChat(std::string_view body, const ApiLimits& limits,
                                  const SamplingDefaults& defaults, ChatRequest* out) {
  JsonBody json;
  if (auto error = JsonBody::Parse(body, &json)) return error;
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  RefuseUnsupported(
      f, {"functions", "function_call", "structural_tag", "lora_path", "return_hidden_states",
          "custom_logit_processor", "logits_processors", "chat_template", "continue_final_message", "audio",
          "documents", "use_beam_search", "prompt_logprobs"});
  ReadEnvelope(f, limits, &out->options);
  ReadSampling(f, limits, defaults, limits.stops_max, &out->options);
  ReadConstraint(f, &out->options);
  ReadMaxTokens(f, {"max_completion_tokens", "max_tokens"}, &out->options);
  bool logprobs = false;
  f.Bool("logprobs", &logprobs);
  int32_t top = 0;
  const bool has_top = f.Int32("top_logprobs", 0, limits.top_logprobs_max, &top);
  if (has_top && top > 0 && !logprobs) {
    f.Fail("top_logprobs", fmt::format("{} needs \"logprobs\": true", top));
  }
  out->options.sampling.top_logprobs = logprobs ? top : -1;
  ReadMessages(f, limits, &out->messages, &out->template_kwargs, &out->add_generation_prompt);
  ReadTools(f, limits, out);
  CheckTotals(f, limits, 1, out->options.sampling.n);
  return error;
}

std::optional<ApiError> ParseCompletion(std::string_view body, const ApiLimits& limits,
                                        const SamplingDefaults& defaults, CompletionRequest* out) {
  JsonBody json;
  if (auto error = JsonBody::Parse(body, &json)) return error;
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  RefuseUnsupported(
      f, {"suffix", "structural_tag", "lora_path", "return_hidden_states", "custom_logit_processor",
          "logits_processors", "use_beam_search", "prompt_embeds", "prompt_logprobs"});
  ReadEnvelope(f, limits, &out->options);
  ReadSampling(f, limits, defaults, limits.stops_max, &out->options);
  ReadConstraint(f, &out->options);
  ReadMaxTokens(f, {"max_tokens", "max_completion_tokens"}, &out->options);
  if (!out->options.has_max_tokens) {
    out->options.has_max_tokens = true;
    out->options.sampling.max_tokens = std::max(16, out->options.sampling.min_tokens);  // OpenAI's default
  }
  f.Bool("echo", &out->echo);
  f.Int32("logprobs", 0, limits.top_logprobs_max, &out->options.sampling.top_logprobs);
  int32_t best_of = 0;
  if (f.Int32("best_of", 1, limits.n_max, &best_of) && best_of != out->options.sampling.n) {
    f.Fail("best_of",
           fmt::format("{} is not n = {}; ranking is not supported, leave it out", best_of,
                       out->options.sampling.n),
           "unsupported");
  }
  bool batch = false;
  ReadPrompts(f, "prompt", limits, &out->prompts, &batch);
  RefuseEmptyIds(f, "prompt", out->prompts, batch);
  CheckTotals(f, limits, out->prompts.size(), out->options.sampling.n);
  return error;
}

std::optional<ApiError> ParseNative(std::string_view body, const ApiLimits& limits,
                                    const SamplingDefaults& defaults, NativeRequest* out) {
  JsonBody json;
  if (auto error = JsonBody::Parse(body, &json)) return error;
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  RefuseUnsupported(
      f, {"image_data", "audio_data", "video_data", "input_embeds", "lora_path", "return_hidden_states",
          "custom_logit_processor", "session_params", "token_ids_logprob"});
  const bool has_text = f.Has("text"), has_ids = f.Has("input_ids");
  if (has_text == has_ids) f.Fail(has_text ? "input_ids" : "text", "send exactly one of text and input_ids");
  ReadPrompts(f, has_text ? "text" : "input_ids", limits, &out->inputs, &out->batch);
  for (const PromptInput& input : out->inputs) {
    if (input.is_ids != has_ids) {
      f.Fail(has_text ? "text" : "input_ids",
             has_text ? "text is a string or a list of strings; token ids go into input_ids"
                      : "input_ids holds token ids; strings go into text");
      break;
    }
  }
  RefuseEmptyIds(f, has_text ? "text" : "input_ids", out->inputs, out->batch);
  f.Bool("return_logprob", &out->return_logprob);
  f.Bool("return_text_in_logprobs", &out->text_in_logprobs);
  f.Bool("incremental_streaming_output", &out->incremental);
  f.Int32("logprob_start_len", -1, std::numeric_limits<int32_t>::max(), &out->logprob_start);
  int32_t top = 0;
  f.Int32("top_logprobs_num", 0, limits.native_top_logprobs_max, &top);

  GenerationOptions shared;
  {
    // rid may be a list here, one per input.
    const auto rid = f.Find("rid");
    std::vector<std::string> rids;
    dom::array rid_list;
    const bool listed = rid && rid->get(rid_list) == simdjson::SUCCESS;
    if (listed) {
      if (!out->batch || rid_list.size() != out->inputs.size()) {
        f.Fail("rid", fmt::format("{} names for {} inputs; send one per input", rid_list.size(),
                                  out->inputs.size()));
      } else {
        for (const JsonElement e : rid_list) {
          std::string_view name;
          if (e.get(name) != simdjson::SUCCESS || name.size() > limits.name_bytes_max) {
            f.Fail("rid",
                   fmt::format("{} is not a string of at most {} bytes", Shown(e), limits.name_bytes_max));
            break;
          }
          rids.emplace_back(name);
          if (const auto twin = std::find(rids.begin(), rids.end() - 1, rids.back());
              twin != rids.end() - 1) {
            f.Fail("rid", fmt::format("{} names two inputs; give each a name of its own", Shown(e)));
            break;
          }
        }
        out->named_each = true;
      }
    }
    if (!listed) {
      ReadEnvelope(f, limits, &shared);
    } else {
      // Everything but the list of names.
      f.Bool("stream", &shared.stream);
      f.String("cache_salt", limits.salt_bytes_max, &shared.cache_salt);
      f.String("extra_key", limits.salt_bytes_max, &shared.extra_key);
      f.Int32("priority", -1000000, 1000000, &shared.priority);
      f.Bool("return_cached_tokens_details", &shared.cached_details);
    }
    shared.sampling.max_tokens = 128;
    shared.has_max_tokens = true;
    const auto params = f.Find("sampling_params");
    dom::array params_list;
    const bool params_listed = params && params->get(params_list) == simdjson::SUCCESS;
    if (params_listed && (!out->batch || params_list.size() != out->inputs.size())) {
      f.Fail("sampling_params", fmt::format("{} objects for {} inputs; send one object, or one per input",
                                            params_list.size(), out->inputs.size()));
    }
    if (params && !params_listed && !params->is_object()) {
      f.Fail("sampling_params", fmt::format("{} is not an object", Shown(*params)));
    }
    if (error) return error;
    size_t total = 0;
    for (size_t i = 0; i < out->inputs.size(); ++i) {
      GenerationOptions options = shared;
      const std::string at = params_listed ? fmt::format("sampling_params[{}].", i) : "sampling_params.";
      std::optional<JsonElement> mine = params;
      if (params_listed) mine = params_list.at(i);
      dom::object object;
      if (mine && mine->get(object) != simdjson::SUCCESS) {
        f.Fail("sampling_params", fmt::format("{} is not an object", Shown(*mine)));
        return error;
      }
      if (mine) {
        FieldReader p(object, at, &error);
        RefuseUnsupported(p, {"structural_tag", "custom_params"});
        ReadSampling(p, limits, defaults, limits.native_stops_max, &options);
        ReadConstraint(p, &options);
        options.has_max_tokens = false;
        ReadMaxTokens(p, {"max_new_tokens", "max_tokens"}, &options);
        if (!options.has_max_tokens) {
          options.has_max_tokens = true;
          options.sampling.max_tokens = std::max(128, options.sampling.min_tokens);
        }
      } else {
        options.sampling.temperature = defaults.temperature;
        options.sampling.top_p = defaults.top_p;
        options.sampling.top_k = defaults.top_k;
        options.sampling.min_p = defaults.min_p;
        options.sampling.repetition_penalty = defaults.repetition_penalty;
      }
      options.sampling.top_logprobs = out->return_logprob ? top : -1;
      if (!rids.empty()) options.rid = rids[i];
      total += size_t(options.sampling.n);
      out->options.push_back(std::move(options));
      if (error) return error;
    }
    if (total > size_t(limits.choices_max)) {
      f.Fail("n",
             fmt::format("{} answers are too many; at most {} in one request", total, limits.choices_max));
    }
  }
  return error;
}

std::optional<ApiError> ParseTokenize(std::string_view body, const ApiLimits& limits, TokenizeRequest* out) {
  JsonBody json;
  if (auto error = JsonBody::Parse(body, &json)) return error;
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  f.Bool("return_token_strs", &out->return_token_strings);
  f.Bool("add_special_tokens", &out->add_special_tokens);
  if (f.Has("messages")) {
    out->messages.emplace();
    ReadMessages(f, limits, &*out->messages, &out->template_kwargs, &out->add_generation_prompt);
    return error;
  }
  const std::string_view name = f.Has("text") ? "text" : "prompt";
  std::vector<PromptInput> prompts;
  ReadPrompts(f, name, limits, &prompts, &out->batch);
  for (PromptInput& p : prompts) {
    if (p.is_ids) {
      f.Fail(name, "token ids are tokens already; send text");
      return error;
    }
    out->prompts.push_back(std::move(p.text));
  }
  return error;
}

std::optional<ApiError> ParseDetokenize(std::string_view body, const ApiLimits& limits,
                                        DetokenizeRequest* out) {
  JsonBody json;
  if (auto error = JsonBody::Parse(body, &json)) return error;
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  f.Bool("skip_special_tokens", &out->skip_special_tokens);
  const auto element = f.Find("tokens");
  dom::array list;
  if (!element || element->get(list) != simdjson::SUCCESS) {
    f.Fail("tokens", element ? fmt::format("{} is not an array of token ids", Shown(*element))
                             : std::string("missing; send an array of token ids"));
    return error;
  }
  constexpr size_t kIdsMax = size_t(1) << 24;
  if (list.size() > 0 && list.at(0).is_array()) {
    out->batch = true;
    if (list.size() > size_t(limits.prompts_max)) {
      f.Fail("tokens",
             fmt::format("{} lists are too many; send at most {}", list.size(), limits.prompts_max));
      return error;
    }
    for (size_t i = 0; i < list.size() && !error; ++i) {
      out->tokens.emplace_back();
      f.ReadInts(list.at(i), fmt::format("tokens[{}]", i), 0, limits.vocab_size - 1, kIdsMax,
                 &out->tokens.back());
    }
    return error;
  }
  out->tokens.emplace_back();
  f.ReadInts(*element, "tokens", 0, limits.vocab_size - 1, kIdsMax, &out->tokens.back());
  return error;
}

std::optional<ApiError> ParseAbort(std::string_view body, const ApiLimits& limits, AbortRequest* out) {
  JsonBody json;
  if (auto error = JsonBody::Parse(body, &json)) return error;
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  f.String("rid", limits.name_bytes_max, &out->rid);
  f.Bool("abort_all", &out->abort_all);
  if (out->rid.empty() && !out->abort_all)
    f.Fail("rid", "missing; name the request, or send \"abort_all\": true");
  return error;
}

StatusOr<SamplingDefaults> ReadGenerationConfig(std::string_view text) {
  SamplingDefaults d;
  JsonBody json;
  if (JsonBody::Parse(text, &json)) return Invalid("not one JSON object, which it must be");
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  ReadDefaults(f, &d);
  bool do_sample = true;
  if (f.Bool("do_sample", &do_sample) && !do_sample) d.temperature = 0;
  if (!error) return d;
  std::string message = error->message;  // made for who sends a request
  constexpr std::string_view kSend = "; send ";
  if (const size_t at = message.find(kSend); at != message.npos)
    message.replace(at, kSend.size(), "; write ");
  return Invalid("{}", message);
}

}  // namespace sluice
