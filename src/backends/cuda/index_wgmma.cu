// Indexer scores of fp8 keys by warpgroup products: 64 keys of a page are M, the 32 heads of one or four rows
// are N. Each of a block's two warpgroups streams its own pages through three stages of shared memory; the
// queries stay there. The same instructions in the same order for every batch, so a row's scores do not
// depend on it.
#include <algorithm>

#include "backends/cuda/device.cuh"
#include "backends/cuda/index_scores.h"
#include "backends/cuda/wgmma.cuh"

namespace sluice::cuda {
namespace {

constexpr int kHeads = 32, kStages = 3, kStageBytes = 9216;  // 64 x 128 keys, 64 scales; stages on 1024 bytes

template <int kRows>
struct Product {
  float acc[kRows * 16];
  __device__ __forceinline__ void Run(uint32_t keys, uint32_t queries) {
    WgmmaFence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const uint64_t a = DescKMajor(keys + kk * 32), b = DescKMajor(queries + kk * 32);
      if constexpr (kRows == 4) {
        WgmmaE4M3N128(acc, a, b, kk > 0);
      } else {
        WgmmaE4M3N32(acc, a, b, kk > 0);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    KeepRegisters(acc);
  }
};

// kRows rows a product, kGroups products a page.
template <int kRows, int kGroups>
__global__ void __launch_bounds__(256, 2)
    ScoresKernel(const __grid_constant__ Seqs seqs, int row0, int rows, const __grid_constant__ IndexQuery q,
                 const __grid_constant__ Slab slab, int block_pages, bool leaders_only, float* scores,
                 int64_t ld) {
  extern __shared__ __align__(1024) unsigned char smem[];
  constexpr int kAll = kRows * kGroups, kQueryBytes = kAll * kHeads * 128;
  __shared__ float weight[kAll * kHeads];
  const int t = threadIdx.x, group = t >> 7, warp = (t >> 5) & 3, lane = t & 31, quad = lane & 3;
  int first = row0 + int(blockIdx.y) * (leaders_only ? 1 : kAll), end = min(first + kAll, row0 + rows);
  if (leaders_only) {  // one block for up to kAll neighbouring rows of a sequence
    const int seq = seqs.seq_of_row[first];
    if (seq < 0) return;
    int before = 0;
    while (first - before > row0 && seqs.seq_of_row[first - before - 1] == seq) ++before;
    if (before % kAll != 0) return;
    int last = first + 1;
    while (last < end && seqs.seq_of_row[last] == seq) ++last;
    end = last;
  }
  const int page0 = int(blockIdx.x) * block_pages;
  if ((seqs.positions[end - 1] + seqs.slot_shift) / 64 < page0) {
    bool any = false;  // an earlier row may belong to a longer sequence
    for (int r = first; r < end; ++r)
      any |= seqs.seq_of_row[r] >= 0 && (seqs.positions[r] + seqs.slot_shift) / 64 >= page0;
    if (!any) return;
  }
  const uint32_t queries = SharedAddress(smem);
  unsigned char* stages = smem + kQueryBytes + group * kStages * kStageBytes;
  const uint32_t stage_base = SharedAddress(stages);
  const int u = t & 127;
  // A segment: rows r .. stop of one sequence. Page numbers are read ahead of the pages.
  int stop = first, pages = 0;
  const int32_t* list = nullptr;
  int32_t ahead = 0;
  const auto number = [&](int p) -> int32_t { return p < pages ? __ldg(list + p) : 0; };
  const auto load = [&](int p, int32_t page_number, int stage) {
    if (p < pages) {
      const std::byte* page = PageAddress(slab, page_number);
      const uint32_t to = stage_base + stage * kStageBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = i * 128 + u, row = c >> 3, piece = c & 7;
        CpAsync16(to + row * 128 + ((piece ^ (row & 7)) << 4), page + c * 16, true);
      }
      if (u < 16) CpAsync16(to + 8192 + u * 16, page + 8192 + u * 16, true);
    }
    CpAsyncCommit();
  };
  const auto begin = [&](int r) {
    const int seq = seqs.seq_of_row[r];
    stop = r + 1;
    while (stop < end && seqs.seq_of_row[stop] == seq) ++stop;
    pages = seq < 0 ? 0 : min(block_pages, (seqs.positions[stop - 1] + seqs.slot_shift) / 64 + 1 - page0);
    list = seqs.pages + (seq < 0 ? 0 : seqs.page_begin[seq]) + page0;
    const int32_t a = number(group), b = number(group + 2);
    ahead = number(group + 4);
    load(group, a, 0);
    load(group + 2, b, 1);
  };
  begin(first);
  for (int i = t; i < kAll * kHeads * 8; i += 256) {
    const int n = i >> 3, piece = i & 7, r = first + n / kHeads;
    const uint4 v =
        r < end ? __ldg(static_cast<const uint4*>(q.q) + (int64_t(r) * kHeads + n % kHeads) * 8 + piece)
                : make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(smem + n * 128 + ((piece ^ (n & 7)) << 4)) = v;
  }
  for (int i = t; i < kAll * kHeads; i += 256)
    weight[i] = first + i / kHeads < end ? q.w[int64_t(first) * kHeads + i] : 0.0f;
  FenceAsyncShared();
  __syncthreads();

