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
    GateSelectKernel(const float* scores, const float* bias, int experts, int topk, bool softmax,
                     bool normalize, int groups, int groups_kept, bool sum_top2, float scaling,
                     int32_t* expert, float* expert_weight) {
  extern __shared__ float mem[];
  float* score = mem;             // [experts]
  float* choice = mem + experts;  // [experts]
  float* group_score = mem + 2 * experts;
  const int lane = threadIdx.x;
  const int64_t r = blockIdx.x;
  const float* in = scores + r * experts;
  float max = -INFINITY;
  for (int e = lane; e < experts; e += 32) max = fmaxf(max, in[e]);
  for (int o = 16; o > 0; o >>= 1) max = fmaxf(max, __shfl_xor_sync(~0u, max, o));
  float sum = 0;
  for (int e = lane; e < experts; e += 32) {
    score[e] = softmax ? expf(in[e] - max) : 1.0f / (1.0f + expf(-in[e]));
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
    for (int g = lane; g < groups; g += 32) {
      float first = -INFINITY, second = -INFINITY;
      for (int e = g * size; e < (g + 1) * size; ++e) {
        if (choice[e] > first) {
          second = first;
          first = choice[e];
        } else {
          second = fmaxf(second, choice[e]);
        }
      }
      group_score[g] = sum_top2 ? first + second : first;
    }
    __syncwarp();
    for (int g = lane; g < groups; g += 32) {
      int better = 0;
      for (int o = 0; o < groups; ++o)
        better += group_score[o] > group_score[g] || (group_score[o] == group_score[g] && o < g);
      if (better >= groups_kept) {
        for (int e = g * size; e < (g + 1) * size; ++e) choice[e] = -INFINITY;
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
    expert_weight[r * topk + k] = (normalize ? w / (total + 1e-20f) : w) * scaling;
  }
}

// Counting sort in one block: order inside an expert follows the pair's number, so it is the same every time.
__global__ void __launch_bounds__(1024)
    SortPairsKernel(const int32_t* expert, int pairs, int experts, int tile, int32_t* begins, int32_t* sorted,
                    int32_t* tile_group, int max_sorted) {
  extern __shared__ int32_t count[];  // [experts]
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
  }
  __syncthreads();
  for (int i = t; i < max_sorted; i += 1024) sorted[i] = -1;
  for (int i = t; i < max_sorted / tile; i += 1024) tile_group[i] = -1;
  __syncthreads();
  for (int e = t; e < experts; e += 1024) {
    for (int i = begins[e]; i < begins[e] + count[e]; i += tile) tile_group[i / tile] = e;
  }
  __syncthreads();
  // Each warp places the pairs of its own experts, in order.
  for (int e = warp; e < experts; e += 32) {
    if (count[e] == 0) continue;
    int at = begins[e];
    for (int p0 = 0; p0 < pairs; p0 += 32) {
      const bool hit = p0 + lane < pairs && expert[p0 + lane] == e;
      const unsigned mask = __ballot_sync(~0u, hit);
      if (hit) sorted[at + __popc(mask & ((1u << lane) - 1))] = p0 + lane;
      at += __popc(mask);
    }
  }
}

__global__ void CombineKernel(const float* out, const int32_t* expert, const float* weight, int topk,
                              int hidden, float* y) {
  const int64_t r = blockIdx.y;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= hidden) return;
  float v = y[r * hidden + i];
  for (int k = 0; k < topk; ++k) {
    if (expert[r * topk + k] >= 0) v += weight[r * topk + k] * out[(r * topk + k) * hidden + i];
  }
  y[r * hidden + i] = v;
}

}  // namespace

void LaunchGate(cudaStream_t s, const float* x, const float* weight, const float* bias, int rows, int hidden,
                int experts, int topk, bool softmax, bool normalize, int groups, int groups_kept,
                bool sum_top2, float scaling, float* scores, int32_t* expert, float* expert_weight) {
  if (rows == 0) return;
  GateScoreKernel<<<dim3(unsigned((rows + 7) / 8), unsigned((experts + 31) / 32)), 256, 0, s>>>(
      x, weight, rows, hidden, experts, scores);
  GateSelectKernel<<<rows, 32, size_t(2 * experts + groups) * 4, s>>>(
      scores, bias, experts, topk, softmax, normalize, groups, groups_kept, sum_top2, scaling, expert,
      expert_weight);
}

void LaunchSortPairs(cudaStream_t s, const int32_t* expert, int pairs, int experts, int tile, int32_t*,
                     int32_t* begins, int32_t* sorted, int32_t* tile_group, int max_sorted) {
  SortPairsKernel<<<1, 1024, size_t(experts) * 4, s>>>(expert, pairs, experts, tile, begins, sorted,
                                                       tile_group, max_sorted);
}

void LaunchCombine(cudaStream_t s, const float* out, const int32_t* expert, const float* weight, int rows,
                   int topk, int hidden, float* y) {
  for (int at = 0; at < rows; at += 65535) {
    CombineKernel<<<dim3(unsigned((hidden + 255) / 256), unsigned(std::min(65535, rows - at))), 256, 0, s>>>(
        out + int64_t(at) * topk * hidden, expert + int64_t(at) * topk, weight + int64_t(at) * topk, topk,
        hidden, y + int64_t(at) * hidden);
  }
}

}  // namespace sluice::cuda
