#include "text/jinja/runtime.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <optional>

#include "fmt/format.h"
#include "text/jinja/ast.h"
#include "text/jinja/builtins.h"

namespace sluice::jinja {

namespace {

// Of nested evaluations and of macro calls; each level takes well under 2 KiB of stack.
constexpr int kMaxDepth = 600;
constexpr int kMaxMacroDepth = 60;
constexpr Int kMaxRange = 100'000;  // the reference's sandbox has the same

struct Scope {
  std::vector<std::pair<std::string_view, Value>>
      variables;  // names live in the tree, in Variables or in constants
  std::shared_ptr<Scope> parent;

  Value* Find(std::string_view name) {
    for (auto& [k, v] : variables) {
      if (k == name) return &v;
    }
    return nullptr;
  }
  void Set(std::string_view name, Value value) {
    if (Value* v = Find(name)) {
      *v = std::move(value);
    } else {
      variables.emplace_back(name, std::move(value));
    }
  }
};

enum class Flow { kNormal, kBreak, kContinue };

}  // namespace

struct Macro {
  const Stmt* definition;
  std::shared_ptr<Scope> scope;  // where it was defined
};

namespace {

class Runtime {
 public:
  Runtime(const Template::Variables& variables, const Limits& limits)
      : budget_(limits.steps, limits.text_bytes) {
    globals_ = std::make_shared<Scope>();
    for (const std::string_view name : {"range", "namespace", "raise_exception", "strftime_now", "dict"}) {
      auto f = std::make_shared<Callable>();
      f->name = name;
      globals_->Set(name, Value(std::shared_ptr<const Callable>(std::move(f))));
    }
    for (const auto& [name, value] : variables) globals_->Set(name, value);
    scope_ = std::make_shared<Scope>();
    scope_->parent = globals_;
  }
  ~Runtime() {
    // Macros and namespaces can refer to themselves through their scope; break the cycles.
    for (const auto& macro : macros_) macro->scope.reset();
    for (const auto& ns : namespaces_) ns->attributes.clear();
  }

  Text Run(const Body& body) {
    Execute(body);
    return std::move(root_);
  }

  int line() const { return line_; }
  int message_index() const { return message_index_; }

 private:
  struct Deeper {
    explicit Deeper(Runtime* r) : runtime(r) {
      if (++runtime->depth_ > kMaxDepth) throw Error{"the template's evaluation is nested too deep"};
    }
    ~Deeper() { --runtime->depth_; }
    Runtime* runtime;
  };
  // A scope that ends with the C++ scope, on errors too.
  struct Inner {
    Inner(Runtime* r, std::shared_ptr<Scope> parent) : runtime(r), outer(std::move(r->scope_)) {
      runtime->scope_ = std::make_shared<Scope>();
      runtime->scope_->parent = std::move(parent);
    }
    ~Inner() { runtime->scope_ = std::move(outer); }
    Runtime* runtime;
    std::shared_ptr<Scope> outer;
  };
  struct Capture {
    explicit Capture(Runtime* r) : runtime(r), outer(r->out_) { runtime->out_ = &text; }
    ~Capture() { runtime->out_ = outer; }
    Runtime* runtime;
    Text* outer;
    Text text;
  };

  void Write(const Text& text) {
    budget_.ChargeBytes(out_->size() + text.size() > budget_.text_limit() ? out_->size() + text.size()
                                                                          : text.size());
    out_->Append(text);
  }

  Flow Execute(const Body& body) {
    for (const StmtPtr& s : body) {
      const Flow flow = Execute(*s);
      if (flow != Flow::kNormal) return flow;
    }
    return Flow::kNormal;
  }

