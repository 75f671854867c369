// A draft row takes over the positions that its sequence's row of the pass before has chosen.
#include "backends/cuda/kernels.h"

namespace sluice::cuda {
namespace {

// A thread owns a column of all rows (the last one the counts), so rows move up in their order without a
// wait.
__global__ void CarryKernel(const int32_t* from, const int32_t* positions, int rows, int topk,
                            int32_t* selected, int32_t* count) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column > topk) return;
  for (int row = 0; row < rows; ++row) {
    const int seen = positions[row] + 1;
    if (column == topk) {
      count[row] = seen <= topk ? seen : count[from[row]];
    } else {
      const int32_t v = seen > topk     ? selected[int64_t(from[row]) * topk + column]
                        : column < seen ? column
                                        : -1;
      selected[int64_t(row) * topk + column] = v;
    }
  }
}

}  // namespace

void LaunchCarrySelection(cudaStream_t s, const int32_t* from, const int32_t* positions, int rows, int topk,
                          int32_t* selected, int32_t* count) {
  if (rows == 0) return;
  CarryKernel<<<(topk + 1 + 127) / 128, 128, 0, s>>>(from, positions, rows, topk, selected, count);
}

}  // namespace sluice::cuda
