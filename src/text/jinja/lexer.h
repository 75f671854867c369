// Template text into tokens, with the reference's white-space rules: trim_blocks and lstrip_blocks on (as
// chat templates are rendered), '-' and '+' marks, one trailing newline dropped, raw blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

namespace sluice::jinja {

enum class TokenKind {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd
};

struct Token {
  TokenKind kind;
  std::string text;  // kData, kName, kString (unescaped), kOperator; numbers as written without '_'
  int line;
};

// Throws Error.
std::vector<Token> Lex(std::string_view source);

}  // namespace sluice::jinja
