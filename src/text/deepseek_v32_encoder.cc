#include "text/deepseek_v32_encoder.h"

#include <algorithm>

#include "text/jinja/value.h"
#include "text/prompt_text.h"

namespace sluice {
namespace {

using jinja::Text;

constexpr std::string_view kBos = "<｜begin▁of▁sentence｜>";
constexpr std::string_view kEos = "<｜end▁of▁sentence｜>";
constexpr std::string_view kUser = "<｜User｜>";
constexpr std::string_view kAssistant = "<｜Assistant｜>";
constexpr std::string_view kThink = "<think>";
constexpr std::string_view kEndThink = "</think>";
constexpr size_t kMaxTextBytes = 64u << 20;

// The wording is part of the format: the model was trained on it.
constexpr std::string_view kToolsBefore =
    R"(## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
)";
constexpr std::string_view kToolsAfter = "\n</functions>\n";
constexpr std::string_view kResponseFormat =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

Text JsonText(const Json& value) { return jinja::ToJson(jinja::FromJson(value, false), {}, kMaxTextBytes); }

class Encoder {
 public:
  Encoder(const Json& messages, bool thinking) : messages_(messages), thinking_(thinking) {
    for (size_t i = 0; i < messages.size(); ++i) {
      const std::string& role = Role(i);
      if (role == "user" || role == "developer") last_user_ = static_cast<int>(i);
    }
  }

  Status Run(const Json& tools, const Json& response_format, bool add_generation_prompt, Text* out) {
    out_ = out;
    generate_ = add_generation_prompt;
    Append(kBos);
    const bool at_first = Role(0) == "system" || Role(0) == "developer";
    RETURN_IF_ERROR(RenderExtras(tools, response_format));
    if (!at_first) out_->Append(extras_);
    for (size_t i = 0; i < messages_.size();) {
      const std::string& role = Role(i);
      if (role == "system") {
        Message(i);
        if (i == 0) out_->Append(extras_);
        ++i;
      } else if (role == "developer") {
        RETURN_IF_ERROR(Developer(i++));
      } else if (role == "user") {
        Append(kUser);
        Message(i);
        OpenTurn(i++);
      } else if (role == "assistant") {
        Assistant(i);
        ASSIGN_OR_RETURN(i, ToolResults(i));
      } else {
        return Invalid("messages[{}]: a tool result must follow an assistant message with tool_calls", i);
      }
    }
    return OkStatus();
  }

 private:
  const std::string& Role(size_t i) const { return messages_[i]["role"].get_ref<const std::string&>(); }
  const std::string& Content(size_t i) const { return messages_[i]["content"].get_ref<const std::string&>(); }
  void Append(std::string_view text) { out_->Append(text, true); }
  void Message(size_t i) { out_->Append(Content(i), false); }
  bool ends_here(size_t i) const { return !generate_ && i + 1 == messages_.size(); }

  // Tools and response format, as they stand behind a system message.
  Status RenderExtras(const Json& tools, const Json& response_format) {
    if (!tools.is_null()) {
      if (!tools.is_array()) return Invalid("tools: must be a list, got {}", tools.type_name());
      for (size_t i = 0; i < tools.size(); ++i) {
        if (!tools[i].is_object() || !tools[i].contains("function") || !tools[i]["function"].is_object()) {
          return Invalid("tools[{}].function: must be an object", i);
        }
        if (i == 0) {
          extras_.Append("\n\n", true);
          extras_.Append(kToolsBefore, true);
        } else {
          extras_.Append("\n", true);
        }
        extras_.Append(JsonText(tools[i]["function"]));
      }
      if (!tools.empty()) extras_.Append(kToolsAfter, true);
    }
    if (!response_format.is_null()) {
      extras_.Append("\n\n", true);
      extras_.Append(kResponseFormat, true);
      extras_.Append(JsonText(response_format));
    }
    return OkStatus();
  }

  Status Developer(size_t i) {
    if (Content(i).empty()) return Invalid("messages[{}].content: a developer message must not be empty", i);
    Append(kUser);
    if (i == 0) out_->Append(extras_);
    Append("\n\n# The user's message is: ");
    Message(i);
    OpenTurn(i);
    return OkStatus();
  }

  // Behind a user's turn: the assistant's begins, thinking only if it is the last.
  void OpenTurn(size_t i) {
    if (ends_here(i)) return;
    Append(kAssistant);
    Append(thinking_ && static_cast<int>(i) == last_user_ ? kThink : kEndThink);
  }

  void Assistant(size_t i) {
    const Json& message = messages_[i];
    if (thinking_ && static_cast<int>(i) > last_user_) {
      if (message.contains("reasoning_content"))
        out_->Append(message["reasoning_content"].get_ref<const std::string&>(), false);
      Append(kEndThink);
    }
    Message(i);
    if (message.contains("tool_calls")) {
      Append("\n\n<｜DSML｜function_calls>\n");
      for (const Json& call : message["tool_calls"]) Call(call["function"]);
      Append("</｜DSML｜function_calls>");
    }
    Append(kEos);
  }

