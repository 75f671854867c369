// tokenizer.json as plain data. What Sluice cannot run exactly as the reference is refused here, by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/added_tokens.h"
#include "text/regex_splitter.h"

namespace sluice {

struct SplitStep {
  std::string pattern;
  bool literal = false;
  RegexSplitter::Options options;
};

struct ByteLevelStep {
  bool present = false;
  bool add_prefix_space = false;
  bool use_regex = false;
};

struct DecoderSpec {
  enum class Kind { kByteLevel, kByteFallback };
  Kind kind = Kind::kByteLevel;
  // kByteFallback only: literal replacements within a token, then what the joined text loses at its start.
  std::vector<std::pair<std::string, std::string>> replacements;
  bool byte_tokens = false;  // <0xNN> stands for a byte
  std::string strip_char;    // one character, or ""
  int strip_start = 0;       // at most this many of it
};

struct TokenizerSpec {
  std::vector<std::pair<std::string, int32_t>> vocab;
  std::vector<std::pair<std::string, std::string>> merges;
  bool byte_fallback = false;
  bool ignore_merges = false;
  bool fuse_unk = false;
  std::string unk_token;  // "": none
  bool nfc = false;
  std::vector<SplitStep> splits;  // before ByteLevel
  ByteLevelStep byte_level;
  DecoderSpec decoder;
  std::vector<AddedToken> added;
  std::vector<std::string> prefix_tokens;  // TemplateProcessing's special tokens before a single sequence
};

StatusOr<TokenizerSpec> ParseTokenizerJson(std::string_view json);

struct TokenizerConfig {
  std::vector<std::string> special_tokens;  // all tokens that the config names as special
  std::string bos_token;
  bool add_bos_token = false;
};

// tokenizer_config.json: only what concerns the mapping of text to ids.
StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json);

}  // namespace sluice
