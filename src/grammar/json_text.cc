#include "grammar/json_text.h"

#include <algorithm>

namespace sluice {
namespace {

constexpr int32_t kDigitsMax = 60;

CharSet One(char c) { return {{char32_t(c), char32_t(c)}}; }
CharSet Digits() { return {{'0', '9'}}; }
ExprPtr Hex() { return Chars({{'0', '9'}, {'A', 'F'}, {'a', 'f'}}); }

// All texts of a string's characters: plain ones, short escapes, \uXXXX (surrogates in pairs only).
ExprPtr AnyChar() {
  const ExprPtr d = Chars({{'D', 'D'}, {'d', 'd'}});
  const ExprPtr high = Chars({{'8', '9'}, {'A', 'B'}, {'a', 'b'}});
  const ExprPtr low = Chars({{'C', 'F'}, {'c', 'f'}});
  const ExprPtr not_surrogate =
      Alt({Seq({Chars(CharSet{{'0', '9'}, {'A', 'F'}, {'a', 'f'}}.Without({{'D', 'D'}, {'d', 'd'}})),
                Repeat(Hex(), 3, 3)}),
           Seq({d, Chars({{'0', '7'}}), Repeat(Hex(), 2, 2)})});
  const ExprPtr pair = Seq({d, high, Repeat(Hex(), 2, 2), Literal("\\u"), d, low, Repeat(Hex(), 2, 2)});
  const CharSet plain = CharSet{{0x20, kCodepointMax}}.Without({{'"', '"'}, {'\\', '\\'}});
  return Alt({Chars(plain),
              Seq({Literal("\\"), Chars({{'"', '"'},
                                         {'\\', '\\'},
                                         {'/', '/'},
                                         {'b', 'b'},
                                         {'f', 'f'},
                                         {'n', 'n'},
                                         {'r', 'r'},
                                         {'t', 't'}})}),
              Seq({Literal("\\u"), Alt({not_surrogate, pair})})});
}

// `count` digits, any.
ExprPtr AnyDigits(size_t count) { return Repeat(Chars(Digits()), int32_t(count), int32_t(count)); }

// Numbers of one length between two texts of that length, digit by digit.
ExprPtr SameLength(const std::string& low, const std::string& high) {
  if (low.empty()) return Empty();
  const size_t rest = low.size() - 1;
  const std::string zeros(rest, '0'), nines(rest, '9');
  if (low[0] == high[0]) return Seq({Chars(One(low[0])), SameLength(low.substr(1), high.substr(1))});
  std::vector<ExprPtr> parts;
  char first = low[0], last = high[0];
  if (low.substr(1) != zeros) {
    parts.push_back(Seq({Chars(One(first)), SameLength(low.substr(1), nines)}));
    ++first;
  }
  if (high.substr(1) != nines) {
    parts.push_back(Seq({Chars(One(last)), SameLength(zeros, high.substr(1))}));
    --last;
  }
  if (first <= last) parts.push_back(Seq({Chars({{char32_t(first), char32_t(last)}}), AnyDigits(rest)}));
  return Alt(std::move(parts));
}

// Not negative; as texts, since -2^63 has no positive twin.
ExprPtr Between(const std::string& low, const std::string& high) {
  std::vector<ExprPtr> parts;
  for (size_t length = low.size(); length <= high.size(); ++length) {
    std::string from = length == low.size() ? low : "1" + std::string(length - 1, '0');
    const std::string to = length == high.size() ? high : std::string(length, '9');
    if (from <= to) parts.push_back(SameLength(from, to));
  }
  return parts.empty() ? Never() : Alt(std::move(parts));
}

std::string Magnitude(int64_t v) { return std::to_string(v < 0 ? 0 - uint64_t(v) : uint64_t(v)); }

// Numbers of at least this magnitude.
ExprPtr FromMagnitude(const std::string& low) {
  return Alt({Between(low, std::string(low.size(), '9')),
              Seq({Chars({{'1', '9'}}), Repeat(Chars(Digits()), int32_t(low.size()), kDigitsMax)})});
}

}  // namespace

ExprPtr JsonChars(const CharSet& set) {
  const CharSet special = {{0, 0x1F}, {'"', '"'}, {'\\', '\\'}};
  std::vector<ExprPtr> parts;
  if (const CharSet plain = set.Without(special); !plain.empty()) parts.push_back(Chars(plain));
  for (const CodepointRange& r : special.ranges()) {
    for (char32_t c = r.low; c <= r.high; ++c) {
      if (!set.Has(c)) continue;
      static constexpr char kHex[] = "0123456789abcdef";
      switch (c) {
        case '"':
          parts.push_back(Literal("\\\""));
          break;
        case '\\':
          parts.push_back(Literal("\\\\"));
          break;
        case '\b':
          parts.push_back(Literal("\\b"));
          break;
        case '\f':
          parts.push_back(Literal("\\f"));
          break;
        case '\n':
          parts.push_back(Literal("\\n"));
          break;
        case '\r':
          parts.push_back(Literal("\\r"));
          break;
        case '\t':
          parts.push_back(Literal("\\t"));
          break;
        default:
          parts.push_back(Literal(std::string("\\u00") + kHex[c >> 4] + kHex[c & 15]));
      }
    }
  }
  return parts.empty() ? Never() : Alt(std::move(parts));
}

namespace {

ExprPtr WholeNumber() {
  return Seq({Optional(Literal("-")),
              Alt({Literal("0"), Seq({Chars({{'1', '9'}}), Repeat(Chars(Digits()), 0, kDigitsMax)})})});
}

ExprPtr Decimal() {
  return Seq({WholeNumber(), Optional(Seq({Literal("."), Repeat(Chars(Digits()), 1, kDigitsMax)})),
              Optional(Seq({Chars({{'E', 'E'}, {'e', 'e'}}), Optional(Chars({{'+', '+'}, {'-', '-'}})),
                            Repeat(Chars(Digits()), 1, 2)}))});
}

}  // namespace

JsonText::JsonText(bool whitespace, GrammarBuilder* builder) {
  const int32_t space =
      builder->AddRule("white space", Star(Chars({{'\t', '\n'}, {'\r', '\r'}, {' ', ' '}})));
  space_ = whitespace ? RuleExpr(space) : Empty();
  after_ = whitespace ? RuleExpr(space) : Optional(Literal(" "));
  char_ = builder->AddRule("character", AnyChar());
  integer_ = builder->AddRule("integer", WholeNumber());
  number_ = builder->AddRule("number", Decimal());
  value_ = builder->NewRule("value");
  object_ = builder->NewRule("object");
  array_ = builder->NewRule("array");
  builder->Define(value_, Alt({String(), Number(), Object(), Array(), Literal("true"), Literal("false"),
                               Literal("null")}));
  const ExprPtr member = Seq({String(), Colon(), Value()});
  builder->Define(object_,
                  Seq({Open('{'), Optional(Seq({member, Star(Seq({Comma(), member}))})), Close('}')}));
  builder->Define(array_,
                  Seq({Open('['), Optional(Seq({Value(), Star(Seq({Comma(), Value()}))})), Close(']')}));
}

// Lengths are bounded: readers of JSON refuse numbers that overflow, and a model must not count for ever.
ExprPtr JsonText::Integer() const { return RuleExpr(integer_); }

ExprPtr JsonText::Number() const { return RuleExpr(number_); }

ExprPtr IntegersBetween(int64_t low, int64_t high) {
  if (low > high) return Never();
  std::vector<ExprPtr> parts;
  if (high >= 0) parts.push_back(Between(Magnitude(std::max<int64_t>(low, 0)), Magnitude(high)));
  if (low < 0) {
    parts.push_back(Seq({Literal("-"), Between(Magnitude(std::min<int64_t>(high, -1)), Magnitude(low))}));
  }
  return Alt(std::move(parts));
}

ExprPtr IntegersFrom(int64_t low) {
  if (low >= 0) return FromMagnitude(Magnitude(low));
  return Alt({FromMagnitude("0"), Seq({Literal("-"), Between("1", Magnitude(low))})});
}

ExprPtr IntegersTo(int64_t high) {
  if (high < 0) return Seq({Literal("-"), FromMagnitude(Magnitude(high))});
  return Alt({Seq({Literal("-"), FromMagnitude("1")}), Between("0", Magnitude(high))});
}

}  // namespace sluice
