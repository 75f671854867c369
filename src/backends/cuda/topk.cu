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

constexpr int kCap = 8192;  // candidates
constexpr int kMaxK = 2048;
constexpr int kBins = 2048;
constexpr int kBatch = 4;  // 16-byte loads of a thread that are tested together

// Higher is better; the order of floats, NaN above all. Never 0.
__device__ __forceinline__ uint32_t KeyOf(float f) {
  const uint32_t u = __float_as_uint(f);
  return max(u & 0x80000000u ? ~u : u | 0x80000000u, 1u);
}
__device__ __forceinline__ float FloatOf(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Candidate {
  float score;
  uint32_t where;
};

struct Board {  // of the block's warps; two sides, so that one barrier a sum is enough
  uint32_t low[2][32], high[2][32];
  uint32_t bin, total, inside;  // what the last histogram found
  uint32_t stored;
};

// A block of kThreads and what it shares.
template <int kThreads>
struct Block {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kKeys = kCap / kThreads;  // of a thread
  Candidate* list;
  uint32_t* bins;  // zeros between the histograms
  Board& board;
  int t, lane, warp, side = 0;

  __device__ __forceinline__ uint32_t Sum(uint32_t v) {
    v = __reduce_add_sync(~0u, v);
    if (lane == 0) board.low[side][warp] = v;
    __syncthreads();
    v = __reduce_add_sync(~0u, lane < kWarps ? board.low[side][lane] : 0u);
    side ^= 1;
    return v;
  }
  __device__ __forceinline__ uint32_t Min(uint32_t v) {
    v = __reduce_min_sync(~0u, v);
    if (lane == 0) board.low[side][warp] = v;
    __syncthreads();
    v = __reduce_min_sync(~0u, lane < kWarps ? board.low[side][lane] : ~0u);
    side ^= 1;
    return v;
  }
  // Sum of v over the threads before this one.
  __device__ __forceinline__ uint32_t Before(uint32_t v) {
    uint32_t scan = v;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const uint32_t u = __shfl_up_sync(~0u, scan, o);
      if (lane >= o) scan += u;
    }
    if (lane == 31) board.low[side][warp] = scan;
    __syncthreads();
    const uint32_t warps = __reduce_add_sync(~0u, lane < warp ? board.low[side][lane] : 0u);
    side ^= 1;
    return warps + scan - v;
  }

  struct Bar {
    uint32_t key;
    uint32_t above;  // keys above all that may equal it
    uint32_t reach;  // keys that reach it
  };
  // The highest key that at least k of the `count` keys reach, or a lower one that no more than `enough`
  // reach: by histograms over a range that narrows around the k-th. Keys of 0 do not count; thread t holds
  // keys t, t + kThreads, ... of `used`.
  template <int N>
  __device__ __forceinline__ Bar FindBar(const uint32_t (&key)[N], int used, uint32_t count, uint32_t k,
                                         uint32_t enough) {
    uint32_t low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      low = min(low, key[i] == 0 ? ~0u : key[i]);
      high = max(high, key[i]);
    }
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (lane == 0) {
      board.low[side][warp] = low;
      board.high[side][warp] = high;
    }
    __syncthreads();
    low = __reduce_min_sync(~0u, lane < kWarps ? board.low[side][lane] : ~0u);
    high = __reduce_max_sync(~0u, lane < kWarps ? board.high[side][lane] : 0u);
    side ^= 1;
    uint32_t above = 0, inside = count;  // keys over high, keys of low .. high
    while (low < high && above + inside > enough) {
      const int shift = max(0, 32 - __clz(int(high - low)) - 11);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i * kThreads >= used) break;  // for the whole block
        if (key[i] >= low && key[i] <= high) atomicAdd(&bins[(key[i] - low) >> shift], 1u);
      }
      __syncthreads();
      // Each thread takes some bins, the first thread the highest.
      constexpr int kPer = kBins / kThreads;
      uint32_t* from = bins + kBins - (t + 1) * kPer;
      uint32_t mine[kPer], sum = 0;
