#include "text/chat_template.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/file_text.h"
#include "text/deepseek_v32_encoder.h"
#include "text/jinja/runtime.h"
#include "text/json_depth.h"
#include "text/prompt_text.h"

namespace sluice {
namespace {

constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant", "tool"};
StatusOr<std::string> NormalContent(const Json& content, const std::string& where) {
  if (content.is_null()) return std::string();
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array())
    return Invalid("{}: must be a string, null or a list of text parts, got {}", where, content.type_name());
  std::string joined;
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& part = content[i];
    if (part.is_string()) {
      joined += part.get_ref<const std::string&>();
      continue;
    }
    if (!part.is_object())
      return Invalid("{}[{}]: must be an object like {{\"type\": \"text\", \"text\": ...}}", where, i);
    const auto type = part.find("type");
    if (type == part.end() || !type->is_string()) return Invalid("{}[{}].type: must be a string", where, i);
    if (*type != "text") {
      return Invalid("{}[{}].type: {} is not supported; this model reads text parts only", where, i,
                     type->dump());
    }
    const auto text = part.find("text");
    if (text == part.end() || !text->is_string()) return Invalid("{}[{}].text: must be a string", where, i);
    joined += text->get_ref<const std::string&>();
  }
  return joined;
}

StatusOr<Json> NormalArguments(const Json& arguments, const std::string& where) {
  if (arguments.is_object()) return arguments;
  if (arguments.is_null()) return Json::object();
  if (!arguments.is_string())
    return Invalid("{}: must be an object or a JSON string of one, got {}", where, arguments.type_name());
  const auto& text = arguments.get_ref<const std::string&>();
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) return Json::object();
  if (JsonTooDeep(text)) return Invalid("{}: is nested more than {} deep", where, kMaxJsonDepth);
  Json parsed = Json::parse(text, nullptr, false);
  if (parsed.is_discarded()) return Invalid("{}: is not valid JSON", where);
  if (!parsed.is_object()) return Invalid("{}: must be a JSON object, got {}", where, parsed.type_name());
  return parsed;
}

StatusOr<Json> NormalToolCalls(const Json& calls, const std::string& where) {
  if (!calls.is_array()) return Invalid("{}: must be a list, got {}", where, calls.type_name());
  Json out = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", where, i);
    if (!calls[i].is_object()) return Invalid("{}: must be an object", at);
    Json call = calls[i];
    const auto function = call.find("function");
    if (function == call.end() || !function->is_object())
      return Invalid("{}.function: must be an object", at);
    const auto name = function->find("name");
    if (name == function->end() || !name->is_string() || name->get_ref<const std::string&>().empty()) {
      return Invalid("{}.function.name: must be a string, not empty", at);
    }
    const auto arguments = function->find("arguments");
    ASSIGN_OR_RETURN(Json normal, NormalArguments(arguments == function->end() ? Json() : *arguments,
                                                  at + ".function.arguments"));
    (*function)["arguments"] = std::move(normal);
    if (!call.contains("type")) call["type"] = "function";
    out.push_back(std::move(call));
  }
  return out;
}

Status NormalizeMessage(const Json& in, const std::string& where, Json* out) {
  if (!in.is_object()) return Invalid("{}: must be an object, got {}", where, in.type_name());
  const auto role = in.find("role");
  if (role == in.end() || !role->is_string()) return Invalid("{}.role: must be a string", where);
  if (std::find(kRoles.begin(), kRoles.end(), role->get_ref<const std::string&>()) == kRoles.end()) {
    return Invalid("{}.role: {} is unknown; use {}", where,
                   role->dump(-1, ' ', false, Json::error_handler_t::replace), fmt::join(kRoles, ", "));
  }
  (*out)["role"] = *role;
  (*out)["content"] = "";
  for (const auto& [key, value] : in.items()) {
    if (key == "role") continue;
    if (key == "content") {
      ASSIGN_OR_RETURN((*out)["content"], NormalContent(value, where + ".content"));
    } else if (key == "tool_calls") {
      if (value.is_null()) continue;
      ASSIGN_OR_RETURN(Json calls, NormalToolCalls(value, where + ".tool_calls"));
      if (!calls.empty()) (*out)["tool_calls"] = std::move(calls);
    } else if (key == "reasoning_content" || key == "reasoning") {
      if (value.is_null()) continue;
      if (!value.is_string())
        return Invalid("{}.{}: must be a string, got {}", where, key, value.type_name());
      if (key == "reasoning" && in.contains("reasoning_content") && !in["reasoning_content"].is_null())
        continue;
      (*out)["reasoning_content"] = value;
    } else if (key == "name" || key == "tool_call_id") {
      if (value.is_null()) continue;
      if (!value.is_string())
        return Invalid("{}.{}: must be a string, got {}", where, key, value.type_name());
      (*out)[key] = value;
    } else {
      (*out)[key] = value;
    }
  }
  return OkStatus();
}

