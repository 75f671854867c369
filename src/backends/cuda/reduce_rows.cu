// Rows of logits to what the sampler needs of them: one block a request. Sums that a token depends on are
// made in the sampler's order and arithmetic; what merely bounds a list (the histogram) is not.
#define SLUICE_EVERYWHERE __device__
#include "backends/cuda/kernels.h"
#include "base/row_arithmetic.h"

namespace sluice::cuda {
namespace {

// nvcc would fuse a product with a sum, unless it is told for each.
struct Exact {
  static __device__ float Mul(float a, float b) { return __fmul_rn(a, b); }
  static __device__ float Add(float a, float b) { return __fadd_rn(a, b); }
  static __device__ float Div(float a, float b) { return __fdiv_rn(a, b); }
  static __device__ int32_t BitsOf(float v) { return __float_as_int(v); }
  static __device__ float FloatOf(int32_t v) { return __int_as_float(v); }
};

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kSumBlock = 64;  // of SumBlocks
constexpr int kBins = 1024;    // of weights: an eighth of an octave each
constexpr int kBinShift = 20;

__device__ __forceinline__ unsigned long long MaxOf(unsigned long long v) {
  for (int d = 16; d > 0; d /= 2) {
    const unsigned long long o = __shfl_xor_sync(0xffffffffu, v, d);
    v = o > v ? o : v;
  }
  return v;
}

struct Shared {
  unsigned long long best[kWarps];
  int low[kWarps];
  float near[kWarps];
  int count[kBins];
  float sum[kBins];
  double total;
  uint64_t hash[4];
  float threshold;
  int listed, block, last;
  int32_t drawn;
};

// Smallest of the greatest weights' bins that hold `k` tokens, or the sum `wanted`; 0: all of them do not.
// By one warp, a lane for 32 bins, the highest first.
__device__ int EndBin(const Shared& s, int k, float wanted) {
  const int lane = threadIdx.x, top = kBins - 1 - 32 * lane;
  int count = 0;
  float sum = 0;
  for (int i = 0; i < 32; ++i) {
    count += s.count[top - i];
    sum += s.sum[top - i];
  }
  int before = count;
  float sum_before = sum;
  for (int d = 1; d < 32; d *= 2) {
    const int c = __shfl_up_sync(0xffffffffu, before, d);
    const float f = __shfl_up_sync(0xffffffffu, sum_before, d);
    if (lane >= d) {
      before += c;
      sum_before += f;
    }
  }
  before -= count;
  sum_before -= sum;
  int end = 0;
  for (int i = 0; i < 32 && end == 0; ++i) {
    before += s.count[top - i];
    sum_before += s.sum[top - i];
    if (k > 0 ? before >= k : sum_before >= wanted) end = top - i;
  }
  return int(__reduce_max_sync(0xffffffffu, unsigned(end)));
}

__device__ void HashLanes(const float* x, int vocab, Shared& s) {
  const int lane = threadIdx.x;
  uint64_t h = row::HashSeed(lane);
#pragma unroll 8
  for (int turn = 0; turn < vocab / 8; ++turn) {
    const auto* word = reinterpret_cast<const uint32_t*>(x + turn * 8 + lane * 2);
    h = row::HashTurn(h, uint64_t(word[1]) << 32 | word[0]);
  }
  s.hash[lane] = h;
}

// Sums of 64 weights each, then the sums of all up to each, in order.
__device__ void SumInOrder(const float* x, int vocab, float max, float temperature, double* upto, Shared& s) {
  const int blocks = (vocab + kSumBlock - 1) / kSumBlock;
  for (int b = threadIdx.x; b < blocks; b += kThreads) {
    const int begin = b * kSumBlock, end = min(vocab, begin + kSumBlock);
    double sum = 0;
#pragma unroll 8
    for (int i = begin; i < end; ++i)
      sum = __dadd_rn(sum, double(row::Weight<Exact>(x[i], max, temperature)));
    upto[b] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
      total = __dadd_rn(total, upto[b]);
      upto[b] = total;
    }
    s.total = total;
    s.block = blocks;
    s.last = -1;
  }
  __syncthreads();
}

__device__ void DrawAmongAll(const float* x, int vocab, float max, float temperature, double uniform,
                             const double* upto, Shared& s) {
  const int blocks = (vocab + kSumBlock - 1) / kSumBlock;
  const double target = __dmul_rn(uniform, s.total);
  for (int b = threadIdx.x; b < blocks; b += kThreads)
    if (upto[b] > target) {
      atomicMin(&s.block, b);
      break;
    }
  __syncthreads();
  if (s.block == blocks) {  // rounding left nothing behind the target: the last token that can come
    for (int i = threadIdx.x; i < vocab; i += kThreads)
      if (row::Weight<Exact>(x[i], max, temperature) > 0) atomicMax(&s.last, i);
    __syncthreads();
    if (threadIdx.x == 0) s.drawn = s.last;
    return;
  }
  if (threadIdx.x != 0) return;
  const int begin = s.block * kSumBlock, end = min(vocab, begin + kSumBlock);
  const double before = s.block > 0 ? upto[s.block - 1] : 0;
  double inside = 0;
  int drawn = 0;
  for (int i = begin; i < end; ++i) {
    const float w = row::Weight<Exact>(x[i], max, temperature);
    if (w <= 0) continue;
    drawn = i;
    inside = __dadd_rn(inside, double(w));
    if (__dadd_rn(before, inside) > target) break;
  }
  s.drawn = drawn;
}

__device__ void ListCandidates(const float* x, int vocab, float max, const RowRequest& q, Shared& s,
                               RowCandidate* list) {
  const bool by_histogram = q.top_k > 0 || q.top_p < 1.0f;
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    s.count[i] = 0;
    s.sum[i] = 0;
  }
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  if (by_histogram) {
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const float w = row::Weight<Exact>(x[i], max, q.temperature);
      if (!(w > 0)) continue;
      const int bin = Exact::BitsOf(w) >> kBinShift;
      atomicAdd(&s.count[bin], 1);
      atomicAdd(&s.sum[bin], w);
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    const int end = by_histogram ? EndBin(s, q.top_k, q.top_p * float(s.total) * 1.0001f) : 0;
    float threshold = Exact::FloatOf(end << kBinShift);
    if (q.top_k == 0) threshold = fmaxf(threshold, q.min_p);
    if (threadIdx.x == 0) s.threshold = threshold;
  }
  __syncthreads();
  const float threshold = s.threshold;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const float w = row::Weight<Exact>(x[i], max, q.temperature);
    if (!(w > 0) || w < threshold) continue;
    const int at = atomicAdd(&s.listed, 1);
    if (at >= kMostCandidates) continue;
    list[at].weight = w;
    list[at].token = i;
  }
}

