// The lightning indexer's scores: sum over heads of relu(q . k) * w, for every position that a row sees.
#include <algorithm>

#include "backends/cuda/device.cuh"
#include "backends/cuda/index_scores.h"

namespace sluice::cuda {
namespace {

// One warp a (row, head): rope on the first dims, then the number format of the product. Factors go into the
// weight.
__global__ void __launch_bounds__(128)
    IndexQueryKernel(const float* q, const float* head_weight, float scale, const int32_t* positions,
                     Rope rope, int pairs, int heads, int dim, int rope_dim, IndexQuery out) {
  const int pair = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (pair >= pairs) return;
  const int row = pair / out.heads, head = pair % out.heads;
  if (head >= heads) {  // padding: no part of any score
    for (int i = lane; i < dim; i += 32) {
      if (out.format == Elem::kE4M3) {
        static_cast<uint8_t*>(out.q)[int64_t(pair) * dim + i] = 0;
      } else if (out.format == Elem::kBF16) {
        static_cast<__nv_bfloat16*>(out.q)[int64_t(pair) * dim + i] = __float2bfloat16_rn(0.0f);
      } else {
        static_cast<float*>(out.q)[int64_t(pair) * dim + i] = 0;
      }
    }
    if (lane == 0) out.w[pair] = 0;
    return;
  }
  const float* x = q + (int64_t(row) * heads + head) * dim;
  const auto value = [&](int i) -> float {
    if (i >= rope_dim) return x[i];
    const int p = rope.interleave ? i >> 1 : i % rope.half;
    const bool second = rope.interleave ? (i & 1) != 0 : i >= rope.half;
    const int a = rope.interleave ? 2 * p : p, b = rope.interleave ? 2 * p + 1 : p + rope.half;
    const float c = rope.cos[int64_t(positions[row]) * rope.half + p],
                s = rope.sin[int64_t(positions[row]) * rope.half + p];
    return second ? x[b] * c + x[a] * s : x[a] * c - x[b] * s;
  };
  float w = head_weight[int64_t(row) * heads + head] * scale;
  if (out.format == Elem::kE4M3) {
    float m = 0;
    for (int i = lane; i < dim; i += 32) m = NanMax(m, fabsf(value(i)));
    const float s = ScaleOf(WarpNanMax(m));
    for (int i = lane; i < dim; i += 32)
      static_cast<uint8_t*>(out.q)[int64_t(pair) * dim + i] = ToE4M3(value(i) / s);
    w *= s;
  } else if (out.format == Elem::kBF16) {
    for (int i = lane; i < dim; i += 32)
      static_cast<__nv_bfloat16*>(out.q)[int64_t(pair) * dim + i] = __float2bfloat16_rn(value(i));
  } else {
    for (int i = lane; i < dim; i += 32) static_cast<float*>(out.q)[int64_t(pair) * dim + i] = value(i);
  }
  if (lane == 0) out.w[pair] = w;
}

__device__ __forceinline__ int32_t PageOf(const Seqs& s, int seq, int page) {
  return s.pages[s.page_begin[seq] + page];
}

// Any shape, f32 arithmetic: a block is one row and 64 slots; four threads share a key.
__global__ void __launch_bounds__(256)
    ScoresAnyKernel(Seqs seqs, int row0, int heads, int dim, const float* q, const float* w, Slab slab,
                    float* scores, int64_t ld) {
  const int r = row0 + blockIdx.x, seq = seqs.seq_of_row[r];
  if (seq < 0) return;
  const int slot = blockIdx.y * 64 + (threadIdx.x >> 2), position = slot - seqs.slot_shift,
            part = threadIdx.x & 3;
  const bool valid = position >= 0 && position <= seqs.positions[r];
  float sum = 0;
  if (valid) {
    const std::byte* page = PageAddress(slab, PageOf(seqs, seq, slot >> 6));
    const int64_t at = int64_t(slot & 63) * dim;
    const auto key = [&](int i) -> float {
      if (slab.format == Elem::kF32) return reinterpret_cast<const float*>(page)[at + i];
      if (slab.format == Elem::kBF16)
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(page)[at + i]);
      return E4M3Value(reinterpret_cast<const uint8_t*>(page)[at + i]);
    };
    const float k_scale = slab.format == Elem::kE4M3
                              ? reinterpret_cast<const float*>(page + int64_t(kPage) * dim)[slot & 63]
                              : 1.0f;
    for (int h = part; h < heads; h += 4) {
      const float* qh = q + (int64_t(r) * heads + h) * dim;
      float dot = 0;
      for (int i = 0; i < dim; ++i) dot = fmaf(qh[i], key(i), dot);
      sum += fmaxf(dot * k_scale, 0.0f) * w[int64_t(r) * heads + h];
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (valid && part == 0) scores[int64_t(blockIdx.x) * ld + position] = sum;
}

// --- keys as M (16 a step), heads as N, 128 dims as K. A page lies in shared memory, its 16-byte pieces
// swizzled by row.
template <bool kFp8>
struct KeyPage {
  static constexpr int kRowBytes = kFp8 ? 128 : 256;
  static constexpr int kSteps = kFp8 ? 4 : 8;  // of the K dimension
  static constexpr int kBytes = 64 * kRowBytes + (kFp8 ? 256 : 0);
};

template <bool kFp8>
__device__ __forceinline__ void LoadPage(uint32_t dst, const std::byte* page, int t, int threads) {
  using P = KeyPage<kFp8>;
  constexpr int kPieces = P::kRowBytes / 16;
  for (int c = t; c < 64 * kPieces; c += threads) {
    const int row = c / kPieces, piece = c % kPieces;
    CpAsync16(dst + row * P::kRowBytes + ((piece ^ (row & 7)) << 4), page + c * 16, true);
  }
  if constexpr (kFp8) {
    for (int c = t; c < 16; c += threads) CpAsync16(dst + 64 * 128 + c * 16, page + 64 * 128 + c * 16, true);
  }
}

template <bool kFp8, int kTiles>
struct QueryRegs {
  uint32_t b[kTiles][KeyPage<kFp8>::kSteps][2];
  float w[kTiles][2];
  __device__ __forceinline__ void Load(const IndexQuery& q, int row, int heads, int head0, int lane) {
    const int n = lane >> 2, quad = lane & 3;
    constexpr int kRow = KeyPage<kFp8>::kRowBytes;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const auto* p = static_cast<const unsigned char*>(q.q) +
                      (int64_t(row) * heads + head0 + j * 8 + n) * kRow + quad * 4;
#pragma unroll
      for (int k = 0; k < KeyPage<kFp8>::kSteps; ++k) {
        b[j][k][0] = *reinterpret_cast<const uint32_t*>(p + k * 32);
        b[j][k][1] = *reinterpret_cast<const uint32_t*>(p + k * 32 + 16);
      }
      const float* pw = q.w + int64_t(row) * heads + head0 + j * 8 + quad * 2;
      w[j][0] = pw[0];
      w[j][1] = pw[1];
    }
  }
};

// Scores of one row against the 64 keys of a page in shared memory.
template <bool kFp8, int kTiles>
__device__ __forceinline__ void ScorePage(uint32_t page, const unsigned char* page_generic,
                                          const QueryRegs<kFp8, kTiles>& q, int lane, int first, int last,
                                          bool add, float* out) {
  using P = KeyPage<kFp8>;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    if (m * 16 > last || m * 16 + 15 < first) continue;
    float acc[kTiles][4] = {};
    const int row = m * 16 + (lane & 15);
#pragma unroll
    for (int k = 0; k < P::kSteps; ++k) {
      uint32_t a[4];
      LdMatrix4(a, page + row * P::kRowBytes + (((k * 2 + (lane >> 4)) ^ (row & 7)) << 4));
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if constexpr (kFp8) {
          MmaE4M3(acc[j], a, q.b[j][k][0], q.b[j][k][1]);
        } else {
          MmaBF16(acc[j], a, q.b[j][k][0], q.b[j][k][1]);
        }
      }
    }
    float s0 = 0, s1 = 0;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      s0 = fmaf(fmaxf(acc[j][0], 0.0f), q.w[j][0], s0);
      s1 = fmaf(fmaxf(acc[j][2], 0.0f), q.w[j][0], s1);
      s0 = fmaf(fmaxf(acc[j][1], 0.0f), q.w[j][1], s0);
      s1 = fmaf(fmaxf(acc[j][3], 0.0f), q.w[j][1], s1);
    }
    s0 += __shfl_xor_sync(~0u, s0, 1);
    s1 += __shfl_xor_sync(~0u, s1, 1);
    s0 += __shfl_xor_sync(~0u, s0, 2);
    s1 += __shfl_xor_sync(~0u, s1, 2);
    const int quad = lane & 3, key = m * 16 + (lane >> 2) + (quad & 1) * 8;
    if (quad < 2 && key >= first && key <= last) {
      float v = quad == 0 ? s0 : s1;
      if constexpr (kFp8) v *= reinterpret_cast<const float*>(page_generic + 64 * 128)[key];
      if (add) v += out[key];
      out[key] = v;
    }
  }
}

