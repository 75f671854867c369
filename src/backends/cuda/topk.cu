// The best k of each row of scores by (score descending, position ascending).
//
// One pass for almost every row: a sample spread over the row gives a bar that a little more than k scores
// reach; the scores that reach it are collected in shared memory in one stream past it and cut down to the
// best k. Where the bar itself is the k-th score and most of the row equals it (ties), a second pass marks
// what lies above it and the first of its equals. Rows whose sample misled (sorted runs, spikes) are streamed
// with a bar that rises as better scores come. All ways choose the same set, and the winners are read off a
// bit map in order.
#include <algorithm>

#include "backends/cuda/device.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kCap = 8192;              // candidates
constexpr int kKeys = kCap / kThreads;  // of a thread
constexpr int kMaxK = 2048;
constexpr int kFlight = 4;  // 16-byte loads of a thread in flight

// Higher is better; the order of floats, NaN above all. Never 0.
__device__ __forceinline__ uint32_t KeyOf(float f) {
  const uint32_t u = __float_as_uint(f);
  return max(u & 0x80000000u ? ~u : u | 0x80000000u, 1u);
}
__device__ __forceinline__ float FloatOf(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Board {  // sums over the block; two sides, so that one barrier a sum is enough
  uint32_t low[2][kWarps], high[2][kWarps];
};

__device__ __forceinline__ void BlockSums(uint32_t a, uint32_t b, Board& board, int& side, uint32_t& sum_a,
                                          uint32_t& sum_b) {
  a = __reduce_add_sync(~0u, a);
  b = __reduce_add_sync(~0u, b);
  const int lane = threadIdx.x & 31;
  if (lane == 0) {
    board.low[side][threadIdx.x >> 5] = a;
    board.high[side][threadIdx.x >> 5] = b;
  }
  __syncthreads();
  sum_a = __reduce_add_sync(~0u, lane < kWarps ? board.low[side][lane] : 0u);
  sum_b = __reduce_add_sync(~0u, lane < kWarps ? board.high[side][lane] : 0u);
  side ^= 1;
}

// The highest bar that at least k of the keys reach, two bits a round; stops as soon as exactly k reach it,
// or with the bits under `last` zero. Keys of 0 do not count. `reach` is how many do.
template <int N>
__device__ __forceinline__ uint32_t FindBar(const uint32_t (&key)[N], uint32_t k, uint32_t count, int last,
                                            Board& board, int& side, uint32_t& reach) {
  // The bits that all keys share need no round.
  uint32_t low = ~0u, high = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    low = min(low, key[i] == 0 ? ~0u : key[i]);
    high = max(high, key[i]);
  }
  low = __reduce_min_sync(~0u, low);
  high = __reduce_max_sync(~0u, high);
  const int lane = threadIdx.x & 31;
  if (lane == 0) {
    board.low[side][threadIdx.x >> 5] = low;
    board.high[side][threadIdx.x >> 5] = high;
  }
  __syncthreads();
  low = __reduce_min_sync(~0u, lane < kWarps ? board.low[side][lane] : ~0u);
  high = __reduce_max_sync(~0u, lane < kWarps ? board.high[side][lane] : 0u);
  side ^= 1;
  reach = count;
  if (low >= high) return high;
  const int first = (31 - __clz(int(low ^ high))) & ~1;
  uint32_t bar = first == 30 ? 0 : high >> (first + 2) << (first + 2);
  for (int bit = first; bit >= last && reach != k; bit -= 2) {
    const uint32_t t1 = bar | (1u << bit), t2 = bar | (2u << bit), t3 = bar | (3u << bit);
    uint32_t n12 = 0, n3 = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      n12 += (key[i] >= t1 ? 1u : 0u) + (key[i] >= t2 ? 0x10000u : 0u);
      n3 += key[i] >= t3 ? 1u : 0u;
    }
    BlockSums(n12, n3, board, side, n12, n3);
    const uint32_t n1 = n12 & 0xffff, n2 = n12 >> 16;
    if (n3 >= k) {
      bar = t3;
      reach = n3;
    } else if (n2 >= k) {
      bar = t2;
      reach = n2;
    } else if (n1 >= k) {
      bar = t1;
      reach = n1;
    }
  }
  return bar;
}

__device__ __forceinline__ uint32_t BlockMin(uint32_t v, Board& board, int& side) {
  v = __reduce_min_sync(~0u, v);
  const int lane = threadIdx.x & 31;
  if (lane == 0) board.low[side][threadIdx.x >> 5] = v;
  __syncthreads();
  v = __reduce_min_sync(~0u, lane < kWarps ? board.low[side][lane] : ~0u);
  side ^= 1;
  return v;
}

