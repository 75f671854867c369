// The fields of a chat request that concern tools and reasoning.
#include <algorithm>

#include "api/parse_options.h"

namespace sluice::api_internal {

namespace dom = simdjson::dom;

namespace {

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == '.' || c == ':' || c == '/';
}

bool HasTool(const nlohmann::ordered_json& tools, std::string_view name) {
  return std::any_of(tools.begin(), tools.end(),
                     [&](const auto& tool) { return tool["function"]["name"] == name; });
}

void ReadToolList(FieldReader& f, const ApiLimits& limits, ChatRequest* out) {
  const auto element = f.Find("tools");
  if (!element) return;
  dom::array list;
  if (element->get(list) != simdjson::SUCCESS) {
    return f.Fail("tools", fmt::format("{} is not an array", Shown(*element)));
  }
  if (list.size() > limits.tools_max) {
    return f.Fail("tools",
                  fmt::format("{} tools are too many; send at most {}", list.size(), limits.tools_max));
  }
  size_t budget = limits.template_values_max;
  size_t i = 0;
  for (const JsonElement entry : list) {
    const std::string at = fmt::format("tools[{}]", i++);
    dom::object tool, function;
    if (entry.get(tool) != simdjson::SUCCESS) {
      return f.Fail(at, fmt::format("{} is not an object with \"type\" and \"function\"", Shown(entry)));
    }
    std::string_view type = "function";
    if (auto value = entry.at_key("type"); value.error() == simdjson::SUCCESS) {
      if (value.get(type) != simdjson::SUCCESS || type != "function") {
        return f.Fail(at + ".type",
                      fmt::format("{} is not supported; only \"function\" tools are", Shown(value.value())),
                      "unsupported");
      }
    }
    if (entry.at_key("function").get(function) != simdjson::SUCCESS) {
      return f.Fail(at + ".function",
                    "missing or not an object; send {\"name\", \"description\", \"parameters\"}");
    }
    std::string_view name;
    if (entry.at_key("function").at_key("name").get(name) != simdjson::SUCCESS) {
      return f.Fail(at + ".function.name", "missing or not a string");
    }
    if (!CheckToolName(f, limits, at + ".function.name", name)) return;
    auto parameters = entry.at_key("function").at_key("parameters");
    if (parameters.error() == simdjson::SUCCESS && !parameters.is_object() && !parameters.is_null()) {
      return f.Fail(at + ".function.parameters",
                    fmt::format("{} is not a JSON schema object", Shown(parameters.value())));
    }
    nlohmann::ordered_json copy;
    if (!ToJson(entry, f.path() + at, &budget, f.error(), &copy)) return;
    copy["type"] = "function";
    if (HasTool(out->tools, name)) {
      return f.Fail(at + ".function.name", fmt::format("{} is declared twice", Quoted(name)));
    }
    out->tools.push_back(std::move(copy));
  }
}

void ReadToolChoice(FieldReader& f, ChatRequest* out) {
  const auto element = f.Find("tool_choice");
  if (!element) return;
  std::string_view word;
  if (element->get(word) == simdjson::SUCCESS) {
    if (word == "auto") {
      out->tool_choice = ToolChoice::kAuto;
    } else if (word == "none") {
      out->tool_choice = ToolChoice::kNone;
    } else if (word == "required") {
      out->tool_choice = ToolChoice::kRequired;
    } else {
      return f.Fail("tool_choice", fmt::format("{} is none of auto, none, required and "
                                               "{{\"type\": \"function\", \"function\": {{\"name\": ...}}}}",
                                               Quoted(word)));
    }
  } else {
    std::string_view type, name;
    if (element->at_key("type").get(type) != simdjson::SUCCESS || type != "function" ||
        element->at_key("function").at_key("name").get(name) != simdjson::SUCCESS) {
      return f.Fail("tool_choice", fmt::format("{} is none of auto, none, required and "
                                               "{{\"type\": \"function\", \"function\": {{\"name\": ...}}}}",
                                               Shown(*element)));
    }
    out->tool_choice = ToolChoice::kNamed;
    out->tool_name = name;
    if (!HasTool(out->tools, name)) {
      return f.Fail("tool_choice", fmt::format("{} is not among the request's tools", Quoted(name)));
    }
  }
  if (out->tool_choice == ToolChoice::kRequired && out->tools.empty()) {
    f.Fail("tool_choice", "required needs \"tools\"; send at least one");
  }
}

}  // namespace

bool CheckToolName(FieldReader& f, const ApiLimits& limits, std::string_view field, std::string_view name) {
  if (name.empty() || name.size() > limits.tool_name_bytes_max) {
    f.Fail(field,
           fmt::format("{} bytes; a function's name has 1 to {}", name.size(), limits.tool_name_bytes_max));
    return false;
  }
  if (!std::all_of(name.begin(), name.end(), IsNameByte)) {
    f.Fail(field, fmt::format("{} has characters other than letters, digits, '_', '-', '.', ':' and '/'",
                              Quoted(name)));
    return false;
  }
  return true;
}

void ReadTools(FieldReader& f, const ApiLimits& limits, ChatRequest* out) {
  ReadToolList(f, limits, out);
  if (f.failed()) return;
  ReadToolChoice(f, out);
  f.Bool("parallel_tool_calls", &out->parallel_tool_calls);
  f.Bool("separate_reasoning", &out->separate_reasoning);
  f.Bool("stream_reasoning", &out->stream_reasoning);
}

}  // namespace sluice::api_internal
