// What a thread asked of the CUDA runtime: the linker sends the runtime's calls that allocate, ask for memory
// or wait (whoever makes them) through counters first. Private to backends/cuda.
#pragma once

#include <cstdint>

namespace sluice::cuda {

struct DeviceCalls {
  int64_t allocations = 0, queries = 0, waits = 0;
  const char* allocation = nullptr;  // names of the last ones
  const char* query = nullptr;
  const char* wait = nullptr;
};

// Calls of this thread are counted from Begin to End.
void BeginDeviceCalls();
DeviceCalls EndDeviceCalls();

// Not counted while one lives: what a first-time recording takes, and the check's own questions.
class UncountedDeviceCalls {
 public:
  UncountedDeviceCalls();
  ~UncountedDeviceCalls();
  UncountedDeviceCalls(const UncountedDeviceCalls&) = delete;
  UncountedDeviceCalls& operator=(const UncountedDeviceCalls&) = delete;

 private:
  const bool counted_;
};

}  // namespace sluice::cuda