#pragma unroll
      for (int x = 0; x < kPer; x += 2) {
        auto* pair = reinterpret_cast<uint2*>(from + x);
        const uint2 v = *pair;
        *pair = make_uint2(0, 0);
        mine[x] = v.x;
        mine[x + 1] = v.y;
        sum += v.x + v.y;
      }
      uint32_t before = Before(sum);
      const uint32_t need = k - above;
      if (before < need && need <= before + sum) {
        bool open = true;
#pragma unroll
        for (int x = kPer - 1; x >= 0; --x) {
          if (!open) continue;
          before += mine[x];
          if (before < need) continue;
          open = false;
          board.bin = uint32_t(kBins - (t + 1) * kPer + x);
          board.total = before;
          board.inside = mine[x];
        }
      }
      __syncthreads();
      inside = board.inside;
      above += board.total - inside;
      low += board.bin << shift;
      high = min(high, low + ((1u << shift) - 1));
    }
    return {low, above, above + inside};
  }

  struct Cut {
    uint32_t bar;         // keys above it stay
    uint32_t last_where;  // and those equal to it up to this position
    __device__ __forceinline__ bool Stays(const Candidate& c) const {
      const uint32_t key = KeyOf(c.score);
      return key > bar || (key == bar && c.where <= last_where);
    }
  };
  // How to cut the list to its best k.
  __device__ __forceinline__ Cut FindCut(uint32_t count, uint32_t k) {
    uint32_t key[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const uint32_t at = uint32_t(i * kThreads + t);
      key[i] = at < count ? KeyOf(list[at].score) : 0;
    }
    const Bar bar = FindBar(key, int(count), count, k, k);
    if (bar.reach == k) return {bar.key, ~0u};
      // The bar is the k-th key itself and has equals: the lowest positions stay.
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
      key[i] = key[i] == bar.key && key[i] != 0 ? ~list[i * kThreads + t].where : 0;
    const uint32_t need = k - bar.above;
    return {bar.key, ~FindBar(key, int(count), bar.reach - bar.above, need, need).key};
  }

  // Appends the scores whose bit in `pass` is set, score i from position where(i). What would not fit is
  // counted, not written. Which place a score gets is left to chance: the list has no order.
  template <int N, typename Where>
  __device__ __forceinline__ void Append(unsigned pass, const float (&f)[N], Where where) {
    const uint32_t count = uint32_t(__popc(pass));
    uint32_t scan = count;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const uint32_t u = __shfl_up_sync(~0u, scan, o);
      if (lane >= o) scan += u;
    }
    uint32_t end = 0;
    if (lane == 31) end = atomicAdd(&board.stored, scan) + scan;
    end = __shfl_sync(~0u, end, 31);
    if (end > kCap) return;  // for the whole warp
    Candidate* to = list + (end - __shfl_sync(~0u, scan, 31) + scan - count);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (pass >> i & 1) *to++ = {f[i], uint32_t(where(i))};
    }
  }
};

__device__ __forceinline__ float4 Scores(const float* row, int at, int n) {
  return at < n ? __ldcs(reinterpret_cast<const float4*>(row + at)) : make_float4(0, 0, 0, 0);
}

// Calls fn(position, four keys) for the whole row, all lanes of a warp together; keys past the end are 0.
template <int kThreads, typename Fn>
__device__ __forceinline__ void StreamKeys(const float* row, int n, Fn fn) {
  constexpr int kRound = kThreads * 4;
  float4 v[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) v[j] = Scores(row, j * kRound + int(threadIdx.x) * 4, n);
  for (int base = 0; base < n; base += kBatch * kRound) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int at = base + j * kRound + int(threadIdx.x) * 4;
      if (base + j * kRound >= n) break;  // for the whole block
      const float4 x = v[j];
      v[j] = Scores(row, at + kBatch * kRound, n);
      uint32_t k[4] = {KeyOf(x.x), KeyOf(x.y), KeyOf(x.z), KeyOf(x.w)};
#pragma unroll
      for (int i = 0; i < 4; ++i) k[i] = at + i < n ? k[i] : 0u;
      fn(at, k);
    }
  }
}

