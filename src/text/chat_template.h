// Chat prompts from the checkpoint's own Jinja template (a bounded subset, see jinja.h) or a native encoder.
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

class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;
  // From tokenizer_config.json's chat_template or chat_template.jinja of the folder. NotFound: the folder has
  // none.
  static StatusOr<std::shared_ptr<const ChatTemplate>> Load(const std::string& folder);
  static StatusOr<std::shared_ptr<const ChatTemplate>> Parse(std::string_view jinja,
                                                             Json special_tokens = Json::object());

  // messages: OpenAI form. Normalised first: null or absent content = "", text parts joined, tool-call
  // arguments as a JSON string are parsed. `kwargs` go into the template's scope (tools, enable_thinking,
  // ...). Invalid with the message's index.
  virtual StatusOr<ChatPrompt> Render(const Json& messages, const Json& kwargs,
                                      bool add_generation_prompt) const = 0;
};

}  // namespace sluice
