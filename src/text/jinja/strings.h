// Python's string operations on marked text. Positions are counted in characters (code points) where Python
// counts them so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "text/jinja/text.h"
#include "text/jinja/value.h"

namespace sluice::jinja {

bool IsPythonSpace(char32_t cp);  // str.isspace
std::string_view StripRight(std::string_view s);
size_t CharCount(std::string_view s);
// Byte offset of a character; s.size() beyond the end.
size_t CharOffset(std::string_view s, size_t index);

enum class Side { kLeft, kRight, kBoth };
// chars: the characters to remove; nullptr: white space.
Text Strip(const Text& s, const std::string* chars, Side side);
// separator empty: at runs of white space. max_splits < 0: all. from_right: str.rsplit.
std::vector<Text> Split(const Text& s, std::string_view separator, int64_t max_splits, bool from_right);
std::vector<Text> SplitLines(const Text& s, bool keep_ends);
Text Replace(const Text& s, std::string_view from, const Text& to, int64_t max_count);
Text Upper(const Text& s);
Text Lower(const Text& s);
Text Capitalize(const Text& s);
Text TitleMethod(const Text& s);  // str.title
Text TitleFilter(const Text& s);  // Jinja's title
// The piece s[start:stop:step] of characters, bounds already clipped as Python's slice.indices does.
Text SliceText(const Text& s, int64_t start, int64_t stop, int64_t step);
std::vector<Value> Characters(const Text& s);
bool IsAllCase(std::string_view s, bool upper);  // str.isupper, str.islower
Text EscapeHtml(const Text& s);

// Python's slice.indices.
struct SliceBounds {
  int64_t start, stop, step;
};
SliceBounds ClipSlice(std::optional<int64_t> start, std::optional<int64_t> stop, std::optional<int64_t> step,
                      int64_t length);

}  // namespace sluice::jinja
