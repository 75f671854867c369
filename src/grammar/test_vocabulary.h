// A small vocabulary for tests of this module: every byte, some longer tokens, markers and an end.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace sluice {

class TestVocabulary final : public Tokenizer {
 public:
  TestVocabulary() {
    for (int b = 0; b < 256; ++b) tokens_.push_back(std::string(1, char(b)));
    for (const char* more : {"{\"",   "\":",           "\", \"", "\"}",  "}}", "[[",  "]]", "tru",
                             "true",  "null",          "12",     "123",  "-1", "0.5", "ab", "abc",
                             "name",  "\"name\": ",    "é",      "🤗", ", ", ": ",  "  ", "\\n",
                             "\\u00", "</arg_value>x", "ab"}) {
      tokens_.push_back(more);
    }
    special_from_ = int32_t(tokens_.size());
    for (const char* marker : {"<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>",
                               "</arg_key>", "<arg_value>", "</arg_value>", "<end>"}) {
      names_[marker] = int32_t(tokens_.size());
      tokens_.push_back(marker);
    }
  }
  int32_t end() const { return vocab_size() - 1; }

  // The longest token that the text begins with, again and again.
  std::vector<int32_t> Encode(std::string_view text, bool) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      int32_t best = static_cast<unsigned char>(text[0]);
      for (int32_t t = 256; t < special_from_; ++t) {
        const std::string& token = tokens_[size_t(t)];
        if (token.size() > tokens_[size_t(best)].size() && text.starts_with(token)) best = t;
      }
      ids.push_back(best);
      text.remove_prefix(tokens_[size_t(best)].size());
    }
    return ids;
  }
  std::vector<int32_t> EncodeSegments(std::span<const PromptSegment>) const override { return {}; }
  std::span<const int32_t> PromptPrefix() const override { return {}; }
  std::string_view TokenBytes(int32_t id) const override { return tokens_[size_t(id)]; }
  bool IsSpecial(int32_t id) const override { return id >= special_from_; }
  int32_t IdOf(std::string_view token) const override {
    const auto it = names_.find(std::string(token));
    return it == names_.end() ? -1 : it->second;
  }
  int32_t vocab_size() const override { return int32_t(tokens_.size()); }
  int32_t max_token_bytes() const override { return 16; }
  const DecodeRules& decode_rules() const override { return rules_; }
  std::string Decode(std::span<const int32_t> ids, bool) const override {
    std::string out;
    for (const int32_t id : ids) out += tokens_[size_t(id)];
    return out;
  }

 private:
  std::vector<std::string> tokens_;
  std::map<std::string, int32_t> names_;
  int32_t special_from_ = 0;
  DecodeRules rules_;
};

}  // namespace sluice