class JinjaChatTemplate final : public ChatTemplate {
 public:
  JinjaChatTemplate(std::shared_ptr<const jinja::Template> parsed, const Json& special_tokens,
                    bool knows_developer)
      : template_(std::move(parsed)), knows_developer_(knows_developer) {
    for (const auto& [name, value] : special_tokens.items())
      fixed_.emplace_back(name, jinja::FromJson(value, true));
    arguments_as_text_ = WantsArgumentsAsText();
  }

  StatusOr<ChatPrompt> Render(const Json& messages, const Json& kwargs,
                              bool add_generation_prompt) const override {
    ASSIGN_OR_RETURN(Json normal, NormalizeMessages(messages));
    if (!kwargs.is_object() && !kwargs.is_null())
      return Invalid("chat_template_kwargs: must be an object, got {}", kwargs.type_name());
    jinja::Text text;
    jinja::RenderFailure failure;
    if (!RenderNormal(std::move(normal), kwargs, add_generation_prompt, arguments_as_text_, &text,
                      &failure)) {
      const std::string where =
          failure.message_index >= 0 ? fmt::format("messages[{}]", failure.message_index) : "messages";
      return Invalid("{}: the chat template refused: {} (template line {})", where, failure.message,
                     failure.line);
    }
    return PromptOf(text);
  }

 private:
  bool RenderNormal(Json messages, const Json& kwargs, bool add_generation_prompt, bool arguments_as_text,
                    jinja::Text* text, jinja::RenderFailure* failure) const {
    try {
      std::vector<jinja::Value> list;
      for (size_t i = 0; i < messages.size(); ++i) {
        failure->message_index = static_cast<int>(i);
        list.push_back(MessageValue(messages[i], i, arguments_as_text));
      }
      failure->message_index = -1;
      jinja::Template::Variables variables = fixed_;
      variables.emplace_back("tools", jinja::Value());
      variables.emplace_back("documents", jinja::Value());
      if (kwargs.is_object()) {
        for (const auto& [name, value] : kwargs.items()) {
          const auto same = [&](const auto& v) { return v.first == name; };
          std::erase_if(variables, same);
          variables.emplace_back(name, jinja::FromJson(value, false));
        }
      }
      variables.emplace_back("messages", jinja::MakeList(std::move(list)));
      variables.emplace_back("add_generation_prompt", jinja::Value(add_generation_prompt));
      return template_->Render(variables, {}, text, failure);
    } catch (const jinja::Error& error) {
      failure->message = error.message;
      return false;
    }
  }

  jinja::Value MessageValue(Json& message, size_t index, bool arguments_as_text) const {
    if (arguments_as_text && message.contains("tool_calls")) {
      for (Json& call : message["tool_calls"]) {
        Json& arguments = call["function"]["arguments"];
        arguments = jinja::ToJson(jinja::FromJson(arguments, false), {}, 64u << 20).str();
      }
    }
    auto dict = std::make_shared<jinja::Dict>();
    dict->set_message_index(static_cast<int>(index));
    for (const auto& [key, value] : message.items()) {
      jinja::Value v = jinja::FromJson(value, false);
      // Role names are one of a fixed list by now, and templates build control tokens from them.
      if (key == "role") {
        std::string role = value.get<std::string>();
        if (role == "developer" && !knows_developer_) role = "system";
        v = jinja::Value::OfTemplate(std::move(role));
      }
      dict->Set(jinja::Value(jinja::Text(key, false)), std::move(v));
    }
    return jinja::Value(std::shared_ptr<const jinja::Dict>(std::move(dict)));
  }

  // Some templates (DeepSeek-V3's) append the arguments to a string, which needs them as JSON text; the
  // others walk the object.
  bool WantsArgumentsAsText() const {
    const Json probe = Json::parse(
        R"([{"role":"user","content":"q"},{"role":"assistant","content":"","tool_calls":[{"id":"c","type":
      "function","function":{"name":"f","arguments":{"x":1}}}]},{"role":"tool","content":"1","tool_call_id":"c"}])");
    jinja::Text text;
    jinja::RenderFailure failure;
    if (RenderNormal(probe, Json(), true, false, &text, &failure)) return false;
    return RenderNormal(probe, Json(), true, true, &text, &failure);
  }

  std::shared_ptr<const jinja::Template> template_;
  jinja::Template::Variables fixed_;
  bool knows_developer_;
  bool arguments_as_text_ = false;
};

