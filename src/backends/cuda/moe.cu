// Routing, sorting of (row, slot) pairs by expert, and the weighted sum of the experts' outputs.
#include <algorithm>

#include "backends/cuda/device.cuh"

namespace sluice::cuda {
namespace {

// 8 rows x 32 experts a block; a warp holds 4 experts and splits the inputs over its lanes.
__global__ void __launch_bounds__(256)
    GateScoreKernel(const float* x, const float* weight, int rows, int hidden, int experts, float* scores) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int r0 = blockIdx.x * 8, e0 = blockIdx.y * 32 + warp * 4;
  float acc[8][4] = {};
  for (int k = lane; k < hidden; k += 32) {
    float xv[8], wv[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) xv[i] = r0 + i < rows ? x[int64_t(r0 + i) * hidden + k] : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) wv[j] = e0 + j < experts ? weight[int64_t(e0 + j) * hidden + k] : 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(xv[i], wv[j], acc[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float v = WarpSum(acc[i][j]);
      if (lane == 0 && r0 + i < rows && e0 + j < experts) scores[int64_t(r0 + i) * experts + e0 + j] = v;
    }
  }
}

// One warp a row; candidates stay in shared memory.
__global__ void __launch_bounds__(32)
    GateSelectKernel(const float* scores, int parts, const __grid_constant__ Gate g) {
  const int experts = g.experts, topk = g.topk, groups = g.groups;
  const bool softmax = g.softmax;
  const float* bias = g.bias;
  int32_t* expert = g.expert;
  float* expert_weight = g.expert_weight;
  extern __shared__ float mem[];
  float* score = mem;             // [experts]
  float* choice = mem + experts;  // [experts]
  float* group_score = mem + 2 * experts;
  const int lane = threadIdx.x;
  const int64_t r = blockIdx.x;
  float max = -INFINITY;
  for (int e = lane; e < experts; e += 32) {
    float v = 0;
    for (int p = parts - 1; p >= 0; --p)
      v += scores[(int64_t(p) * g.rows + r) * experts + e];  // the small ones first
    score[e] = v;
    max = fmaxf(max, v);
  }
  for (int o = 16; o > 0; o >>= 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, o));
  float sum = 0;
  for (int e = lane; e < experts; e += 32) {
    score[e] = softmax ? expf(score[e] - max) : 1.0f / (1.0f + expf(-score[e]));
    sum += score[e];
  }
  sum = WarpSum(sum);
  for (int e = lane; e < experts; e += 32) {
    if (softmax) score[e] /= sum;
    choice[e] = score[e] + (bias != nullptr ? bias[e] : 0.0f);
  }
  __syncwarp();
  if (groups > 1) {
    const int size = experts / groups;
    for (int at = lane; at < groups; at += 32) {
      float first = -INFINITY, second = -INFINITY;
      for (int e = at * size; e < (at + 1) * size; ++e) {
        if (choice[e] > first) {
          second = first;
          first = choice[e];
        } else {
          second = fmaxf(second, choice[e]);
        }
      }
      group_score[at] = g.sum_top2 ? first + second : first;
    }
    __syncwarp();
    for (int at = lane; at < groups; at += 32) {
      int better = 0;
      for (int o = 0; o < groups; ++o)
        better += group_score[o] > group_score[at] || (group_score[o] == group_score[at] && o < at);
      if (better >= g.groups_kept) {
        for (int e = at * size; e < (at + 1) * size; ++e) choice[e] = -INFINITY;
      }
    }
    __syncwarp();
  }
  float total = 0, mine = 0;
  int my_expert = -1;
  for (int k = 0; k < topk; ++k) {
    float best = -INFINITY;
    int at = experts;
    for (int e = lane; e < experts; e += 32) {
      if (choice[e] > best || (choice[e] == best && e < at)) {
        best = choice[e];
        at = e;
      }
    }
    for (int o = 16; o > 0; o >>= 1) {
      const float ob = __shfl_xor_sync(~0u, best, o);
      const int oa = __shfl_xor_sync(~0u, at, o);
      if (ob > best || (ob == best && oa < at)) {
        best = ob;
        at = oa;
      }
    }
    if (at >= experts) at = 0;  // NaN scores: the row is found not finite later
    total += score[at];
    if (lane == k % 32) {
      mine = score[at];
      my_expert = at;
    }
    __syncwarp();
    if (lane == 0) choice[at] = -INFINITY;
    __syncwarp();
    if (k % 32 == 31 || k + 1 == topk) {
      const int slot = k / 32 * 32 + lane;
      if (slot <= k) {
        expert[r * topk + slot] = my_expert;
        expert_weight[r * topk + slot] = mine;
      }
    }
  }
  __syncwarp();
  for (int k = lane; k < topk; k += 32) {
    const float w = expert_weight[r * topk + k];
    expert_weight[r * topk + k] = (g.normalize ? w / (total + 1e-20f) : w) * g.scaling;
  }
}

