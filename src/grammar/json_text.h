// Pieces of JSON text as expressions. Internal to grammar/.
#pragma once

#include <string>
#include <vector>

#include "grammar/program.h"

namespace sluice {

// The characters as they stand inside a JSON string: escaped where JSON demands it, else plain.
ExprPtr JsonChars(const CharSet& set);

// Rules that every JSON grammar shares; made once for a builder.
class JsonText {
 public:
  JsonText(bool whitespace, GrammarBuilder* builder);

  ExprPtr Value() const { return RuleExpr(value_); }
  ExprPtr Object() const { return RuleExpr(object_); }
  ExprPtr Array() const { return RuleExpr(array_); }
  ExprPtr String() const { return Seq({Literal("\""), Star(RuleExpr(char_)), Literal("\"")}); }
  ExprPtr StringChar() const { return RuleExpr(char_); }  // with every escape that JSON knows
  ExprPtr Integer() const;
  ExprPtr Number() const;
  // White space is allowed here (nothing unless asked for), and behind ':' and ','.
  ExprPtr Space() const { return space_; }
  ExprPtr Colon() const { return Seq({space_, Literal(":"), after_}); }
  ExprPtr Comma() const { return Seq({space_, Literal(","), after_}); }
  ExprPtr Open(char bracket) const { return Seq({Literal(std::string(1, bracket)), space_}); }
  ExprPtr Close(char bracket) const { return Seq({space_, Literal(std::string(1, bracket))}); }

 private:
  ExprPtr space_, after_;
  int32_t char_, integer_, number_, value_, object_, array_;
};

// Whole numbers from low to high: digits only, '-' before negative ones. Never() when there is none.
ExprPtr IntegersBetween(int64_t low, int64_t high);
ExprPtr IntegersFrom(int64_t low);
ExprPtr IntegersTo(int64_t high);

}  // namespace sluice
