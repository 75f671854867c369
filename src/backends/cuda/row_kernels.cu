// Per-row operations: embedding, norms, rope, writes of KV rows, activation, gathers.
#include <algorithm>

#include "backends/cuda/quantise.cuh"

namespace sluice::cuda {
namespace {

__global__ void EmbedKernel(const void* table, Elem dtype, const float* scale, int block_n, int block_k,
                            const int32_t* tokens, int hidden, float* x) {
  const int64_t row = tokens[blockIdx.x];
  float* out = x + int64_t(blockIdx.x) * hidden;
  const int k_blocks = block_k > 0 ? (hidden + block_k - 1) / block_k : 0;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const int64_t at = row * hidden + i;
    float v = 0;
    if (dtype == Elem::kF32) v = static_cast<const float*>(table)[at];
    if (dtype == Elem::kBF16) v = __bfloat162float(static_cast<const __nv_bfloat16*>(table)[at]);
    if (dtype == Elem::kF16) v = __half2float(static_cast<const __half*>(table)[at]);
    if (dtype == Elem::kE4M3)
      v = E4M3Value(static_cast<const uint8_t*>(table)[at]) * scale[row / block_n * k_blocks + i / block_k];
    out[i] = v;
  }
}

// A row lives in registers between the sum and the write: one read, one write.
template <typename T, int kVec, int kThreads>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const float* x, int64_t x_ld, const float* weight, float eps, int dim, T* y, int64_t y_ld,
                  float* y_f32) {
  __shared__ float shared[kThreads / 32];
  const float* in = x + int64_t(blockIdx.x) * x_ld;
  float4 v[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const int i = (j * kThreads + int(threadIdx.x)) * 4;
    v[j] = i < dim ? __ldcs(reinterpret_cast<const float4*>(in + i)) : make_float4(0, 0, 0, 0);
  }
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sum += v[j].x * v[j].x + v[j].y * v[j].y + v[j].z * v[j].z + v[j].w * v[j].w;
  sum = WarpSum(sum);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = sum;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += shared[i];
  const float scale = rsqrtf(total / float(dim) + eps);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const int i = (j * kThreads + int(threadIdx.x)) * 4;
    if (i >= dim) break;
    const float4 w = __ldg(reinterpret_cast<const float4*>(weight + i));
    const float4 r =
        make_float4(v[j].x * scale * w.x, v[j].y * scale * w.y, v[j].z * scale * w.z, v[j].w * scale * w.w);
    if (y_f32 != nullptr) *reinterpret_cast<float4*>(y_f32 + int64_t(blockIdx.x) * dim + i) = r;
    if (y != nullptr) {
      T* out = y + int64_t(blockIdx.x) * y_ld + i;
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float4*>(out) = r;
      } else {
        __nv_bfloat162 p[2] = {__floats2bfloat162_rn(r.x, r.y), __floats2bfloat162_rn(r.z, r.w)};
        *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(p);
      }
    }
  }
}

template <typename T>
__global__ void RmsNormAnyKernel(const float* x, int64_t x_ld, const float* weight, float eps, int dim, T* y,
                                 int64_t y_ld, float* y_f32) {
  __shared__ float shared[33];
  const float* in = x + int64_t(blockIdx.x) * x_ld;
  float sum = 0;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) sum += in[i] * in[i];
  const float scale = rsqrtf(BlockSum(sum, shared) / float(dim) + eps);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    const float r = in[i] * scale * weight[i];
    if (y_f32 != nullptr) y_f32[int64_t(blockIdx.x) * dim + i] = r;
    if (y != nullptr) y[int64_t(blockIdx.x) * y_ld + i] = FromFloat<T>(r);
  }
}

__device__ __forceinline__ float2 Rotated(const float* x, const Rope& rope, int position, int i, int& a,
                                          int& b) {
  a = rope.interleave ? 2 * i : i;
  b = rope.interleave ? 2 * i + 1 : i + rope.half;
  const float c = rope.cos[int64_t(position) * rope.half + i],
              s = rope.sin[int64_t(position) * rope.half + i];
  return make_float2(x[a] * c - x[b] * s, x[b] * c + x[a] * s);
}