struct Cut {
  uint32_t bar;         // keys above it stay
  uint32_t last_where;  // and those equal to it up to this position
};

// How to cut the buffer to its best k.
__device__ __forceinline__ Cut FindCut(const uint32_t* keys, const uint32_t* where, uint32_t count,
                                       uint32_t k, Board& board, int& side) {
  const int t = threadIdx.x;
  uint32_t key[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) key[i] = uint32_t(i * kThreads + t) < count ? keys[i * kThreads + t] : 0;
  uint32_t reach;
  const uint32_t bar = FindBar(key, k, count, 0, board, side, reach);
  Cut cut{bar, ~0u};
  if (reach == k) return cut;
  // The bar is the k-th key itself and has equals: the lowest positions stay.
  uint32_t above = 0, unused;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) above += key[i] > bar;
  BlockSums(above, 0, board, side, above, unused);
  const uint32_t need = k - above;
  uint32_t p = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t tried = p | (1u << bit);
    uint32_t n = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) n += key[i] == bar && where[i * kThreads + t] < tried;
    BlockSums(n, 0, board, side, n, unused);
    if (n < need) p = tried;
  }
  cut.last_where = p;
  return cut;
}

__device__ __forceinline__ bool Stays(const Cut& cut, uint32_t key, uint32_t where) {
  return key > cut.bar || (key == cut.bar && where <= cut.last_where);
}

// Appends the positions [at, at + 4) whose bit in `pass` is set; places past the end are counted, not
// written. Which place a position gets is left to chance: the buffer has no order.
__device__ __forceinline__ void Append(unsigned pass, const uint32_t (&k)[4], int at, uint32_t* keys,
                                       uint32_t* where, uint32_t* stored) {
  const int lane = threadIdx.x & 31;
  const unsigned below = (1u << lane) - 1;
  uint32_t mine[4], count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned mask = __ballot_sync(~0u, pass >> i & 1);
    mine[i] = count + uint32_t(__popc(mask & below));
    count += uint32_t(__popc(mask));
  }
  uint32_t place = 0;
  if (lane == 0) place = atomicAdd(stored, count);
  place = __shfl_sync(~0u, place, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((pass >> i & 1) && place + mine[i] < kCap) {
      keys[place + mine[i]] = k[i];
      where[place + mine[i]] = uint32_t(at + i);
    }
  }
}