template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    TopKKernel(const float* scores, int64_t ld, const int32_t* positions, const int32_t* seq_of_row, int topk,
               int32_t* selected, int32_t* count_out, float* gap) {
  extern __shared__ __align__(16) uint32_t smem[];  // bins; the list, then bit maps
  using B = Block<kThreads>;
  constexpr int kRound = kThreads * 4, kKeys = B::kKeys;
  __shared__ Board board;
  uint32_t* maps = smem + kBins;
  B b{reinterpret_cast<Candidate*>(maps),
      smem,
      board,
      int(threadIdx.x),
      int(threadIdx.x & 31),
      int(threadIdx.x >> 5)};
  const int r = blockIdx.x, t = b.t;
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
  const bool sampled = n > 2 * kRound;
  float4 sample = make_float4(0, 0, 0, 0), next[kBatch];
  if (sampled) sample = *reinterpret_cast<const float4*>(row + int64_t(n / 4) * t / kThreads * 4);
  const float4* from = reinterpret_cast<const float4*>(row) + t;
  int left = n - t * 4;  // scores from there
  const auto fetch = [&] {
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      next[j] = left > j * kRound ? __ldcs(from + j * kThreads) : make_float4(0, 0, 0, 0);
    from += kBatch * kThreads;
    left -= kBatch * kRound;
  };
  fetch();
  for (int i = t; i < kBins; i += kThreads) b.bins[i] = 0;
  if (t == 0) board.stored = 0;
  uint32_t bar = 0;
  if (sampled) {
    // A bar from a sample of the row, on the safe side of the expected place of the k-th: one of its scores.
    const uint32_t key[4] = {KeyOf(sample.x), KeyOf(sample.y), KeyOf(sample.z), KeyOf(sample.w)};
    const float expected = float(kRound) * float(topk) / float(n);
    const uint32_t rank = min(uint32_t(kRound), uint32_t(expected + 4.5f * sqrtf(expected) + 8.0f));
    bar = b.FindBar(key, kRound, uint32_t(kRound), rank, rank + rank / 32).key;
    uint32_t lowest = ~0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) lowest = key[i] >= bar ? min(lowest, key[i]) : lowest;
    bar = b.Min(lowest);
  } else {
    __syncthreads();
  }
  // Scores are compared as floats, and only what passes becomes a key: a NaN passes, and -0 where the bar is
  // 0.
  const float lowest_kept = bar == 0 ? -INFINITY : FloatOf(bar);
  for (int base = 0; base < n; base += kBatch * kRound) {
    float f[kBatch * 4];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      f[j * 4] = next[j].x;
      f[j * 4 + 1] = next[j].y;
      f[j * 4 + 2] = next[j].z;
      f[j * 4 + 3] = next[j].w;
    }
    fetch();
    unsigned pass = 0;
