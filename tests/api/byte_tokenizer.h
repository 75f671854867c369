// A tokenizer whose ids 0..255 are the bytes, and a chat template that joins the messages' texts: what a test
// sends is what the scripted engine gets.
#pragma once

#include <memory>
#include <string>

#include "api/json_writer.h"
#include "nlohmann/json.hpp"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace sluice {

inline std::shared_ptr<const Tokenizer> MakeByteTokenizer() {
  nlohmann::ordered_json vocab = nlohmann::ordered_json::object();
  // GPT-2's byte alphabet: printable bytes stand for themselves, the others are moved up to U+0100.
  char32_t moved = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    std::string key;
    AppendUtf8(printable ? char32_t(b) : moved++, &key);
    vocab[key] = b;
  }
  nlohmann::ordered_json added = nlohmann::ordered_json::array();
  int id = 256;
  for (const char* content : {"<|end|>", "<|user|>", "<|assistant|>"}) {
    added.push_back({{"id", id++},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const nlohmann::ordered_json file = {
      {"version", "1.0"},
      {"added_tokens", added},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::ordered_json::array()}}}};
  return Tokenizer::Parse(file.dump()).value();
}

class JoiningTemplate final : public ChatTemplate {
 public:
  StatusOr<ChatPrompt> Render(const Json& messages, const Json&, bool) const override {
    ChatPrompt prompt;
    for (const Json& message : messages) {
      const auto content = message.find("content");
      if (content == message.end() || content->is_null()) continue;
      if (content->is_string()) {
        prompt.segments.push_back({.text = content->get<std::string>(), .from_template = false});
        continue;
      }
      for (const Json& part : *content)
        prompt.segments.push_back({.text = part["text"], .from_template = false});
    }
    if (prompt.Text() == "bad template") return Invalid("messages[0]: the template refuses this");
    return prompt;
  }
};

}  // namespace sluice
