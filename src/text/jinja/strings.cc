#include "text/jinja/strings.h"

#include <utf8proc.h>

#include <algorithm>

#include "text/utf8.h"

namespace sluice::jinja {

bool IsPythonSpace(char32_t cp) { return IsWhiteSpace(cp) || (cp >= 0x1C && cp <= 0x1F); }

namespace {

size_t PreviousOffset(std::string_view s, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (static_cast<unsigned char>(s[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

template <typename Predicate>
std::pair<size_t, size_t> StripBounds(std::string_view s, Side side, Predicate removed) {
  size_t begin = 0, end = s.size();
  if (side != Side::kRight) {
    while (begin < end) {
      const Utf8Step step = DecodeUtf8(s, begin);
      if (!removed(step.codepoint)) break;
      begin += step.bytes;
    }
  }
  if (side != Side::kLeft) {
    while (end > begin) {
      const size_t previous = PreviousOffset(s, end);
      if (!removed(DecodeUtf8(s, previous).codepoint)) break;
      end = previous;
    }
  }
  return {begin, end};
}

bool IsCased(char32_t cp) {
  const auto c = utf8proc_category(static_cast<utf8proc_int32_t>(cp));
  return c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LL || c == UTF8PROC_CATEGORY_LT;
}
bool IsUpper(char32_t cp) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(cp)) == UTF8PROC_CATEGORY_LU;
}
bool IsLower(char32_t cp) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(cp)) == UTF8PROC_CATEGORY_LL;
}

void AppendUpper(char32_t cp, std::string* out) {
  if (cp == 0xDF) {
    *out += "SS";
  } else {
    AppendUtf8(static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(cp))), out);
  }
}
void AppendLower(char32_t cp, std::string* out) {
  AppendUtf8(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(cp))), out);
}

// map(codepoint, out) for every character; marks are kept.
template <typename Map>
Text MapChars(const Text& s, Map map) {
  Text out;
  const std::string_view bytes = s.str();
  s.ForEachRun(0, s.size(), [&](size_t begin, size_t end, bool origin) {
    std::string mapped;
    for (size_t pos = begin; pos < end;) {
      const Utf8Step step = DecodeUtf8(bytes, pos);
      map(step.codepoint, &mapped);
      pos += step.bytes;
    }
    out.Append(mapped, origin);
  });
  return out;
}

bool IsLineEnd(char32_t cp) {
  return (cp >= 0x0A && cp <= 0x0D) || (cp >= 0x1C && cp <= 0x1E) || cp == 0x85 || cp == 0x2028 ||
         cp == 0x2029;
}

}  // namespace

std::string_view StripRight(std::string_view s) {
  return s.substr(0, StripBounds(s, Side::kRight, IsPythonSpace).second);
}

