// UTF-8 as the whole text module sees it: strict (no surrogates, no overlong forms), with the replacement
// rule of Unicode's "maximal subpart" that Python's errors="replace", WHATWG and Rust's from_utf8_lossy
// share.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace sluice {

inline constexpr std::string_view kReplacementChar = "\xEF\xBF\xBD";  // U+FFFD

enum class Utf8Kind {
  kValid,      // one whole character
  kInvalid,    // a maximal subpart that no further byte can make valid
  kTruncated,  // the text ends inside a character that could still become valid
};

struct Utf8Step {
  Utf8Kind kind;
  size_t bytes;        // >= 1
  char32_t codepoint;  // valid only for kValid
};

// REQUIRES pos < text.size().
Utf8Step DecodeUtf8(std::string_view text, size_t pos);
void AppendUtf8(char32_t codepoint, std::string* out);
bool IsValidUtf8(std::string_view text);
// Each maximal invalid subpart becomes one U+FFFD.
std::string ReplaceInvalidUtf8(std::string_view text);

// Character classes as Rust's regex crate defines them (added-token borders): \w and \s.
bool IsWordChar(char32_t codepoint);
bool IsWhiteSpace(char32_t codepoint);

// NFC of valid UTF-8.
bool IsAscii(std::string_view text);
std::string NormalizeNfc(std::string_view text);

}  // namespace sluice
