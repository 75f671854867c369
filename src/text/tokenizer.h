// Hugging Face tokenizer.json, byte-level BPE, in time linear in the text. Immutable and thread-safe after
// Load.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace sluice {

// A piece of a rendered prompt. Only template text may become control tokens; message text never does.
struct PromptSegment {
  std::string text;
  bool from_template = true;
};

// How bytes of tokens become text. Byte-level tokenizers: the defaults.
struct DecodeRules {
  // false: each maximal invalid subpart is one U+FFFD. true (byte-fallback tokenizers, <0xNN>): each invalid
  // byte is one.
  bool replace_each_byte = false;
  std::string strip_char;  // the text loses up to strip_start of this character at its start
  int strip_start = 0;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Folder with tokenizer.json and, optionally, tokenizer_config.json (names further special tokens and a
  // leading BOS; its tokenizer_class is ignored: the file's own components decide). NotFound: no
  // tokenizer.json.
  static StatusOr<std::shared_ptr<const Tokenizer>> Load(const std::string& folder);
  static StatusOr<std::shared_ptr<const Tokenizer>> Parse(std::string_view tokenizer_json,
                                                          std::string_view config_json = {});

  // allow_special: added tokens are matched in the text (the reference's default); false: the text is plain
  // bytes. Invalid UTF-8 is encoded as U+FFFD for each maximal invalid subpart.
  virtual std::vector<int32_t> Encode(std::string_view text, bool allow_special) const = 0;
  // Added tokens are found only within from_template segments (adjacent ones are joined first); the text
  // between two of them is pre-tokenised as a whole across segment borders, so ordinary messages give exactly
  // the ids of the joined text.
  virtual std::vector<int32_t> EncodeSegments(std::span<const PromptSegment> segments) const = 0;
  // What the reference puts before a plain prompt (not before a chat template's text), e.g. DeepSeek's BOS.
  // Often empty.
  virtual std::span<const int32_t> PromptPrefix() const = 0;
  // Raw bytes of one token (special tokens: their text; byte-level alphabet undone; byte fallback undone). ""
  // for unknown ids.
  virtual std::string_view TokenBytes(int32_t id) const = 0;
  virtual bool IsSpecial(int32_t id) const = 0;            // skipped by skip_special_tokens
  virtual int32_t IdOf(std::string_view token) const = 0;  // by its spelling in tokenizer.json; -1: none
  virtual int32_t vocab_size() const = 0;                  // ids are < this
  // No token stands for more bytes of input, so a text of b bytes has at least b / max_token_bytes tokens
  // (white space that an added token's lstrip or rstrip eats aside): lets a server refuse an oversized text
  // before encoding it.
  virtual int32_t max_token_bytes() const = 0;
  virtual const DecodeRules& decode_rules() const = 0;
  virtual std::string Decode(std::span<const int32_t> ids,
                             bool skip_special) const = 0;  // invalid bytes become U+FFFD
};

// Turns a growing list of ids into text that is valid UTF-8 at every step: bytes of an unfinished character
// are held back. All pieces joined equal Tokenizer::Decode of all ids. Keep one per choice.
class IncrementalDetokenizer {
 public:
  // kept: special tokens that skip_special does not skip (a response parser's markers).
  IncrementalDetokenizer(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special,
                         std::vector<int32_t> kept = {})
      : tokenizer_(std::move(tokenizer)),
        skip_special_(skip_special),
        strip_left_(tokenizer_->decode_rules().strip_start),
        kept_(std::move(kept)) {}
  std::string Add(int32_t id);  // text that became certain; may be ""
  // Held bytes as at most one U+FFFD (one each for byte-fallback tokenizers). Call once, at the end.
  std::string Finish();

 private:
  std::string Strip(std::string text);
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_;
  int strip_left_;
  std::vector<int32_t> kept_;
  std::string held_;  // at most 3 bytes: a truncated character
};

}  // namespace sluice
