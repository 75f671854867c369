#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "fmt/format.h"
#include "text/jinja/ast.h"
#include "text/jinja/builtins.h"
#include "text/jinja/lexer.h"

namespace sluice::jinja {
namespace {

// Nesting of expressions and of blocks; bounds the stack of parser and runtime.
constexpr int kMaxNesting = 100;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(Lex(source)) {}

  Body Run() {
    Body body = ParseBody({});
    if (Now().kind != TokenKind::kEnd) Fail("unexpected text behind the end");
    return body;
  }

 private:
  const Token& Now() const { return tokens_[at_]; }
  const Token& Peek() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  [[noreturn]] void Fail(const std::string& what) const {
    throw Error{fmt::format("line {}: {}", Now().line, what)};
  }
  Token Take() { return std::move(tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]); }
  bool IsOp(std::string_view op) const { return Now().kind == TokenKind::kOperator && Now().text == op; }
  bool IsName(std::string_view name) const { return Now().kind == TokenKind::kName && Now().text == name; }
  bool SkipOp(std::string_view op) {
    if (!IsOp(op)) return false;
    ++at_;
    return true;
  }
  bool SkipName(std::string_view name) {
    if (!IsName(name)) return false;
    ++at_;
    return true;
  }
  static std::string Describe(const Token& t) {
    switch (t.kind) {
      case TokenKind::kEnd:
        return "end of template";
      case TokenKind::kBlockEnd:
        return "'%}'";
      case TokenKind::kVariableEnd:
        return "'}}'";
      default:
        return fmt::format("'{}'", t.text);
    }
  }
  void ExpectOp(std::string_view op) {
    if (!SkipOp(op)) Fail(fmt::format("expected '{}', got {}", op, Describe(Now())));
  }
  void ExpectName(std::string_view name) {
    if (!SkipName(name)) Fail(fmt::format("expected '{}', got {}", name, Describe(Now())));
  }
  std::string ExpectAnyName() {
    if (Now().kind != TokenKind::kName) Fail(fmt::format("expected a name, got {}", Describe(Now())));
    return Take().text;
  }
  void ExpectBlockEnd() {
    if (Now().kind != TokenKind::kBlockEnd) Fail(fmt::format("expected '%}}', got {}", Describe(Now())));
    ++at_;
  }

  struct Nest {
    explicit Nest(Parser* p) : parser(p) {
      if (++parser->nesting_ > kMaxNesting)
        parser->Fail(fmt::format("the template is nested more than {} deep", kMaxNesting));
    }
    ~Nest() { --parser->nesting_; }
    Parser* parser;
  };

  ExprPtr New(Expr::Kind kind) const {
    auto e = std::make_unique<Expr>();
    e->kind = kind;
    e->line = Now().line;
    return e;
  }
  ExprPtr New(Expr::Kind kind, ExprPtr first) const {
    ExprPtr e = New(kind);
    e->args.push_back(std::move(first));
    return e;
  }

  // ---- statements ----

  // Up to a block tag whose name is in `ends` (left to the caller, its name being the current token), or the
  // end of the template.
  Body ParseBody(std::initializer_list<std::string_view> ends) {
    const Nest nest(this);
    Body body;
    while (true) {
      switch (Now().kind) {
        case TokenKind::kEnd:
          if (ends.size() > 0)
            Fail(fmt::format("the template ends within a block; expected '{}'", *(ends.end() - 1)));
          return body;
        case TokenKind::kData: {
          auto s = NewStmt(Stmt::Kind::kData);
          s->text = Text(Take().text, true);
          body.push_back(std::move(s));
          break;
        }
        case TokenKind::kVariableBegin: {
          ++at_;
          auto s = NewStmt(Stmt::Kind::kOutput);
          s->expr = ParseTuple(true, false);
          if (Now().kind != TokenKind::kVariableEnd)
            Fail(fmt::format("expected '}}}}', got {}", Describe(Now())));
          ++at_;
          body.push_back(std::move(s));
          break;
        }
        case TokenKind::kBlockBegin: {
          ++at_;
          if (Now().kind != TokenKind::kName) Fail("tag name expected");
          for (const std::string_view end : ends) {
            if (Now().text == end) return body;
          }
          body.push_back(ParseTag());
          break;
        }
        default:
          Fail(fmt::format("unexpected {}", Describe(Now())));
      }
    }
  }

  StmtPtr NewStmt(Stmt::Kind kind) const {
    auto s = std::make_unique<Stmt>();
    s->kind = kind;
    s->line = Now().line;
    return s;
  }

