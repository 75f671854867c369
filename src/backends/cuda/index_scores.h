// Between the files of the indexer's scores.
#pragma once

#include "backends/cuda/kernels.h"

namespace sluice::cuda {

// REQUIRES: 32 heads (padded), 128 dims, e4m3 queries and pages.
void LaunchScoresE4M3(cudaStream_t s, const Seqs& seqs, int row0, int rows, const IndexQuery& q,
                      const Slab& slab, float* scores, int64_t ld);

}  // namespace sluice::cuda