  for (int r = first; r < end; r = stop) {
    if (r > first) {
      asm volatile("bar.sync %0, 128;\n" ::"r"(group + 1) : "memory");  // the last segment's stages are read
      begin(r);
    }
    // Of the rows whose results this thread writes: row `quad` of each product (with one row a product, quad
    // 0 writes).
    int limit[kGroups];
    float* out[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int mine = first + g * kRows + (kRows == 4 ? quad : 0);
      const bool write = mine >= r && mine < stop && (kRows == 4 || quad == 0);
      limit[g] = write ? seqs.positions[mine] : -1;
      out[g] = scores + int64_t(write ? mine - row0 : 0) * ld;
    }
    int stage = 0;
    for (int p = group; p < pages; p += 2) {
      CpAsyncWait<1>();
      FenceAsyncShared();
      asm volatile("bar.sync %0, 128;\n" ::"r"(group + 1) : "memory");
      load(p + 4, ahead, stage == 0 ? 2 : stage - 1);
      ahead = number(p + 6);
      const uint32_t keys = stage_base + stage * kStageBytes;
      const float* scale = reinterpret_cast<const float*>(stages + stage * kStageBytes + 8192);
      const int key = warp * 16 + (lane >> 2);
      const int position = (page0 + p) * 64 + key - seqs.slot_shift;
      const float scale0 = scale[key], scale1 = scale[key + 8];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        Product<kRows> product;
        product.Run(keys, queries + g * kRows * kHeads * 128);
        float s[kRows][2];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          s[row][0] = s[row][1] = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 w =
                *reinterpret_cast<const float2*>(&weight[(g * kRows + row) * kHeads + j * 8 + quad * 2]);
            const float* d = product.acc + (row * 4 + j) * 4;
            s[row][0] = fmaf(fmaxf(d[0], 0.0f), w.x, s[row][0]);
            s[row][1] = fmaf(fmaxf(d[2], 0.0f), w.x, s[row][1]);
            s[row][0] = fmaf(fmaxf(d[1], 0.0f), w.y, s[row][0]);
            s[row][1] = fmaf(fmaxf(d[3], 0.0f), w.y, s[row][1]);
          }
        }
        float v0, v1;
        if constexpr (kRows == 4) {
          // Sums over the quad, scattered: thread `quad` ends with row `quad`. (0 + 2) + (1 + 3), as below.
          const bool high = quad >= 2, odd = (quad & 1) != 0;
          float a[2][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float keep = high ? s[i + 2][h] : s[i][h], send = high ? s[i][h] : s[i + 2][h];
              a[i][h] = keep + __shfl_xor_sync(~0u, send, 2);
            }
          }
          v0 = (odd ? a[1][0] : a[0][0]) + __shfl_xor_sync(~0u, odd ? a[0][0] : a[1][0], 1);
          v1 = (odd ? a[1][1] : a[0][1]) + __shfl_xor_sync(~0u, odd ? a[0][1] : a[1][1], 1);
        } else {
          v0 = s[0][0] + __shfl_xor_sync(~0u, s[0][0], 2);
          v1 = s[0][1] + __shfl_xor_sync(~0u, s[0][1], 2);
          v0 += __shfl_xor_sync(~0u, v0, 1);
          v1 += __shfl_xor_sync(~0u, v1, 1);
        }
        if (position <= limit[g] && position >= 0) out[g][position] = v0 * scale0;
        if (position + 8 <= limit[g] && position + 8 >= 0) out[g][position + 8] = v1 * scale1;
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    CpAsyncWait<0>();
  }
}

// Pages a block for few rows: as many as fill the `at_once` blocks that run together evenly, counting what a
// block costs before its first page.
int BlockPages(int at_once, int rows, int pages) {
  constexpr int kStart = 4, kLeast = 4, kMost = 96;
  int best = kLeast;
  int64_t best_cost = INT64_MAX;
  for (int each = kLeast; each <= kMost; ++each) {
    const int64_t blocks = int64_t(rows) * ((pages + each - 1) / each);
    const int64_t cost = (blocks + at_once - 1) / at_once * (each + kStart);
    if (cost < best_cost) {
      best = each;
      best_cost = cost;
    }
  }
  return best;
}

template <int kRows, int kGroups>
void Launch(cudaStream_t s, const Seqs& seqs, int row0, int rows, const IndexQuery& q, const Slab& slab,
            bool leaders_only, float* scores, int64_t ld) {
  constexpr int kBytes = kRows * kGroups * kHeads * 128 + 2 * kStages * kStageBytes;
  const auto kernel = ScoresKernel<kRows, kGroups>;
  static const cudaError_t sized =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (sized != cudaSuccess) return;
  static const int at_once = [&] {
    int device = 0, processors = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 256, kBytes);
    return std::max(processors * blocks, 1);
  }();
  const int pages = (seqs.max_context + seqs.slot_shift + 63) / 64, each = leaders_only ? 1 : kRows * kGroups;
  const int block_pages = leaders_only ? BlockPages(at_once, seqs.seqs, pages) : 64;
  const dim3 grid(unsigned((pages + block_pages - 1) / block_pages), unsigned((rows + each - 1) / each));
  kernel<<<grid, 256, kBytes, s>>>(seqs, row0, rows, q, slab, block_pages, leaders_only, scores, ld);
}

}  // namespace

void LaunchScoresE4M3(cudaStream_t s, const Seqs& seqs, int row0, int rows, const IndexQuery& q,
                      const Slab& slab, float* scores, int64_t ld) {
  if (seqs.rows >= 8 * seqs.seqs) {
    Launch<4, 2>(s, seqs, row0, rows, q, slab, false, scores, ld);
  } else if (seqs.rows == seqs.seqs) {
    Launch<1, 1>(s, seqs, row0, rows, q, slab, true, scores, ld);
  } else {
    Launch<4, 1>(s, seqs, row0, rows, q, slab, true, scores, ld);
  }
}

}  // namespace sluice::cuda
