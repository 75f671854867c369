// Grammars: expressions over bytes, tokens and rules, and the program of nodes and edges that they compile
// to.
//
//   front ends (JSON schema, regex, EBNF, tool calls) --GrammarBuilder--> Program --Automaton--> token masks
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "grammar/char_set.h"

namespace sluice {

constexpr int32_t kGrammarNodesMax = 200000;  // documented limits
constexpr int32_t kGrammarRepeatMax = 20000;
constexpr int32_t kUnreachable = 1 << 28;  // of lengths: no end is possible

struct GrammarExpr;
using ExprPtr = std::shared_ptr<const GrammarExpr>;

struct GrammarExpr {
  enum class Kind : uint8_t { kEmpty, kNever, kLiteral, kChars, kToken, kRule, kSeq, kAlt, kRepeat };
  Kind kind = Kind::kEmpty;
  std::string literal;
  CharSet chars;
  int32_t id = -1;  // token or rule
  std::vector<ExprPtr> parts;
  int32_t min = 0, max = -1;  // kRepeat; -1: no limit
};

ExprPtr Empty();
ExprPtr Never();
ExprPtr Literal(std::string text);
ExprPtr Chars(CharSet set);
ExprPtr TokenExpr(int32_t id);
ExprPtr RuleExpr(int32_t rule);
ExprPtr Seq(std::vector<ExprPtr> parts);
ExprPtr Alt(std::vector<ExprPtr> parts);
ExprPtr Repeat(ExprPtr part, int32_t min, int32_t max);
inline ExprPtr Optional(ExprPtr part) { return Repeat(std::move(part), 0, 1); }
inline ExprPtr Star(ExprPtr part) { return Repeat(std::move(part), 0, -1); }
// Any text without `end` in it (and that does not run into it).
ExprPtr TextWithout(class GrammarBuilder* builder, std::string_view end);

struct GrammarEdge {
  enum class Kind : uint8_t { kEpsilon, kBytes, kToken, kRule };
  Kind kind = Kind::kEpsilon;
  uint8_t low = 0, high = 0;
  int32_t id = -1;
  int32_t to = -1;
};

// Immutable. A rule is a start node and an end node without edges.
struct Program {
  struct Rule {
    int32_t start = -1, end = -1;
  };
  std::vector<int32_t> edge_begin;  // [nodes + 1]
  std::vector<GrammarEdge> edges;
  std::vector<uint8_t> is_end;  // [nodes]
  std::vector<int32_t> to_end;  // [nodes] fewest bytes (or tokens) to the end of the node's rule
  std::vector<Rule> rules;
  int32_t root = 0;
  int32_t longest_rule = 0;  // greatest to_end of a rule's start
};

class GrammarBuilder {
 public:
  // The name is for error messages.
  int32_t NewRule(std::string name);
  void Define(int32_t rule, ExprPtr expr) { rules_[size_t(rule)].expr = std::move(expr); }
  int32_t AddRule(std::string name, ExprPtr expr) {
    const int32_t rule = NewRule(std::move(name));
    Define(rule, std::move(expr));
    return rule;
  }
  // Invalid: too large, left recursion (named), or nothing matches.
  StatusOr<Program> Compile(int32_t root) const;

 private:
  struct Rule {
    std::string name;
    ExprPtr expr;
  };
  std::vector<Rule> rules_;
};

}  // namespace sluice
