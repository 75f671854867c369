// Pages by index lists in device memory, row by row: for host layouts in which the rows of a page lie apart,
// and for strides that bulk copies do not take. A warp moves a row at a time, in the widest words that all
// addresses allow.
#include "backends/cuda/kernels.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256, kFlight = 4;

template <typename Word>
__global__ void __launch_bounds__(kThreads) PageRowsKernel(PageRows p) {
  const int lane = int(threadIdx.x % 32);
  const int64_t warps = int64_t(gridDim.x) * (kThreads / 32), words = p.row_bytes / int64_t(sizeof(Word));
  for (int64_t r = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; r < p.count * p.rows;
       r += warps) {
    const int64_t page = r / p.rows, row = r % p.rows;
    const auto* from = reinterpret_cast<const Word*>(p.src + int64_t(__ldg(p.src_index + page)) * p.src_page +
                                                     row * p.src_row);
    auto* to =
        reinterpret_cast<Word*>(p.dst + int64_t(__ldg(p.dst_index + page)) * p.dst_page + row * p.dst_row);
    for (int64_t base = lane; base < words; base += 32 * kFlight) {
      Word v[kFlight];
#pragma unroll
      for (int j = 0; j < kFlight; ++j)
        if (base + 32 * j < words) v[j] = from[base + 32 * j];
#pragma unroll
      for (int j = 0; j < kFlight; ++j)
        if (base + 32 * j < words) to[base + 32 * j] = v[j];
    }
  }
}

template <typename Word>
void Launch(cudaStream_t s, const PageRows& p, int blocks) {
  PageRowsKernel<Word><<<unsigned(blocks), kThreads, 0, s>>>(p);
}

}  // namespace

void LaunchPageRows(cudaStream_t s, const PageRows& p, int blocks) {
  if (p.count == 0 || p.row_bytes == 0) return;
  const uint64_t any = uint64_t(reinterpret_cast<uintptr_t>(p.src)) |
                       uint64_t(reinterpret_cast<uintptr_t>(p.dst)) | uint64_t(p.src_page) |
                       uint64_t(p.dst_page) | uint64_t(p.row_bytes) |
                       (p.rows > 1 ? uint64_t(p.src_row) | uint64_t(p.dst_row) : 0);
  if (any % 16 == 0) {
    Launch<uint4>(s, p, blocks);
  } else if (any % 8 == 0) {
    Launch<uint2>(s, p, blocks);
  } else if (any % 4 == 0) {
    Launch<uint32_t>(s, p, blocks);
  } else {
    Launch<uint8_t>(s, p, blocks);
  }
}

}  // namespace sluice::cuda