// Calls fn(position, four scores) for the whole row, all lanes of a warp together; scores past the end mean
// nothing.
template <typename Fn>
__device__ __forceinline__ void StreamScores(const float* row, int n, Fn fn) {
  constexpr int kRound = kThreads * 4;
  float4 v[kFlight];
  const auto fetch = [&](int base, float4& x) {
    const int at = base + int(threadIdx.x) * 4;
    if (at < n) x = __ldcs(reinterpret_cast<const float4*>(row + at));
  };
#pragma unroll
  for (int j = 0; j < kFlight; ++j) fetch(j * kRound, v[j]);
  for (int base = 0; base < n; base += kFlight * kRound) {
#pragma unroll
    for (int j = 0; j < kFlight; ++j) {
      const int at = base + j * kRound + int(threadIdx.x) * 4;
      if (base + j * kRound >= n) break;  // for the whole block
      const float4 x = v[j];
      fetch(base + (j + kFlight) * kRound, v[j]);
      fn(at, x);
    }
  }
}
// The same with keys; those past the end are 0.
template <typename Fn>
__device__ __forceinline__ void Stream(const float* row, int n, Fn fn) {
  StreamScores(row, n, [&](int at, const float4& x) {
    uint32_t k[4] = {KeyOf(x.x), KeyOf(x.y), KeyOf(x.z), KeyOf(x.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) k[i] = at + i < n ? k[i] : 0u;
    fn(at, k);
  });
}

__global__ void __launch_bounds__(kThreads, 2)
    TopKKernel(const float* scores, int64_t ld, const int32_t* positions, const int32_t* seq_of_row, int topk,
               int32_t* selected, int32_t* count_out, float* gap) {
  extern __shared__ __align__(16) uint32_t smem[];
  uint32_t* keys = smem;
  uint32_t* where = smem + kCap;
  __shared__ Board board;
  __shared__ uint32_t stored;
  const int r = blockIdx.x, t = threadIdx.x, lane = t & 31;
  int32_t* out = selected + int64_t(r) * topk;
  const int n = seq_of_row[r] < 0 ? 0 : positions[r] + 1;
  if (n <= topk) {
    for (int i = t; i < topk; i += kThreads) out[i] = i < n ? i : -1;
    if (t == 0) {
      count_out[r] = n;
      if (gap != nullptr) gap[r] = INFINITY;
    }
    return;
  }
  const float* row = scores + int64_t(r) * ld;
  const uint32_t k = uint32_t(topk);
  const int words = (n + 31) / 32;
  int side = 0;
  uint32_t bar = 0;
  // A bar from a sample of the row, on the safe side of the expected place of the k-th.
  if (n > 2 * kThreads * 4) {
    const int at = int(int64_t(n / 4) * t / kThreads) * 4;
    const float4 v = *reinterpret_cast<const float4*>(row + at);
    const uint32_t sample[4] = {KeyOf(v.x), KeyOf(v.y), KeyOf(v.z), KeyOf(v.w)};
    const float expected = 4.0f * kThreads * float(topk) / float(n);
    const uint32_t rank = min(uint32_t(4 * kThreads), uint32_t(expected + 5.0f * sqrtf(expected) + 8.0f));
    uint32_t reach;
    bar = FindBar(sample, rank, 4 * kThreads, 12, board, side, reach);
  }
  if (t == 0) stored = 0;
  __syncthreads();
  // Scores are compared as floats, and only what passes becomes a key: a NaN passes, and -0 where the bar is
  // 0.
  const float lowest_kept = bar == 0 ? -INFINITY : FloatOf(bar);
  StreamScores(row, n, [&](int at, const float4& x) {
    const float f[4] = {x.x, x.y, x.z, x.w};
    unsigned pass = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) pass |= unsigned(at + i < n && !(f[i] < lowest_kept)) << i;
    if (__any_sync(~0u, pass != 0)) {
      const uint32_t key[4] = {KeyOf(f[0]), KeyOf(f[1]), KeyOf(f[2]), KeyOf(f[3])};
      Append(pass, key, at, keys, where, &stored);
    }
  });
  __syncthreads();
  uint32_t held = stored;
  Cut cut{0, ~0u};
  bool marked = false;  // the bit map is made
  if (held >= k && held <= kCap) {
    cut = FindCut(keys, where, held, k, board, side);
  } else if (held > kCap && bar != 0 && 2 * words <= 2 * kCap) {
    // Many reach the bar. When fewer than k lie above it, it is the k-th score: mark those above and those
    // equal.
    uint32_t* above = smem;
    uint32_t* equal = smem + words;
    for (int i = t; i < 2 * words; i += kThreads) smem[i] = 0;
    __syncthreads();
    uint32_t count = 0, unused;
    Stream(row, n, [&](int at, const uint32_t(&key)[4]) {
      unsigned a = 0, e = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a |= unsigned(key[i] > bar) << i;
        e |= unsigned(key[i] == bar) << i;
      }
      count += uint32_t(__popc(a));
      if (a != 0) atomicOr(&above[at >> 5], a << (at & 31));
      if (e != 0) atomicOr(&equal[at >> 5], e << (at & 31));
    });
    BlockSums(count, 0, board, side, count, unused);  // and a barrier for the marks
    if (count < k) {
      // The first `need` equals in order.
      const uint32_t need = k - count;
      const int per = (words + kThreads - 1) / kThreads, begin = min(t * per, words),
                end = min(begin + per, words);
      uint32_t mine = 0;
      for (int i = begin; i < end; ++i) mine += uint32_t(__popc(equal[i]));
      uint32_t scan = mine;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const uint32_t u = __shfl_up_sync(~0u, scan, o);
        if (lane >= o) scan += u;
      }
      if (lane == 31) board.low[side][t >> 5] = scan;
      __syncthreads();
      uint32_t before = scan - mine;
      for (int w = 0; w < (t >> 5); ++w) before += board.low[side][w];
      side ^= 1;
      for (int i = begin; i < end; ++i) {
        uint32_t bits = equal[i], take = 0;
        for (; bits != 0 && before < need; bits &= bits - 1, ++before) take |= bits & (~bits + 1);
        above[i] |= take;
      }
      marked = true;
      __syncthreads();
    } else {
      held = 0;
    }
  } else {
    held = 0;
  }
  if (!marked && (held < k || held > kCap)) {
    // A rising bar: what does not beat the k-th best so far is dropped; a full buffer is cut to its best k.
    // Positions ascend, so a later equal never beats an earlier one.
    constexpr int kRound = kThreads * 4;
    __syncthreads();
    if (t == 0) stored = 0;
    bar = 0;
    held = 0;
    __syncthreads();
    for (int base = 0; base < n; base += kRound) {
      if (held > kCap - kRound) {
        const Cut c = FindCut(keys, where, held, k, board, side);
        uint32_t kept_key[kKeys], kept_where[kKeys];
        uint32_t low = ~0u;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const uint32_t at = uint32_t(i * kThreads + t);
          kept_key[i] = at < held ? keys[at] : 0;
          kept_where[i] = at < held ? where[at] : 0;
          if (kept_key[i] == 0 || !Stays(c, kept_key[i], kept_where[i])) kept_key[i] = 0;
          if (kept_key[i] != 0) low = min(low, kept_key[i]);
        }
        bar = BlockMin(low, board, side);
        if (t == 0) stored = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          if (kept_key[i] == 0) continue;
          const uint32_t place = atomicAdd(&stored, 1u);
          keys[place] = kept_key[i];
          where[place] = kept_where[i];
        }
        __syncthreads();
      }
      const int at = base + t * 4;
      uint32_t key[4] = {0, 0, 0, 0};
      if (at < n) {
        const float4 v = *reinterpret_cast<const float4*>(row + at);
        const float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) key[i] = at + i < n ? KeyOf(f[i]) : 0;
      }
      unsigned pass = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) pass |= unsigned(key[i] > bar) << i;
      if (__any_sync(~0u, pass != 0)) Append(pass, key, at, keys, where, &stored);
      __syncthreads();
      held = stored;
      __syncthreads();
    }
    cut = FindCut(keys, where, held, k, board, side);
  }
  if (!marked) {
    // Winners into a bit map over the buffer's own memory.
    uint32_t won[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const uint32_t at = uint32_t(i * kThreads + t);
      won[i] = at < held && Stays(cut, keys[at], where[at]) ? where[at] : ~0u;
    }
    __syncthreads();
    for (int i = t; i < words; i += kThreads) smem[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (won[i] != ~0u) atomicOr(&smem[won[i] >> 5], 1u << (won[i] & 31));
    }
    __syncthreads();
  }
  const uint32_t* map = smem;
  const int per = (words + kThreads - 1) / kThreads, begin = min(t * per, words),
            end = min(begin + per, words);
  int mine = 0;
  for (int i = begin; i < end; ++i) mine += __popc(map[i]);
  int scan = mine;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int u = __shfl_up_sync(~0u, scan, o);
    if (lane >= o) scan += u;
  }
  if (lane == 31) board.low[side][t >> 5] = uint32_t(scan);
  __syncthreads();
  int place = scan - mine;
  for (int w = 0; w < (t >> 5); ++w) place += int(board.low[side][w]);
  side ^= 1;
  for (int i = begin; i < end; ++i) {
    for (uint32_t bits = map[i]; bits != 0; bits &= bits - 1) out[place++] = i * 32 + __ffs(int(bits)) - 1;
  }
  if (t == 0) count_out[r] = topk;
  if (gap == nullptr) return;
  // For tests: the lowest score that was chosen minus the highest that was not.
  uint32_t lowest = ~0u, highest = 0;
  for (int i = t; i < n; i += kThreads) {
    const uint32_t key = KeyOf(row[i]);
    if (map[i >> 5] >> (i & 31) & 1) {
      lowest = min(lowest, key);
    } else {
      highest = max(highest, key);
    }
  }
  __syncthreads();
  lowest = BlockMin(lowest, board, side);
  highest = ~BlockMin(~highest, board, side);
  if (t == 0) gap[r] = FloatOf(lowest) - FloatOf(highest);
}

