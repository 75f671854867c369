// The catalogue of device ops at real shapes: every op checked against double-precision sums and timed
// against what bounds it. `sluice bench ops --device cuda` and the program that build.sh makes run the same
// one.
#pragma once

#include <string>
#include <vector>

namespace sluice::cuda {

struct OpTime {
  std::string op, shape;
  double us = 0;      // median of `runs` runs by device events, the L2 emptied before each
  double amount = 0;  // per second of that median, in `unit`
  std::string unit;   // "GB/s" or "TFLOP/s"
  double limit = 0;   // the same unit
  std::string limit_name;
};

struct OpCheck {
  std::string what;
  double error = 0, bound = 0;
  bool ok() const { return error <= bound; }  // NaN is not
};

struct OpReport {
  std::string device;
  int multiprocessors = 0, l2_mb = 0;
  double copy_gbs = 0, read_gbs = 0, h2d_gbs = 0, d2h_gbs = 0;  // ceilings of this run
  std::vector<OpTime> times;
  std::vector<OpCheck> checks;
};

// Parts of the catalogue, in the order in which they run.
const std::vector<std::string>& OpParts();

struct OpCatalogueOptions {
  std::string only;    // parts whose name contains this; "": all
  int runs = 0;        // timed runs of each op; 0: each op's own number, 5 to 11
  bool print = false;  // lines to stdout as they come
};

// False: this machine has no device. A device error ends the process with exit code 2 and its text on stderr.
bool RunOpCatalogue(const OpCatalogueOptions& options, OpReport* report);

}  // namespace sluice::cuda