template <typename T>
__global__ void SplitQueryKernel(const float* q, const int32_t* positions, Rope rope, int heads, int nope,
                                 int rope_dim, int kv_lora, T* q_nope, T* q_full) {
  const int64_t r = blockIdx.x;
  const int dim = nope + rope_dim, full = kv_lora + rope_dim;
  for (int i = threadIdx.x; i < heads * nope; i += blockDim.x) {
    const int h = i / nope, c = i % nope;
    q_nope[r * heads * nope + i] = FromFloat<T>(q[(r * heads + h) * dim + c]);
  }
  const int position = positions[r];
  for (int i = threadIdx.x; i < heads * rope.half; i += blockDim.x) {
    const int h = i / rope.half;
    int a, b;
    const float2 v = Rotated(q + (r * heads + h) * dim + nope, rope, position, i % rope.half, a, b);
    T* out = q_full + (r * heads + h) * full + kv_lora;
    out[a] = FromFloat<T>(v.x);
    out[b] = FromFloat<T>(v.y);
  }
}

// One block of 128 threads a row: thread t holds values t, t + 128, ..., so that iteration j is fp8 tile j.
__global__ void __launch_bounds__(128)
    WriteLatentKernel(const float* ckv, int64_t ld, const float* norm, float eps, const int32_t* positions,
                      Rope rope, const int32_t* page, const int32_t* offset, int lora, int rope_dim,
                      Slab slab) {
  __shared__ float shared[33];
  __shared__ float amax[4];
  const int r = blockIdx.x, t = threadIdx.x;
  if (page[r] < 0) return;
  const float* x = ckv + int64_t(r) * ld;
  float sum = 0;
  for (int i = t; i < lora; i += 128) sum += x[i] * x[i];
  const float scale = rsqrtf(BlockSum(sum, shared) / float(lora) + eps);
  std::byte* base = MutablePage(slab, page[r]);
  const int tiles = (lora + 127) / 128;
  const bool fp8 = slab.format == Elem::kE4M3;
  const int64_t row_bytes =
      fp8 ? lora + 4 * tiles + 2 * rope_dim : int64_t(lora + rope_dim) * (slab.format == Elem::kF32 ? 4 : 2);
  std::byte* out = base + int64_t(offset[r]) * row_bytes;
  for (int j = 0; j < tiles; ++j) {
    const int i = j * 128 + t;
    const float v = i < lora ? x[i] * scale * norm[i] : 0.0f;
    if (!fp8) {
      if (i >= lora) continue;
      if (slab.format == Elem::kF32) {
        reinterpret_cast<float*>(out)[i] = v;
      } else {
        reinterpret_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(v);
      }
      continue;
    }
    const float m = WarpNanMax(fabsf(v));
    if ((t & 31) == 0) amax[t >> 5] = m;
    __syncthreads();
    const float s = ScaleOf(NanMax(NanMax(amax[0], amax[1]), NanMax(amax[2], amax[3])));
    if (i < lora) reinterpret_cast<uint8_t*>(out)[i] = ToE4M3(v / s);
    if (t == 0) reinterpret_cast<float*>(out + lora)[j] = s;
    __syncthreads();
  }
  if (t < rope.half) {
    int a, b;
    const float2 v = Rotated(x + lora, rope, positions[r], t, a, b);
    if (slab.format == Elem::kF32) {
      float* tail = reinterpret_cast<float*>(out) + lora;
      tail[a] = v.x;
      tail[b] = v.y;
    } else {
      auto* tail = reinterpret_cast<__nv_bfloat16*>(out + (fp8 ? lora + 4 * tiles : 2 * lora));
      tail[a] = __float2bfloat16_rn(v.x);
      tail[b] = __float2bfloat16_rn(v.y);
    }
  }
}

