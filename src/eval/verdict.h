// Compares a pass with the accuracy that was measured when the data was made (`sluice eval --expected F`).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "eval/report.h"

namespace sluice::eval {

struct Expected {
  std::map<std::string, double> buckets;  // bucket -> share of right answers
  std::vector<std::string> core_kinds;    // kinds that must all be right
};

// {"core_kinds": [...], "bf16": {"index": {"buckets": {"512": 0.88, ...}}}}
StatusOr<Expected> ReadExpected(const std::string& path);
StatusOr<Expected> ParseExpected(const std::string& text);

struct Verdict {
  std::string name;
  int64_t answers = 0;
  double got = 0, want = 0;
  double margin = 0;  // allowed distance below and above `want`, 0 where `want` is a lower bound
  bool holds = false;
};

// One verdict a bucket (the share lies within 1.96 standard errors of a binomial share of that many answers),
// and one each for the core kinds (all right), the answers marked sure (>= 99.5%) and the agreement with the
// reference (>= 95%). What the data does not mark is left out; a bucket without an expected share does not
// hold.
std::vector<Verdict> Judge(const PassResult& pass, const Dataset& dataset, const Expected& expected);

// A pass that is named after a tier (l2, l3) proves nothing when no token came from that tier.
struct TierVerdict {
  bool holds = true;
  std::string line;  // "" when there were hits, or the pass is named after no tier
};
// `least_tokens`: the shortest prompt that can hit that tier. When no prompt has as many, the line says so
// and the pass holds.
TierVerdict JudgeTier(const PassResult& pass, int64_t least_tokens);

Json VerdictJson(const std::vector<Verdict>& verdicts);
std::string VerdictTable(const std::string& pass, const std::vector<Verdict>& verdicts);

}  // namespace sluice::eval
