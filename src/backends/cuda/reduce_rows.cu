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
// Of weights, a 64th of an octave each, from 2^-32 on; the first holds all below, the last is closed at 1.
constexpr int kBins = 2048, kLanes = 32, kBinsALane = kBins / kLanes;
constexpr int kBinShift = 17, kFirstBin = (127 - 32) << (23 - kBinShift);

__device__ __forceinline__ int BinOf(float weight) {
  return max(0, min(kBins - 1, (Exact::BitsOf(weight) >> kBinShift) - kFirstBin));
}
__device__ __forceinline__ float BinBegin(int bin) {
  return bin == 0 ? 0.0f : Exact::FloatOf((bin + kFirstBin) << kBinShift);
}

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
  uint2 list[kMostCandidates];
  double total;
  uint64_t hash[4];
  float threshold;
  int listed, block, last;
  int32_t drawn;
};

// The highest bin from which on there are `k` tokens; 0: there are fewer. By one warp, the lanes from the
// top.
__device__ int BinOfTopK(const int* count, int k) {
  const int top = kBins - 1 - kBinsALane * int(threadIdx.x);
  int mine = 0;
  for (int i = 0; i < kBinsALane; ++i) mine += count[top - i];
  int before = mine;
  for (int d = 1; d < kLanes; d *= 2) {
    const int o = __shfl_up_sync(0xffffffffu, before, d);
    if (int(threadIdx.x) >= d) before += o;
  }
  before -= mine;
  int bin = 0;
  for (int i = 0; i < kBinsALane && bin == 0; ++i) {
    before += count[top - i];
    if (before >= k) bin = top - i;
  }
  return int(__reduce_max_sync(0xffffffffu, unsigned(bin)));
}

// The highest bin below which all tokens together weigh no more than `most`, each counted as its bin's end.
// By one warp, the lanes from the bottom.
__device__ int BinOfTail(const int* count, float most) {
  const int bottom = kBinsALane * int(threadIdx.x);
  float mine = 0;
  for (int i = 0; i < kBinsALane; ++i) mine += float(count[bottom + i]) * BinBegin(bottom + i + 1);
  float before = mine;
  for (int d = 1; d < kLanes; d *= 2) {
    const float o = __shfl_up_sync(0xffffffffu, before, d);
    if (int(threadIdx.x) >= d) before += o;
  }
  before -= mine;
  int bin = 0;
  for (int i = 0; i < kBinsALane && before <= most; ++i) {
    bin = bottom + i;
    before += float(count[bin]) * BinBegin(bin + 1);
  }
  return int(__reduce_max_sync(0xffffffffu, unsigned(bin)));
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
  for (int i = threadIdx.x; i < kBins; i += kThreads) s.count[i] = 0;
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  if (by_histogram) {
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const float w = row::Weight<Exact>(x[i], max, q.temperature);
      if (w > 0) atomicAdd(&s.count[BinOf(w)], 1);
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    // Rounding apart, what top_p leaves out is at most the tail's share: the list holds all that it keeps.
    const int bin = q.top_k > 0    ? BinOfTopK(s.count, q.top_k)
                    : by_histogram ? BinOfTail(s.count, float((1.0 - double(q.top_p)) * s.total) * 0.999f)
                                   : 0;
    float threshold = BinBegin(bin);
    if (q.top_k == 0) threshold = fmaxf(threshold, q.min_p);
    if (threadIdx.x == 0) s.threshold = threshold;
  }
  __syncthreads();
  const float threshold = s.threshold;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const float w = row::Weight<Exact>(x[i], max, q.temperature);
    if (!(w > 0) || w < threshold) continue;
    const int at = atomicAdd(&s.listed, 1);
    if (at < kMostCandidates) s.list[at] = make_uint2(uint32_t(Exact::BitsOf(w)), uint32_t(i));
  }
  // Over the link in whole lines.
  static_assert(sizeof(RowCandidate) == sizeof(uint2));
  __syncthreads();
  const int listed = min(s.listed, kMostCandidates);
  for (int i = threadIdx.x; i < listed; i += kThreads) reinterpret_cast<uint2*>(list)[i] = s.list[i];
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