__global__ void __launch_bounds__(128)
    WriteIndexKernel(const float* k, int64_t ld, const float* norm, const float* bias, float eps,
                     const int32_t* positions, Rope rope, const int32_t* page, const int32_t* offset, int dim,
                     Slab slab) {
  extern __shared__ float row[];  // [dim]
  __shared__ float shared[33];
  __shared__ float amax[4];
  const int r = blockIdx.x, t = threadIdx.x;
  if (page[r] < 0) return;
  const float* x = k + int64_t(r) * ld;
  float sum = 0;
  for (int i = t; i < dim; i += 128) sum += x[i];
  const float mean = BlockSum(sum, shared) / float(dim);
  float var = 0;
  for (int i = t; i < dim; i += 128) var += (x[i] - mean) * (x[i] - mean);
  const float scale = rsqrtf(BlockSum(var, shared) / float(dim) + eps);
  for (int i = t; i < dim; i += 128) row[i] = (x[i] - mean) * scale * norm[i] + bias[i];
  __syncthreads();
  if (t < rope.half) {
    int a, b;
    const float2 v = Rotated(row, rope, positions[r], t, a, b);
    row[a] = v.x;  // the pair belongs to this thread alone
    row[b] = v.y;
  }
  __syncthreads();
  std::byte* base = MutablePage(slab, page[r]);
  if (slab.format == Elem::kF32) {
    for (int i = t; i < dim; i += 128) reinterpret_cast<float*>(base)[int64_t(offset[r]) * dim + i] = row[i];
    return;
  }
  if (slab.format == Elem::kBF16) {
    for (int i = t; i < dim; i += 128)
      reinterpret_cast<__nv_bfloat16*>(base)[int64_t(offset[r]) * dim + i] = __float2bfloat16_rn(row[i]);
    return;
  }
  float m = 0;
  for (int i = t; i < dim; i += 128) m = NanMax(m, fabsf(row[i]));
  m = WarpNanMax(m);
  if ((t & 31) == 0) amax[t >> 5] = m;
  __syncthreads();
  const float s = ScaleOf(NanMax(NanMax(amax[0], amax[1]), NanMax(amax[2], amax[3])));
  for (int i = t; i < dim; i += 128)
    reinterpret_cast<uint8_t*>(base)[int64_t(offset[r]) * dim + i] = ToE4M3(row[i] / s);
  if (t == 0) reinterpret_cast<float*>(base + int64_t(kPage) * dim)[offset[r]] = s;
}

constexpr int kWriteRows = 8;     // of a block of the next kernels, a warp each
constexpr int kBulkRows = 32768;  // from which on latent rows leave in one copy each

