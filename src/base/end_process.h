// The end of a process that cannot go on because of what lies outside of it (a device that faults or hangs):
// one report on stderr and the exit code for a failing environment. Nothing is torn down, since that would
// wait for what does not answer.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

namespace sluice {

inline constexpr int kEndedByEnvironment = 3;  // as the commands' exit code for a failing resource

[[noreturn]] inline void EndProcess(const std::string& report) {
  std::fprintf(stderr, "sluice: %s\n", report.c_str());
  std::fflush(nullptr);
  _exit(kEndedByEnvironment);
}

}  // namespace sluice
