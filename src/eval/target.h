// Whoever answers the questions of an evaluation: an engine in this process or a server.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "eval/dataset.h"
#include "request/request.h"
#include "schedule/draft_counters.h"

namespace sluice::eval {

struct Answer {
  std::string text;
  FinishReason finish = FinishReason::kNone;
  std::vector<int32_t> output_ids;  // without the token that stopped it; empty against a server
  uint64_t logits_hash = 0;         // over all steps; 0 against a server
  int32_t prompt_tokens = 0, output_tokens = 0;
  CachedTokens cached;
  int32_t spec_proposed = 0, spec_accepted = 0, spec_steps = 0, spec_first_accepted = 0;
};

struct Question {
  Json messages;  // chat; or, when empty, `prompt` as plain text
  std::string prompt;
  std::string salt;  // cache namespace
  int32_t max_tokens = 256;
  std::vector<std::string> stop;  // strings that end the answer (plain prompts)
};

class Target {
 public:
  virtual ~Target() = default;
  // Greedy. Thread-safe; blocks until the answer is complete.
  virtual StatusOr<Answer> Ask(const Question& question) = 0;
  virtual bool has_hashes() const = 0;  // output_ids and logits_hash are filled
  // Empties the device tier, keeping lower ones. No question may be open. Unsupported when there is no lower
  // tier.
  virtual Status DropDevice() = 0;
  // Tears the engine down and starts it again: device and host tier empty, storage kept. Unsupported without
  // storage.
  virtual Status Restart() = 0;
  // Of the engine since it started; nullopt where that is not known.
  virtual std::optional<DraftCounters> Drafts() const { return std::nullopt; }
  // Facts about the engine for the report.
  virtual Json Describe() = 0;
};

}  // namespace sluice::eval