__global__ void SelectAllKernel(const int32_t* positions, const int32_t* seq_of_row, int topk,
                                int32_t* selected, int32_t* count, float* gap) {
  const int r = blockIdx.x;
  const int n = seq_of_row[r] < 0 ? 0 : min(positions[r] + 1, topk);
  for (int i = threadIdx.x; i < topk; i += blockDim.x) selected[int64_t(r) * topk + i] = i < n ? i : -1;
  if (threadIdx.x == 0) {
    count[r] = n;
    if (gap != nullptr) gap[r] = INFINITY;
  }
}

}  // namespace

void LaunchTopK(cudaStream_t s, const float* scores, int64_t ld, const int32_t* positions,
                const int32_t* seq_of_row, int rows, int topk, int max_context, int32_t* selected,
                int32_t* count, float* gap) {
  if (rows == 0 || topk > kMaxK) return;
  const int bytes = std::max(2 * kCap * 4, (max_context + 31) / 32 * 4);
  static int sized = 0;
  if (bytes > sized) {
    if (cudaFuncSetAttribute(TopKKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
      return;
    sized = bytes;
  }
  TopKKernel<<<rows, kThreads, bytes, s>>>(scores, ld, positions, seq_of_row, topk, selected, count, gap);
}

void LaunchSelectAll(cudaStream_t s, const int32_t* positions, const int32_t* seq_of_row, int rows, int topk,
                     int32_t* selected, int32_t* count, float* gap) {
  if (rows == 0) return;
  SelectAllKernel<<<rows, 256, 0, s>>>(positions, seq_of_row, topk, selected, count, gap);
}

}  // namespace sluice::cuda
