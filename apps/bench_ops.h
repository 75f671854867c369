// Times each op of a backend at real shapes against a ceiling measured in the same rounds, and checks its
// result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace sluice {

struct OpsBenchOptions {
  int threads = 0;  // 0: every core that this process may use
  std::string isa = "auto";
  std::string only;  // rows whose op or shape contains this; on a device the parts whose name does
  int rounds = 7;
  bool quick = false;  // smaller contexts, for a smoke test
};

struct OpsBenchRow {
  std::string op, shape;
  double us = 0, us_min = 0, us_max = 0;
  double gb_s = 0, tflop_s = 0;
  std::string limit;  // "flops" or "memory", with its figure in limit_value (TFLOP/s or GB/s)
  double limit_value = 0;
  double share_of_limit = 0;  // median over rounds of rate / ceiling of the same round
  double error = 0;           // largest deviation from double sums, relative to the size of the terms
  double error_bound = 0;     // what the types and lengths allow
};

struct OpsBenchResult {
  std::string device, isa;
  int threads = 0;
  std::vector<OpsBenchRow> rows;
  bool correct = true;  // every error within its bound
};

// `progress` gets one line a case, or is null.
StatusOr<OpsBenchResult> BenchCpuOps(const OpsBenchOptions& options, void (*progress)(const std::string&));

}  // namespace sluice
