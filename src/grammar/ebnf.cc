#include <map>
#include <utility>

#include "grammar/syntax.h"
#include "text/utf8.h"

namespace sluice {
namespace {

constexpr int kGroupsDeepMax = 100;

class EbnfParser {
 public:
  EbnfParser(std::string_view text, GrammarBuilder* builder) : text_(text), builder_(builder) {}

  StatusOr<int32_t> Parse() {
    Skip();
    while (at_ < text_.size()) {
      ASSIGN_OR_RETURN(const std::string name, Name());
      Skip();
      if (text_.substr(at_, 3) != "::=") return Error("expected ::= behind the name of a rule");
      at_ += 3;
      ASSIGN_OR_RETURN(ExprPtr body, Alternatives(0));
      Named& rule = Rule(name);
      if (rule.defined) return Error(fmt::format("rule {} is defined twice", name));
      rule.defined = true;
      builder_->Define(rule.id, std::move(body));
      Skip();
    }
    for (const auto& [name, rule] : rules_) {
      if (!rule.defined) return Invalid("rule {} is used and not defined", name);
    }
    const auto root = rules_.find("root");
    if (root == rules_.end()) return Invalid("there is no rule named root");
    return root->second.id;
  }

 private:
  struct Named {
    int32_t id = -1;
    bool defined = false;
  };

  Status Error(std::string_view what) const {
    size_t line = 1;
    for (size_t i = 0; i < at_ && i < text_.size(); ++i) line += text_[i] == '\n';
    return Invalid("{} in line {}", what, line);
  }
  Named& Rule(const std::string& name) {
    Named& rule = rules_[name];
    if (rule.id < 0) rule.id = builder_->NewRule("rule " + name);
    return rule;
  }
  static bool IsNameByte(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  }
  void Skip() {
    while (at_ < text_.size()) {
      if (text_[at_] == '#') {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\r' || text_[at_] == '\n') {
        ++at_;
      } else {
        return;
      }
    }
  }
  bool Is(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool Take(char c) {
    if (!Is(c)) return false;
    ++at_;
    return true;
  }
  StatusOr<std::string> Name() {
    const size_t begin = at_;
    while (at_ < text_.size() && IsNameByte(text_[at_])) ++at_;
    if (at_ == begin) return Error("expected the name of a rule");
    return std::string(text_.substr(begin, at_ - begin));
  }
  // A name that a ::= follows begins the next rule.
  bool AtRule() {
    const size_t before = at_;
    while (at_ < text_.size() && IsNameByte(text_[at_])) ++at_;
    const bool name = at_ > before;
    Skip();
    const bool rule = name && text_.substr(at_, 3) == "::=";
    at_ = before;
    return rule;
  }

  StatusOr<ExprPtr> Alternatives(int deep) {
    if (deep > kGroupsDeepMax) return Error("groups are nested too deeply");
    std::vector<ExprPtr> alternatives;
    do {
      std::vector<ExprPtr> parts;
      for (Skip(); at_ < text_.size() && !Is('|') && !Is(')') && !AtRule(); Skip()) {
        ASSIGN_OR_RETURN(ExprPtr part, Quantified(deep));
        parts.push_back(std::move(part));
      }
      alternatives.push_back(Seq(std::move(parts)));
    } while (Take('|'));
    return Alt(std::move(alternatives));
  }

  StatusOr<ExprPtr> Quantified(int deep) {
    ASSIGN_OR_RETURN(ExprPtr atom, Atom(deep));
    for (;;) {
      if (Take('*')) {
        atom = Repeat(std::move(atom), 0, -1);
      } else if (Take('+')) {
        atom = Repeat(std::move(atom), 1, -1);
      } else if (Take('?')) {
        atom = Repeat(std::move(atom), 0, 1);
      } else if (Take('{')) {
        int32_t min = 0, max = 0;
        Skip();
        if (!Number(&min)) return Error("expected a count behind '{'");
        max = min;
        Skip();
        if (Take(',')) {
          Skip();
          max = -1;
          if (!Is('}') && !Number(&max)) return Error("expected a count or '}' behind ','");
          Skip();
        }
        if (!Take('}')) return Error("missing '}'");
        if ((max >= 0 && min > max) || std::max(min, max) > kGrammarRepeatMax)
          return Error("a count is out of range");
        atom = Repeat(std::move(atom), min, max);
      } else {
        return atom;
      }
    }
  }
  bool Number(int32_t* out) {
    int64_t value = 0;
    size_t digits = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && digits < 7) {
      value = value * 10 + (text_[at_++] - '0');
      ++digits;
    }
    *out = int32_t(value);
    return digits > 0;
  }