  Flow Execute(const Stmt& s) {
    const Deeper deeper(this);
    budget_.Charge();
    line_ = s.line;
    switch (s.kind) {
      case Stmt::Kind::kData:
        Write(s.text);
        return Flow::kNormal;
      case Stmt::Kind::kOutput: {
        const Value v = Evaluate(*s.expr);
        Write(v.text() != nullptr ? *v.text() : ToText(v, budget_.text_limit()));
        return Flow::kNormal;
      }
      case Stmt::Kind::kIf:
        for (size_t i = 0; i < s.conditions.size(); ++i) {
          if (Truth(Evaluate(*s.conditions[i]))) return Execute(s.bodies[i]);
        }
        return s.bodies.size() > s.conditions.size() ? Execute(s.bodies.back()) : Flow::kNormal;
      case Stmt::Kind::kFor:
        return Loop(s);
      case Stmt::Kind::kSet:
        Assign(s.target, Evaluate(*s.expr));
        return Flow::kNormal;
      case Stmt::Kind::kSetBlock: {
        Value text = Captured(s.bodies[0]);
        Assign(s.target, s.expr ? ApplyFilters(*s.expr, std::move(text)) : std::move(text));
        return Flow::kNormal;
      }
      case Stmt::Kind::kFilterBlock: {
        const Value v = ApplyFilters(*s.expr, Captured(s.bodies[0]));
        Write(ToText(v, budget_.text_limit()));
        return Flow::kNormal;
      }
      case Stmt::Kind::kMacro: {
        auto macro = std::make_shared<Macro>(Macro{&s, scope_});
        macros_.push_back(macro);
        auto f = std::make_shared<Callable>();
        f->kind = Callable::Kind::kMacro;
        f->name = s.name;
        f->macro = std::move(macro);
        scope_->Set(s.name, Value(std::shared_ptr<const Callable>(std::move(f))));
        return Flow::kNormal;
      }
      case Stmt::Kind::kWith: {
        std::vector<Value> values;
        for (const ExprPtr& e : s.conditions) values.push_back(Evaluate(*e));
        const Inner inner(this, scope_);
        for (size_t i = 0; i < values.size(); ++i) Assign(s.targets[i], std::move(values[i]));
        return Execute(s.bodies[0]);
      }
      case Stmt::Kind::kBlock: {
        const Inner inner(this, scope_);
        return Execute(s.bodies[0]);
      }
      case Stmt::Kind::kBreak:
        return Flow::kBreak;
      case Stmt::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNormal;
  }

  Value Captured(const Body& body) {
    Capture capture(this);
    const Inner inner(this, scope_);
    Execute(body);
    return Value(std::move(capture.text));
  }

  void Assign(const Target& target, Value value) {
    if (target.parts.empty()) {
      if (target.attribute.empty()) {
        scope_->Set(target.name, std::move(value));
        return;
      }
      const Value object = Lookup(target.name);
      Namespace* ns = object.ns();
      if (ns == nullptr) throw Error{"cannot assign attribute on non-namespace object"};
      if (Value* v = ns->Find(target.attribute)) {
        *v = std::move(value);
      } else {
        ns->attributes.emplace_back(target.attribute, std::move(value));
      }
      return;
    }
    std::vector<Value> parts = Iterate(value, &budget_);
    if (parts.size() != target.parts.size()) {
      throw Error{fmt::format("cannot unpack {} values into {} names", parts.size(), target.parts.size())};
    }
    for (size_t i = 0; i < parts.size(); ++i) Assign(target.parts[i], std::move(parts[i]));
  }

  Value Lookup(std::string_view name) {
    for (Scope* s = scope_.get(); s != nullptr; s = s->parent.get()) {
      if (Value* v = s->Find(name)) return *v;
    }
    return Value(Undefined{std::string(name)});
  }

  enum LoopField {
    kIndex,
    kIndex0,
    kRevIndex,
    kRevIndex0,
    kFirst,
    kLast,
    kLength,
    kDepth,
    kDepth0,
    kPrevious,
    kNext
  };

  std::shared_ptr<Namespace> NewLoop(size_t length) {
    auto loop = std::make_shared<Namespace>();
    for (const char* name : {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth",
                             "depth0", "previtem", "nextitem"}) {
      loop->attributes.emplace_back(name, Value());
    }
    loop->attributes[kLength].second = Value(length);
    loop->attributes[kDepth].second = Value(1);  // counts recursive loops only, which there are none of
    loop->attributes[kDepth0].second = Value(0);
    for (const auto& [name, kind] : {std::pair{"cycle", Callable::Kind::kLoopCycle},
                                     std::pair{"changed", Callable::Kind::kLoopChanged}}) {
      auto f = std::make_shared<Callable>();
      f->kind = kind;
      f->name = name;
      f->self = Value(loop);
      f->previous = std::make_shared<Value>(Undefined{});
      loop->attributes.emplace_back(name, Value(std::shared_ptr<const Callable>(std::move(f))));
    }
    namespaces_.push_back(loop);
    return loop;
  }

  Flow Loop(const Stmt& s) {
    std::vector<Value> items = Iterate(Evaluate(*s.expr), &budget_);
    if (s.filter) {
      std::vector<Value> kept;
      for (Value& item : items) {
        budget_.Charge();
        const Inner inner(this, scope_);
        Assign(s.target, item);
        if (Truth(Evaluate(*s.filter))) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    if (items.empty()) {
      if (s.bodies.size() < 2) return Flow::kNormal;
      const Inner inner(this, scope_);
      return Execute(s.bodies[1]);
    }
    const int outer_message = message_index_;
    const std::shared_ptr<Namespace> loop = NewLoop(items.size());
    Flow flow = Flow::kNormal;
    for (size_t i = 0; i < items.size() && flow != Flow::kBreak; ++i) {
      budget_.Charge(4);
      auto& a = loop->attributes;
      a[kIndex].second = Value(i + 1);
      a[kIndex0].second = Value(i);
      a[kRevIndex].second = Value(items.size() - i);
      a[kRevIndex0].second = Value(items.size() - i - 1);
      a[kFirst].second = Value(i == 0);
      a[kLast].second = Value(i + 1 == items.size());
      a[kPrevious].second = i > 0 ? items[i - 1] : Value(Undefined{"there is no previous item"});
      a[kNext].second = i + 1 < items.size() ? items[i + 1] : Value(Undefined{"there is no next item"});
      if (items[i].dict() != nullptr && items[i].dict()->message_index() >= 0)
        message_index_ = items[i].dict()->message_index();
      const Inner inner(this, scope_);
      scope_->Set("loop", Value(loop));
      Assign(s.target, items[i]);
      flow = Execute(s.bodies[0]);
    }
    message_index_ = outer_message;
    return Flow::kNormal;
  }

  // ---- expressions ----

  Value Evaluate(const Expr& e) {
    const Deeper deeper(this);
    budget_.Charge();
    switch (e.kind) {
      case Expr::Kind::kConstant:
        return e.constant;
      case Expr::Kind::kName:
        return Lookup(e.name);
      case Expr::Kind::kList:
      case Expr::Kind::kTuple: {
        std::vector<Value> items;
        items.reserve(e.args.size());
        for (const ExprPtr& a : e.args) items.push_back(Evaluate(*a));
        return MakeList(std::move(items), e.kind == Expr::Kind::kTuple);
      }
      case Expr::Kind::kDict: {
        auto dict = std::make_shared<Dict>();
        for (size_t i = 0; i < e.args.size(); i += 2) {
          Value key = Evaluate(*e.args[i]);
          dict->Set(std::move(key), Evaluate(*e.args[i + 1]));
        }
        return Value(std::shared_ptr<const Dict>(std::move(dict)));
      }
      case Expr::Kind::kAttribute:
        return GetAttribute(Evaluate(*e.args[0]), e.name);
      case Expr::Kind::kItem: {
        const Value object = Evaluate(*e.args[0]);
        return GetItem(object, Evaluate(*e.args[1]), &budget_);
      }
      case Expr::Kind::kSlice: {
        const Value object = Evaluate(*e.args[0]);
        Value bounds[3];
        for (size_t i = 0; i < 3; ++i) bounds[i] = e.args[i + 1] ? Evaluate(*e.args[i + 1]) : Value(None{});
        return Slice(object, bounds[0], bounds[1], bounds[2], &budget_);
      }
      case Expr::Kind::kCall:
        return Call(e);
      case Expr::Kind::kFilter:
        return ApplyFilters(e, Value());
      case Expr::Kind::kTest: {
        const Value v = Evaluate(*e.args[0]);
        return Value(CallTest(e.name, v, Arguments(e), &budget_));
      }
      case Expr::Kind::kUnary: {
        const Value v = Evaluate(*e.args[0]);
        if (e.name == "not") return Value(!Truth(v));
        return e.name == "-" ? Negate(v) : Negate(Negate(v));
      }
      case Expr::Kind::kBinary: {
        Value left = Evaluate(*e.args[0]);
        if (e.name == "and") return Truth(left) ? Evaluate(*e.args[1]) : left;
        if (e.name == "or") return Truth(left) ? left : Evaluate(*e.args[1]);
        return Arithmetic(e.name, left, Evaluate(*e.args[1]), &budget_);
      }
      case Expr::Kind::kConcat: {
        Text out;
        for (const ExprPtr& a : e.args) {
          out.Append(ToText(Evaluate(*a), budget_.text_limit()));
          budget_.ChargeBytes(out.size());
        }
        return Value(std::move(out));
      }
      case Expr::Kind::kCompare:
        return Compare(e);
      case Expr::Kind::kConditional:
        if (Truth(Evaluate(*e.args[0]))) return Evaluate(*e.args[1]);
        if (e.args[2]) return Evaluate(*e.args[2]);
        return Value(Undefined{"the inline if-expression evaluated to false and has no else section; it"});
    }
    return Value();
  }

  Value Compare(const Expr& e) {
    Value left = Evaluate(*e.args[0]);
    for (size_t i = 0; i < e.operators.size(); ++i) {
      Value right = Evaluate(*e.args[i + 1]);
      const std::string& op = e.operators[i];
      bool holds;
      if (op == "==" || op == "!=") {
        if (left.text() && right.text())
          budget_.Charge(std::min(left.text()->size(), right.text()->size()) / 64);
        holds = Equal(left, right) == (op == "==");
      } else if (op == "in" || op == "not in") {
        holds = Contains(right, left, &budget_) == (op == "in");
      } else if (op == "<") {
        holds = Less(left, right);
      } else if (op == ">") {
        holds = Less(right, left);
      } else {
        const bool below = op == "<=";
        holds = below ? Less(left, right) || Equal(left, right) : Less(right, left) || Equal(left, right);
      }
      if (!holds) return Value(false);
      left = std::move(right);
    }
    return Value(true);
  }

  Args Arguments(const Expr& e) {
    Args args;
    args.positional.reserve(e.args.size() - 1);
    for (size_t i = 1; i < e.args.size(); ++i) args.positional.push_back(Evaluate(*e.args[i]));
    for (const auto& [name, value] : e.kwargs) args.named.emplace_back(name, Evaluate(*value));
    return args;
  }

  // A chain of filters; where its innermost operand is left out, `operand` stands there.
  Value ApplyFilters(const Expr& e, Value operand) {
    const Deeper deeper(this);
    if (e.args[0] == nullptr) {
      // operand as it is
    } else if (e.args[0]->kind == Expr::Kind::kFilter) {
      operand = ApplyFilters(*e.args[0], std::move(operand));
    } else {
      operand = Evaluate(*e.args[0]);
    }
    return CallFilter(e.name, operand, Arguments(e), &budget_);
  }

  Value Call(const Expr& e) {
    const Expr& callee = *e.args[0];
    // A method called at once needs no callable value of its own.
    if (callee.kind == Expr::Kind::kAttribute) {
      const Value object = Evaluate(*callee.args[0]);
      if (HasMethod(object, callee.name)) return CallMethod(object, callee.name, Arguments(e), &budget_);
      return CallValue(GetAttribute(object, callee.name), e);
    }
    return CallValue(Evaluate(callee), e);
  }

  Value CallValue(const Value& f, const Expr& e) {
    if (f.IsUndefined()) throw Error{fmt::format("'{}' is undefined", f.undefined_name())};
    const Callable* c = f.callable();
    if (c == nullptr) throw Error{fmt::format("'{}' object is not callable", TypeName(f))};
    Args args = Arguments(e);
    switch (c->kind) {
      case Callable::Kind::kMethod:
        return CallMethod(c->self, c->name, args, &budget_);
      case Callable::Kind::kMacro:
        return CallMacro(*c->macro, std::move(args));
      case Callable::Kind::kLoopCycle:
        if (args.positional.empty()) throw Error{"no items for cycling given"};
        return args.positional[static_cast<size_t>(c->self.ns()->attributes[kIndex0].second.AsInt()) %
                               args.positional.size()];
      case Callable::Kind::kLoopChanged: {
        Value now = MakeList(std::move(args.positional), true);
        if (!c->previous->IsUndefined() && Equal(*c->previous, now)) return Value(false);
        *c->previous = std::move(now);
        return Value(true);
      }
      case Callable::Kind::kFunction:
        return CallFunction(c->name, args);
    }
    return Value();
  }

  Value CallFunction(const std::string& name, const Args& args) {
    if (name == "raise_exception") {
      const Bound a(name, args, {"message"});
      throw Error{a.Has(0) ? ToText(*a[0], budget_.text_limit()).str()
                           : "the template refused the conversation"};
    }
    if (name == "range") {
      const Bound a(name, args, {"start", "stop", "step"});
      if (!a.Has(0)) throw Error{"range expected at least 1 argument, got 0"};
      const Int start = a.Has(1) ? a.Integer(0, 0) : 0, stop = a.Has(1) ? a.Integer(1, 0) : a.Integer(0, 0),
                step = a.Integer(2, 1);
      if (step == 0) throw Error{"range() arg 3 must not be zero"};
      const Int distance = step > 0 ? stop - start : start - stop, stride = step > 0 ? step : -step;
      const Int count = distance <= 0 ? 0 : (distance + stride - 1) / stride;
      if (count > kMaxRange)
        throw Error{
            fmt::format("range too big; the sandbox blocks ranges larger than {}", IntText(kMaxRange))};
      budget_.Charge(static_cast<size_t>(count));
      std::vector<Value> items;
      items.reserve(static_cast<size_t>(count));
      for (Int i = 0; i < count; ++i) items.emplace_back(start + i * step);
      return MakeList(std::move(items));
    }
    if (name == "strftime_now") {
      const Bound a(name, args, {"format"});
      if (!a.Has(0) || a[0]->text() == nullptr) throw Error{"strftime_now needs a format"};
      const std::time_t now = std::time(nullptr);
      std::tm local{};
      localtime_r(&now, &local);
      std::array<char, 512> buffer;
      const size_t n = std::strftime(buffer.data(), buffer.size(), a[0]->text()->str().c_str(), &local);
      return Value(Text(std::string(buffer.data(), n), a[0]->text()->all_from_template()));
    }
    // namespace(...) and dict(...): a mapping and named values.
    std::vector<std::pair<Value, Value>> entries;
    for (const Value& v : args.positional) {
      if (v.dict() == nullptr) throw Error{fmt::format("{}() takes a mapping and named values", name)};
      entries.insert(entries.end(), v.dict()->entries().begin(), v.dict()->entries().end());
    }
    for (const auto& [key, value] : args.named) entries.emplace_back(Value::OfTemplate(key), value);
    if (name == "dict") {
      auto dict = std::make_shared<Dict>();
      for (auto& [key, value] : entries) dict->Set(std::move(key), std::move(value));
      return Value(std::shared_ptr<const Dict>(std::move(dict)));
    }
    auto ns = std::make_shared<Namespace>();
    for (auto& [key, value] : entries) {
      if (key.text() == nullptr) throw Error{"the names of a namespace must be strings"};
      if (Value* old = ns->Find(key.text()->str())) {
        *old = std::move(value);
      } else {
        ns->attributes.emplace_back(key.text()->str(), std::move(value));
      }
    }
    namespaces_.push_back(ns);
    return Value(std::move(ns));
  }

  Value CallMacro(const Macro& macro, Args args) {
    if (macro_depth_ >= kMaxMacroDepth)
      throw Error{fmt::format("macros call each other more than {} deep", kMaxMacroDepth)};
    const Stmt& def = *macro.definition;
    if (args.positional.size() > def.params.size()) {
      throw Error{fmt::format("macro '{}' takes not more than {} argument(s)", def.name, def.params.size())};
    }
    std::vector<std::optional<Value>> given(def.params.size());
    for (size_t i = 0; i < args.positional.size(); ++i) given[i] = std::move(args.positional[i]);
    for (auto& [name, value] : args.named) {
      const auto it = std::find(def.params.begin(), def.params.end(), name);
      if (it == def.params.end())
        throw Error{fmt::format("macro '{}' takes no keyword argument '{}'", def.name, name)};
      std::optional<Value>& slot = given[static_cast<size_t>(it - def.params.begin())];
      if (slot) throw Error{fmt::format("macro '{}' got multiple values for argument '{}'", def.name, name)};
      slot = std::move(value);
    }
    const int line = line_;
    ++macro_depth_;
    Capture capture(this);
    const Inner inner(this, macro.scope);
    const size_t first_default = def.params.size() - def.conditions.size();
    for (size_t i = 0; i < def.params.size(); ++i) {
      if (given[i]) {
        scope_->Set(def.params[i], std::move(*given[i]));
      } else if (i >= first_default) {
        scope_->Set(def.params[i], Evaluate(*def.conditions[i - first_default]));
      } else {
        scope_->Set(def.params[i], Value(Undefined{def.params[i]}));
      }
    }
    Execute(def.bodies[0]);
    --macro_depth_;
    line_ = line;
    return Value(std::move(capture.text));
  }

  Budget budget_;
  std::shared_ptr<Scope> globals_;
  std::shared_ptr<Scope> scope_;
  Text root_;
  Text* out_ = &root_;
  std::vector<std::shared_ptr<Macro>> macros_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  int depth_ = 0;
  int macro_depth_ = 0;
  int line_ = 0;
  int message_index_ = -1;
};

}  // namespace

struct Template::Ast {
  Body body;
};

Template::Template(std::unique_ptr<Ast> ast) : ast_(std::move(ast)) {}
Template::~Template() = default;

StatusOr<std::shared_ptr<const Template>> Template::Parse(std::string_view source) {
  auto ast = std::make_unique<Ast>();
  try {
    ast->body = ParseTemplate(source);
  } catch (const Error& error) {
    return Invalid("chat template: {}", error.message);
  }
  return std::shared_ptr<const Template>(new Template(std::move(ast)));
}

bool Template::Render(const Variables& variables, const Limits& limits, Text* out,
                      RenderFailure* failure) const {
  Runtime runtime(variables, limits);
  try {
    *out = runtime.Run(ast_->body);
    return true;
  } catch (const Error& error) {
    *failure = {error.message, runtime.line(), runtime.message_index()};
    return false;
  }
}

}  // namespace sluice::jinja
