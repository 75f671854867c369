// Evaluation data: chat sessions with expected answers, or GSM8K-style questions. One JSON object a line,
// plain or gzipped.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "nlohmann/json.hpp"

namespace sluice::eval {

using Json = nlohmann::ordered_json;

// What is asked in one turn of a session: all messages before an assistant message.
struct Turn {
  size_t messages = 0;  // number of messages before the answer
  std::string expected;
  std::string kind;
  bool sure = false;                 // the reference gets it right as a rule
  std::optional<bool> reference_ok;  // whether the reference got it right
};

struct Session {
  std::string id, bucket;
  Json messages;  // [{role, content}]
  std::vector<Turn> turns;
};

struct Problem {                 // GSM8K style
  std::string question, answer;  // the answer ends in "#### number"
};

enum class DatasetKind : uint8_t { kSessions, kProblems };

struct Dataset {
  DatasetKind kind = DatasetKind::kSessions;
  std::vector<Session> sessions;
  std::vector<Problem> problems;
  bool has_sure = false, has_reference = false;
};

// limit: sessions to read, or problems to read behind the first `shots`, which serve as examples; < 0: all.
// Errors name the line.
StatusOr<Dataset> ReadDataset(const std::string& path, int64_t limit, int64_t shots = 0);
// Keeps `per_bucket` sessions of every bucket, drawn with the seed; their order stays. A larger sample of the
// same seed contains the smaller one.
void SampleSessions(Dataset* dataset, int64_t per_bucket, uint64_t seed);
// One line per element; for tests.
StatusOr<Dataset> ParseDataset(std::string_view text, int64_t limit);

// The number after "####" as GSM8K writes it (commas dropped); nullopt without one.
std::optional<std::string> FinalNumber(std::string_view answer);
// The last number in a text, which is how answers of a model are scored; nullopt without one.
std::optional<std::string> LastNumber(std::string_view text);
// Equal as numbers: "18" = "18.0" = "18.".
bool SameNumber(std::string_view a, std::string_view b);

}  // namespace sluice::eval
