// The parsed template. Plain trees, immutable after parsing.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace sluice::jinja {

struct Expr {
  enum class Kind {
    kConstant,    // constant
    kName,        // name
    kList,        // args
    kTuple,       // args
    kDict,        // args: key, value, key, value...
    kAttribute,   // args[0].name
    kItem,        // args[0][args[1]]
    kSlice,       // args[0][args[1]:args[2]:args[3]], null where left out
    kCall,        // args[0](args[1..], kwargs)
    kFilter,      // args[0] | name(args[1..], kwargs)
    kTest,        // args[0] is name(args[1..], kwargs)
    kUnary,       // name: "-", "+", "not"
    kBinary,      // name: + - * / // % ** and or
    kConcat,      // args joined by ~
    kCompare,     // args[0] operators[0] args[1] operators[1] args[2] ...
    kConditional  // args[1] if args[0] else args[2] (null: undefined)
  };
  Kind kind;
  int line = 0;
  std::string name;
  Value constant;
  std::vector<std::unique_ptr<Expr>> args;
  std::vector<std::pair<std::string, std::unique_ptr<Expr>>> kwargs;
  std::vector<std::string> operators;
};
using ExprPtr = std::unique_ptr<Expr>;

// What an assignment or a loop binds: one name, an attribute of a namespace, or a tuple of targets.
struct Target {
  std::string name;
  std::string attribute;      // "": plain name
  std::vector<Target> parts;  // not empty: a tuple
};

struct Stmt {
  enum class Kind {
    kData,      // text
    kOutput,    // expr
    kIf,        // conditions and bodies; bodies may have one more (else)
    kFor,       // target, expr, filter (may be null), bodies[0], bodies[1] = else (may be absent)
    kSet,       // target = expr
    kSetBlock,  // target = body, through filters (expr: a chain whose innermost operand is null)
    kMacro,     // name, params, defaults (aligned to the end), bodies[0]
    kWith,      // targets and exprs, bodies[0]
    kFilterBlock,
    kBlock,  // bodies[0], for tags that change nothing ({% generation %})
    kBreak,
    kContinue
  };
  Kind kind;
  int line = 0;
  Text text;
  std::string name;
  Target target;
  ExprPtr expr;
  ExprPtr filter;
  std::vector<ExprPtr> conditions;
  std::vector<Target> targets;
  std::vector<std::string> params;
  std::vector<std::vector<std::unique_ptr<Stmt>>> bodies;
};
using StmtPtr = std::unique_ptr<Stmt>;
using Body = std::vector<StmtPtr>;

// Throws Error: a syntax error, or a tag, filter or test that is not built.
Body ParseTemplate(std::string_view source);

}  // namespace sluice::jinja