// Where each expert's pairs begin, and whose each tile is.
__global__ void __launch_bounds__(1024)
    CountPairsKernel(const int32_t* expert, int pairs, int experts, int tile, int32_t* begins,
                     int32_t* tile_group, int max_tiles) {
  extern __shared__ int32_t count[];  // [experts]
  __shared__ int32_t used;
  const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
  for (int e = t; e < experts; e += 1024) count[e] = 0;
  __syncthreads();
  for (int p = t; p < pairs; p += 1024) {
    if (expert[p] >= 0) atomicAdd(&count[expert[p]], 1);
  }
  __syncthreads();
  if (warp == 0) {  // padded starts
    int at = 0;
    for (int e0 = 0; e0 < experts; e0 += 32) {
      const int e = e0 + lane;
      const int padded = e < experts ? (count[e] + tile - 1) / tile * tile : 0;
      int scan = padded;
      for (int o = 1; o < 32; o <<= 1) {
        const int v = __shfl_up_sync(~0u, scan, o);
        if (lane >= o) scan += v;
      }
      if (e < experts) begins[e] = at + scan - padded;
      at += __shfl_sync(~0u, scan, 31);
    }
    if (lane == 0) {
      used = at / tile;
      tile_group[max_tiles] = used;
    }
  }
  __syncthreads();
  for (int i = used + t; i < max_tiles; i += 1024) tile_group[i] = -1;
  for (int e = t; e < experts; e += 1024) {
    for (int i = 0; i < count[e]; i += tile) tile_group[(begins[e] + i) / tile] = e;
  }
}

// One block an expert: its pairs in order of their numbers, then -1 to the end of its last tile.
__global__ void __launch_bounds__(256)
    PlacePairsKernel(const int32_t* expert, int pairs, int tile, const int32_t* begins, int32_t* sorted) {
  __shared__ int32_t sums[2][8];
  const int e = blockIdx.x, t = threadIdx.x, warp = t >> 5, lane = t & 31, begin = begins[e];
  int at = begin, side = 0;
  for (int p0 = 0; p0 < pairs; p0 += 1024, side ^= 1) {
    unsigned mask[4];
    int mine = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int p = p0 + warp * 128 + j * 32 + lane;
      mask[j] = __ballot_sync(~0u, p < pairs && __ldg(expert + p) == e);
      mine += __popc(mask[j]);
    }
    if (lane == 0) sums[side][warp] = mine;
    __syncthreads();
    int before = at;
    for (int w = 0; w < 8; ++w) {
      if (w < warp) before += sums[side][w];
      at += sums[side][w];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (mask[j] >> lane & 1)
        sorted[before + __popc(mask[j] & ((1u << lane) - 1))] = p0 + warp * 128 + j * 32 + lane;
      before += __popc(mask[j]);
    }
  }
  const int end = begin + (at - begin + tile - 1) / tile * tile;
  for (int i = at + t; i < end; i += 256) sorted[i] = -1;
}

template <typename T>
__global__ void CombineKernel(const T* out, const int32_t* expert, const float* weight, int topk, int hidden,
                              float* y) {
  const int64_t r = blockIdx.y;
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (i >= hidden) return;
  if ((hidden & 3) != 0) {
    for (int c = i; c < min(i + 4, hidden); ++c) {
      float v = y[r * hidden + c];
      for (int k = 0; k < topk; ++k) {
        if (expert[r * topk + k] >= 0)
          v = fmaf(weight[r * topk + k], ToFloat(out[(r * topk + k) * hidden + c]), v);
      }
      y[r * hidden + c] = v;
    }
    return;
  }
  float4 v = *reinterpret_cast<const float4*>(y + r * hidden + i);
#pragma unroll 8
  for (int k = 0; k < topk; ++k) {
    if (__ldg(expert + r * topk + k) < 0) continue;
    const float w = __ldg(weight + r * topk + k);
    const T* from = out + (r * topk + k) * hidden + i;
    float4 x;
    if constexpr (sizeof(T) == 4) {
      x = *reinterpret_cast<const float4*>(from);
    } else {
      const uint2 raw = *reinterpret_cast<const uint2*>(from);
      const float2 lo = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.x)),
                   hi = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.y));
      x = make_float4(lo.x, lo.y, hi.x, hi.y);
    }
    v = make_float4(fmaf(w, x.x, v.x), fmaf(w, x.y, v.y), fmaf(w, x.z, v.z), fmaf(w, x.w, v.w));
  }
  *reinterpret_cast<float4*>(y + r * hidden + i) = v;
}

