// The op catalogue alone, for a machine that has nothing but the CUDA toolkit: see build.sh beside it. Exit
// code 1 when a check fails, 3 without a device.
#include "tools/cuda/check.h"

int main(int argc, char** argv) {
  sluice::cuda::OpReport report;
  if (!sluice::cuda::RunOpCatalogue({.only = argc > 1 ? argv[1] : "", .print = true}, &report)) {
    std::fprintf(stderr, "op_check: no CUDA device on this machine\n");
    return 3;
  }
  int failed = 0;
  for (const sluice::cuda::OpCheck& check : report.checks) failed += !check.ok();
  std::printf("%s: %d checks failed\n", failed == 0 ? "ALL OK" : "FAILED", failed);
  return failed == 0 ? 0 : 1;
}
