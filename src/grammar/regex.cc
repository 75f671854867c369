#include <algorithm>
#include <optional>
#include <utility>

#include "grammar/json_text.h"
#include "grammar/syntax.h"
#include "text/utf8.h"

namespace sluice {
namespace {

constexpr int kGroupsDeepMax = 100;

const CharSet& Digits() {
  static const CharSet set = {{'0', '9'}};
  return set;
}
const CharSet& WordCharacters() {
  static const CharSet set = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
  return set;
}
const CharSet& Spaces() {
  static const CharSet set = {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                              {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                              {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
  return set;
}

class RegexParser {
 public:
  RegexParser(std::string_view pattern, const RegexMode& mode) : mode_(mode) {
    for (size_t i = 0; i < pattern.size();) {
      const Utf8Step step = DecodeUtf8(pattern, i);
      text_ += step.kind == Utf8Kind::kValid ? step.codepoint : char32_t(0xFFFD);
      i += step.bytes;
    }
  }

  StatusOr<ExprPtr> Parse() {
    ASSIGN_OR_RETURN(ExprPtr all, Alternatives(/*top=*/true, 0));
    if (at_ < text_.size()) return Error("unmatched ')'");
    return all;
  }

 private:
  Status Error(std::string_view what) const { return Invalid("{} at character {}", what, at_ + 1); }
  bool Is(char32_t c) const { return at_ < text_.size() && text_[at_] == c; }
  bool Take(char32_t c) {
    if (!Is(c)) return false;
    ++at_;
    return true;
  }
  ExprPtr CharsOf(const CharSet& set) const { return mode_.json_string ? JsonChars(set) : Chars(set); }
  ExprPtr Anything() const { return Star(CharsOf(CharSet::All())); }

  // Anchors count at the ends of the pattern's own alternatives only.
  StatusOr<ExprPtr> Alternatives(bool top, int deep) {
    if (deep > kGroupsDeepMax) return Error("groups are nested too deeply");
    std::vector<ExprPtr> alternatives;
    do {
      std::vector<ExprPtr> parts;
      const bool begins = top && Take('^');
      if (top && mode_.search && !begins) parts.push_back(Anything());
      bool ends = false;
      while (at_ < text_.size() && !Is('|') && !Is(')')) {
        if (Is('$') && top && (at_ + 1 == text_.size() || text_[at_ + 1] == '|')) {
          ++at_;
          ends = true;
          break;
        }
        ASSIGN_OR_RETURN(ExprPtr part, Quantified(deep));
        parts.push_back(std::move(part));
      }
      if (top && mode_.search && !ends) parts.push_back(Anything());
      alternatives.push_back(Seq(std::move(parts)));
    } while (Take('|'));
    return Alt(std::move(alternatives));
  }

  StatusOr<ExprPtr> Quantified(int deep) {
    ASSIGN_OR_RETURN(ExprPtr atom, Atom(deep));
    int32_t min = 1, max = 1;
    if (Take('*')) {
      min = 0, max = -1;
    } else if (Take('+')) {
      max = -1;
    } else if (Take('?')) {
      min = 0;
    } else if (Is('{')) {
      const size_t before = at_;
      if (!Bounds(&min, &max)) {
        at_ = before;
        return Error("'{' does not begin a count {m}, {m,} or {m,n}; write \\{");
      }
      if (max >= 0 && min > max) return Error("a count's minimum is above its maximum");
      if (std::max(min, max) > kGrammarRepeatMax) return Error("a count is too large");
    } else {
      return atom;
    }
    Take('?');  // lazy or not: the same texts match
    if (Is('*') || Is('+') || Is('{')) return Error("nothing to repeat");
    return Repeat(std::move(atom), min, max);
  }

  bool Number(int32_t* out) {
    size_t digits = 0;
    int64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && digits < 7) {
      value = value * 10 + (text_[at_++] - '0');
      ++digits;
    }
    *out = int32_t(value);
    return digits > 0;
  }
  bool Bounds(int32_t* min, int32_t* max) {
    Take('{');
    if (!Number(min)) return false;
    *max = *min;
    if (Take(',')) {
      *max = -1;
      if (!Is('}') && !Number(max)) return false;
    }
    return Take('}');
  }

  StatusOr<ExprPtr> Atom(int deep) {
    if (Take('(')) {
      if (Take('?')) {
        if (!Take(':')) {
          // (?<name>...) is a group; everything else looks around or sets flags.
          if (!Is('<') || (at_ + 1 < text_.size() && (text_[at_ + 1] == '=' || text_[at_ + 1] == '!'))) {
            return Error("look-around and flags are not supported");
          }
          while (at_ < text_.size() && !Take('>')) ++at_;
        }
      }
      ASSIGN_OR_RETURN(ExprPtr group, Alternatives(/*top=*/false, deep + 1));
      if (!Take(')')) return Error("missing ')'");
      return group;
    }
    if (Take('.')) {
      return CharsOf(CharSet::All().Without({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}));
    }
    if (Take('[')) {
      ASSIGN_OR_RETURN(const CharSet set, Class());
      return CharsOf(set);
    }
    if (Is('*') || Is('+') || Is('?')) return Error("nothing to repeat");
    if (Is('^') || Is('$')) return Error("'^' and '$' are supported at the ends of the pattern only");
    CharSet set;
    if (Take('\\')) {
      ASSIGN_OR_RETURN(set, Escape(/*in_class=*/false));
    } else {
      set.Add(text_[at_], text_[at_]);
      ++at_;
    }
    return CharsOf(set);
  }

  StatusOr<char32_t> Hex(int digits) {
    char32_t value = 0;
    for (int i = 0; i < digits; ++i) {
      if (at_ >= text_.size()) return Error("a hexadecimal escape is cut off");
      const char32_t c = text_[at_++];
      if (c >= '0' && c <= '9') {
        value = value * 16 + (c - '0');
      } else if ((c | 32) >= 'a' && (c | 32) <= 'f') {
        value = value * 16 + ((c | 32) - 'a' + 10);
      } else {
        return Error("not a hexadecimal digit");
      }
    }
    return value;
  }

  // Behind the backslash.
  StatusOr<CharSet> Escape(bool in_class) {
    if (at_ >= text_.size()) return Error("a backslash ends the pattern");
    const char32_t c = text_[at_++];
    const auto one = [](char32_t value) { return CharSet{{value, value}}; };
    switch (c) {
      case 'd':
        return Digits();
      case 'D':
        return Digits().Complement();
      case 'w':
        return WordCharacters();
      case 'W':
        return WordCharacters().Complement();
      case 's':
        return Spaces();
      case 'S':
        return Spaces().Complement();
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 't':
        return one('\t');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case '0':
        return one(0);
      case 'b':
        if (in_class) return one('\b');
        break;
      case 'x': {
        ASSIGN_OR_RETURN(const char32_t value, Hex(2));
        return one(value);
      }
      case 'u': {
        if (Take('{')) {
          char32_t value = 0;
          for (int digits = 0; !Take('}'); ++digits) {
            if (digits >= 6) return Error("\\u{...} has more than 6 digits");
            ASSIGN_OR_RETURN(const char32_t digit, Hex(1));
            value = value * 16 + digit;
          }
          return one(value);
        }
        ASSIGN_OR_RETURN(const char32_t value, Hex(4));
        return one(value);
      }
      default:
        break;
    }
    const bool word = c < 0x80 && WordCharacters().Has(c);
    if (word) {
      --at_;
      return Error("this escape is not supported (no back references, \\b or \\p)");
    }
    return one(c);
  }

  // Behind the bracket.
  StatusOr<CharSet> Class() {
    CharSet set;
    const bool negated = Take('^');
    while (!Is(']')) {
      if (at_ >= text_.size()) return Error("missing ']'");
      CharSet low;
      if (Take('\\')) {
        ASSIGN_OR_RETURN(low, Escape(/*in_class=*/true));
      } else {
        low.Add(text_[at_], text_[at_]);
        ++at_;
      }
      const auto single = [](const CharSet& s) {
        return s.ranges().size() == 1 && s.ranges()[0].low == s.ranges()[0].high;
      };
      if (Is('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']' && single(low)) {
        ++at_;
        CharSet high;
        if (Take('\\')) {
          ASSIGN_OR_RETURN(high, Escape(/*in_class=*/true));
        } else {
          high.Add(text_[at_], text_[at_]);
          ++at_;
        }
        if (!single(high)) return Error("a range ends with a class");
        if (high.ranges()[0].low < low.ranges()[0].low) return Error("a range is empty");
        set.Add(low.ranges()[0].low, high.ranges()[0].low);
        continue;
      }
      set.Add(low);
    }
    Take(']');
    return negated ? set.Complement() : set;
  }

  const RegexMode mode_;
  std::u32string text_;
  size_t at_ = 0;
};

}  // namespace

StatusOr<ExprPtr> ParseRegex(std::string_view pattern, const RegexMode& mode) {
  return RegexParser(pattern, mode).Parse();
}

}  // namespace sluice