size_t CharCount(std::string_view s) {
  return static_cast<size_t>(std::count_if(
      s.begin(), s.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

size_t CharOffset(std::string_view s, size_t index) {
  size_t pos = 0;
  for (; index > 0 && pos < s.size(); --index) pos += DecodeUtf8(s, pos).bytes;
  return pos;
}

Text Strip(const Text& s, const std::string* chars, Side side) {
  std::pair<size_t, size_t> bounds;
  if (chars == nullptr) {
    bounds = StripBounds(s.str(), side, IsPythonSpace);
  } else {
    std::u32string set;
    for (size_t pos = 0; pos < chars->size();) {
      const Utf8Step step = DecodeUtf8(*chars, pos);
      set += step.codepoint;
      pos += step.bytes;
    }
    bounds = StripBounds(s.str(), side, [&](char32_t cp) { return set.find(cp) != std::u32string::npos; });
  }
  return s.Substr(bounds.first, bounds.second);
}

std::vector<Text> Split(const Text& s, std::string_view separator, int64_t max_splits, bool from_right) {
  const std::string_view bytes = s.str();
  std::vector<std::pair<size_t, size_t>> parts;
  const auto may_split = [&] { return max_splits < 0 || static_cast<int64_t>(parts.size()) < max_splits; };
  if (!separator.empty() && !from_right) {
    size_t begin = 0;
    while (may_split()) {
      const size_t at = bytes.find(separator, begin);
      if (at == std::string_view::npos) break;
      parts.emplace_back(begin, at);
      begin = at + separator.size();
    }
    parts.emplace_back(begin, bytes.size());
  } else if (!separator.empty()) {
    size_t end = bytes.size();
    while (may_split() && end >= separator.size()) {
      const size_t at = bytes.rfind(separator, end - separator.size());
      if (at == std::string_view::npos) break;
      parts.emplace_back(at + separator.size(), end);
      end = at;
    }
    parts.emplace_back(0, end);
    std::reverse(parts.begin(), parts.end());
  } else if (!from_right) {
    size_t pos = StripBounds(bytes, Side::kLeft, IsPythonSpace).first;
    while (pos < bytes.size()) {
      if (!may_split()) {
        parts.emplace_back(pos, bytes.size());  // the rest keeps its white space at the far end
        break;
      }
      size_t end = pos;
      while (end < bytes.size()) {
        const Utf8Step step = DecodeUtf8(bytes, end);
        if (IsPythonSpace(step.codepoint)) break;
        end += step.bytes;
      }
      parts.emplace_back(pos, end);
      pos = end + StripBounds(bytes.substr(end), Side::kLeft, IsPythonSpace).first;
    }
  } else {
    size_t end = StripBounds(bytes, Side::kRight, IsPythonSpace).second;
    while (end > 0) {
      if (!may_split()) {
        parts.emplace_back(0, end);
        break;
      }
      size_t begin = end;
      while (begin > 0) {
        const size_t previous = PreviousOffset(bytes, begin);
        if (IsPythonSpace(DecodeUtf8(bytes, previous).codepoint)) break;
        begin = previous;
      }
      parts.emplace_back(begin, end);
      end = StripBounds(bytes.substr(0, begin), Side::kRight, IsPythonSpace).second;
    }
    std::reverse(parts.begin(), parts.end());
  }
  std::vector<Text> out;
  out.reserve(parts.size());
  for (const auto& [begin, end] : parts) out.push_back(s.Substr(begin, end));
  return out;
}

std::vector<Text> SplitLines(const Text& s, bool keep_ends) {
  const std::string_view bytes = s.str();
  std::vector<Text> out;
  size_t begin = 0;
  for (size_t pos = 0; pos < bytes.size();) {
    const Utf8Step step = DecodeUtf8(bytes, pos);
    if (!IsLineEnd(step.codepoint)) {
      pos += step.bytes;
      continue;
    }
    size_t next = pos + step.bytes;
    if (step.codepoint == '\r' && next < bytes.size() && bytes[next] == '\n') ++next;
    out.push_back(s.Substr(begin, keep_ends ? next : pos));
    begin = pos = next;
  }
  if (begin < bytes.size()) out.push_back(s.Substr(begin, bytes.size()));
  return out;
}

Text Replace(const Text& s, std::string_view from, const Text& to, int64_t max_count) {
  Text out;
  const std::string_view bytes = s.str();
  int64_t count = 0;
  if (from.empty()) {  // between all characters, and at both ends
    for (size_t pos = 0;; ++count) {
      if (max_count < 0 || count < max_count) out.Append(to);
      if (pos >= bytes.size()) break;
      const size_t next = pos + DecodeUtf8(bytes, pos).bytes;
      out.Append(s, pos, next);
      pos = next;
    }
    return out;
  }
  size_t begin = 0;
  while (max_count < 0 || count < max_count) {
    const size_t at = bytes.find(from, begin);
    if (at == std::string_view::npos) break;
    out.Append(s, begin, at);
    out.Append(to);
    begin = at + from.size();
    ++count;
  }
  out.Append(s, begin, bytes.size());
  return out;
}

Text Upper(const Text& s) { return MapChars(s, AppendUpper); }
Text Lower(const Text& s) { return MapChars(s, AppendLower); }

Text Capitalize(const Text& s) {
  bool first = true;
  return MapChars(s, [&](char32_t cp, std::string* out) {
    first ? AppendUpper(cp, out) : AppendLower(cp, out);
    first = false;
  });
}

Text TitleMethod(const Text& s) {
  bool inside = false;
  return MapChars(s, [&](char32_t cp, std::string* out) {
    inside ? AppendLower(cp, out) : AppendUpper(cp, out);
    inside = IsCased(cp);
  });
}

Text TitleFilter(const Text& s) {
  bool inside = false;
  return MapChars(s, [&](char32_t cp, std::string* out) {
    inside ? AppendLower(cp, out) : AppendUpper(cp, out);
    inside = !(IsPythonSpace(cp) || cp == '-' || cp == '(' || cp == '{' || cp == '[' || cp == '<');
  });
}

Text SliceText(const Text& s, int64_t start, int64_t stop, int64_t step) {
  const std::string_view bytes = s.str();
  if (step == 1) {
    if (start >= stop) return Text();
    const size_t begin = CharOffset(bytes, static_cast<size_t>(start));
    return s.Substr(begin, begin + CharOffset(bytes.substr(begin), static_cast<size_t>(stop - start)));
  }
  std::vector<size_t> offsets;
  for (size_t pos = 0; pos < bytes.size(); pos += DecodeUtf8(bytes, pos).bytes) offsets.push_back(pos);
  offsets.push_back(bytes.size());
  Text out;
  for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
    out.Append(s, offsets[static_cast<size_t>(i)], offsets[static_cast<size_t>(i) + 1]);
  }
  return out;
}

std::vector<Value> Characters(const Text& s) {
  std::vector<Value> out;
  for (size_t pos = 0; pos < s.size();) {
    const size_t next = pos + DecodeUtf8(s.str(), pos).bytes;
    out.emplace_back(s.Substr(pos, next));
    pos = next;
  }
  return out;
}

bool IsAllCase(std::string_view s, bool upper) {
  bool any = false;
  for (size_t pos = 0; pos < s.size();) {
    const Utf8Step step = DecodeUtf8(s, pos);
    if (IsCased(step.codepoint)) {
      if (upper ? !IsUpper(step.codepoint) : !IsLower(step.codepoint)) return false;
      any = true;
    }
    pos += step.bytes;
  }
  return any;
}

Text EscapeHtml(const Text& s) {
  return MapChars(s, [](char32_t cp, std::string* out) {
    switch (cp) {
      case '&':
        *out += "&amp;";
        break;
      case '<':
        *out += "&lt;";
        break;
      case '>':
        *out += "&gt;";
        break;
      case '"':
        *out += "&#34;";
        break;
      case '\'':
        *out += "&#39;";
        break;
      default:
        AppendUtf8(cp, out);
    }
  });
}

SliceBounds ClipSlice(std::optional<int64_t> start, std::optional<int64_t> stop, std::optional<int64_t> step,
                      int64_t length) {
  const int64_t by = step.value_or(1);
  if (by == 0) throw Error{"slice step cannot be zero"};
  const int64_t low = by > 0 ? 0 : -1, high = by > 0 ? length : length - 1;
  const auto clip = [&](std::optional<int64_t> bound, int64_t fallback) {
    if (!bound) return fallback;
    int64_t b = *bound;
    if (b < 0) b = std::max(b, -length - 1) + length;
    return std::clamp(b, low, high);
  };
  return {clip(start, by > 0 ? low : high), clip(stop, by > 0 ? high : low), by};
}

}  // namespace sluice::jinja
