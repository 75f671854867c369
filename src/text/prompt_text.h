// From marked text to prompt segments.
#pragma once

#include "text/chat_template.h"
#include "text/jinja/text.h"

namespace sluice {

inline ChatPrompt PromptOf(const jinja::Text& text) {
  ChatPrompt prompt;
  text.ForEachRun(0, text.size(), [&](size_t begin, size_t end, bool from_template) {
    prompt.segments.push_back({text.str().substr(begin, end - begin), from_template});
  });
  return prompt;
}

}  // namespace sluice
