// e4m3 x e4m3 for many rows, not grouped: 128 x 192 a block, two warpgroups of 64 x 192 sums each. As in
// gemm_kernel.cuh two blocks of a cluster take neighbouring rows and share the weight tile, and an element's
// bits are the same.
//
// A block of 128 inputs is one product of all 192 columns: fewer and longer ones than 128 x 256 would need.
// Finished rows leave through shared memory by tensor copies that nobody waits for before the next tile is
// done.
#pragma once

#include "backends/cuda/gemm_kernel.cuh"

namespace sluice::cuda::gemm {

struct E4M3Shape {
  static constexpr int kRows = 128,
                       kHalf = kE4M3Columns / 2;  // each block of a cluster loads half the columns
  static constexpr int kStages = 4;
  static constexpr int kA = kRows * kBlockBytes, kB = kE4M3Columns * kBlockBytes, kStage = kA + kB;
  // Scales of kScaleBlocks blocks: [64 rows][block][64] and two sets of [block][4], one for 64 outputs each.
  static constexpr int kRowScales = kRows * kScaleBlocks, kSet = (kRowScales + 2 * kScaleBlocks * 4) * 4;
  static constexpr int kSets = kStages + 1;
  // A warp's 16 rows on their way out: boxes of 16 swizzled rows of 128 bytes.
  static constexpr int kBox = 16 * 128, kBoxes = 3, kWarpOut = kBoxes * kBox;
  static constexpr int kOut = kStages * kStage;
  static constexpr int kScale = kOut + 8 * kWarpOut;
  static constexpr int kBars = kScale + kSets * kSet;
  static constexpr int kBytes = kBars + kStages * 16 + 64;
};

__device__ __forceinline__ void TileStore(const CUtensorMap* map, int column, int row, uint32_t src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(map),
               "r"(column), "r"(row), "r"(src)
               : "memory");
}

// Each value is added once, so the sum's bits are those of a load, an addition and a store.
__device__ __forceinline__ void TileAdd(const CUtensorMap* map, int column, int row, uint32_t src) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(
          map),
      "r"(column), "r"(row), "r"(src)
      : "memory");
}

struct E4M3Place {  // of a tile's columns in the weight scales
  int set;          // of 256 outputs, and its successor
  int first;        // of the tile's three scales, among the eight of both
};
__device__ __forceinline__ E4M3Place PlaceOf(int n0) { return {n0 / 256, n0 / 64 & 3}; }

