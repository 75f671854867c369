// Activations as e4m3 with one scale per row and 128 values, plainly, through the list of sorted rows, and
// fused with the activation between two products; and f32 rows as sums of three bf16.
#include <algorithm>

#include "backends/cuda/quantise.cuh"

namespace sluice::cuda {
namespace {

// Sixteen lanes hold 128 values of a row, eight each. All lanes of a warp call, those past the row's end too.
__device__ __forceinline__ void WriteBlock(const float (&v)[8], uint8_t* out, bool write, bool write_scale,
                                           float* scale) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = NanMax(amax, fabsf(v[i]));
#pragma unroll
  for (int o = 8; o > 0; o >>= 1) amax = NanMax(amax, __shfl_xor_sync(~0u, amax, o));
  const float s = ScaleOf(amax), inverse = 1.0f / s;
  if (write)
    *reinterpret_cast<uint2*>(out) =
        make_uint2(Pack4E4M3(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse),
                   Pack4E4M3(v[4] * inverse, v[5] * inverse, v[6] * inverse, v[7] * inverse));
  if (write_scale && (threadIdx.x & 15) == 0) *scale = s;
}

__device__ __forceinline__ void Load8(const __nv_bfloat16* x, float (&v)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(x);
  const auto* p = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __bfloat1622float2(p[i]);
    v[2 * i] = f.x;
    v[2 * i + 1] = f.y;
  }
}

// Rows along x, 2048 columns along y.
template <bool kSorted>
__global__ void __launch_bounds__(256)
    QuantiseKernel(const __nv_bfloat16* x, int64_t x_ld, int k, const int32_t* sorted, int divide,
                   const int32_t* tiles_used, int tile_rows, bool flat, uint8_t* y, float* scale) {
  const int64_t r = blockIdx.x;
  const int c = int(blockIdx.y) * 2048 + int(threadIdx.x) * 8;
  int64_t from = r;
  if constexpr (kSorted) {
    if (r >= int64_t(__ldg(tiles_used)) * tile_rows) return;
    const int pair = __ldg(sorted + r);
    from = pair < 0 ? -1 : pair / divide;
  }
  float v[8] = {};
  if (from >= 0 && c < k) Load8(x + from * x_ld + c, v);
  WriteBlock(v, y + r * k + c, c < k, c / 128 * 128 < k,
             scale + (flat ? int64_t(c >> 7) * gridDim.x + r : RowScaleAt(r, c >> 7, (k + 127) / 128)));
}

__global__ void __launch_bounds__(256)
    SiluQuantiseKernel(const float* gate_up, int dim, const int32_t* tiles_used, int tile_rows, uint8_t* y,
                       float* scale) {
  const int64_t r = blockIdx.x;
  const int c = int(blockIdx.y) * 2048 + int(threadIdx.x) * 8;
  if (tiles_used != nullptr && r >= int64_t(__ldg(tiles_used)) * tile_rows) return;
  float v[8] = {};
  if (c < dim) {
    const float* g = gate_up + r * 2 * dim + c;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 a = *reinterpret_cast<const float4*>(g + i),
                   b = *reinterpret_cast<const float4*>(g + dim + i);
      v[i] = Silu(a.x, b.x);
      v[i + 1] = Silu(a.y, b.y);
      v[i + 2] = Silu(a.z, b.z);
      v[i + 3] = Silu(a.w, b.w);
    }
  }
  WriteBlock(v, y + r * dim + c, c < dim, c / 128 * 128 < dim,
             scale + RowScaleAt(r, c >> 7, (dim + 127) / 128));
}

__global__ void __launch_bounds__(256)
    GatherSortedKernel(const __nv_bfloat16* x, int64_t x_ld, int k, const int32_t* sorted, int divide,
                       const int32_t* tiles_used, int tile_rows, __nv_bfloat16* y) {
  const int64_t r = blockIdx.x;
  if (r >= int64_t(__ldg(tiles_used)) * tile_rows) return;
  const int pair = __ldg(sorted + r);
  for (int c = int(threadIdx.x) * 8; c < k; c += 2048) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (pair >= 0) v = *reinterpret_cast<const uint4*>(x + int64_t(pair / divide) * x_ld + c);
    *reinterpret_cast<uint4*>(y + r * k + c) = v;
  }
}

__global__ void __launch_bounds__(256) SplitBF16Kernel(const float* x, int64_t n, __nv_bfloat16* y) {
  const int64_t i = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * 4;
  if (i >= n) return;
  const float4 v = *reinterpret_cast<const float4*>(x + i);
  float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    __nv_bfloat16 b[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b[j] = __float2bfloat16_rn(f[j]);
      f[j] -= __bfloat162float(b[j]);
    }
    *reinterpret_cast<uint2*>(y + part * n + i) = *reinterpret_cast<const uint2*>(b);
  }
}

}  // namespace

void LaunchQuantise(cudaStream_t s, const void* x, int64_t x_ld, int rows, int k, void* y, float* scale,
                    bool flat) {
  if (rows == 0) return;
  QuantiseKernel<false><<<dim3(unsigned(rows), unsigned((k + 2047) / 2048)), 256, 0, s>>>(
      static_cast<const __nv_bfloat16*>(x), x_ld, k, nullptr, 1, nullptr, 0, flat, static_cast<uint8_t*>(y),
      scale);
}

void LaunchQuantiseSorted(cudaStream_t s, const void* x, int64_t x_ld, int k, const SortedRows& sorted,
                          int divide, void* y, float* scale) {
  if (sorted.capacity == 0) return;
  QuantiseKernel<true><<<dim3(unsigned(sorted.capacity), unsigned((k + 2047) / 2048)), 256, 0, s>>>(
      static_cast<const __nv_bfloat16*>(x), x_ld, k, sorted.rows, divide, sorted.tiles_used, sorted.tile_rows,
      false, static_cast<uint8_t*>(y), scale);
}

void LaunchGatherSorted(cudaStream_t s, const void* x, int64_t x_ld, int k, const SortedRows& sorted,
                        int divide, void* y) {
  if (sorted.capacity == 0) return;
  GatherSortedKernel<<<unsigned(sorted.capacity), 256, 0, s>>>(
      static_cast<const __nv_bfloat16*>(x), x_ld, k, sorted.rows, divide, sorted.tiles_used, sorted.tile_rows,
      static_cast<__nv_bfloat16*>(y));
}

void LaunchSiluQuantise(cudaStream_t s, const float* gate_up, int64_t rows, int dim, const SortedRows* sorted,
                        void* y, float* scale) {
  if (rows == 0) return;
  SiluQuantiseKernel<<<dim3(unsigned(rows), unsigned((dim + 2047) / 2048)), 256, 0, s>>>(
      gate_up, dim, sorted == nullptr ? nullptr : sorted->tiles_used,
      sorted == nullptr ? 0 : sorted->tile_rows, static_cast<uint8_t*>(y), scale);
}

void LaunchSplitBF16(cudaStream_t s, const float* x, int64_t n, void* y) {
  if (n == 0) return;
  SplitBF16Kernel<<<unsigned((n / 4 + 255) / 256), 256, 0, s>>>(x, n, static_cast<__nv_bfloat16*>(y));
}

}  // namespace sluice::cuda
