#include "api/parse_options.h"

#include <charconv>
#include <limits>

namespace sluice::api_internal {

namespace dom = simdjson::dom;

namespace {

constexpr size_t kTextBytesMax = size_t(1) << 30;  // the body's limit is the real one

void ReadStop(FieldReader& f, const ApiLimits& limits, int32_t stops_max, GenerationOptions* out) {
  const auto element = f.Find("stop");
  if (!element) return;
  const auto add = [&](JsonElement value, const std::string& field) {
    std::string_view text;
    if (value.get(text) != simdjson::SUCCESS) {
      f.Fail(field, fmt::format("{} is not a string; send a string or a list of strings", Shown(value)));
    } else if (text.empty()) {
      f.Fail(field, "an empty stop string would end every answer at once; leave it out");
    } else if (text.size() > limits.stop_bytes_max) {
      f.Fail(field, fmt::format("{} bytes are too many; a stop string has at most {}", text.size(),
                                limits.stop_bytes_max));
    } else {
      out->stop.emplace_back(text);
    }
  };
  dom::array list;
  if (element->get(list) != simdjson::SUCCESS) {
    add(*element, "stop");
    return;
  }
  if (list.size() > size_t(stops_max)) {
    f.Fail("stop", fmt::format("{} stop strings are too many; send at most {}", list.size(), stops_max));
    return;
  }
  size_t i = 0;
  for (const JsonElement value : list) add(value, fmt::format("stop[{}]", i++));
}

void ReadLogitBias(FieldReader& f, const ApiLimits& limits, GenerationOptions* out) {
  const auto element = f.Find("logit_bias");
  if (!element) return;
  dom::object object;
  if (element->get(object) != simdjson::SUCCESS) {
    f.Fail("logit_bias", fmt::format("{} is not an object of token id to bias", Shown(*element)));
    return;
  }
  if (object.size() > limits.logit_bias_max) {
    f.Fail("logit_bias",
           fmt::format("{} entries are too many; send at most {}", object.size(), limits.logit_bias_max));
    return;
  }
  FieldReader inner(object, f.path() + "logit_bias.", f.error());
  for (const auto [key, value] : object) {
    int32_t id = -1;
    const auto [end, ec] = std::from_chars(key.data(), key.data() + key.size(), id);
    const std::string field = key.size() <= 32 ? std::string(key) : std::string(key.substr(0, 8));
    if (ec != std::errc() || end != key.data() + key.size() || id < 0 || id >= limits.vocab_size) {
      f.Fail("logit_bias",
             fmt::format("{} is not a token id from 0 to {}", Quoted(key), limits.vocab_size - 1));
      return;
    }
    float bias = 0;
    if (!inner.Float(field, -100, 100, &bias)) {
      if (!f.failed()) f.Fail("logit_bias", fmt::format("the bias of token {} is null", id));
      return;
    }
    out->sampling.logit_bias.emplace_back(id, bias);
  }
}

void ReadSeed(FieldReader& f, GenerationOptions* out) {
  const auto element = f.Find("seed");
  if (!element) return;
  uint64_t wide;
  if (const auto value = AsInt(*element)) {
    out->sampling.seed = uint64_t(*value);
  } else if (element->is_uint64() && element->get(wide) == simdjson::SUCCESS) {
    out->sampling.seed = wide;
  } else {
    f.Fail("seed", fmt::format("{} is not a 64-bit integer", Shown(*element)));
    return;
  }
  out->has_seed = true;
}

bool SaysNothing(JsonElement e) {
  switch (e.type()) {
    case dom::element_type::ARRAY:
      return dom::array(e).size() == 0;
    case dom::element_type::OBJECT:
      return dom::object(e).size() == 0;
    case dom::element_type::STRING:
      return std::string_view(e).empty();
    case dom::element_type::BOOL:
      return !bool(e);
    default:
      return e.is_null();
  }
}

void CheckContent(FieldReader& f, JsonElement content, const std::string& field) {
  if (content.is_string()) return;
  dom::array parts;
  if (content.get(parts) != simdjson::SUCCESS) {
    f.Fail(field, fmt::format("{} is not text; send a string, a list of text parts or null", Shown(content)));
    return;
  }
  size_t i = 0;
  for (const JsonElement part : parts) {
    const std::string at = fmt::format("{}[{}]", field, i++);
    std::string_view type, text;
    if (!part.is_object()) {
      f.Fail(at,
             fmt::format("{} is not a content part; send {{\"type\":\"text\",\"text\":...}}", Shown(part)));
    } else if (part.at_key("type").get(type) != simdjson::SUCCESS) {
      f.Fail(at, "a content part needs a type; this model reads \"text\"");
    } else if (type != "text") {
      f.Fail(at,
             fmt::format("parts of type {} are not supported; this model reads \"text\" only", Quoted(type)),
             "unsupported");
    } else if (part.at_key("text").get(text) != simdjson::SUCCESS) {
      f.Fail(at, "a text part needs a string \"text\"");
    }
    if (f.failed()) return;
  }
}

}  // namespace

void ReadDefaults(FieldReader& f, SamplingDefaults* out) {
  f.Float("temperature", 0, 2, &out->temperature);
  f.Float("top_p", 0, 1, &out->top_p, /*exclusive_low=*/true);
  f.Int32("top_k", -1, std::numeric_limits<int32_t>::max(), &out->top_k);
  if (out->top_k == 0) out->top_k = -1;
  f.Float("min_p", 0, 1, &out->min_p);
  f.Float("repetition_penalty", 0.01, 2, &out->repetition_penalty);  // its powers stay far from infinity
}

void ReadSampling(FieldReader& f, const ApiLimits& limits, const SamplingDefaults& defaults,
                  int32_t stops_max, GenerationOptions* out) {
  SamplingParams& s = out->sampling;
  SamplingDefaults mine = defaults;
  ReadDefaults(f, &mine);
  s.temperature = mine.temperature;
  s.top_p = mine.top_p;
  s.top_k = mine.top_k;
  s.min_p = mine.min_p;
  s.repetition_penalty = mine.repetition_penalty;
  f.Float("presence_penalty", -2, 2, &s.presence_penalty);
  f.Float("frequency_penalty", -2, 2, &s.frequency_penalty);
  f.Int32("n", 1, limits.n_max, &s.n);
  f.Bool("ignore_eos", &s.ignore_eos);
  f.Bool("skip_special_tokens", &out->skip_special_tokens);
  f.Ints("stop_token_ids", 0, limits.vocab_size - 1, limits.stop_token_ids_max, &s.stop_token_ids);
  ReadSeed(f, out);
  ReadStop(f, limits, stops_max, out);
  ReadLogitBias(f, limits, out);
  bool keep_stop = false;
  f.Bool("no_stop_trim", &keep_stop);
  f.Bool("include_stop_str_in_output", &keep_stop);
  out->trim_stop = !keep_stop;
}

void ReadMaxTokens(FieldReader& f, std::initializer_list<std::string_view> names, GenerationOptions* out) {
  std::string_view before;
  for (std::string_view name : names) {
    int32_t value = 0;
    if (!f.Int32(name, 0, std::numeric_limits<int32_t>::max(), &value)) continue;
    if (out->has_max_tokens && value != out->sampling.max_tokens) {
      f.Fail(name, fmt::format("{} contradicts {} = {}; send one of them", value, before,
                               out->sampling.max_tokens));
    }
    out->has_max_tokens = true;
    out->sampling.max_tokens = value;
    before = name;
  }
  const bool has_min = f.Int32(f.Has("min_tokens") ? "min_tokens" : "min_new_tokens", 0,
                               std::numeric_limits<int32_t>::max(), &out->sampling.min_tokens);
  if (has_min && out->has_max_tokens && out->sampling.min_tokens > out->sampling.max_tokens) {
    f.Fail("min_tokens", fmt::format("{} is more than the {} tokens allowed; lower it",
                                     out->sampling.min_tokens, out->sampling.max_tokens));
  }
}

void ReadEnvelope(FieldReader& f, const ApiLimits& limits, GenerationOptions* out) {
  f.Bool("stream", &out->stream);
  if (const auto element = f.Find("stream_options")) {
    dom::object object;
    if (element->get(object) != simdjson::SUCCESS) {
      f.Fail("stream_options", fmt::format("{} is not an object", Shown(*element)));
    } else if (!out->stream) {
      f.Fail("stream_options", "only allowed together with \"stream\": true");
    } else {
      FieldReader inner(object, f.path() + "stream_options.", f.error());
      inner.Bool("include_usage", &out->include_usage);
      inner.Bool("continuous_usage_stats", &out->continuous_usage);
    }
  }
  f.String("model", limits.name_bytes_max, &out->model);
  f.String("user", limits.name_bytes_max, &out->user);
  f.String("rid", limits.name_bytes_max, &out->rid);
  for (const auto& [name, field] :
       {std::pair{"cache_salt", &out->cache_salt}, {"extra_key", &out->extra_key}}) {
    if (f.String(name, limits.salt_bytes_max, field) && field->empty()) {
      f.Fail(name, "an empty string is not a namespace; leave the field out for the shared one");
    }
  }
  f.Int32("priority", -1000000, 1000000, &out->priority);
  f.Bool("return_cached_tokens_details", &out->cached_details);
  ReadCourse(f, limits, out);
}

void ReadCourse(FieldReader& f, const ApiLimits& limits, GenerationOptions* out) {
  if (f.Find("bootstrap_room")) {
    out->has_room = f.Int("bootstrap_room", 0, std::numeric_limits<int64_t>::max() - 4096, &out->room);
    f.String("bootstrap_host", limits.name_bytes_max, &out->bootstrap_host);
    f.Int32("bootstrap_port", 1, 65535, &out->bootstrap_port);
    if (out->has_room && (out->bootstrap_host.empty() || out->bootstrap_port == 0))
      f.Fail("bootstrap_host",
             "bootstrap_room needs bootstrap_host and bootstrap_port of the prefill instance");
  }
  float timeout = 0;
  if (f.Float("timeout", 0, limits.timeout_s_max, &timeout, /*exclusive_low=*/true)) out->timeout_s = timeout;
}

void RefuseUnsupported(FieldReader& f, std::initializer_list<std::string_view> names) {
  for (std::string_view name : names) {
    const auto element = f.Find(name);
    if (!element || SaysNothing(*element)) continue;
    if (name == "response_format") {
      std::string_view type;
      if (element->is_object() && element->at_key("type").get(type) == simdjson::SUCCESS && type == "text")
        continue;
    }
    if (name == "tool_choice") {
      std::string_view choice;
      if (element->get(choice) == simdjson::SUCCESS && (choice == "none" || choice == "auto")) continue;
    }
    f.Fail(name, "not supported by this server; leave it out", "unsupported");
    return;
  }
}

void ReadMessages(FieldReader& f, const ApiLimits& limits, nlohmann::ordered_json* messages,
                  nlohmann::ordered_json* kwargs, bool* add_generation_prompt) {
  size_t budget = limits.template_values_max;
  const auto element = f.Find("messages");
  dom::array list;
  if (!element) {
    f.Fail("messages", "missing; send a list of {\"role\", \"content\"} objects");
    return;
  }
  if (element->get(list) != simdjson::SUCCESS) {
    f.Fail("messages", fmt::format("{} is not an array", Shown(*element)));
    return;
  }
  if (list.size() == 0) {
    f.Fail("messages", "the list is empty; send at least one message");
    return;
  }
  *messages = nlohmann::ordered_json::array();
  size_t i = 0;
  for (const JsonElement message : list) {
    const std::string at = fmt::format("messages[{}]", i++);
    std::string_view role;
    if (!message.is_object()) {
      f.Fail(at, fmt::format("{} is not an object with \"role\" and \"content\"", Shown(message)));
      return;
    }
    FieldReader m(dom::object(message), f.path() + at + ".", f.error());
    const auto role_element = m.Find("role");
    if (!role_element || role_element->get(role) != simdjson::SUCCESS) {
      m.Fail("role", "missing or not a string; send system, user, assistant, tool or developer");
      return;
    }
    if (role != "system" && role != "user" && role != "assistant" && role != "tool" && role != "developer") {
      m.Fail("role",
             fmt::format("{} is unknown; send system, user, assistant, tool or developer", Quoted(role)));
      return;
    }
    if (const auto content = m.Find("content")) CheckContent(m, *content, "content");
    if (f.failed()) return;
    nlohmann::ordered_json copy = nlohmann::ordered_json::object();
    for (std::string_view name :
         {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}) {
      const auto value = m.Find(name);
      if (!value) continue;
      if (!ToJson(*value, m.path() + std::string(name), &budget, f.error(), &copy[std::string(name)])) return;
    }
    messages->push_back(std::move(copy));
  }
  if (const auto element_kwargs = f.Find("chat_template_kwargs")) {
    if (!element_kwargs->is_object()) {
      f.Fail("chat_template_kwargs", fmt::format("{} is not an object", Shown(*element_kwargs)));
      return;
    }
    if (!ToJson(*element_kwargs, f.path() + "chat_template_kwargs", &budget, f.error(), kwargs)) return;
    for (const char* reserved : {"messages", "add_generation_prompt", "tools"}) {
      if (kwargs->contains(reserved)) {
        f.Fail("chat_template_kwargs", fmt::format("{} is a field of the request itself", reserved));
        return;
      }
    }
  }
  std::string effort;
  if (f.String("reasoning_effort", 32, &effort)) {
    (*kwargs)["reasoning_effort"] = effort;
    if (effort == "none") {  // the switches that templates know; the client's own kwargs win
      for (const char* name : {"enable_thinking", "thinking"}) {
        if (!kwargs->contains(name)) (*kwargs)[name] = false;
      }
    }
  }
  f.Bool("add_generation_prompt", add_generation_prompt);
}

void ReadPrompts(FieldReader& f, std::string_view name, const ApiLimits& limits,
                 std::vector<PromptInput>* out, bool* batch) {
  const auto element = f.Find(name);
  const std::string field(name);
  if (!element) {
    f.Fail(name, "missing; send a string, a list of strings, token ids or a list of lists of token ids");
    return;
  }
  *batch = false;
  if (std::string_view text; element->get(text) == simdjson::SUCCESS) {
    out->push_back({.text = std::string(text)});
    return;
  }
  dom::array list;
  if (element->get(list) != simdjson::SUCCESS) {
    f.Fail(name, fmt::format("{} is neither text nor token ids", Shown(*element)));
    return;
  }
  if (list.size() == 0) {
    f.Fail(name, "the list is empty; send at least one prompt");
    return;
  }
  const size_t ids_max =
      size_t(limits.context_length) + 1;  // one more, so that the context error is the one reported
  if (list.at(0).is_number()) {
    PromptInput input{.is_ids = true};
    if (list.size() > ids_max) {
      f.Fail(name,
             fmt::format("{} tokens are more than the context of {} tokens; shorten the prompt", list.size(),
                         limits.context_length),
             "context_length_exceeded");
      return;
    }
    if (f.ReadInts(*element, field, 0, limits.vocab_size - 1, ids_max, &input.ids))
      out->push_back(std::move(input));
    return;
  }
  if (list.size() > size_t(limits.prompts_max)) {
    f.Fail(name, fmt::format("{} prompts are too many; send at most {} in one request", list.size(),
                             limits.prompts_max));
    return;
  }
  *batch = true;
  size_t i = 0;
  for (const JsonElement entry : list) {
    const std::string at = fmt::format("{}[{}]", field, i++);
    PromptInput input;
    if (std::string_view text; entry.get(text) == simdjson::SUCCESS) {
      input.text = std::string(text);
    } else if (dom::array ids; entry.get(ids) == simdjson::SUCCESS) {
      input.is_ids = true;
      if (ids.size() > ids_max) {
        f.Fail(at,
               fmt::format("{} tokens are more than the context of {} tokens; shorten the prompt", ids.size(),
                           limits.context_length),
               "context_length_exceeded");
        return;
      }
      if (!f.ReadInts(entry, at, 0, limits.vocab_size - 1, ids_max, &input.ids)) return;
    } else {
      f.Fail(at, fmt::format("{} is neither a string nor a list of token ids", Shown(entry)));
      return;
    }
    out->push_back(std::move(input));
  }
}

void CheckTotals(FieldReader& f, const ApiLimits& limits, size_t prompts, int32_t n) {
  if (int64_t(prompts) * n > limits.choices_max) {
    f.Fail("n", fmt::format("{} prompts x {} choices are too many; at most {} together", prompts, n,
                            limits.choices_max));
  }
}

}  // namespace sluice::api_internal
