// What this machine can do at best, measured in the same run as what is compared with it.
#pragma once

#include "tensor/dtype.h"

namespace sluice {

// oneDNN's rate for a large matrix product (weights packed by it), FLOP/s. One sample, about 0.1 s.
// dtype: kBF16 or kF32; on a processor without bf16 products kBF16 is measured in float32.
double LargeGemmRate(DType dtype, int threads);

// Bytes/s of reading memory with `threads` threads, each its own part of a buffer far larger than the caches.
double MemoryReadRate(int threads);

}  // namespace sluice
