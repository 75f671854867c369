// Scores of an evaluation and their forms: one JSON document, one JSON line a turn, a readable table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "eval/dataset.h"
#include "eval/target.h"

namespace sluice::eval {

struct TurnResult {
  const Session* session = nullptr;
  const Turn* turn = nullptr;
  int32_t number = 0;  // of the turn in its session
  Answer answer;
  bool right = false;  // the text is the expected one and the model stopped by itself
};

struct PassResult {
  std::string name;
  double seconds = 0;
  std::vector<TurnResult> turns;  // in file order
  std::optional<DraftCounters> drafts;
};

// `cold` may be null (the pass was not run) or the pass itself.
Json PassJson(const PassResult& pass, const PassResult* cold, const Dataset& dataset, bool has_hashes);
// One line a turn: pass, id, turn, text, finish, and with hashes output_ids and logits_hash (16 hex digits).
std::string OutputLine(const PassResult& pass, const TurnResult& turn, bool has_hashes);
// The cold pass of another run over the same dataset, from its lines: stands for a cold pass of this one.
// Errors name the turn that is missing.
StatusOr<PassResult> ReadColdOutputs(const std::string& path, const Dataset& dataset);
// What became of drafts by how far ahead they were: proposed, reached (all before it stood), accepted of each
// place, and the share of the reached that were accepted.
Json DraftPlacesJson(const DraftCounters& drafts);
// A table for people, from the JSON of all passes.
std::string PassTable(const Json& passes);

struct ProblemReport {  // GSM8K style
  double accuracy = 0, invalid = 0, latency_s = 0, output_tokens_per_s = 0;
  int64_t problems = 0, output_tokens = 0;
  std::vector<int32_t> prompt_tokens;  // of each problem, in file order
};

}  // namespace sluice::eval