// Slots first .. last of the page that the row sees; the page's first slot is position page * 64 - shift.
__device__ __forceinline__ bool Window(int page, int shift, int position, int& first, int& last) {
  first = max(0, shift - page * 64);
  last = min(63, position + shift - page * 64);
  return last >= first;
}

constexpr int kRowsABlock = 8, kPagesABlock = 16;

// Long extends: eight rows a block, one a warp, over the same pages, which are loaded once for all.
template <bool kFp8, int kTiles>
__global__ void __launch_bounds__(256)
    ScoresPrefillKernel(const __grid_constant__ Seqs seqs, int row0, int rows, int heads, int head0,
                        const __grid_constant__ IndexQuery q, const __grid_constant__ Slab slab,
                        float* scores, int64_t ld) {
  extern __shared__ __align__(128) unsigned char smem[];
  using P = KeyPage<kFp8>;
  const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
  const int first_row = row0 + blockIdx.y * kRowsABlock, end_row = min(first_row + kRowsABlock, row0 + rows);
  const int page0 = blockIdx.x * kPagesABlock;
  const int my_row = first_row + warp;
  QueryRegs<kFp8, kTiles> regs;
  if (my_row < end_row) regs.Load(q, my_row, heads, head0, lane);
  for (int r = first_row; r < end_row;) {
    const int seq = seqs.seq_of_row[r];
    int end = r + 1;
    while (end < end_row && seqs.seq_of_row[end] == seq) ++end;
    const int last_position = seqs.positions[end - 1];  // rows of a sequence ascend
    const int pages = seq < 0 ? 0 : min(kPagesABlock, (last_position + seqs.slot_shift) / 64 + 1 - page0);
    const bool mine = my_row >= r && my_row < end;
    const int position = mine ? seqs.positions[my_row] : -1;
    if (pages > 0) LoadPage<kFp8>(SharedAddress(smem), PageAddress(slab, PageOf(seqs, seq, page0)), t, 256);
    CpAsyncCommit();
    for (int p = 0; p < pages; ++p) {
      if (p + 1 < pages)
        LoadPage<kFp8>(SharedAddress(smem) + ((p + 1) & 1) * P::kBytes,
                       PageAddress(slab, PageOf(seqs, seq, page0 + p + 1)), t, 256);
      CpAsyncCommit();
      CpAsyncWait<1>();
      __syncthreads();
      int first, last;
      if (mine && Window(page0 + p, seqs.slot_shift, position, first, last)) {
        ScorePage<kFp8, kTiles>(
            SharedAddress(smem) + (p & 1) * P::kBytes, smem + (p & 1) * P::kBytes, regs, lane, first, last,
            head0 > 0, scores + int64_t(my_row - row0) * ld + int64_t(page0 + p) * 64 - seqs.slot_shift);
      }
      __syncthreads();
    }
    r = end;
  }
}