// Rows of 512 + 64 values: a warp a row, lane l takes values 4 l .. of each tile of 128 and one pair of the
// rope's. kBulk: a row is put together in shared memory and leaves in one copy. Its parts start in the middle
// of sectors, so that parts stored by themselves cost a tenth of the rate; for few rows the way through
// shared memory costs more than that.
template <bool kFp8, bool kBulk>
__global__ void __launch_bounds__(kWriteRows * 32)
    WriteLatent576Kernel(const float* ckv, int64_t ld, const float* norm, float eps, const int32_t* positions,
                         Rope rope, const int32_t* page, const int32_t* offset, int rows, Slab slab) {
  constexpr int kLora = 512, kHalf = 32;
  constexpr int64_t kRowBytes = kFp8 ? kLora + 16 + 4 * kHalf : 2 * kLora + 4 * kHalf;
  __shared__ __align__(16) std::byte staged[kBulk ? kWriteRows : 1][kRowBytes];
  const int warp = int(threadIdx.x >> 5), r = int(blockIdx.x) * kWriteRows + warp, lane = threadIdx.x & 31;
  if (r >= rows) return;
  const int32_t at = __ldg(page + r), slot = __ldg(offset + r), position = __ldg(positions + r);
  const float* x = ckv + int64_t(r) * ld;
  float4 v[4];  // before the page is known
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = __ldcs(reinterpret_cast<const float4*>(x + j * 128) + lane);
  float2 tail;
  if (rope.interleave) {
    tail = __ldcs(reinterpret_cast<const float2*>(x + kLora) + lane);
  } else {
    tail = make_float2(__ldcs(x + kLora + lane), __ldcs(x + kLora + kHalf + lane));
  }
  if (at < 0) return;
  const int64_t angle = int64_t(position) * kHalf + lane;
  const float c = __ldg(rope.cos + angle), d = __ldg(rope.sin + angle);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) sum += v[j].x * v[j].x + v[j].y * v[j].y + v[j].z * v[j].z + v[j].w * v[j].w;
  const float scale = rsqrtf(WarpSum(sum) / float(kLora) + eps);
  std::byte* row = MutablePage(slab, at) + int64_t(slot) * kRowBytes;
  std::byte* out = kBulk ? staged[warp] : row;
  float mine = 0;  // the scale of tile `lane`
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 w = __ldg(reinterpret_cast<const float4*>(norm + j * 128) + lane);
    const float4 y =
        make_float4(v[j].x * scale * w.x, v[j].y * scale * w.y, v[j].z * scale * w.z, v[j].w * scale * w.w);
    if constexpr (kFp8) {
      // As unsigned numbers magnitudes keep their order, NaN above all.
      const uint32_t most = max(max(__float_as_uint(fabsf(y.x)), __float_as_uint(fabsf(y.y))),
                                max(__float_as_uint(fabsf(y.z)), __float_as_uint(fabsf(y.w))));
      const float s = ScaleOf(__uint_as_float(__reduce_max_sync(~0u, most))), inverse = 1.0f / s;
      mine = lane == j ? s : mine;
      reinterpret_cast<uint32_t*>(out + j * 128)[lane] =
          Pack4E4M3(y.x * inverse, y.y * inverse, y.z * inverse, y.w * inverse);
    } else {
      const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(y.x, y.y), __floats2bfloat162_rn(y.z, y.w)};
      reinterpret_cast<uint2*>(out + j * 256)[lane] = *reinterpret_cast<const uint2*>(pairs);
    }
  }
  if (kFp8 && lane < 4) reinterpret_cast<float*>(out + kLora)[lane] = mine;
  auto* to = reinterpret_cast<__nv_bfloat16*>(out + (kFp8 ? kLora + 16 : 2 * kLora));
  const float a = tail.x * c - tail.y * d, b = tail.y * c + tail.x * d;
  if (rope.interleave) {
    reinterpret_cast<__nv_bfloat162*>(to)[lane] = __floats2bfloat162_rn(a, b);
  } else {
    to[lane] = __float2bfloat16_rn(a);
    to[kHalf + lane] = __float2bfloat16_rn(b);
  }
  if constexpr (kBulk) {
    FenceAsyncShared();
    __syncwarp();
    if (lane == 0) {
      BulkStore(row, SharedAddress(out), uint32_t(kRowBytes));
      BulkCommit();
      BulkWaitRead<0>();
    }
  }
}

