// A parsed chat template and its rendering. Templates come with checkpoints and are not trusted: steps, text
// size and recursion are bounded, values cannot be changed in place, and nothing outside the given variables
// can be reached.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/jinja/text.h"
#include "text/jinja/value.h"

namespace sluice::jinja {

struct Limits {
  int64_t steps = 20'000'000;     // evaluated nodes, visited items and 64-byte pieces of handled text
  size_t text_bytes = 64u << 20;  // of any one text, the output included
};

struct RenderFailure {
  std::string message;
  int line = 0;            // of the template; 0: unknown
  int message_index = -1;  // of the conversation's message that a loop was at; -1: none
};

// Immutable and thread-safe.
class Template {
 public:
  // Invalid: syntax, or a feature that is not built (named, with what is).
  static StatusOr<std::shared_ptr<const Template>> Parse(std::string_view source);
  ~Template();

  using Variables = std::vector<std::pair<std::string, Value>>;
  // False: `failure` says why.
  bool Render(const Variables& variables, const Limits& limits, Text* out, RenderFailure* failure) const;

 private:
  struct Ast;
  explicit Template(std::unique_ptr<Ast> ast);
  std::unique_ptr<Ast> ast_;
};

}  // namespace sluice::jinja