__device__ __forceinline__ void ProduceE4M3(const Task& t, uint32_t base, uint32_t rank, int first,
                                            int step) {
  using S = E4M3Shape;
  const uint32_t full = base + S::kBars, empty = full + S::kStages * 8;
  const Walk<true> walk(t);
  if ((threadIdx.x & 127) != 0) return;
  int stage = 0, set = 0;
  uint32_t parity = 1;
  for (int item = first; item < walk.items; item += step) {
    const Item i = walk.At(item, rank);
    const int n0 = i.tile_n * kE4M3Columns;
    const E4M3Place place = PlaceOf(n0);
    const bool two = place.first > 1 && place.set + 1 < t.w_scale_sets;  // the third scale is in the next set
    const int tile_m = i.tile_m < walk.tiles_m ? i.tile_m : 0;
    for (int kb = 0; kb < t.k_blocks; ++kb) {
      BarrierWait(empty + 8 * stage, parity);
      const uint32_t bar = full + 8 * stage, to = base + stage * S::kStage;
      const bool scales = kb % kScaleBlocks == 0;
      const int blocks = min(kScaleBlocks, t.k_blocks - kb);
      BarrierExpect(bar, uint32_t(S::kStage + (scales ? blocks * (S::kRows * 4 + (two ? 32 : 16)) : 0)));
      TileLoad(to, &t.a, kb * 128, i.tile_m * S::kRows, 0, bar);
      TileLoadBoth(to + S::kA + rank * S::kHalf * kBlockBytes, &t.b, kb * 128, n0 + int(rank) * S::kHalf, 0,
                   bar);
      if (scales) {
        const uint32_t at = base + S::kScale + set * S::kSet;
        set = set + 1 == S::kSets ? 0 : set + 1;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          BulkLoad(at + half * 256 * kScaleBlocks,
                   t.x_scale + (int64_t(tile_m * 2 + half) * t.k_blocks + kb) * 64, uint32_t(blocks) * 256,
                   bar);
        const float* w = t.w_scale + (int64_t(place.set) * t.k_blocks + kb) * 4;
        BulkLoad(at + S::kRowScales * 4, w, uint32_t(blocks) * 16, bar);
        if (two)
          BulkLoad(at + S::kRowScales * 4 + 16 * kScaleBlocks, w + int64_t(t.k_blocks) * 4,
                   uint32_t(blocks) * 16, bar);
      }
      if (++stage == S::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// Puts all of a warp's 16 rows into its boxes as bf16, or their columns from column 96 * half as f32.
__device__ __forceinline__ void PutBF16(uint32_t to, int lane, const float (&acc)[96]) {
  // Lane l of stmatrix names row l % 16 and, from lane 16 on, the second of two groups of 8 columns.
  const uint32_t row = to + (lane & 15) * 128, piece = ((lane >> 4) ^ (lane & 7)) << 4;
#pragma unroll
  for (int j = 0; j < 24; j += 2) {
    uint32_t w[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int at = (j + (x >> 1)) * 4 + (x & 1) * 2;
      const __nv_bfloat162 p = __floats2bfloat162_rn(acc[at], acc[at + 1]);
      w[x] = *reinterpret_cast<const uint32_t*>(&p);
    }
    StMatrix4(w, row + (j >> 3) * E4M3Shape::kBox + (piece ^ ((j & 7) << 4)));
  }
}
__device__ __forceinline__ void PutF32(uint32_t to, int lane, const float (&acc)[96], int half) {
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    const int r = below * 8 + (lane >> 2);
    const uint32_t row = to + r * 128 + (lane & 1) * 8, piece = ((lane >> 1 & 1) ^ (r & 7)) << 4;
#pragma unroll
    for (int j = 0; j < 12; ++j) {
      const float* v = &acc[(half * 12 + j) * 4 + below * 2];
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(row + (j >> 2) * E4M3Shape::kBox +
                                                              (piece ^ ((j & 3) << 5))),
                   "f"(v[0]), "f"(v[1])
                   : "memory");
    }
  }
}

__device__ __forceinline__ void ConsumeE4M3(const Task& t, unsigned char* smem, uint32_t base, int first,
                                            int step, uint32_t rank) {
  using S = E4M3Shape;
  const uint32_t full = base + S::kBars, empty = full + S::kStages * 8;
  const Walk<true> walk(t);
  const int wg = threadIdx.x >> 7, warp = (threadIdx.x & 127) >> 5, lane = threadIdx.x & 31, quad = lane & 3;
  const int row0 = wg * 64 + warp * 16 + (lane >> 2);
  const uint32_t out = base + S::kOut + (wg * 4 + warp) * S::kWarpOut;
  int stage = 0, set = S::kSets - 1;
  uint32_t parity = 0;
  for (int item = first; item < walk.items; item += step) {
    const Item i = walk.At(item, rank);
    const int n0 = i.tile_n * kE4M3Columns, place = PlaceOf(n0).first;
    // Where the tile's three weight scales of a block lie; a set's block takes four floats.
    int at[3];
#pragma unroll
    for (int x = 0; x < 3; ++x)
      at[x] = S::kRowScales + (place + x >= 4 ? kScaleBlocks * 4 : 0) + (place + x & 3);
    float acc[96];
#pragma unroll
    for (int j = 0; j < 96; ++j) acc[j] = 0;
    const float* scales = nullptr;  // of these four blocks
    for (int kb = 0; kb < t.k_blocks; ++kb) {
      BarrierWait(full + 8 * stage, parity);
      const int block = kb % kScaleBlocks;
      if (block == 0) {
        set = set + 1 == S::kSets ? 0 : set + 1;
        scales = reinterpret_cast<const float*>(smem + S::kScale + set * S::kSet);
      }
      const float* rows = scales + wg * 64 * kScaleBlocks + block * 64 + (row0 & 63);
      const float sa0 = rows[0], sa1 = rows[8];
      float s0[3], s1[3];
#pragma unroll
      for (int x = 0; x < 3; ++x) {
        const float sb = scales[at[x] + block * 4];
        s0[x] = sa0 * sb;
        s1[x] = sa1 * sb;
      }
      const uint32_t a = base + stage * S::kStage + wg * 64 * kBlockBytes,
                     b = base + stage * S::kStage + S::kA;
      float part[96];
      WgmmaFence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
        WgmmaE4M3N192(part, DescKMajor(a + kk * 32), DescKMajor(b + kk * 32), kk > 0);
      WgmmaCommit();
      WgmmaWait<0>();
      KeepRegisters(part);
      if (lane < 2) RemoteArrive(Remote(empty + 8 * stage, uint32_t(lane)));
      if (++stage == S::kStages) {
        stage = 0;
        parity ^= 1;
      }
#pragma unroll
      for (int j = 0; j < 24; ++j) {
        acc[j * 4] = fmaf(part[j * 4], s0[j / 8], acc[j * 4]);
        acc[j * 4 + 1] = fmaf(part[j * 4 + 1], s0[j / 8], acc[j * 4 + 1]);
        acc[j * 4 + 2] = fmaf(part[j * 4 + 2], s1[j / 8], acc[j * 4 + 2]);
        acc[j * 4 + 3] = fmaf(part[j * 4 + 3], s1[j / 8], acc[j * 4 + 3]);
      }
    }
    if (t.staged) {
      const int row = i.tile_m * S::kRows + wg * 64 + warp * 16;
      const auto send = [&](int column, int columns) {
        FenceAsyncShared();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int box = 0; box < S::kBoxes; ++box) {
            if (t.out == Out::kF32Add) {
              TileAdd(&t.y_map, column + box * columns, row, out + box * S::kBox);
            } else {
              TileStore(&t.y_map, column + box * columns, row, out + box * S::kBox);
            }
          }
        }
        BulkCommit();
      };
      const auto free = [&] {  // of what was sent before
        BulkWaitRead<0>();
        __syncwarp();
      };
      free();
      if (t.out == Out::kAct) {
        PutBF16(out, lane, acc);
        send(n0, 64);
      } else {
        PutF32(out, lane, acc, 0);
        send(n0, 32);
        free();
        PutF32(out, lane, acc, 1);
        send(n0 + S::kHalf, 32);
      }
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i.tile_m * S::kRows + row0 + half * 8;
      StoreRow<kE4M3Columns>(t, int64_t(row) * t.y_ld, n0, i.live && row < t.rows, quad,
                             [&](int j, int e) { return acc[j * 4 + half * 2 + e]; });
    }
  }
  BulkWait<0>();
}

__global__ void __launch_bounds__(kThreads, 1) E4M3GemmKernel(const __grid_constant__ Task t) {
  using S = E4M3Shape;
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t base = SharedAddress(smem), full = base + S::kBars, empty = full + S::kStages * 8;
  const uint32_t rank = ClusterRank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(full + 8 * i, 1);
      BarrierInit(empty + 8 * i, 16);  // warps of both blocks
    }
    FenceBarrierInit();
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&t.a) : "memory");
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&t.b) : "memory");
    if (t.staged) asm volatile("prefetch.tensormap [%0];\n" ::"l"(&t.y_map) : "memory");
  }
  __syncthreads();
  ClusterSync();
  const int first = int(blockIdx.x / 2), step = int(gridDim.x / 2);
  if (threadIdx.x >= kConsumers) {
    RegistersDown<40>();
    ProduceE4M3(t, base, rank, first, step);
    __syncwarp();
  } else {
    RegistersUp<232>();
    ConsumeE4M3(t, smem, base, first, step, rank);
  }
  // No block ends while another may still signal its barriers.
  ClusterSync();
}

}  // namespace sluice::cuda::gemm
