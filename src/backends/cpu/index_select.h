// Lightning indexer: scores of every visible position, then the exact top-k as ascending positions.
//
// A (query, key) score is one chain over the key's dims and the heads in order; which rows, keys or pages are
// worked on together changes no bit. Top-k is by (score descending, position ascending), -0 equals +0, NaN is
// lowest.
#pragma once

#include "backends/cpu/cpu_queue.h"
#include "backends/cpu/kernel_table.h"
#include "ops/backend.h"

namespace sluice::cpu {

void RunIndexSelect(CpuQueue& q, const KernelTable& t, DType act, const ops::IndexSelectArgs& a);

// Positions of the k best of scores[0:n], ascending, k <= n. Returns the k-th score minus the best left out
// (+inf when k == n). Scratch: keys [n], found [n + 64].
float SelectTopK(const KernelTable& t, const float* scores, int64_t n, int64_t k, int32_t* out,
                 int32_t* found, uint32_t* keys);

}  // namespace sluice::cpu
