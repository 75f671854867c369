// Hugging Face tokenizer.json, byte-level BPE, in time linear in the text. Immutable and thread-safe after Load.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace sluice {

// A piece of a rendered prompt. Only template text may become control tokens; message text never does.
struct PromptSegment {
  std::string text;
  bool from_template = true;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  static StatusOr<std::shared_ptr<const Tokenizer>> Load(const std::string& folder);          // tokenizer.json (+ config)
  static StatusOr<std::shared_ptr<const Tokenizer>> Parse(std::string_view tokenizer_json);

  // allow_special: added tokens are matched in the text (the reference's default); false: the text is plain bytes.
  virtual std::vector<int32_t> Encode(std::string_view text, bool allow_special) const = 0;
  virtual std::vector<int32_t> EncodeSegments(std::span<const PromptSegment> segments) const = 0;
  // Raw bytes of one token (special tokens: their text; byte-level alphabet undone; byte fallback undone).
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;         // skipped by skip_special_tokens
  virtual int32_t IdOf(std::string_view token) const = 0;  // -1: none
  virtual int32_t vocab_size() const = 0;               // ids are < this
  virtual std::string Decode(std::span<const int32_t> ids, bool skip_special) const = 0;  // invalid bytes become U+FFFD
};

// Turns a growing list of ids into text that is valid UTF-8 at every step: bytes of an unfinished character are held back.
class IncrementalDetokenizer {
 public:
  IncrementalDetokenizer(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special)
      : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}
  std::string Add(int32_t id);       // text that became certain; may be ""
  std::string Finish();              // held bytes as at most one U+FFFD

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_;
  std::string held_;
};

}  // namespace sluice
