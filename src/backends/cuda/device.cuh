// Device-side building blocks: number formats, warp reductions, asynchronous copies, matrix instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

#include "backends/cuda/kernels.h"

namespace sluice::cuda {

constexpr int kPage = 64;  // tokens

__device__ __forceinline__ const std::byte* PageAddress(const Slab& s, int32_t page) {
  return s.base + int64_t(page % s.lanes) * s.lane_stride + int64_t(page / s.lanes) * s.page_bytes;
}
__device__ __forceinline__ std::byte* MutablePage(const Slab& s, int32_t page) {
  return s.base + int64_t(page % s.lanes) * s.lane_stride + int64_t(page / s.lanes) * s.page_bytes;
}

template <typename T>
__device__ __forceinline__ float ToFloat(T v);
template <>
__device__ __forceinline__ float ToFloat<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ float ToFloat<__nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <typename T>
__device__ __forceinline__ T FromFloat(float v);
template <>
__device__ __forceinline__ float FromFloat<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

__device__ __forceinline__ float E4M3Value(uint8_t b) {
  const __half_raw h = __nv_cvt_fp8_to_halfraw(b, __NV_E4M3);
  return __half2float(__half(h));
}
__device__ __forceinline__ uint8_t ToE4M3(float v) {
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
}
// The one scale rule of fp8 rows: amax / 448, never zero; a NaN stays a NaN.
__device__ __forceinline__ float ScaleOf(float amax) {
  return amax != amax ? amax : fmaxf(amax / 448.0f, FLT_MIN);
}
__device__ __forceinline__ float NanMax(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }

// Four e4m3 values as two pairs of bf16, exact: the bits are moved into place and the exponent bias is made
// up for by multiplying by 2^120. NaN (0x7f) becomes 480.
__device__ __forceinline__ void E4M3x4ToBF16(uint32_t v, uint32_t& lo, uint32_t& hi) {
  const uint32_t a = __byte_perm(v, 0, 0x1404);  // bytes 0 and 1 in the high halves
  const uint32_t b = __byte_perm(v, 0, 0x3424);
  const uint32_t ea = (a & 0x80008000u) | ((a & 0x7f007f00u) >> 4);
  const uint32_t eb = (b & 0x80008000u) | ((b & 0x7f007f00u) >> 4);
  const __nv_bfloat162 k = __float2bfloat162_rn(0x1p120f);
  __nv_bfloat162 ra = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&ea), k);
  __nv_bfloat162 rb = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&eb), k);
  lo = *reinterpret_cast<uint32_t*>(&ra);
  hi = *reinterpret_cast<uint32_t*>(&rb);
}

// Four e4m3 values times a scale as bf16, rounded once: the scale comes as the sum of two bf16 (both times
// 2^120, which makes up for moving an e4m3's bits into a bf16's exponent and mantissa), and the small part
// goes first.
__device__ __forceinline__ void Dequantise(uint32_t v, __nv_bfloat162 large, __nv_bfloat162 small,
                                           uint32_t& lo, uint32_t& hi) {
  const auto pair = [&](uint32_t x) {
    const uint32_t bits = (x & 0x80008000u) | ((x & 0x7f007f00u) >> 4);
    const __nv_bfloat162 e = *reinterpret_cast<const __nv_bfloat162*>(&bits);
    const __nv_bfloat162 r = __hfma2(e, large, __hmul2(e, small));
    return *reinterpret_cast<const uint32_t*>(&r);
  };
  lo = pair(__byte_perm(v, 0, 0x1404));
  hi = pair(__byte_perm(v, 0, 0x3424));
}
__device__ __forceinline__ void SplitScale(float scale, __nv_bfloat162& large, __nv_bfloat162& small) {
  const float f = scale * 0x1p120f;
  const __nv_bfloat16 l = __float2bfloat16_rn(f);
  large = __bfloat162bfloat162(l);
  small = __float2bfloat162_rn(f - __bfloat162float(l));
}

__device__ __forceinline__ float WarpSum(float v) {
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__device__ __forceinline__ float WarpNanMax(float v) {
  for (int o = 16; o > 0; o >>= 1) v = NanMax(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
// Sum over the block, in every thread. `shared` holds 33 floats; may be reused after the call.
__device__ __forceinline__ float BlockSum(float v, float* shared) {
  v = WarpSum(v);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  if (warp == 0) {
    float t = lane < warps ? shared[lane] : 0.0f;
    t = WarpSum(t);
    if (lane == 0) shared[32] = t;
  }
  __syncthreads();
  const float total = shared[32];
  __syncthreads();
  return total;
}

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void CpAsync16(uint32_t dst, const void* src, bool valid) {
  const int n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void CpAsyncCommit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

__device__ __forceinline__ void MmaBF16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void MmaE4M3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void LdMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void StMatrix4(const uint32_t (&r)[4], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- mbarriers and bulk copies
__device__ __forceinline__ void BarrierInit(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void BarrierExpect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void BulkLoad(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void BulkStore(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BulkCommit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void BulkWait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(N) : "memory");
}
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void FenceAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// ---- clusters
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32_t ClusterSize() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(r));
  return r;
}
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
}
__device__ __forceinline__ uint32_t Remote(uint32_t shared, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(r) : "r"(shared), "r"(rank));
  return r;
}
__device__ __forceinline__ float RemoteFloat(uint32_t address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float4 RemoteFloat4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Places w[x] of four neighbouring lanes as a 4 x 4 transposition: lane q ends with what the four lanes held
// in w[q].
__device__ __forceinline__ void Transpose4(uint32_t (&w)[4], int quad) {
  const bool odd = quad & 1, high = quad & 2;
  uint32_t s0 = odd ? w[0] : w[1], s1 = odd ? w[2] : w[3];
  s0 = __shfl_xor_sync(~0u, s0, 1);
  s1 = __shfl_xor_sync(~0u, s1, 1);
  const uint32_t a0 = odd ? s0 : w[0], a1 = odd ? w[1] : s0;  // of lanes l & ~1 and l | 1, for word odd
  const uint32_t b0 = odd ? s1 : w[2], b1 = odd ? w[3] : s1;  // likewise for word 2 + odd
  const uint32_t t0 = __shfl_xor_sync(~0u, high ? a0 : b0, 2), t1 = __shfl_xor_sync(~0u, high ? a1 : b1, 2);
  w[0] = high ? t0 : a0;
  w[1] = high ? t1 : a1;
  w[2] = high ? b0 : t0;
  w[3] = high ? b1 : t1;
}

}  // namespace sluice::cuda