#pragma unroll
    for (int i = 0; i < kBatch * 4; ++i) pass |= unsigned(!(f[i] < lowest_kept)) << i;
    const int at = base + t * 4;
    if (base + kBatch * kRound > n) {  // the end of the row
#pragma unroll
      for (int i = 0; i < kBatch * 4; ++i) {
        if (at + (i >> 2) * kRound + (i & 3) >= n) pass &= ~(1u << i);
      }
    }
    b.Append(pass, f, [&](int i) { return at + (i >> 2) * kRound + (i & 3); });
  }
  __syncthreads();
  uint32_t held = board.stored;
  typename B::Cut cut{0, ~0u};
  bool marked = false;  // the bit map is made
  if (held >= k && held <= kCap) {
    cut = b.FindCut(held, k);
  } else if (held > kCap && bar != 0 && 2 * words <= 2 * kCap) {
    // Many reach the bar. When fewer than k lie above it, it is the k-th score: mark those above and those
    // equal. Eight lanes make a word.
    uint32_t* above = maps;
    uint32_t* equal = maps + words;
    uint32_t count = 0;
    StreamKeys<kThreads>(row, n, [&](int at, const uint32_t(&key)[4]) {
      uint32_t a = 0, e = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a |= uint32_t(key[i] > bar) << i;
        e |= uint32_t(key[i] == bar) << i;
      }
      count += uint32_t(__popc(a));
      a <<= at & 31;
      e <<= at & 31;
#pragma unroll
      for (int o = 1; o < 8; o <<= 1) {
        a |= __shfl_xor_sync(~0u, a, o);
        e |= __shfl_xor_sync(~0u, e, o);
      }
      if ((b.lane & 7) == 0 && at < n) {
        above[at >> 5] = a;
        equal[at >> 5] = e;
      }
    });
    count = b.Sum(count);  // and a barrier for the marks
    if (count < k) {
      // The first `need` equals in order.
      const uint32_t need = k - count;
      const int per = (words + kThreads - 1) / kThreads, begin = min(t * per, words),
                end = min(begin + per, words);
      uint32_t mine = 0;
      for (int i = begin; i < end; ++i) mine += uint32_t(__popc(equal[i]));
      uint32_t before = b.Before(mine);
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
    // A rising bar: what does not beat the k-th best so far is dropped; a full list is cut to its best k.
    // Positions ascend, so a later equal never beats an earlier one.
    __syncthreads();
    if (t == 0) board.stored = 0;
    bar = 0;
    held = 0;
    __syncthreads();
    for (int base = 0; base < n; base += kRound) {
      if (held > kCap - kRound) {
        const typename B::Cut c = b.FindCut(held, k);
        Candidate kept[kKeys];
        unsigned keep = 0;
        uint32_t low = ~0u;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const uint32_t at = uint32_t(i * kThreads + t);
          if (at >= held) break;
          kept[i] = b.list[at];
          if (!c.Stays(kept[i])) continue;
          keep |= 1u << i;
          low = min(low, KeyOf(kept[i].score));
        }
        bar = b.Min(low);
        if (t == 0) board.stored = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          if (keep >> i & 1) b.list[atomicAdd(&board.stored, 1u)] = kept[i];
        }
        __syncthreads();
      }
      const int at = base + t * 4;
      const float4 v = Scores(row, at, n);
      const float f[4] = {v.x, v.y, v.z, v.w};
      unsigned pass = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) pass |= unsigned(at + i < n && KeyOf(f[i]) > bar) << i;
      b.Append(pass, f, [&](int i) { return at + i; });
      __syncthreads();
      held = board.stored;
      __syncthreads();
    }
    cut = b.FindCut(held, k);
  }
  if (!marked) {
    // Winners into a bit map over the list's own memory.
    uint32_t won[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const uint32_t at = uint32_t(i * kThreads + t);
      won[i] = at < held && cut.Stays(b.list[at]) ? b.list[at].where : ~0u;
    }
    __syncthreads();
    for (int i = t; i < words; i += kThreads) maps[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (won[i] != ~0u) atomicOr(&maps[won[i] >> 5], 1u << (won[i] & 31));
    }
    __syncthreads();
  }
  const int per = (words + kThreads - 1) / kThreads, begin = min(t * per, words),
            end = min(begin + per, words);
  uint32_t mine = 0;
  for (int i = begin; i < end; ++i) mine += uint32_t(__popc(maps[i]));
  uint32_t place = b.Before(mine);
  for (int i = begin; i < end; ++i) {
    for (uint32_t bits = maps[i]; bits != 0; bits &= bits - 1) out[place++] = i * 32 + __ffs(int(bits)) - 1;
  }
  if (t == 0) count_out[r] = topk;
  if (gap == nullptr) return;
  // For tests: the lowest score that was chosen minus the highest that was not.
  uint32_t lowest = ~0u, highest = 0;
  for (int i = t; i < n; i += kThreads) {
    const uint32_t key = KeyOf(row[i]);
    if (maps[i >> 5] >> (i & 31) & 1) {
      lowest = min(lowest, key);
    } else {
      highest = max(highest, key);
    }
  }
  lowest = b.Min(lowest);
  highest = ~b.Min(~highest);
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

template <int kThreads, int kBlocks>
void StartTopK(cudaStream_t s, const float* scores, int64_t ld, const int32_t* positions,
               const int32_t* seq_of_row, int rows, int topk, int max_context, int32_t* selected,
               int32_t* count, float* gap) {
  const int bytes = kBins * 4 + std::max(kCap * int(sizeof(Candidate)), (max_context + 31) / 32 * 4);
  static int sized = 0;
  if (bytes > sized) {
    if (cudaFuncSetAttribute(TopKKernel<kThreads, kBlocks>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes) != cudaSuccess)
      return;
    sized = bytes;
  }
  TopKKernel<kThreads, kBlocks>
      <<<rows, kThreads, bytes, s>>>(scores, ld, positions, seq_of_row, topk, selected, count, gap);
}

}  // namespace

// Few rows take a whole multiprocessor each; the chosen set is the same.
void LaunchTopK(cudaStream_t s, const float* scores, int64_t ld, const int32_t* positions,
                const int32_t* seq_of_row, int rows, int topk, int max_context, int32_t* selected,
                int32_t* count, float* gap) {
  if (rows == 0 || topk > kMaxK) return;
  const auto start = rows <= 132 ? StartTopK<1024, 1> : StartTopK<512, 2>;
  start(s, scores, ld, positions, seq_of_row, rows, topk, max_context, selected, count, gap);
}

void LaunchSelectAll(cudaStream_t s, const int32_t* positions, const int32_t* seq_of_row, int rows, int topk,
                     int32_t* selected, int32_t* count, float* gap) {
  if (rows == 0) return;
  SelectAllKernel<<<rows, 256, 0, s>>>(positions, seq_of_row, topk, selected, count, gap);
}

}  // namespace sluice::cuda