  void EndTag(std::string_view name) {
    ExpectName(name);
    ExpectBlockEnd();
  }

  StmtPtr ParseTag() {
    const std::string tag = Now().text;
    if (tag == "if") return ParseIf();
    if (tag == "for") return ParseFor();
    if (tag == "set") return ParseSet();
    if (tag == "macro") return ParseMacro();
    if (tag == "with") return ParseWith();
    if (tag == "filter") return ParseFilterBlock();
    if (tag == "generation") {
      auto s = NewStmt(Stmt::Kind::kBlock);
      ++at_;
      ExpectBlockEnd();
      s->bodies.push_back(ParseBody({"endgeneration"}));
      EndTag("endgeneration");
      return s;
    }
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) Fail(fmt::format("'{}' outside of a loop", tag));
      auto s = NewStmt(tag == "break" ? Stmt::Kind::kBreak : Stmt::Kind::kContinue);
      ++at_;
      ExpectBlockEnd();
      return s;
    }
    Fail(
        fmt::format("tag '{}' is not supported; supported: if, for, set, macro, with, filter, raw, break, "
                    "continue, generation",
                    tag));
  }

  StmtPtr ParseIf() {
    auto s = NewStmt(Stmt::Kind::kIf);
    ++at_;
    while (true) {
      s->conditions.push_back(ParseTuple(false, false));
      ExpectBlockEnd();
      s->bodies.push_back(ParseBody({"elif", "else", "endif"}));
      if (SkipName("elif")) continue;
      if (SkipName("else")) {
        ExpectBlockEnd();
        s->bodies.push_back(ParseBody({"endif"}));
      }
      EndTag("endif");
      return s;
    }
  }

  StmtPtr ParseFor() {
    auto s = NewStmt(Stmt::Kind::kFor);
    ++at_;
    s->target = ParseTarget(false);
    ExpectName("in");
    s->expr = ParseTuple(false, true);
    if (SkipName("if")) s->filter = ParseExpression();
    if (IsName("recursive")) Fail("recursive loops are not supported; use a macro");
    ExpectBlockEnd();
    ++loops_;
    s->bodies.push_back(ParseBody({"else", "endfor"}));
    --loops_;
    if (SkipName("else")) {
      ExpectBlockEnd();
      s->bodies.push_back(ParseBody({"endfor"}));
    }
    EndTag("endfor");
    return s;
  }

  StmtPtr ParseSet() {
    auto s = NewStmt(Stmt::Kind::kSet);
    ++at_;
    s->target = ParseTarget(true);
    if (SkipOp("=")) {
      s->expr = ParseTuple(true, false);
      ExpectBlockEnd();
      return s;
    }
    s->kind = Stmt::Kind::kSetBlock;
    s->expr = ParseFilterChain();
    ExpectBlockEnd();
    s->bodies.push_back(ParseBody({"endset"}));
    EndTag("endset");
    return s;
  }

  // "| upper | trim" behind a block tag. The innermost operand is null: the block's text.
  ExprPtr ParseFilterChain() {
    ExprPtr e;
    while (SkipOp("|")) e = ParseOneFilter(std::move(e));
    return e;
  }

  StmtPtr ParseFilterBlock() {
    auto s = NewStmt(Stmt::Kind::kFilterBlock);
    ++at_;
    s->expr = ParseOneFilter(nullptr);
    while (SkipOp("|")) s->expr = ParseOneFilter(std::move(s->expr));
    ExpectBlockEnd();
    s->bodies.push_back(ParseBody({"endfilter"}));
    EndTag("endfilter");
    return s;
  }

  StmtPtr ParseMacro() {
    auto s = NewStmt(Stmt::Kind::kMacro);
    ++at_;
    s->name = ExpectAnyName();
    ExpectOp("(");
    while (!IsOp(")")) {
      if (!s->params.empty()) ExpectOp(",");
      s->params.push_back(ExpectAnyName());
      if (SkipOp("=")) {
        s->conditions.push_back(ParseExpression());  // the defaults
      } else if (!s->conditions.empty()) {
        Fail("a parameter without default follows one with a default");
      }
    }
    ExpectOp(")");
    ExpectBlockEnd();
    const int loops = std::exchange(loops_, 0);
    s->bodies.push_back(ParseBody({"endmacro"}));
    loops_ = loops;
    EndTag("endmacro");
    return s;
  }

  StmtPtr ParseWith() {
    auto s = NewStmt(Stmt::Kind::kWith);
    ++at_;
    while (Now().kind != TokenKind::kBlockEnd) {
      if (!s->targets.empty()) ExpectOp(",");
      s->targets.push_back(ParseTarget(false));
      ExpectOp("=");
      s->conditions.push_back(ParseExpression());
    }
    ExpectBlockEnd();
    s->bodies.push_back(ParseBody({"endwith"}));
    EndTag("endwith");
    return s;
  }

  Target ParseTarget(bool attribute_allowed) {
    const Nest nest(this);
    Target first = ParseOneTarget(attribute_allowed);
    if (!IsOp(",")) return first;
    Target tuple;
    tuple.parts.push_back(std::move(first));
    while (SkipOp(",")) {
      if (IsName("in") || IsOp("=") || IsOp(")")) break;
      tuple.parts.push_back(ParseOneTarget(attribute_allowed));
    }
    return tuple;
  }
  Target ParseOneTarget(bool attribute_allowed) {
    Target t;
    if (SkipOp("(")) {
      t = ParseTarget(attribute_allowed);
      ExpectOp(")");
      return t;
    }
    t.name = ExpectAnyName();
    for (const std::string_view reserved : {"true", "false", "none", "True", "False", "None"}) {
      if (t.name == reserved) Fail(fmt::format("'{}' cannot be assigned to", reserved));
    }
    if (attribute_allowed && SkipOp(".")) t.attribute = ExpectAnyName();
    return t;
  }

  // ---- expressions ----

  ExprPtr ParseTuple(bool with_conditional, bool for_iterable) {
    const auto one = [&] { return with_conditional || !for_iterable ? ParseExpression() : ParseOr(); };
    ExprPtr first = one();
    if (!IsOp(",")) return first;
    ExprPtr tuple = New(Expr::Kind::kTuple, std::move(first));
    while (SkipOp(",")) {
      if (TupleEnds()) break;
      tuple->args.push_back(one());
    }
    return tuple;
  }
  bool TupleEnds() const {
    return Now().kind == TokenKind::kBlockEnd || Now().kind == TokenKind::kVariableEnd || IsOp(")") ||
           IsName("if") || IsName("recursive");
  }

  ExprPtr ParseExpression() {
    const Nest nest(this);
    ExprPtr e = ParseOr();
    while (SkipName("if")) {
      ExprPtr c = New(Expr::Kind::kConditional, ParseOr());
      c->args.push_back(std::move(e));
      c->args.push_back(SkipName("else") ? ParseExpression() : nullptr);
      e = std::move(c);
    }
    return e;
  }

  ExprPtr Binary(std::string_view op, ExprPtr left, ExprPtr right) {
    ExprPtr e = New(Expr::Kind::kBinary, std::move(left));
    e->args.push_back(std::move(right));
    e->name = op;
    // A long chain "a + b + c ..." is a deep tree on its left.
    if (++chain_ > kMaxChain) Fail(fmt::format("the template has more than {} binary operators", kMaxChain));
    return e;
  }

  ExprPtr ParseOr() {
    ExprPtr e = ParseAnd();
    for (int n = 0; SkipName("or"); ++n) {
      LimitChain(n);
      e = Binary("or", std::move(e), ParseAnd());
    }
    return e;
  }
  ExprPtr ParseAnd() {
    ExprPtr e = ParseNot();
    for (int n = 0; SkipName("and"); ++n) {
      LimitChain(n);
      e = Binary("and", std::move(e), ParseNot());
    }
    return e;
  }
  ExprPtr ParseNot() {
    if (!IsName("not")) return ParseCompare();
    const Nest nest(this);
    ++at_;
    ExprPtr e = New(Expr::Kind::kUnary, ParseNot());
    e->name = "not";
    return e;
  }
  ExprPtr ParseCompare() {
    ExprPtr e = ParseSum();
    ExprPtr compare;
    while (true) {
      std::string op;
      if (Now().kind == TokenKind::kOperator &&
          (Now().text == "==" || Now().text == "!=" || Now().text == "<" || Now().text == "<=" ||
           Now().text == ">" || Now().text == ">=")) {
        op = Take().text;
      } else if (SkipName("in")) {
        op = "in";
      } else if (IsName("not") && Peek().kind == TokenKind::kName && Peek().text == "in") {
        at_ += 2;
        op = "not in";
      } else {
        return compare ? std::move(compare) : std::move(e);
      }
      if (!compare) compare = New(Expr::Kind::kCompare, std::move(e));
      compare->operators.push_back(std::move(op));
      compare->args.push_back(ParseSum());
    }
  }
  ExprPtr ParseSum() {
    ExprPtr e = ParseConcat();
    for (int n = 0; IsOp("+") || IsOp("-"); ++n) {
      LimitChain(n);
      const std::string op = Take().text;
      e = Binary(op, std::move(e), ParseConcat());
    }
    return e;
  }
  ExprPtr ParseConcat() {
    ExprPtr e = ParseProduct();
    if (!IsOp("~")) return e;
    ExprPtr concat = New(Expr::Kind::kConcat, std::move(e));
    while (SkipOp("~")) concat->args.push_back(ParseProduct());
    return concat;
  }
  ExprPtr ParseProduct() {
    ExprPtr e = ParsePower();
    for (int n = 0; IsOp("*") || IsOp("/") || IsOp("//") || IsOp("%"); ++n) {
      LimitChain(n);
      const std::string op = Take().text;
      e = Binary(op, std::move(e), ParsePower());
    }
    return e;
  }
  ExprPtr ParsePower() {
    ExprPtr e = ParseUnary(true);
    for (int n = 0; IsOp("**"); ++n) {
      LimitChain(n);
      ++at_;
      e = Binary("**", std::move(e), ParseUnary(true));
    }
    return e;
  }
  ExprPtr ParseUnary(bool with_filter) {
    ExprPtr e;
    if (IsOp("-") || IsOp("+")) {
      const Nest nest(this);
      const std::string op = Take().text;
      e = New(Expr::Kind::kUnary, ParseUnary(false));
      e->name = op;
    } else {
      e = ParsePrimary();
    }
    e = ParsePostfix(std::move(e));
    if (with_filter) e = ParseFilters(std::move(e));
    return e;
  }

  ExprPtr Constant(Value v) {
    ExprPtr e = New(Expr::Kind::kConstant);
    e->constant = std::move(v);
    return e;
  }

  ExprPtr ParsePrimary() {
    const Token& t = Now();
    switch (t.kind) {
      case TokenKind::kName: {
        const std::string name = Take().text;
        if (name == "true" || name == "True") return Constant(Value(true));
        if (name == "false" || name == "False") return Constant(Value(false));
        if (name == "none" || name == "None") return Constant(Value(None{}));
        ExprPtr e = New(Expr::Kind::kName);
        e->name = name;
        return e;
      }
      case TokenKind::kString: {
        std::string s = Take().text;
        while (Now().kind == TokenKind::kString) s += Take().text;
        return Constant(Value::OfTemplate(std::move(s)));
      }
      case TokenKind::kInteger:
        return Constant(ParseInteger(Take().text));
      case TokenKind::kFloat:
        return Constant(Value(std::strtod(Take().text.c_str(), nullptr)));
      case TokenKind::kOperator:
        if (SkipOp("(")) {
          if (SkipOp(")")) return New(Expr::Kind::kTuple);
          ExprPtr e = ParseTuple(true, false);
          ExpectOp(")");
          return e;
        }
        if (SkipOp("[")) {
          ExprPtr e = New(Expr::Kind::kList);
          while (!IsOp("]")) {
            if (!e->args.empty()) {
              ExpectOp(",");
              if (IsOp("]")) break;
            }
            e->args.push_back(ParseExpression());
          }
          ExpectOp("]");
          return e;
        }
        if (SkipOp("{")) {
          ExprPtr e = New(Expr::Kind::kDict);
          while (!IsOp("}")) {
            if (!e->args.empty()) {
              ExpectOp(",");
              if (IsOp("}")) break;
            }
            e->args.push_back(ParseExpression());
            ExpectOp(":");
            e->args.push_back(ParseExpression());
          }
          ExpectOp("}");
          return e;
        }
        [[fallthrough]];
      default:
        Fail(fmt::format("unexpected {}", Describe(t)));
    }
  }

  Value ParseInteger(const std::string& text) const {
    std::string_view digits = text;
    int base = 10;
    if (digits.size() > 2 && digits[0] == '0' && !(digits[1] >= '0' && digits[1] <= '9')) {
      const char kind = static_cast<char>(digits[1] | 0x20);
      base = kind == 'x' ? 16 : kind == 'o' ? 8 : 2;
      digits.remove_prefix(2);
    }
    int64_t value = 0;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
    if (result.ec != std::errc() || result.ptr != digits.data() + digits.size())
      Fail(fmt::format("integer {} is out of range", text));
    return Value(static_cast<Int>(value));
  }

  ExprPtr ParsePostfix(ExprPtr e) {
    for (int n = 0;; ++n) {
      LimitChain(n);
      if (SkipOp(".")) {
        if (Now().kind == TokenKind::kInteger) {
          ExprPtr item = New(Expr::Kind::kItem, std::move(e));
          item->args.push_back(Constant(ParseInteger(Take().text)));
          e = std::move(item);
          continue;
        }
        ExprPtr attribute = New(Expr::Kind::kAttribute, std::move(e));
        attribute->name = ExpectAnyName();
        e = std::move(attribute);
      } else if (SkipOp("[")) {
        e = ParseSubscript(std::move(e));
        ExpectOp("]");
      } else if (IsOp("(")) {
        ExprPtr call = New(Expr::Kind::kCall, std::move(e));
        ParseArguments(call.get());
        e = std::move(call);
      } else {
        return e;
      }
    }
  }

  ExprPtr ParseSubscript(ExprPtr object) {
    ExprPtr start;
    if (!IsOp(":")) start = ParseExpression();
    if (!IsOp(":")) {
      ExprPtr item = New(Expr::Kind::kItem, std::move(object));
      item->args.push_back(std::move(start));
      return item;
    }
    ExprPtr slice = New(Expr::Kind::kSlice, std::move(object));
    slice->args.push_back(std::move(start));
    ++at_;
    slice->args.push_back(IsOp(":") || IsOp("]") ? nullptr : ParseExpression());
    slice->args.push_back(SkipOp(":") && !IsOp("]") ? ParseExpression() : nullptr);
    return slice;
  }

  void ParseArguments(Expr* call) {
    ExpectOp("(");
    bool first = true;
    while (!IsOp(")")) {
      if (!first) {
        ExpectOp(",");
        if (IsOp(")")) break;
      }
      first = false;
      if (IsOp("*") || IsOp("**")) Fail("'*' and '**' arguments are not supported");
      if (Now().kind == TokenKind::kName && Peek().kind == TokenKind::kOperator && Peek().text == "=") {
        std::string name = Take().text;
        ++at_;
        call->kwargs.emplace_back(std::move(name), ParseExpression());
      } else {
        if (!call->kwargs.empty()) Fail("a positional argument follows a named one");
        call->args.push_back(ParseExpression());
      }
    }
    ExpectOp(")");
  }

  ExprPtr ParseOneFilter(ExprPtr operand) {
    ExprPtr e = New(Expr::Kind::kFilter);
    e->args.push_back(std::move(operand));
    e->name = ExpectAnyName();
    if (!IsFilter(e->name))
      Fail(fmt::format("filter '{}' is not supported; supported: {}", e->name, FilterNames()));
    if (IsOp("(")) ParseArguments(e.get());
    return e;
  }

  ExprPtr ParseFilters(ExprPtr e) {
    for (int n = 0;; ++n) {
      LimitChain(n);
      if (SkipOp("|")) {
        e = ParseOneFilter(std::move(e));
      } else if (SkipName("is")) {
        e = ParseTest(std::move(e));
      } else if (IsOp("(")) {
        ExprPtr call = New(Expr::Kind::kCall, std::move(e));
        ParseArguments(call.get());
        e = std::move(call);
      } else {
        return e;
      }
    }
  }

  ExprPtr ParseTest(ExprPtr operand) {
    const bool negated = SkipName("not");
    ExprPtr e = New(Expr::Kind::kTest, std::move(operand));
    e->name = ExpectAnyName();
    if (!IsTest(e->name))
      Fail(fmt::format("test '{}' is not supported; supported: {}", e->name, TestNames()));
    if (IsOp("(")) {
      ParseArguments(e.get());
    } else if (Now().kind == TokenKind::kString || Now().kind == TokenKind::kInteger ||
               Now().kind == TokenKind::kFloat || IsOp("[") || IsOp("{") ||
               (Now().kind == TokenKind::kName && !IsName("else") && !IsName("or") && !IsName("and"))) {
      if (IsName("is")) Fail("tests cannot be chained with 'is'");
      // The reference would read "x is defined if y" as a test with the argument "if"; a test without
      // arguments takes none.
      if (TestTakesArgument(e->name)) e->args.push_back(ParsePostfix(ParsePrimary()));
    }
    if (!negated) return e;
    ExprPtr inverse = New(Expr::Kind::kUnary, std::move(e));
    inverse->name = "not";
    return inverse;
  }

  static constexpr int kMaxChainLength = 200;
  static constexpr int kMaxChain = 100'000;
  void LimitChain(int n) const {
    if (n > kMaxChainLength)
      Fail(fmt::format("an expression has more than {} operators in a row", kMaxChainLength));
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
  int loops_ = 0;
  int chain_ = 0;
};

}  // namespace

Body ParseTemplate(std::string_view source) { return Parser(source).Run(); }

}  // namespace sluice::jinja