// Index keys of 128 values, 64 of them turned, as fp8: a warp a row, four values a lane.
__global__ void __launch_bounds__(kWriteRows * 32)
    WriteIndex128Kernel(const float* k, int64_t ld, const float* norm, const float* bias, float eps,
                        const int32_t* positions, Rope rope, const int32_t* page, const int32_t* offset,
                        int rows, Slab slab) {
  constexpr int kDim = 128, kHalf = 32;
  const int r = int(blockIdx.x) * kWriteRows + int(threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (r >= rows) return;
  const int32_t at = __ldg(page + r), slot = __ldg(offset + r), position = __ldg(positions + r);
  const float4 x = __ldcs(reinterpret_cast<const float4*>(k + int64_t(r) * ld) + lane);
  if (at < 0) return;
  const float4 w = __ldg(reinterpret_cast<const float4*>(norm) + lane),
               shift = __ldg(reinterpret_cast<const float4*>(bias) + lane);
  const int64_t angle = int64_t(position) * kHalf;
  const float mean = WarpSum(x.x + x.y + x.z + x.w) / float(kDim);
  const float4 d = make_float4(x.x - mean, x.y - mean, x.z - mean, x.w - mean);
  const float scale = rsqrtf(WarpSum(d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w) / float(kDim) + eps);
  float y[4] = {d.x * scale * w.x + shift.x, d.y * scale * w.y + shift.y, d.z * scale * w.z + shift.z,
                d.w * scale * w.w + shift.w};
  if (rope.interleave) {
    if (lane < 16) {
      const float2 c = __ldg(reinterpret_cast<const float2*>(rope.cos + angle) + lane),
                   s = __ldg(reinterpret_cast<const float2*>(rope.sin + angle) + lane);
      const float a0 = y[0] * c.x - y[1] * s.x, b0 = y[1] * c.x + y[0] * s.x;
      const float a1 = y[2] * c.y - y[3] * s.y, b1 = y[3] * c.y + y[2] * s.y;
      y[0] = a0;
      y[1] = b0;
      y[2] = a1;
      y[3] = b1;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(~0u, y[i], 8);
      if (lane >= 16) continue;
      const float c = __ldg(rope.cos + angle + (lane & 7) * 4 + i),
                  s = __ldg(rope.sin + angle + (lane & 7) * 4 + i);
      y[i] = lane < 8 ? y[i] * c - other * s : y[i] * c + other * s;
    }
  }
  const uint32_t most = max(max(__float_as_uint(fabsf(y[0])), __float_as_uint(fabsf(y[1]))),
                            max(__float_as_uint(fabsf(y[2])), __float_as_uint(fabsf(y[3]))));
  const float s = ScaleOf(__uint_as_float(__reduce_max_sync(~0u, most))), inverse = 1.0f / s;
  std::byte* base = MutablePage(slab, at);
  reinterpret_cast<uint32_t*>(base + int64_t(slot) * kDim)[lane] =
      Pack4E4M3(y[0] * inverse, y[1] * inverse, y[2] * inverse, y[3] * inverse);
  if (lane == 0) reinterpret_cast<float*>(base + int64_t(kPage) * kDim)[slot] = s;
}

template <typename T>
__global__ void SiluMulKernel(const float* gate_up, int dim, T* act) {
  const int64_t r = blockIdx.y;
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (i >= dim) return;
  const float* x = gate_up + r * 2 * dim;
  if ((dim & 3) == 0) {
    const float4 g = *reinterpret_cast<const float4*>(x + i),
                 u = *reinterpret_cast<const float4*>(x + dim + i);
    T o[4] = {FromFloat<T>(Silu(g.x, u.x)), FromFloat<T>(Silu(g.y, u.y)), FromFloat<T>(Silu(g.z, u.z)),
              FromFloat<T>(Silu(g.w, u.w))};
    for (int j = 0; j < 4; ++j) act[r * dim + i + j] = o[j];
  } else {
    for (int j = i; j < min(i + 4, dim); ++j) act[r * dim + j] = FromFloat<T>(Silu(x[j], x[dim + j]));
  }
}

__global__ void GatherRowsKernel(const std::byte* src, const int32_t* index, int64_t bytes, std::byte* dst) {
  const std::byte* in = src + int64_t(index[blockIdx.x]) * bytes;
  std::byte* out = dst + int64_t(blockIdx.x) * bytes;
  if ((bytes & 15) == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
      reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(in)[i];
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = in[i];
  }
}

__global__ void FiniteRowsKernel(const float* x, int dim, int32_t* finite) {
  const float* in = x + int64_t(blockIdx.x) * dim;
  int bad = 0;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) bad |= !isfinite(in[i]);
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) finite[blockIdx.x] = bad ? 0 : 1;
}

