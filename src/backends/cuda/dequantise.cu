// Whole pages of fp8 latent rows as bf16 rows, bit by bit what the attention kernel makes of the rows that it
// selects.
#include "backends/cuda/device.cuh"

namespace sluice::cuda {
namespace {

constexpr int kLora = 512, kRope = 64, kFp8Row = kLora + 16 + 2 * kRope, kBF16Row = 2 * (kLora + kRope);

// One block a page; 32 threads take a row's 512 values, 16 each, and 8 of them its 64 rope values.
__global__ void __launch_bounds__(256)
    DequantisePagesKernel(Slab slab, const int32_t* pages, std::byte* out, int32_t* places) {
  if (threadIdx.x == 0) places[blockIdx.x] = int32_t(blockIdx.x);
  const std::byte* from = PageAddress(slab, __ldg(pages + blockIdx.x));
  std::byte* to = out + int64_t(blockIdx.x) * kBF16PageBytes;
  const int piece = threadIdx.x & 31;
  for (int row = threadIdx.x >> 5; row < kPage; row += 8) {
    const std::byte* in = from + row * kFp8Row;
    const uint4 raw = *reinterpret_cast<const uint4*>(in + piece * 16);
    __nv_bfloat162 large, small;
    SplitScale(*reinterpret_cast<const float*>(in + kLora + piece / 8 * 4), large, small);
    uint4 v[2];
    Dequantise(raw.x, large, small, v[0].x, v[0].y);
    Dequantise(raw.y, large, small, v[0].z, v[0].w);
    Dequantise(raw.z, large, small, v[1].x, v[1].y);
    Dequantise(raw.w, large, small, v[1].z, v[1].w);
    auto* values = reinterpret_cast<uint4*>(to + row * kBF16Row);
    values[piece * 2] = v[0];
    values[piece * 2 + 1] = v[1];
    if (piece < 8) values[64 + piece] = *reinterpret_cast<const uint4*>(in + kLora + 16 + piece * 16);
  }
}

}  // namespace

void LaunchDequantisePages(cudaStream_t s, Slab slab, const int32_t* pages, int n, std::byte* out,
                           int32_t* places) {
  if (n == 0) return;
  DequantisePagesKernel<<<n, 256, 0, s>>>(slab, pages, out, places);
}

}  // namespace sluice::cuda