// Few rows a sequence: a warp streams its own pages and scores up to four rows of the sequence against each.
constexpr int kDecodeWarps = 4, kDecodeRows = 4, kDecodePages = 8;

template <bool kFp8, int kTiles>
__global__ void __launch_bounds__(kDecodeWarps * 32)
    ScoresDecodeKernel(const __grid_constant__ Seqs seqs, int row0, int rows, int heads, int head0,
                       const __grid_constant__ IndexQuery q, const __grid_constant__ Slab slab, float* scores,
                       int64_t ld) {
  extern __shared__ __align__(128) unsigned char smem[];
  using P = KeyPage<kFp8>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, r = row0 + blockIdx.y;
  const int seq = seqs.seq_of_row[r];
  if (seq < 0) return;
  int before = 0;  // rows of the same sequence before this one in the launch
  while (r - before > row0 && seqs.seq_of_row[r - before - 1] == seq) ++before;
  if (before % kDecodeRows != 0) return;
  int count = 1;
  while (count < kDecodeRows && r + count < row0 + rows && seqs.seq_of_row[r + count] == seq) ++count;
  const int pages = (seqs.positions[r + count - 1] + seqs.slot_shift) / 64 + 1;
  const int begin = (blockIdx.x * kDecodeWarps + warp) * kDecodePages, end = min(begin + kDecodePages, pages);
  if (begin >= end) return;
  unsigned char* mine = smem + warp * 2 * P::kBytes;
  QueryRegs<kFp8, kTiles> regs;
  regs.Load(q, r, heads, head0, lane);
  int loaded = 0;
  LoadPage<kFp8>(SharedAddress(mine), PageAddress(slab, PageOf(seqs, seq, begin)), lane, 32);
  CpAsyncCommit();
  for (int p = begin; p < end; ++p) {
    const int stage = (p - begin) & 1;
    if (p + 1 < end)
      LoadPage<kFp8>(SharedAddress(mine) + (stage ^ 1) * P::kBytes,
                     PageAddress(slab, PageOf(seqs, seq, p + 1)), lane, 32);
    CpAsyncCommit();
    CpAsyncWait<1>();
    __syncwarp();
    for (int i = 0; i < count; ++i) {
      int first, last;
      if (!Window(p, seqs.slot_shift, seqs.positions[r + i], first, last)) continue;
      if (loaded != i) {
        regs.Load(q, r + i, heads, head0, lane);
        loaded = i;
      }
      ScorePage<kFp8, kTiles>(SharedAddress(mine) + stage * P::kBytes, mine + stage * P::kBytes, regs, lane,
                              first, last, head0 > 0,
                              scores + int64_t(r + i - row0) * ld + int64_t(p) * 64 - seqs.slot_shift);
    }
    __syncwarp();
  }
}

