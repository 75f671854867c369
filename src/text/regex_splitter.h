// Cuts text by a pre-tokenizer's regular expression (Oniguruma dialect as found in tokenizer.json) with
// PCRE2's JIT.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "base/status.h"

namespace sluice {

enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

// Immutable after Create; Split may run on any thread (match data and JIT stack are per thread).
class RegexSplitter {
 public:
  struct Options {
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;
  };
  // Invalid: the pattern does not compile, or uses a construct whose meaning differs between the dialects.
  static StatusOr<std::unique_ptr<const RegexSplitter>> Create(std::string_view pattern, Options options);
  // The pattern is a literal string.
  static StatusOr<std::unique_ptr<const RegexSplitter>> CreateLiteral(std::string_view literal,
                                                                      Options options);
  ~RegexSplitter();
  RegexSplitter(const RegexSplitter&) = delete;

  // Calls `piece` for each piece of `text`, in order; empty pieces are left out. REQUIRES valid UTF-8.
  // `piece` may split again. A text on which the pattern exceeds its match budget is cut after the offending
  // character, and matching goes on there.
  void Split(std::string_view text, absl::FunctionRef<void(std::string_view)> piece) const;

 private:
  struct Compiled;
  RegexSplitter(std::unique_ptr<Compiled> compiled, Options options);
  std::unique_ptr<Compiled> compiled_;
  Options options_;
};

}  // namespace sluice
