// POST /v1/messages: Anthropic's request, brought into the form of a chat request.
//
//   system                     a system message
//   tool_result blocks         tool messages, before the rest of their user message
//   tool_use, thinking blocks  tool_calls and reasoning_content of the assistant message
//   a last assistant message   the beginning of the answer (prefill)
#include "api/parse_options.h"

namespace sluice {

namespace dom = simdjson::dom;
using Json = nlohmann::ordered_json;
using namespace api_internal;  // NOLINT: parts of the parsers

namespace {

// What the blocks of one message hold.
struct Blocks {
  std::string text, thinking;
  Json calls = Json::array(), results = Json::array();
};

std::string_view StringAt(JsonElement object, std::string_view key) {
  std::string_view out;
  return object.at_key(key).get(out) == simdjson::SUCCESS ? out : std::string_view();
}

// The text of a string or of a list of text blocks.
bool ReadText(FieldReader& f, JsonElement content, const std::string& at, std::string* out) {
  if (std::string_view text; content.get(text) == simdjson::SUCCESS) {
    *out += text;
    return true;
  }
  dom::array list;
  if (content.get(list) != simdjson::SUCCESS) {
    f.Fail(at, fmt::format("{} is neither a string nor a list of text blocks", Shown(content)));
    return false;
  }
  size_t i = 0;
  for (const JsonElement block : list) {
    const std::string here = fmt::format("{}[{}]", at, i++);
    std::string_view text;
    if (StringAt(block, "type") != "text" || block.at_key("text").get(text) != simdjson::SUCCESS) {
      f.Fail(here, "is not a text block {\"type\": \"text\", \"text\": ...}; this model reads text only",
             "unsupported");
      return false;
    }
    *out += text;
  }
  return true;
}

bool ReadBlock(FieldReader& f, JsonElement block, const std::string& at, bool assistant, size_t* budget,
               Blocks* out) {
  std::string_view type;
  if (!block.is_object() || block.at_key("type").get(type) != simdjson::SUCCESS) {
    f.Fail(at, fmt::format("{} is not a content block with a \"type\"", Shown(block)));
    return false;
  }
  std::string_view text;
  if (type == "text") {
    if (block.at_key("text").get(text) != simdjson::SUCCESS) {
      f.Fail(at + ".text", "missing or not a string");
      return false;
    }
    out->text += text;
  } else if (type == "thinking" && assistant) {
    out->thinking += StringAt(block, "thinking");
  } else if (type == "redacted_thinking" && assistant) {
    // Nothing that a model could read.
  } else if (type == "tool_use" && assistant) {
    const std::string_view name = StringAt(block, "name"), id = StringAt(block, "id");
    if (name.empty() || id.empty()) {
      f.Fail(at, "a tool_use block needs the strings \"id\" and \"name\"");
      return false;
    }
    Json input = Json::object();
    if (auto value = block.at_key("input"); value.error() == simdjson::SUCCESS) {
      if (!value.is_object()) {
        f.Fail(at + ".input", fmt::format("{} is not an object", Shown(value.value())));
        return false;
      }
      if (!ToJson(value.value(), at + ".input", budget, f.error(), &input)) return false;
    }
    out->calls.push_back(
        {{"id", id}, {"type", "function"}, {"function", {{"name", name}, {"arguments", std::move(input)}}}});
  } else if (type == "tool_result" && !assistant) {
    const std::string_view id = StringAt(block, "tool_use_id");
    if (id.empty()) {
      f.Fail(at + ".tool_use_id", "missing or not a string");
      return false;
    }
    std::string content;
    if (auto value = block.at_key("content"); value.error() == simdjson::SUCCESS && !value.is_null()) {
      if (!ReadText(f, value.value(), at + ".content", &content)) return false;
    }
    bool is_error = false;
    if (block.at_key("is_error").get(is_error) == simdjson::SUCCESS && is_error)
      content = "Error: " + content;
    out->results.push_back({{"role", "tool"}, {"content", std::move(content)}, {"tool_call_id", id}});
  } else {
    f.Fail(at,
           fmt::format("blocks of type {} are not supported in {} messages", Quoted(type),
                       assistant ? "assistant" : "user"),
           "unsupported");
    return false;
  }
  return true;
}

void ReadMessageList(FieldReader& f, const ApiLimits& limits, ChatRequest* out) {
  const auto element = f.Find("messages");
  dom::array list;
  if (!element || element->get(list) != simdjson::SUCCESS || list.size() == 0) {
    return f.Fail("messages", "missing; send a list of {\"role\", \"content\"} objects, at least one");
  }
  size_t budget = limits.template_values_max;
  if (list.size() > budget) return f.Fail("messages", "the list is too long");
  size_t i = 0;
  for (const JsonElement message : list) {
    const std::string at = fmt::format("messages[{}]", i++);
    std::string_view role;
    if (!message.is_object() || message.at_key("role").get(role) != simdjson::SUCCESS ||
        (role != "user" && role != "assistant")) {
      return f.Fail(at + ".role", "must be user or assistant; a system prompt goes into \"system\"");
    }
    const bool assistant = role == "assistant";
    auto content = message.at_key("content");
    if (content.error() != simdjson::SUCCESS) return f.Fail(at + ".content", "missing");
    Blocks blocks;
    dom::array parts;
    if (std::string_view text; content.get(text) == simdjson::SUCCESS) {
      blocks.text = text;
    } else if (content.get(parts) == simdjson::SUCCESS) {
      size_t b = 0;
      for (const JsonElement block : parts) {
        if (!ReadBlock(f, block, fmt::format("{}.content[{}]", at, b++), assistant, &budget, &blocks)) return;
      }
    } else {
      return f.Fail(at + ".content",
                    fmt::format("{} is neither a string nor a list of blocks", Shown(content.value())));
    }
    if (assistant && i == list.size() && blocks.calls.empty()) {
      out->prefill = std::move(blocks.text);
      continue;
    }
    for (Json& result : blocks.results) out->messages.push_back(std::move(result));
    if (!assistant && blocks.text.empty() && !blocks.results.empty()) continue;
    Json entry = {{"role", role}, {"content", std::move(blocks.text)}};
    if (!blocks.thinking.empty()) entry["reasoning_content"] = std::move(blocks.thinking);
    if (!blocks.calls.empty()) entry["tool_calls"] = std::move(blocks.calls);
    out->messages.push_back(std::move(entry));
  }
  if (out->messages.empty()) f.Fail("messages", "nothing to answer: there is no user message");
}

void ReadMessagesTools(FieldReader& f, const ApiLimits& limits, ChatRequest* out) {
  if (const auto element = f.Find("tools")) {
    dom::array list;
    if (element->get(list) != simdjson::SUCCESS) {
      return f.Fail("tools", fmt::format("{} is not an array", Shown(*element)));
    }
    if (list.size() > limits.tools_max) {
      return f.Fail("tools",
                    fmt::format("{} tools are too many; send at most {}", list.size(), limits.tools_max));
    }
    size_t budget = limits.template_values_max, i = 0;
    for (const JsonElement tool : list) {
      const std::string at = fmt::format("tools[{}]", i++);
      if (!tool.is_object()) return f.Fail(at, fmt::format("{} is not an object", Shown(tool)));
      if (const std::string_view type = StringAt(tool, "type"); !type.empty() && type != "custom") {
        return f.Fail(at + ".type",
                      fmt::format("{} is not supported; this server runs no tools of its own", Quoted(type)),
                      "unsupported");
      }
      const std::string_view name = StringAt(tool, "name");
      if (!CheckToolName(f, limits, at + ".name", name)) return;
      Json function = {{"name", name}};
      if (const std::string_view text = StringAt(tool, "description"); !text.empty())
        function["description"] = text;
      auto schema = tool.at_key("input_schema");
      if (schema.error() != simdjson::SUCCESS || !schema.is_object()) {
        return f.Fail(at + ".input_schema", "missing or not an object");
      }
      if (!ToJson(schema.value(), at + ".input_schema", &budget, f.error(), &function["parameters"])) return;
      out->tools.push_back({{"type", "function"}, {"function", std::move(function)}});
    }
  }
  const auto choice = f.Find("tool_choice");
  if (!choice) return;
  const std::string_view type = StringAt(*choice, "type");
  if (type == "auto") {
    out->tool_choice = ToolChoice::kAuto;
  } else if (type == "none") {
    out->tool_choice = ToolChoice::kNone;
  } else if (type == "any") {
    out->tool_choice = ToolChoice::kRequired;
  } else if (type == "tool") {
    out->tool_choice = ToolChoice::kNamed;
    out->tool_name = StringAt(*choice, "name");
  } else {
    return f.Fail("tool_choice.type", "missing or none of auto, any, tool and none");
  }
  const auto declared = [&] {
    for (const Json& tool : out->tools) {
      if (tool["function"]["name"] == out->tool_name) return true;
    }
    return false;
  };
  if (out->tool_choice == ToolChoice::kNamed && !declared()) {
    return f.Fail("tool_choice.name",
                  fmt::format("{} is not among the request's tools", Quoted(out->tool_name)));
  }
  if (out->tool_choice == ToolChoice::kRequired && out->tools.empty()) {
    return f.Fail("tool_choice", "any needs \"tools\"; send at least one");
  }
  bool one = false;
  if (choice->at_key("disable_parallel_tool_use").get(one) == simdjson::SUCCESS)
    out->parallel_tool_calls = !one;
}

}  // namespace

std::optional<ApiError> ParseMessages(std::string_view body, const ApiLimits& limits,
                                      const SamplingDefaults& defaults, bool count_only, ChatRequest* out) {
  JsonBody json;
  if (auto error = JsonBody::Parse(body, &json)) return error;
  std::optional<ApiError> error;
  FieldReader f(json.root(), "", &error);
  RefuseUnsupported(f, {"mcp_servers", "container", "context_management", "output_format", "output_config"});
  GenerationOptions& o = out->options;
  o.sampling.temperature = defaults.temperature;
  o.sampling.top_p = defaults.top_p;
  o.sampling.top_k = defaults.top_k;
  o.sampling.min_p = defaults.min_p;
  o.sampling.repetition_penalty = defaults.repetition_penalty;
  f.String("model", limits.name_bytes_max, &o.model);
  f.Bool("stream", &o.stream);
  f.Float("temperature", 0, 1, &o.sampling.temperature);
  f.Float("top_p", 0, 1, &o.sampling.top_p, /*exclusive_low=*/true);
  f.Int32("top_k", -1, 1 << 30, &o.sampling.top_k);
  if (o.sampling.top_k == 0) o.sampling.top_k = -1;
  o.has_max_tokens = f.Int32("max_tokens", 1, 1 << 30, &o.sampling.max_tokens);
  if (!o.has_max_tokens && !count_only)
    f.Fail("max_tokens", "missing; send the most tokens the answer may have");
  if (const auto stops = f.Find("stop_sequences")) {
    dom::array list;
    if (stops->get(list) != simdjson::SUCCESS || list.size() > size_t(limits.native_stops_max)) {
      f.Fail("stop_sequences", fmt::format("must be a list of at most {} strings", limits.native_stops_max));
    } else {
      for (const JsonElement stop : list) {
        std::string_view text;
        if (stop.get(text) != simdjson::SUCCESS || text.empty() || text.size() > limits.stop_bytes_max) {
          f.Fail("stop_sequences",
                 fmt::format("{} is not a string of 1 to {} bytes", Shown(stop), limits.stop_bytes_max));
          break;
        }
        o.stop.emplace_back(text);
      }
    }
  }
  if (const auto metadata = f.Find("metadata"); metadata && metadata->is_object()) {
    o.user = std::string(StringAt(*metadata, "user_id").substr(0, limits.name_bytes_max));
  }
  bool thinking = false;
  if (const auto element = f.Find("thinking")) {
    const std::string_view type = StringAt(*element, "type");
    if (type != "enabled" && type != "disabled" && type != "adaptive") {
      f.Fail("thinking.type", "missing or none of enabled, adaptive and disabled");
    }
    thinking = type != "disabled";
  }
  out->template_kwargs = {{"enable_thinking", thinking}, {"thinking", thinking}};
  out->messages = Json::array();
  if (const auto system = f.Find("system")) {
    std::string text;
    if (ReadText(f, *system, "system", &text) && !text.empty()) {
      out->messages.push_back({{"role", "system"}, {"content", std::move(text)}});
    }
  }
  if (!error) ReadMessageList(f, limits, out);
  if (!error) ReadMessagesTools(f, limits, out);
  for (auto [name, field] : {std::pair{"cache_salt", &o.cache_salt}, {"rid", &o.rid}}) {
    f.String(name, limits.salt_bytes_max, field);
  }
  f.Int32("priority", -1000000, 1000000, &o.priority);
  ReadCourse(f, limits, &o);
  return error;
}

}  // namespace sluice