__global__ void __launch_bounds__(1024) ArgmaxRowsKernel(const float* x, int dim, int32_t* best) {
  __shared__ float value[32];
  __shared__ int where[32];
  const float* in = x + int64_t(blockIdx.x) * dim;
  float v = -INFINITY;
  int at = dim, bad = 0;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    const float f = in[i];
    bad |= f != f || f == INFINITY;
    if (f > v) {
      v = f;
      at = i;
    }
  }
  bad = __syncthreads_or(bad);
  const auto merge = [&](float ov, int oat) {
    if (ov > v || (ov == v && oat < at)) {
      v = ov;
      at = oat;
    }
  };
  for (int o = 16; o > 0; o >>= 1) merge(__shfl_xor_sync(~0u, v, o), __shfl_xor_sync(~0u, at, o));
  if ((threadIdx.x & 31) == 0) {
    value[threadIdx.x >> 5] = v;
    where[threadIdx.x >> 5] = at;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < int(blockDim.x >> 5); ++w) merge(value[w], where[w]);
    best[blockIdx.x] = bad || at >= dim ? -1 : at;
  }
}

bool Aligned16(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

}  // namespace

void LaunchEmbed(cudaStream_t s, const void* table, Elem dtype, const float* scale, int block_n, int block_k,
                 const int32_t* tokens, int rows, int hidden, float* x) {
  if (rows == 0) return;
  EmbedKernel<<<rows, 256, 0, s>>>(table, dtype, scale, block_n, block_k, tokens, hidden, x);
}

template <typename T>
static void RmsNorm(cudaStream_t s, const float* x, int64_t x_ld, const float* w, float eps, int rows,
                    int dim, T* y, int64_t y_ld, float* y_f32) {
  const bool vector =
      (dim & 3) == 0 && (x_ld & 3) == 0 && (y_ld & 3) == 0 && (reinterpret_cast<uintptr_t>(x) & 15) == 0 &&
      (reinterpret_cast<uintptr_t>(y) & 15) == 0 && (reinterpret_cast<uintptr_t>(w) & 15) == 0;
  // The kernel follows from the row's shape alone, never from the number of rows.
  const auto start = [&](auto kernel, int threads) {
    kernel<<<rows, threads, 0, s>>>(x, x_ld, w, eps, dim, y, y_ld, y_f32);
  };
  if (vector && dim <= 1024) {
    start(RmsNormKernel<T, 1, 256>, 256);
  } else if (vector && dim <= 2048) {
    start(RmsNormKernel<T, 2, 256>, 256);
  } else if (vector && dim <= 6144) {
    start(RmsNormKernel<T, 3, 512>, 512);
  } else if (vector && dim <= 8192) {
    start(RmsNormKernel<T, 4, 512>, 512);
  } else {
    RmsNormAnyKernel<T><<<rows, 256, 0, s>>>(x, x_ld, w, eps, dim, y, y_ld, y_f32);
  }
}

void LaunchRmsNorm(cudaStream_t s, const float* x, int64_t x_ld, const float* weight, float eps, int rows,
                   int dim, void* y_act, int64_t y_ld, bool f32, float* y_f32) {
  if (rows == 0) return;
  if (f32) {
    RmsNorm<float>(s, x, x_ld, weight, eps, rows, dim, static_cast<float*>(y_act), y_ld, y_f32);
  } else {
    RmsNorm<__nv_bfloat16>(s, x, x_ld, weight, eps, rows, dim, static_cast<__nv_bfloat16*>(y_act), y_ld,
                           y_f32);
  }
}

void LaunchSplitQuery(cudaStream_t s, const float* q, const int32_t* positions, Rope rope, int rows,
                      int heads, int nope, int rope_dim, int kv_lora, void* q_nope, void* q_full, bool f32) {
  if (rows == 0) return;
  if (f32) {
    SplitQueryKernel<float><<<rows, 256, 0, s>>>(q, positions, rope, heads, nope, rope_dim, kv_lora,
                                                 static_cast<float*>(q_nope), static_cast<float*>(q_full));
  } else {
    SplitQueryKernel<__nv_bfloat16><<<rows, 256, 0, s>>>(q, positions, rope, heads, nope, rope_dim, kv_lora,
                                                         static_cast<__nv_bfloat16*>(q_nope),
                                                         static_cast<__nv_bfloat16*>(q_full));
  }
}

