// Runs the passes of an evaluation against a target.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "eval/dataset.h"
#include "eval/report.h"
#include "eval/target.h"

namespace sluice::eval {

enum class PassKind : uint8_t { kCold, kWarm, kL2, kL3 };
StatusOr<std::vector<PassKind>> ParsePasses(const std::string& list);  // "cold,warm,l2,l3", each at most once

struct RunOptions {
  std::vector<PassKind> passes;
  int concurrency = 8;
  int32_t max_tokens = 256;
  // Another process has filled the storage with this dataset: no run fills it here. l3 only, besides cold.
  bool filled = false;
  std::function<void(const std::string& what, int64_t done, int64_t all)>
      progress;  // may be null; any thread
};

// cold: each turn in a namespace of its own. warm, l2, l3 share a namespace that one untimed run fills first;
// l2 empties the device tier before each group of `concurrency` sessions, l3 restarts the engine once. Turns
// of a session run one after another, always with the dataset's own answers as history. The first error of a
// question ends the run.
StatusOr<std::vector<PassResult>> RunPasses(const Dataset& dataset, Target* target,
                                            const RunOptions& options);

struct ProblemOptions {
  int num_shots = 5;
  int parallel = 8;
  int32_t max_tokens = 512;
  bool chat = false;  // shots and question as chat messages instead of one plain prompt
  std::function<void(const std::string& what, int64_t done, int64_t all)> progress;
};
// The first num_shots problems are the examples before every question; the rest is asked.
StatusOr<ProblemReport> RunProblems(const Dataset& dataset, Target* target, const ProblemOptions& options);

}  // namespace sluice::eval
