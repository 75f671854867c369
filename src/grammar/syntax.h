// The notations that constraints come in, parsed into expressions. Invalid names what is not understood and
// where; nothing is left out in silence.
#pragma once

#include <string_view>

#include "grammar/program.h"
#include "nlohmann/json.hpp"
#include "text/tokenizer.h"
#include "text/tool_call_format.h"

namespace sluice {

struct RegexMode {
  bool json_string = false;  // the text inside a JSON string's quotes: " \ and control characters are escaped
  bool search = false;  // JSON schema's `pattern`: may match anywhere unless anchored; else the whole text
};
// ECMA-262's and RE2's common part: literals, classes, \d \w \s, groups, | * + ? {m,n}, ^ and $ at the ends
// of an alternative. No look-around, back references, \b, \p or flags.
StatusOr<ExprPtr> ParseRegex(std::string_view pattern, const RegexMode& mode);

// `root ::= ...` rules with "text", [a-z], (...), | * + ? {m,n}, and # comments. Adds the rules to the
// builder and gives the one named root.
StatusOr<int32_t> ParseEbnf(std::string_view text, GrammarBuilder* builder);

using OrderedJson = nlohmann::ordered_json;

// `whitespace`: any white space between JSON's tokens; else at most one space after ':' and ','.
// `root`: what "#" refers to, when the schema is a part of another one.
StatusOr<ExprPtr> ParseJsonSchema(const OrderedJson& schema, bool whitespace, GrammarBuilder* builder,
                                  const OrderedJson* root = nullptr);
// Any JSON object.
ExprPtr AnyJsonObject(bool whitespace, GrammarBuilder* builder);

// One or more calls (exactly one if `one`) of the declared tools in a model's own form, and nothing else.
// Tokens of the tokenizer stand for the form's markers where it has them.
StatusOr<ExprPtr> ToolCallGrammar(ToolCallStyle style, const OrderedJson& tools, bool one,
                                  const Tokenizer& tokenizer, GrammarBuilder* builder);

}  // namespace sluice