void LaunchWriteLatent(cudaStream_t s, const float* ckv, int64_t ld, const float* norm, float eps,
                       const int32_t* positions, Rope rope, const int32_t* page, const int32_t* offset,
                       int rows, int lora, int rope_dim, Slab slab) {
  if (rows == 0) return;
  if (lora == 512 && rope_dim == 64 && rope.half == 32 && slab.format != Elem::kF32 && ld % 4 == 0 &&
      Aligned16(ckv) && Aligned16(norm)) {
    const bool fp8 = slab.format == Elem::kE4M3;
    const bool bulk =
        rows >= kBulkRows && Aligned16(slab.base) && slab.page_bytes % 16 == 0 && slab.lane_stride % 16 == 0;
    const auto kernel = fp8 ? (bulk ? WriteLatent576Kernel<true, true> : WriteLatent576Kernel<true, false>)
                            : (bulk ? WriteLatent576Kernel<false, true> : WriteLatent576Kernel<false, false>);
    kernel<<<(rows + kWriteRows - 1) / kWriteRows, kWriteRows * 32, 0, s>>>(ckv, ld, norm, eps, positions,
                                                                            rope, page, offset, rows, slab);
    return;
  }
  WriteLatentKernel<<<rows, 128, 0, s>>>(ckv, ld, norm, eps, positions, rope, page, offset, lora, rope_dim,
                                         slab);
}

void LaunchWriteIndex(cudaStream_t s, const float* k, int64_t ld, const float* norm, const float* bias,
                      float eps, const int32_t* positions, Rope rope, const int32_t* page,
                      const int32_t* offset, int rows, int dim, int, Slab slab) {
  if (rows == 0) return;
  if (dim == 128 && rope.half == 32 && slab.format == Elem::kE4M3 && ld % 4 == 0 && Aligned16(k) &&
      Aligned16(norm) && Aligned16(bias) && Aligned16(rope.cos) && Aligned16(rope.sin)) {
    WriteIndex128Kernel<<<(rows + kWriteRows - 1) / kWriteRows, kWriteRows * 32, 0, s>>>(
        k, ld, norm, bias, eps, positions, rope, page, offset, rows, slab);
    return;
  }
  WriteIndexKernel<<<rows, 128, size_t(dim) * 4, s>>>(k, ld, norm, bias, eps, positions, rope, page, offset,
                                                      dim, slab);
}

void LaunchSiluMul(cudaStream_t s, const float* gate_up, int64_t rows, int dim, void* act, bool f32) {
  // Rows go along y in pieces, since a grid's y is limited.
  for (int64_t at = 0; at < rows; at += 65535) {
    const dim3 grid(unsigned((dim + 1023) / 1024), unsigned(std::min<int64_t>(65535, rows - at)));
    if (f32) {
      SiluMulKernel<float>
          <<<grid, 256, 0, s>>>(gate_up + at * 2 * dim, dim, static_cast<float*>(act) + at * dim);
    } else {
      SiluMulKernel<__nv_bfloat16>
          <<<grid, 256, 0, s>>>(gate_up + at * 2 * dim, dim, static_cast<__nv_bfloat16*>(act) + at * dim);
    }
  }
}

void LaunchGatherRows(cudaStream_t s, const void* src, const int32_t* index, int rows, int64_t bytes,
                      void* dst) {
  if (rows == 0) return;
  GatherRowsKernel<<<rows, 256, 0, s>>>(static_cast<const std::byte*>(src), index, bytes,
                                        static_cast<std::byte*>(dst));
}

void LaunchFiniteRows(cudaStream_t s, const float* x, int rows, int dim, int32_t* finite) {
  if (rows == 0) return;
  FiniteRowsKernel<<<rows, 256, 0, s>>>(x, dim, finite);
}

void LaunchArgmaxRows(cudaStream_t s, const float* x, int rows, int dim, int32_t* best) {
  if (rows == 0) return;
  ArgmaxRowsKernel<<<rows, 1024, 0, s>>>(x, dim, best);
}

}  // namespace sluice::cuda
