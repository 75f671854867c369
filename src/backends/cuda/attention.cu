// Attention of a row over latent rows of its sequence: a kernel for any shape, and the merge of split
// results.
#include "backends/cuda/device.cuh"

namespace sluice::cuda {
namespace {

__device__ __forceinline__ float LatentValue(const Slab& slab, const std::byte* row, int lora, int i) {
  if (slab.format == Elem::kF32) return reinterpret_cast<const float*>(row)[i];
  if (slab.format == Elem::kBF16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
  const int tiles = (lora + 127) / 128;
  if (i >= lora)
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row + lora + 4 * tiles)[i - lora]);
  return E4M3Value(reinterpret_cast<const uint8_t*>(row)[i]) *
         reinterpret_cast<const float*>(row + lora)[i / 128];
}

// One block a (row, head), 64 keys at a time, f32 arithmetic.
template <typename T>
__global__ void __launch_bounds__(128) AttendAnyKernel(const __grid_constant__ Attend a) {
  extern __shared__ float mem[];  // q [dim], out [lora], p [64]
  __shared__ float shared_max, shared_sum;
  const int dim = a.kv_lora + a.rope, r = blockIdx.x, h = blockIdx.y, t = threadIdx.x, warp = t >> 5,
            lane = t & 31;
  float* q = mem;
  float* acc = mem + dim;
  float* p = acc + a.kv_lora;
  __shared__ const std::byte* rows[64];
  const int seq = a.seqs.seq_of_row[r];
  T* out = static_cast<T*>(a.out) + (int64_t(r) * a.heads + h) * a.kv_lora;
  const int n = seq < 0 ? 0 : a.selected != nullptr ? a.count[r] : a.seqs.positions[r] + 1;
  if (n == 0) {
    for (int i = t; i < a.kv_lora; i += 128) out[i] = FromFloat<T>(0.0f);
    return;
  }
  const T* in = static_cast<const T*>(a.q) + (int64_t(r) * a.heads + h) * dim;
  for (int i = t; i < dim; i += 128) q[i] = ToFloat(in[i]);
  for (int i = t; i < a.kv_lora; i += 128) acc[i] = 0;
  const int tiles = (a.kv_lora + 127) / 128;
  const int64_t row_bytes = a.slab.format == Elem::kE4M3  ? a.kv_lora + 4 * tiles + 2 * a.rope
                            : a.slab.format == Elem::kF32 ? 4 * dim
                                                          : 2 * dim;
  float max = -INFINITY, sum = 0;
  for (int j0 = 0; j0 < n; j0 += 64) {
    const int keys = min(64, n - j0);
    __syncthreads();
    if (t < keys) {
      const int position = a.selected != nullptr ? a.selected[int64_t(r) * a.topk + j0 + t] : j0 + t;
      const int slot = position + a.seqs.slot_shift;
      rows[t] =
          PageAddress(a.slab, a.seqs.pages[a.seqs.page_begin[seq] + (slot >> 6)]) + (slot & 63) * row_bytes;
    }
    __syncthreads();
    for (int j = warp; j < keys; j += 4) {
      float dot = 0;
      for (int i = lane; i < dim; i += 32) dot = fmaf(q[i], LatentValue(a.slab, rows[j], a.kv_lora, i), dot);
      dot = WarpSum(dot);
      if (lane == 0) p[j] = dot * a.scale;
    }
    __syncthreads();
    if (warp == 0) {
      const float x = lane < keys ? p[lane] : -INFINITY, y = lane + 32 < keys ? p[lane + 32] : -INFINITY;
      const float m = fmaxf(max, WarpNanMax(NanMax(x, y)));
      const float ex = lane < keys ? expf(x - m) : 0.0f, ey = lane + 32 < keys ? expf(y - m) : 0.0f;
      const float total = WarpSum(ex + ey);
      p[lane] = ex;
      p[lane + 32] = ey;
      if (lane == 0) {
        shared_max = m;
        shared_sum = total;
      }
    }
    __syncthreads();
    const float rescale = max == shared_max ? 1.0f : expf(max - shared_max);
    max = shared_max;
    sum = sum * rescale + shared_sum;
    for (int i = t; i < a.kv_lora; i += 128) {
      float v = acc[i] * rescale;
      for (int j = 0; j < keys; ++j) v = fmaf(p[j], LatentValue(a.slab, rows[j], a.kv_lora, i), v);
      acc[i] = v;
    }
  }
  for (int i = t; i < a.kv_lora; i += 128) out[i] = FromFloat<T>(acc[i] / sum);
}

}  // namespace

void LaunchAttendAny(cudaStream_t s, const Attend& a) {
  if (a.seqs.rows == 0) return;
  const dim3 grid(unsigned(a.seqs.rows), unsigned(a.heads));
  const size_t bytes = size_t(2 * a.kv_lora + a.rope + 64) * 4;
  if (a.f32) {
    AttendAnyKernel<float><<<grid, 128, bytes, s>>>(a);
  } else {
    AttendAnyKernel<__nv_bfloat16><<<grid, 128, bytes, s>>>(a);
  }
}

}  // namespace sluice::cuda