// nullopt only when nothing is there.
StatusOr<std::optional<std::string>> ReadIfThere(const std::string& path) {
  StatusOr<std::string> text = ReadFileText(path);
  if (text.ok()) return std::optional<std::string>(*std::move(text));
  if (absl::IsNotFound(text.status())) return std::optional<std::string>();
  return text.status();
}

// bos_token and the like, written as a string or as {"content": ...}.
Json SpecialTokens(const Json& config) {
  Json out = Json::object();
  const auto text = [](const Json& v) -> Json {
    if (v.is_string()) return v;
    if (v.is_object() && v.contains("content") && v["content"].is_string()) return v["content"];
    return Json();
  };
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    if (!config.contains(name)) continue;
    Json value = text(config[name]);
    if (!value.is_null()) out[name] = std::move(value);
  }
  if (config.contains("additional_special_tokens") && config["additional_special_tokens"].is_array()) {
    Json list = Json::array();
    for (const Json& v : config["additional_special_tokens"]) {
      Json value = text(v);
      if (!value.is_null()) list.push_back(std::move(value));
    }
    out["additional_special_tokens"] = std::move(list);
  }
  return out;
}

// The config's chat_template: a string, or a list of named ones.
StatusOr<std::string> TemplateOf(const Json& config, const std::string& path) {
  const auto it = config.find("chat_template");
  if (it == config.end() || it->is_null())
    return NotFound("{}: holds no chat_template; add one, or a chat_template.jinja", path);
  if (it->is_string()) return it->get<std::string>();
  if (it->is_array()) {
    for (const Json& entry : *it) {
      if (entry.is_object() && entry.value("name", "") == "default" && entry.contains("template") &&
          entry["template"].is_string()) {
        return entry["template"].get<std::string>();
      }
    }
  }
  return Invalid(
      "{}: chat_template must be a string or a list with one named \"default\"; correct it, or put the "
      "template into "
      "chat_template.jinja",
      path);
}

bool IsDeepseekV32(const std::string& folder) {
  const StatusOr<std::string> text = ReadFileText(folder + "/config.json");
  if (!text.ok() || JsonTooDeep(*text)) return false;
  const Json config = Json::parse(*text, nullptr, false);
  if (!config.is_object() || !config.contains("architectures") || !config["architectures"].is_array())
    return false;
  const Json& names = config["architectures"];
  return std::find(names.begin(), names.end(), "DeepseekV32ForCausalLM") != names.end();
}

}  // namespace

std::string ChatPrompt::Text() const {
  std::string out;
  for (const PromptSegment& s : segments) out += s.text;
  return out;
}

StatusOr<Json> NormalizeMessages(const Json& messages) {
  if (!messages.is_array()) return Invalid("messages: must be a list, got {}", messages.type_name());
  if (messages.empty()) return Invalid("messages: is empty; send at least one message");
  Json out = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    Json message = Json::object();
    RETURN_IF_ERROR(NormalizeMessage(messages[i], fmt::format("messages[{}]", i), &message));
    out.push_back(std::move(message));
  }
  return out;
}

StatusOr<std::shared_ptr<const ChatTemplate>> ChatTemplate::Parse(std::string_view source,
                                                                  Json special_tokens) {
  ASSIGN_OR_RETURN(auto parsed, jinja::Template::Parse(source));
  return std::make_shared<JinjaChatTemplate>(std::move(parsed), special_tokens,
                                             source.find("developer") != std::string_view::npos);
}

StatusOr<std::shared_ptr<const ChatTemplate>> ChatTemplate::Load(const std::string& folder) {
  const std::string config_path = folder + "/tokenizer_config.json",
                    file_path = folder + "/chat_template.jinja";
  Json config = Json::object();
  ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadIfThere(config_path));
  if (text) {
    if (!JsonTooDeep(*text)) config = Json::parse(*text, nullptr, false);
    if (!config.is_object() || JsonTooDeep(*text))
      return Invalid("{}: is not a JSON object; fetch the file again", config_path);
  }
  const Json tokens = SpecialTokens(config);
  StatusOr<std::string> source = TemplateOf(config, config_path);
  ASSIGN_OR_RETURN(std::optional<std::string> file, ReadIfThere(file_path));
  const std::string& path = file ? file_path : config_path;
  if (file) source = *std::move(file);
  if (!source.ok()) {
    if (absl::IsNotFound(source.status()) && IsDeepseekV32(folder)) return MakeDeepseekV32Encoder();
    return source.status();
  }
  auto parsed = Parse(*source, tokens);
  if (!parsed.ok()) {
    return Status(parsed.status().code(),
                  fmt::format("{}: chat template: {} (correct it, or take it out to serve without "
                              "/v1/chat/completions)",
                              path, Message(parsed.status())));
  }
  return parsed;
}

}  // namespace sluice
