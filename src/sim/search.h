// Runs many seeds of scenarios in child processes, so that a crash or a failed check of one seed is a
// violation of that seed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "sim/report.h"

namespace sluice::sim {

struct SearchOptions {
  std::vector<Scenario> scenarios;
  uint64_t first = 0, end = 0;  // seeds [first, end), each by each scenario
  int jobs = 1;                 // child processes at once
  bool stop_at_first = false;   // stop when a violation was found (seeds under way are still counted)
  int seconds_per_seed = 60;    // a seed that takes longer is ended and is a violation
  std::function<void(int64_t runs, int64_t violations)> progress;
};

struct Finding {
  std::string scenario;
  uint64_t seed = 0;
  std::string what;
};

struct SearchResult {
  int64_t runs = 0, events = 0, violations = 0;  // violations: seeds that failed
  std::vector<Finding> findings;  // the first of each failing seed, by (seed, scenario); at most 100 are kept
  std::map<std::string, int64_t> coverage;
};

StatusOr<SearchResult> Search(const SearchOptions& options);

}  // namespace sluice::sim
