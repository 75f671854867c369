// The one rule by which activations become e4m3, and the activation between two products.
#pragma once

#include "backends/cuda/device.cuh"

namespace sluice::cuda {

__device__ __forceinline__ float Silu(float g, float u) { return g / (1.0f + __expf(-g)) * u; }

__device__ __forceinline__ uint32_t Pack4E4M3(float a, float b, float c, float d) {
  const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return lo | hi << 16;
}

}  // namespace sluice::cuda