__global__ void __launch_bounds__(kThreads)
    ReduceRowsKernel(const float* logits, int vocab, const RowRequest* requests, ReducedRow* out,
                     RowCandidate* candidates) {
  extern __shared__ double upto[];
  __shared__ __align__(8) unsigned char asked[sizeof(RowRequest)];
  __shared__ Shared s;
  if (threadIdx.x < sizeof(RowRequest) / 4)
    reinterpret_cast<uint32_t*>(asked)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(requests + blockIdx.x)[threadIdx.x];
  __syncthreads();
  const RowRequest& q = *reinterpret_cast<const RowRequest*>(asked);
  const float* x = logits + int64_t(q.place) * vocab;
  const int warp = threadIdx.x / 32;

  unsigned long long best = 0;  // order of the value, then of lower ids
  int low = 0x7fffffff;
#pragma unroll 4
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const int key = row::OrderKey<Exact>(x[i]);
    const unsigned long long mine =
        (unsigned long long)(uint32_t(key) ^ 0x80000000u) << 32 | (0xffffffffu - uint32_t(i));
    best = mine > best ? mine : best;
    low = min(low, key);
  }
  best = MaxOf(best);
  low = __reduce_min_sync(0xffffffffu, low);
  if (threadIdx.x % 32 == 0) {
    s.best[warp] = best;
    s.low[warp] = low;
  }
  __syncthreads();
  best = MaxOf(s.best[threadIdx.x % 32]);
  low = __reduce_min_sync(0xffffffffu, s.low[threadIdx.x % 32]);
  const int high = int(uint32_t(best >> 32) ^ 0x80000000u);
  const float max = row::OfOrderKey<Exact>(high);
  ReducedRow r;
  r.max = max;
  r.unusable = row::Unusable(high, low);
  if (r.unusable) {
    if (threadIdx.x == 0) out[blockIdx.x] = r;
    return;
  }
  r.best = int32_t(0xffffffffu - uint32_t(best));

  if (q.hash && threadIdx.x < 4) HashLanes(x, vocab, s);
  if (q.near) {
    float near = 0;
    for (int i = threadIdx.x; i < vocab; i += kThreads)
      if (x[i] > max - kNearRange) near += __expf(x[i] - max);
    for (int d = 16; d > 0; d /= 2) near += __shfl_xor_sync(0xffffffffu, near, d);
    if (threadIdx.x % 32 == 0) s.near[warp] = near;
  }
  if (threadIdx.x == 0) s.drawn = -1;
  __syncthreads();
  if (q.temperature > 0) {
    if (!q.filtered || (q.top_k == 0 && q.top_p < 1.0f)) {
      SumInOrder(x, vocab, max, q.temperature, upto, s);
    } else {
      if (threadIdx.x == 0) s.total = 0;
      __syncthreads();
    }
    if (q.filtered) {
      ListCandidates(x, vocab, max, q, s, candidates + int64_t(blockIdx.x) * kMostCandidates);
    } else {
      DrawAmongAll(x, vocab, max, q.temperature, q.uniform, upto, s);
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (q.near)
    for (int w = 0; w < kWarps; ++w) r.near_sum += s.near[w];
  if (q.hash) {
    for (int l = 0; l < 4; ++l) r.hash_lane[l] = s.hash[l];
    for (int i = 0; i < vocab % 8; ++i) r.hash_tail[i] = x[vocab / 8 * 8 + i];
  }
  if (q.temperature > 0) {
    r.total = s.total;
    if (q.filtered) {
      r.threshold = s.threshold;
      r.candidates = s.listed;
    } else {
      r.drawn = s.drawn;
      r.drawn_value = x[s.drawn];
    }
  }
  out[blockIdx.x] = r;
}

}  // namespace

cudaError_t LaunchReduceRows(cudaStream_t s, const float* logits, int vocab, const RowRequest* request,
                             int requests, ReducedRow* out, RowCandidate* candidates) {
  static_assert(sizeof(RowRequest) % 4 == 0);
  if (requests == 0) return cudaSuccess;
  constexpr int kMostShared = 160 << 10;
  static const cudaError_t sized =
      cudaFuncSetAttribute(ReduceRowsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared);
  const int bytes = (vocab + kSumBlock - 1) / kSumBlock * 8;
  if (sized != cudaSuccess || bytes > kMostShared)
    return sized != cudaSuccess ? sized : cudaErrorInvalidValue;
  ReduceRowsKernel<<<requests, kThreads, size_t(bytes), s>>>(logits, vocab, request, out, candidates);
  return cudaSuccess;
}

}  // namespace sluice::cuda