constexpr int kGateChunks = 4;  // parts of the inputs whose products are summed apart

}  // namespace

bool GateTakesPlanes(int hidden, int experts) { return hidden % 64 == 0 && experts % 2 == 0; }
int GateScoreParts(int hidden) { return 6 * (hidden % (64 * kGateChunks) == 0 ? kGateChunks : 1); }

cudaError_t LaunchGate(cudaStream_t s, const Gate& g) {
  if (g.rows == 0) return cudaSuccess;
  int parts = 1;
  if (g.weight_planes != nullptr) {
    // x w = (x0 + x1 + x2)(w0 + w1 + w2) without the products that are under f32's last bit.
    constexpr int8_t kX[6] = {0, 0, 1, 1, 0, 2}, kW[6] = {0, 1, 0, 1, 2, 0};
    LaunchSplitBF16(s, g.x, int64_t(g.rows) * g.hidden, g.x_planes);
    parts = GateScoreParts(g.hidden);
    Gemm m;
    m.rows = g.rows;
    m.n = g.experts;
    m.k = g.hidden;
    m.x = g.x_planes;
    m.x_ld = g.hidden;
    m.x_group = int64_t(g.rows) * g.hidden;
    m.w = g.weight_planes;
    m.y = g.scores;
    m.y_ld = g.experts;
    m.y_group = int64_t(g.rows) * g.experts;
    m.pieces.count = parts;
    m.pieces.k = g.hidden / (parts / 6);
    for (int i = 0; i < parts; ++i) {
      m.pieces.x[i] = kX[i / (parts / 6)];
      m.pieces.w[i] = kW[i / (parts / 6)];
      m.pieces.k_block[i] = int16_t(i % (parts / 6) * m.pieces.k / 64);
    }
    const cudaError_t error = LaunchWgmmaGemm(s, m);
    if (error != cudaSuccess) return error;
  } else {
    GateScoreKernel<<<dim3(unsigned((g.rows + 7) / 8), unsigned((g.experts + 31) / 32)), 256, 0, s>>>(
        g.x, g.weight, g.rows, g.hidden, g.experts, g.scores);
  }
  GateSelectKernel<<<g.rows, 32, size_t(2 * g.experts + g.groups) * 4, s>>>(g.scores, parts, g);
  return cudaGetLastError();
}

void LaunchSortPairs(cudaStream_t s, const int32_t* expert, int pairs, int experts, int tile, int32_t*,
                     int32_t* begins, int32_t* sorted, int32_t* tile_group, int max_sorted) {
  CountPairsKernel<<<1, 1024, size_t(experts) * 4, s>>>(expert, pairs, experts, tile, begins, tile_group,
                                                        max_sorted / tile);
  PlacePairsKernel<<<experts, 256, 0, s>>>(expert, pairs, tile, begins, sorted);
}

void LaunchCombine(cudaStream_t s, const void* out, bool bf16, const int32_t* expert, const float* weight,
                   int rows, int topk, int hidden, float* y) {
  for (int at = 0; at < rows; at += 65535) {
    const dim3 grid(unsigned((hidden + 1023) / 1024), unsigned(std::min(65535, rows - at)));
    const int64_t first = int64_t(at) * topk;
    if (bf16) {
      CombineKernel<<<grid, 256, 0, s>>>(static_cast<const __nv_bfloat16*>(out) + first * hidden,
                                         expert + first, weight + first, topk, hidden,
                                         y + int64_t(at) * hidden);
    } else {
      CombineKernel<<<grid, 256, 0, s>>>(static_cast<const float*>(out) + first * hidden, expert + first,
                                         weight + first, topk, hidden, y + int64_t(at) * hidden);
    }
  }
}

}  // namespace sluice::cuda
