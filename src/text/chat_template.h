// Chat prompts from the checkpoint's own Jinja template (the subset in jinja/) or a native encoder.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "nlohmann/json.hpp"
#include "text/tokenizer.h"

namespace sluice {

using Json = nlohmann::ordered_json;

struct ChatPrompt {
  std::vector<PromptSegment> segments;  // in order; joined they are the rendered text
  std::string Text() const;
};

// Immutable and thread-safe.
class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;
  // chat_template.jinja of the folder, else tokenizer_config.json's chat_template (of several the one named
  // "default"), else the native encoder of the architecture in config.json (DeepSeek-V3.2). NotFound: the
  // folder has none.
  static StatusOr<std::shared_ptr<const ChatTemplate>> Load(const std::string& folder);
  // special_tokens: variables such as bos_token, as text.
  static StatusOr<std::shared_ptr<const ChatTemplate>> Parse(std::string_view jinja,
                                                             Json special_tokens = Json::object());

  // messages: OpenAI form, normalised first (NormalizeMessages). `kwargs` go into the template's scope
  // (tools, enable_thinking, ...); absent tools and documents are none. Everything from messages and kwargs
  // is marked as message text, only role names are not. Invalid: names the message ("messages[3].content:
  // ..."), also for what the template itself refuses.
  virtual StatusOr<ChatPrompt> Render(const Json& messages, const Json& kwargs,
                                      bool add_generation_prompt) const = 0;
};

// What every template may rely on:
//  - role is system, developer, user, assistant or tool; others are Invalid.
//  - content is a string: null or absent is "", a list of {type: text, text} parts is joined without
//  separator; other parts
//    (images, audio) and other types are Invalid.
//  - tool_calls: null and [] are dropped; each has function.name, a non-empty string, and function.arguments,
//  an object (a JSON
//    string is parsed; absent or "" is {}); anything else is Invalid.
//  - reasoning_content is a string or absent (`reasoning` is taken as another name for it); name and
//  tool_call_id are strings
//    and are passed on as they are: whether a template shows `name` is the template's matter.
StatusOr<Json> NormalizeMessages(const Json& messages);

}  // namespace sluice