  StatusOr<ExprPtr> Atom(int deep) {
    if (Take('(')) {
      ASSIGN_OR_RETURN(ExprPtr group, Alternatives(deep + 1));
      if (!Take(')')) return Error("missing ')'");
      return group;
    }
    if (Is('"') || Is('\'')) return Quoted(text_[at_++]);
    if (Take('[')) return Class();
    if (Take('.')) return Chars(CharSet::All());
    ASSIGN_OR_RETURN(const std::string name, Name());
    return RuleExpr(Rule(name).id);
  }

  // One character, perhaps an escape.
  StatusOr<char32_t> Character() {
    const Utf8Step step = DecodeUtf8(text_, at_);
    if (step.kind != Utf8Kind::kValid) return Error("bytes that are not UTF-8");
    at_ += step.bytes;
    if (step.codepoint != '\\') return step.codepoint;
    if (at_ >= text_.size()) return Error("a backslash ends the text");
    const char c = text_[at_++];
    switch (c) {
      case 'n':
        return U'\n';
      case 'r':
        return U'\r';
      case 't':
        return U'\t';
      case '0':
        return U'\0';
      case 'x':
        return Hex(2);
      case 'u':
        return Hex(4);
      case 'U':
        return Hex(8);
      default:
        if (IsNameByte(c) && c != '-' && c != '.' && c != '_')
          return Error(fmt::format("\\{} is no escape", c));
        return char32_t(static_cast<unsigned char>(c));
    }
  }
  StatusOr<char32_t> Hex(int digits) {
    char32_t value = 0;
    for (int i = 0; i < digits; ++i) {
      const char c = at_ < text_.size() ? text_[at_] : ' ';
      const char lower = char(c | 32);
      if (c >= '0' && c <= '9') {
        value = value * 16 + char32_t(c - '0');
      } else if (lower >= 'a' && lower <= 'f') {
        value = value * 16 + char32_t(lower - 'a' + 10);
      } else {
        return Error("not a hexadecimal digit");
      }
      ++at_;
    }
    if (value > kCodepointMax || (value >= 0xD800 && value <= 0xDFFF))
      return Error("no character has this number");
    return value;
  }
  StatusOr<ExprPtr> Quoted(char quote) {
    std::string out;
    while (!Take(quote)) {
      if (at_ >= text_.size()) return Error("a text is not closed");
      ASSIGN_OR_RETURN(const char32_t c, Character());
      AppendUtf8(c, &out);
    }
    return Literal(std::move(out));
  }
  StatusOr<ExprPtr> Class() {
    CharSet set;
    const bool negated = Take('^');
    while (!Take(']')) {
      if (at_ >= text_.size()) return Error("missing ']'");
      ASSIGN_OR_RETURN(const char32_t low, Character());
      char32_t high = low;
      if (Is('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        ASSIGN_OR_RETURN(high, Character());
        if (high < low) return Error("a range is empty");
      }
      set.Add(low, high);
    }
    return Chars(negated ? set.Complement() : set);
  }

  const std::string_view text_;
  GrammarBuilder* const builder_;
  size_t at_ = 0;
  std::map<std::string, Named> rules_;
};

}  // namespace

StatusOr<int32_t> ParseEbnf(std::string_view text, GrammarBuilder* builder) {
  return EbnfParser(text, builder).Parse();
}

}  // namespace sluice