  void Call(const Json& function) {
    Append("<｜DSML｜invoke name=\"");
    out_->Append(function["name"].get_ref<const std::string&>(), false);
    Append("\">\n");
    bool first = true;
    for (const auto& [key, value] : function["arguments"].items()) {
      if (!first) Append("\n");
      first = false;
      Append("<｜DSML｜parameter name=\"");
      out_->Append(key, false);
      Append(value.is_string() ? "\" string=\"true\">" : "\" string=\"false\">");
      if (value.is_string()) {
        out_->Append(value.get_ref<const std::string&>(), false);
      } else {
        out_->Append(JsonText(value));
      }
      Append("</｜DSML｜parameter>");
    }
    Append("\n</｜DSML｜invoke>\n");
  }

  // The results that follow the assistant message `i`; returns the index behind them.
  StatusOr<size_t> ToolResults(size_t i) {
    size_t end = i + 1;
    while (end < messages_.size() && Role(end) == "tool") ++end;
    const size_t results = end - i - 1;
    if (results == 0) return end;
    const size_t calls = messages_[i].contains("tool_calls") ? messages_[i]["tool_calls"].size() : 0;
    if (calls == 0)
      return Invalid("messages[{}]: a tool result must follow an assistant message with tool_calls", i + 1);
    if (results > calls)
      return Invalid("messages[{}]: more tool results ({}) than tool calls ({})", i + 1 + calls, results,
                     calls);
    if (results < calls)
      return Invalid("messages[{}]: fewer tool results ({}) than tool calls ({})", end - 1, results, calls);
    ASSIGN_OR_RETURN(const std::vector<size_t> order, ResultOrder(i, calls));
    Append("\n\n<function_results>");
    for (const size_t k : order) {
      Append("\n<result>");
      Message(k);
      Append("</result>");
    }
    Append("\n</function_results>");
    if (!ends_here(end - 1)) {
      Append("\n\n");
      Append(thinking_ && static_cast<int>(end - 1) >= last_user_ ? kThink : kEndThink);
    }
    return end;
  }

  StatusOr<std::vector<size_t>> ResultOrder(size_t i, size_t calls) const {
    std::vector<size_t> order(calls, 0);
    bool all_named = true;
    for (size_t k = 0; k < calls; ++k) {
      order[k] = i + 1 + k;
      all_named = all_named && messages_[i + 1 + k].contains("tool_call_id") &&
                  messages_[i]["tool_calls"][k].contains("id");
    }
    if (!all_named) return order;  // by position
    std::vector<bool> taken(calls, false);
    for (size_t k = 0; k < calls; ++k) {
      const Json& id = messages_[i + 1 + k]["tool_call_id"];
      size_t at = 0;
      while (at < calls && (taken[at] || messages_[i]["tool_calls"][at]["id"] != id)) ++at;
      if (at == calls)
        return Invalid("messages[{}].tool_call_id: {} names no open tool call", i + 1 + k, id.dump());
      taken[at] = true;
      order[at] = i + 1 + k;
    }
    return order;
  }

  const Json& messages_;
  bool thinking_;
  bool generate_ = true;
  int last_user_ = -1;
  Text extras_;
  Text* out_ = nullptr;
};

class DeepseekV32Encoder final : public ChatTemplate {
 public:
  StatusOr<ChatPrompt> Render(const Json& messages, const Json& kwargs,
                              bool add_generation_prompt) const override {
    ASSIGN_OR_RETURN(const Json normal, NormalizeMessages(messages));
    if (!kwargs.is_object() && !kwargs.is_null())
      return Invalid("chat_template_kwargs: must be an object, got {}", kwargs.type_name());
    bool thinking = false;
    for (const char* name : {"enable_thinking", "thinking"}) {
      if (!kwargs.contains(name) || kwargs[name].is_null()) continue;
      if (!kwargs[name].is_boolean()) return Invalid("chat_template_kwargs.{}: must be true or false", name);
      thinking = kwargs[name].get<bool>();
    }
    const auto value = [&](const char* name) { return kwargs.contains(name) ? kwargs[name] : Json(); };
    Text text;
    try {
      Encoder encoder(normal, thinking);
      RETURN_IF_ERROR(encoder.Run(value("tools"), value("response_format"), add_generation_prompt, &text));
    } catch (const jinja::Error& error) {
      return Invalid("messages: {}", error.message);
    }
    return PromptOf(text);
  }
};

}  // namespace

std::shared_ptr<const ChatTemplate> MakeDeepseekV32Encoder() {
  return std::make_shared<DeepseekV32Encoder>();
}

}  // namespace sluice
