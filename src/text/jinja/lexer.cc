#include "text/jinja/lexer.h"

#include <algorithm>

#include "fmt/format.h"
#include "text/jinja/strings.h"
#include "text/utf8.h"

namespace sluice::jinja {
namespace {

bool IsNameStart(char32_t cp) {
  return cp == '_' || (cp >= 'a' && cp <= 'z') || (cp >= 'A' && cp <= 'Z') || (cp >= 0x80 && IsWordChar(cp));
}
bool IsNameChar(char32_t cp) { return IsNameStart(cp) || (cp >= '0' && cp <= '9'); }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    // One kind of line end, and no final one.
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] == '\r') {
        text_ += '\n';
        if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
      } else {
        text_ += source[i];
      }
    }
    if (text_.ends_with('\n')) text_.pop_back();
  }

  std::vector<Token> Run() {
    while (pos_ < text_.size()) Root();
    Push(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void Fail(const std::string& what) const {
    throw Error{fmt::format("line {}: {}", line_, what)};
  }
  bool At(std::string_view s) const { return text_.compare(pos_, s.size(), s) == 0; }
  void Push(TokenKind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
  void Advance(size_t end) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<ptrdiff_t>(pos_),
                                         text_.begin() + static_cast<ptrdiff_t>(end), '\n'));
    if (end > pos_) line_starting_ = text_[end - 1] == '\n';
    pos_ = end;
  }
  size_t SkipSpace(size_t at) const {
    while (at < text_.size()) {
      const Utf8Step step = DecodeUtf8(text_, at);
      if (!IsPythonSpace(step.codepoint)) break;
      at += step.bytes;
    }
    return at;
  }

  // Text up to the next tag, then the tag.
  void Root() {
    size_t tag = pos_;
    for (;; ++tag) {
      tag = text_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= text_.size()) {
        Data(text_.size(), false, '\0');
        return;
      }
      const char next = text_[tag + 1];
      if (next == '{' || next == '%' || next == '#') break;
    }
    const char kind = text_[tag + 1];
    const char sign =
        tag + 2 < text_.size() && (text_[tag + 2] == '-' || text_[tag + 2] == '+') ? text_[tag + 2] : '\0';
    Data(tag, kind != '{', sign);
    if (kind == '#') {
      Comment();
    } else if (kind == '{') {
      Push(TokenKind::kVariableBegin, "");
      Advance(tag + 2 + (sign == '-' ? 1 : 0));
      Expression(TokenKind::kVariableEnd);
    } else if (!RawBlock()) {
      Push(TokenKind::kBlockBegin, "");
      Advance(tag + 2 + (sign != '\0' ? 1 : 0));
      Expression(TokenKind::kBlockEnd);
    }
  }

  void Data(size_t end, bool strippable, char sign) {
    std::string_view data = std::string_view(text_).substr(pos_, end - pos_);
    if (sign == '-') {
      data = StripRight(data);
    } else if (sign != '+' && strippable) {
      const size_t newline = data.rfind('\n');
      const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
      if ((line_begin > 0 || line_starting_) && StripRight(data.substr(line_begin)).empty())
        data = data.substr(0, line_begin);
    }
    if (!data.empty()) Push(TokenKind::kData, std::string(data));
    Advance(end);
  }

  // Behind the tag's end that starts at `end`: "-%}" eats all white space, "%}" one newline, "+%}" nothing.
  void AfterBlock(size_t marker, char sign) {
    size_t end = marker + 2;
    if (sign == '-') {
      end = SkipSpace(end);
    } else if (sign != '+' && end < text_.size() && text_[end] == '\n') {
      ++end;
    }
    Advance(end);
  }

  void Comment() {
    const size_t end = text_.find("#}", pos_ + 2);
    if (end == std::string::npos) Fail("missing end of comment tag");
    const char sign = text_[end - 1];
    AfterBlock(end, end > pos_ + 2 ? sign : '\0');
  }

  bool RawBlock() {
    size_t at = pos_ + 2;
    if (at < text_.size() && (text_[at] == '-' || text_[at] == '+')) ++at;
    at = SkipSpace(at);
    if (text_.compare(at, 3, "raw") != 0) return false;
    at = SkipSpace(at + 3);
    if (text_.compare(at, 3, "-%}") == 0) {
      at = SkipSpace(at + 3);
    } else if (text_.compare(at, 2, "%}") == 0) {
      at += 2;
    } else {
      return false;
    }
    Advance(at);
    for (size_t tag = pos_; (tag = text_.find("{%", tag)) != std::string::npos; tag += 2) {
      size_t inner = tag + 2;
      const char sign =
          inner < text_.size() && (text_[inner] == '-' || text_[inner] == '+') ? text_[inner++] : '\0';
      inner = SkipSpace(inner);
      if (text_.compare(inner, 6, "endraw") != 0) continue;
      inner = SkipSpace(inner + 6);
      const char end_sign =
          inner < text_.size() && (text_[inner] == '-' || text_[inner] == '+') ? text_[inner++] : '\0';
      if (text_.compare(inner, 2, "%}") != 0) continue;
      Data(tag, true, sign);
      AfterBlock(inner, end_sign);
      return true;
    }
    Fail("missing end of raw block");
  }

  void Expression(TokenKind end_kind) {
    const std::string_view marker = end_kind == TokenKind::kVariableEnd ? "}}" : "%}";
    std::string open;
    while (true) {
      Advance(SkipSpace(pos_));
      if (pos_ >= text_.size()) Fail(fmt::format("unexpected end of template, expected '{}'", marker));
      if (open.empty()) {
        const char sign = text_[pos_] == '-' || (text_[pos_] == '+' && end_kind == TokenKind::kBlockEnd)
                              ? text_[pos_]
                              : '\0';
        const size_t at = pos_ + (sign == '\0' ? 0 : 1);
        if (text_.compare(at, 2, marker) == 0) {
          Push(end_kind, "");
          if (end_kind == TokenKind::kBlockEnd) {
            AfterBlock(at, sign);
          } else {
            Advance(sign == '-' ? SkipSpace(at + 2) : at + 2);
          }
          return;
        }
      }
      const char c = text_[pos_];
      if (c == '"' || c == '\'') {
        String(c);
      } else if (IsDigit(c)) {
        Number();
      } else if (IsNameStart(DecodeUtf8(text_, pos_).codepoint)) {
        size_t end = pos_;
        while (end < text_.size()) {
          const Utf8Step step = DecodeUtf8(text_, end);
          if (step.kind != Utf8Kind::kValid || !IsNameChar(step.codepoint)) break;
          end += step.bytes;
        }
        Push(TokenKind::kName, text_.substr(pos_, end - pos_));
        Advance(end);
      } else {
        Operator(&open);
      }
    }
  }

  void Operator(std::string* open) {
    for (const std::string_view op : {"//", "**", "==", "!=", ">=", "<="}) {
      if (At(op)) {
        Push(TokenKind::kOperator, std::string(op));
        Advance(pos_ + 2);
        return;
      }
    }
    const char c = text_[pos_];
    if (std::string_view("+-/*%~[](){}<>=.:|,;").find(c) == std::string_view::npos)
      Fail(fmt::format("unexpected character '{}'", c));
    if (c == '(' || c == '[' || c == '{') {
      if (open->size() >= 256) Fail("brackets are nested more than 256 deep");
      open->push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    } else if (c == ')' || c == ']' || c == '}') {
      if (open->empty()) Fail(fmt::format("unexpected '{}'", c));
      if (open->back() != c) Fail(fmt::format("unexpected '{}', expected '{}'", c, open->back()));
      open->pop_back();
    }
    Push(TokenKind::kOperator, std::string(1, c));
    Advance(pos_ + 1);
  }

  void Number() {
    size_t end = pos_;
    const auto digits = [&](auto is_digit) {
      while (end < text_.size() && (is_digit(text_[end]) || (text_[end] == '_' && end + 1 < text_.size() &&
                                                             is_digit(text_[end + 1]))))
        ++end;
    };
    const auto is_hex = [](char c) { return IsDigit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); };
    const char kind =
        text_[pos_] == '0' && pos_ + 1 < text_.size() ? static_cast<char>(text_[pos_ + 1] | 0x20) : '\0';
    bool is_float = false;
    if (kind == 'x' || kind == 'o' || kind == 'b') {
      end += 2;
      digits([&](char c) {
        return kind == 'x' ? is_hex(c) : kind == 'o' ? c >= '0' && c <= '7' : c == '0' || c == '1';
      });
    } else {
      digits(IsDigit);
      const bool after_dot = pos_ > 0 && text_[pos_ - 1] == '.';  // x.0.1: two integer attributes
      if (!after_dot && end + 1 < text_.size() && text_[end] == '.' && IsDigit(text_[end + 1])) {
        is_float = true;
        ++end;
        digits(IsDigit);
      }
      if (!after_dot && end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
        size_t exponent = end + 1;
        if (exponent < text_.size() && (text_[exponent] == '+' || text_[exponent] == '-')) ++exponent;
        if (exponent < text_.size() && IsDigit(text_[exponent])) {
          is_float = true;
          end = exponent;
          digits(IsDigit);
        }
      }
    }
    std::string number = text_.substr(pos_, end - pos_);
    std::erase(number, '_');
    Push(is_float ? TokenKind::kFloat : TokenKind::kInteger, std::move(number));
    Advance(end);
  }

  void String(char quote) {
    std::string out;
    size_t at = pos_ + 1;
    const auto hex = [&](size_t count) {
      uint32_t value = 0;
      for (size_t i = 0; i < count; ++i) {
        const char c = at < text_.size() ? text_[at++] : '\0';
        const char lower = static_cast<char>(c | 0x20);
        if (IsDigit(c)) {
          value = value * 16 + static_cast<uint32_t>(c - '0');
        } else if (lower >= 'a' && lower <= 'f') {
          value = value * 16 + static_cast<uint32_t>(lower - 'a' + 10);
        } else {
          Fail("a string has a broken \\x, \\u or \\U escape");
        }
      }
      if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000))
        Fail("a string escape is no Unicode character");
      AppendUtf8(value, &out);
    };
    while (true) {
      if (at >= text_.size()) Fail("a string does not end");
      const char c = text_[at++];
      if (c == quote) break;
      if (c != '\\') {
        out += c;
        continue;
      }
      if (at >= text_.size()) Fail("a string does not end");
      const char e = text_[at++];
      switch (e) {
        case '\n':
          break;
        case 'n':
          out += '\n';
          break;
        case 't':
          out += '\t';
          break;
        case 'r':
          out += '\r';
          break;
        case 'a':
          out += '\a';
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'v':
          out += '\v';
          break;
        case '\\':
        case '\'':
        case '"':
          out += e;
          break;
        case 'x':
          hex(2);
          break;
        case 'u':
          hex(4);
          break;
        case 'U':
          hex(8);
          break;
        default:
          if (e >= '0' && e <= '7') {
            uint32_t value = static_cast<uint32_t>(e - '0');
            for (int i = 0; i < 2 && at < text_.size() && text_[at] >= '0' && text_[at] <= '7'; ++i) {
              value = value * 8 + static_cast<uint32_t>(text_[at++] - '0');
            }
            AppendUtf8(value, &out);
          } else {
            out += '\\';
            out += e;
          }
      }
    }
    Push(TokenKind::kString, std::move(out));
    Advance(at);
  }

  std::string text_;
  size_t pos_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> Lex(std::string_view source) {
  if (!IsValidUtf8(source)) throw Error{"the template is not valid UTF-8"};
  return Lexer(source).Run();
}

}  // namespace sluice::jinja
