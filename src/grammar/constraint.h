// Constraints of answers: compiled once, kept, and followed token by token, with masks made on threads of
// their own while the device computes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/token_constraint.h"
#include "nlohmann/json.hpp"
#include "text/tokenizer.h"
#include "text/tool_call_format.h"

namespace sluice {

struct ConstraintRequest {
  enum class Kind : uint8_t { kJsonObject, kJsonSchema, kRegex, kEbnf, kToolCalls } kind{};
  std::string text;              // schema as JSON text, pattern or grammar
  bool whitespace = false;       // JSON kinds
  nlohmann::ordered_json tools;  // kToolCalls: the callable ones, in OpenAI form
  ToolCallStyle style{};
  bool one_call = false;
  // Reasoning comes first and is free: the prompt opened it, or the answer may open it.
  enum class Reasoning : uint8_t { kNone, kMayOpen, kOpen } reasoning = Reasoning::kNone;
};

// Thread-safe. Compiled constraints are kept by what was asked, the least recently used go first.
class ConstraintCompiler {
 public:
  static constexpr size_t kTextBytesMax = 256 << 10;
  static constexpr size_t kKeptMax = 64;

  // stop_tokens: that end an answer once the constraint is met. workers: threads that make masks.
  ConstraintCompiler(std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> stop_tokens,
                     int workers = 1);
  ~ConstraintCompiler();

  // Invalid names what is not supported or wrong.
  StatusOr<std::shared_ptr<const TokenConstraint>> Compile(const ConstraintRequest& request);
  int64_t compiled() const;  // that were not kept already

 private:
  struct Shared;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace sluice
