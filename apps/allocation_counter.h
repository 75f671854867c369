// Counts heap allocations of the calling thread, for benchmarks that promise none.
#pragma once

#include <cstdint>

namespace sluice {

// Number of operator new calls of this thread so far. Counting is a thread-local increment and always on.
int64_t ThreadAllocations();

}  // namespace sluice