template <bool kFp8, int kTiles>
void LaunchScores(cudaStream_t s, const Seqs& seqs, int row0, int rows, int heads, int head0,
                  const IndexQuery& q, const Slab& slab, float* scores, int64_t ld) {
  using P = KeyPage<kFp8>;
  const int pages = (seqs.max_context + seqs.slot_shift + 63) / 64;
  if (seqs.rows >= 8 * seqs.seqs) {
    const dim3 grid(unsigned((pages + kPagesABlock - 1) / kPagesABlock),
                    unsigned((rows + kRowsABlock - 1) / kRowsABlock));
    ScoresPrefillKernel<kFp8, kTiles>
        <<<grid, 256, 2 * P::kBytes, s>>>(seqs, row0, rows, heads, head0, q, slab, scores, ld);
    return;
  }
  const int each = kDecodeWarps * kDecodePages;
  const dim3 grid(unsigned((pages + each - 1) / each), unsigned(rows));
  constexpr int kBytes = kDecodeWarps * 2 * P::kBytes;
  static const cudaError_t sized = cudaFuncSetAttribute(ScoresDecodeKernel<kFp8, kTiles>,
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (sized == cudaSuccess)
    ScoresDecodeKernel<kFp8, kTiles>
        <<<grid, kDecodeWarps * 32, kBytes, s>>>(seqs, row0, rows, heads, head0, q, slab, scores, ld);
}

template <bool kFp8>
void LaunchHeads(cudaStream_t s, const Seqs& seqs, int row0, int rows, int heads, const IndexQuery& q,
                 const Slab& slab, float* scores, int64_t ld) {
  for (int head0 = 0; head0 < heads;) {  // a later group adds to the sums of the ones before
    const int rest = heads - head0;
    if (rest >= 32) {
      LaunchScores<kFp8, 4>(s, seqs, row0, rows, heads, head0, q, slab, scores, ld);
      head0 += 32;
    } else if (rest >= 16) {
      LaunchScores<kFp8, 2>(s, seqs, row0, rows, heads, head0, q, slab, scores, ld);
      head0 += 16;
    } else {
      LaunchScores<kFp8, 1>(s, seqs, row0, rows, heads, head0, q, slab, scores, ld);
      head0 += 8;
    }
  }
}

}  // namespace

void LaunchIndexQuery(cudaStream_t s, const float* q, const float* head_weight, float scale,
                      const int32_t* positions, Rope rope, int rows, int heads, int dim, int rope_dim,
                      IndexQuery out) {
  if (rows == 0) return;
  const int pairs = rows * out.heads;
  IndexQueryKernel<<<(pairs + 3) / 4, 128, 0, s>>>(q, head_weight, scale, positions, rope, pairs, heads, dim,
                                                   rope_dim, out);
}

void LaunchIndexScores(cudaStream_t s, const Seqs& seqs, int row0, int rows, int heads, int dim, IndexQuery q,
                       Slab slab, float* scores, int64_t ld) {
  if (rows == 0 || seqs.max_context == 0) return;
  if (q.format == Elem::kF32) {
    const dim3 grid(unsigned(rows), unsigned((seqs.max_context + seqs.slot_shift + 63) / 64));
    ScoresAnyKernel<<<grid, 256, 0, s>>>(seqs, row0, heads, dim, static_cast<const float*>(q.q), q.w, slab,
                                         scores, ld);
  } else if (q.format == Elem::kE4M3 && q.heads == 32) {
    LaunchScoresE4M3(s, seqs, row0, rows, q, slab, scores, ld);
  } else if (q.format == Elem::kE4M3) {
    LaunchHeads<true>(s, seqs, row0, rows, heads, q, slab, scores, ld);
  } else {
    LaunchHeads<false>(s, seqs, row0, rows, heads, q, slab, scores, ld);
  }
}

}  // namespace sluice::cuda
