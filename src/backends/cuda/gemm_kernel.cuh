// Matrix products on the warpgroup matrix units: e4m3 x e4m3 with one scale per row (or 64 output columns)
// and 128 inputs, and bf16 x bf16. Tiles come by tensor copies into a ring of stages that one producer thread
// fills; two warpgroups multiply.
//
// Two shapes. Wide, for many rows: 128 x 256 a block, a warpgroup holds 64 x 256 sums, two blocks of a
// cluster take neighbouring rows and share the weight tile (each loads half of it for both). Narrow, for few
// rows: 64 x 128 a block, the blocks of a cluster may split the inputs, their sums are added in the blocks'
// order.
//
// Products of 128 inputs are summed by the matrix unit, and added to the f32 sum of all inputs times their
// scales. An element's bits depend on its row, its column and the number of parts alone, not on the shape.
#pragma once

#include <cuda.h>

#include "backends/cuda/device.cuh"
#include "backends/cuda/gemm_choice.h"
#include "backends/cuda/quantise.cuh"
#include "backends/cuda/wgmma.cuh"

namespace sluice::cuda::gemm {

constexpr int kThreads = 384, kConsumers = 256;
constexpr int kBlockBytes = 128;  // of one row in one stage: 128 e4m3 or 64 bf16
constexpr int kBoxRows = 128;     // of the weight tile that one copy brings
constexpr int kReduceLd = 132;
constexpr int kGroupPairs = 8;   // pairs of row tiles that are walked before the next weight tile
constexpr int kScaleBlocks = 4;  // blocks of inputs whose scales come together

struct alignas(128) Task {
  CUtensorMap a, b, y_map;  // y_map: boxes of 16 rows of 128 bytes, when staged
  const float* x_scale = nullptr;
  const float* w_scale = nullptr;
  const int32_t* tile_group = nullptr;
  const int32_t* tiles_used = nullptr;
  const int32_t* scatter = nullptr;
  void* y = nullptr;
  float* y_scale = nullptr;
  int64_t y_ld = 0, y_group = 0;
  int y_blocks = 0;      // of 128 columns
  int w_scale_sets = 0;  // of 256 outputs, of one group
  int rows = 0, n = 0, k_blocks = 0, tiles_m = 0, tiles_n = 0, groups = 1;
  int up_row = 0;  // first row of the second half of the weight when both halves make one output
  int heads = 0;   // x has groups of its own
  Out out = Out::kF32;
  bool aligned16 = false;
  bool staged = false;  // finished rows leave through shared memory
  GemmPieces pieces;
};

template <bool kFp8, bool kWide>
struct Shape {
  static constexpr int kRows = kWide ? 128 : 64;
  static constexpr int kBoxes = kWide ? 2 : 1;
  static constexpr int kStages = kWide ? 4 : 7;
  static constexpr int kA = kRows * kBlockBytes, kB = kBoxes * kBoxRows * kBlockBytes;
  static constexpr int kStage = kA + kB;
  // Scales of kScaleBlocks blocks: [64 rows][block][64] and [box][block][4]. One more set than there are
  // stages, so that the set that is filled next was read before the stage that it comes with was freed.
  static constexpr int kRowScales = kRows * kScaleBlocks, kSet = (kRowScales + kBoxes * kScaleBlocks * 4) * 4;
  static constexpr int kSets = kFp8 ? kStages + 1 : 0;
  static constexpr int kReduce = kStages * kStage;
  static constexpr int kScale = kReduce + (kWide ? 0 : 64 * kReduceLd * 4);
  static constexpr int kBars = kScale + kSets * kSet;
  static constexpr int kBytes = kBars + kStages * 16 + 64;
  static constexpr int kWarps = kWide ? 16 : 8;  // that free a stage, of all blocks it was filled for
};

__device__ __forceinline__ void RemoteArrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void TileLoad(uint32_t dst, const CUtensorMap* map, int k, int row, int group,
                                         uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];\n" ::"r"(dst),
      "l"(map), "r"(k), "r"(row), "r"(group), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void TileLoadBoth(uint32_t dst, const CUtensorMap* map, int k, int row, int group,
                                             uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, "
      "%3, %4}], [%5], %6;\n" ::"r"(dst),
      "l"(map), "r"(k), "r"(row), "r"(group), "r"(bar), "h"(uint16_t(3))
      : "memory");
}

// What a block works on.
struct Item {
  int tile_m, tile_n, group;
  bool live, shared;  // its rows exist; both blocks of the cluster take the same weight tile
};

template <bool kWide>
struct Walk {
  const Task& t;
  int tiles_m, per_group, items;
  __device__ explicit Walk(const Task& task) : t(task) {
    tiles_m = t.tiles_used != nullptr ? __ldg(t.tiles_used) : t.tiles_m;
    const int steps_m = kWide ? (tiles_m + 1) / 2 : tiles_m;
    per_group = steps_m * t.tiles_n;
    items = per_group * (t.tile_group != nullptr ? 1 : t.groups);
  }
  __device__ Item At(int item, uint32_t rank) const {
    Item i;
    i.group = item / per_group;
    int in = item % per_group;
    const int steps_m = per_group / t.tiles_n, band = in / (kGroupPairs * t.tiles_n);
    in -= band * kGroupPairs * t.tiles_n;
    const int size = min(kGroupPairs, steps_m - band * kGroupPairs);
    const int m = band * kGroupPairs + in % size;
    i.tile_n = in / size;
    i.tile_m = kWide ? 2 * m + int(rank) : m;
    i.live = i.tile_m < tiles_m;
    i.shared = true;
    if (t.tile_group != nullptr) {
      const int mine = i.live ? __ldg(t.tile_group + i.tile_m) : -1;
      i.live = mine >= 0;
      i.group = mine;
      if constexpr (kWide) {
        const int other_tile = i.tile_m ^ 1;
        const int other = other_tile < tiles_m ? __ldg(t.tile_group + other_tile) : -1;
        // A block without rows of its own helps the other.
        i.shared = mine < 0 || other < 0 || mine == other;
        if (mine < 0) i.group = other;
      }
      if (i.group < 0) i.group = 0;
    }
    return i;
  }
};

template <bool kFp8>
__device__ __forceinline__ void Wgmma(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (kFp8) {
    WgmmaE4M3N128(d, a, b, add);
  } else {
    WgmmaN128(d, a, b, add);
  }
}
template <bool kFp8>
__device__ __forceinline__ void Wgmma(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  if constexpr (kFp8) {
    WgmmaE4M3N64(d, a, b, add);
  } else {
    WgmmaN64(d, a, b, add);
  }
}

// One row of kN columns from column0; v(j, e): value e (0, 1) of the lane's pair in columns 8 j.
template <int kN, typename Value>
__device__ __forceinline__ void StoreRow(const Task& t, int64_t at, int column0, bool write, int quad,
                                         Value v) {
  if (t.out == Out::kAct) {
    auto* y = static_cast<__nv_bfloat16*>(t.y) + at;
#pragma unroll
    for (int j = 0; j < kN / 8; j += 4) {
      uint32_t w[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const __nv_bfloat162 p = __floats2bfloat162_rn(v(j + x, 0), v(j + x, 1));
        w[x] = *reinterpret_cast<const uint32_t*>(&p);
      }
      Transpose4(w, quad);
      const int c = column0 + (j + quad) * 8;
      if (!write) continue;
      if (t.aligned16 && c + 8 <= t.n) {
        *reinterpret_cast<uint4*>(y + c) = make_uint4(w[0], w[1], w[2], w[3]);
      } else {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          if (c + 2 * x < t.n) *reinterpret_cast<uint32_t*>(y + c + 2 * x) = w[x];
        }
      }
    }
    return;
  }
  if (!write) return;
  float* y = static_cast<float*>(t.y) + at;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const int c = column0 + j * 8 + quad * 2;
    if (c >= t.n) continue;
    float2 r = make_float2(v(j, 0), v(j, 1));
    if (t.out == Out::kF32Add) {
      const float2 old = *reinterpret_cast<const float2*>(y + c);
      r.x += old.x;
      r.y += old.y;
    }
    *reinterpret_cast<float2*>(y + c) = r;
  }
}

// silu(gate) * up of one row's 128 columns as e4m3 with its scale.
__device__ __forceinline__ void StoreSilu(const Task& t, int row, int tile_n, bool write, int quad,
                                          const float (&gate)[64], const float (&up)[64], int half) {
  float v[32];
  float amax = 0;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      v[j * 2 + e] = Silu(gate[j * 4 + half * 2 + e], up[j * 4 + half * 2 + e]);
      amax = NanMax(amax, fabsf(v[j * 2 + e]));
    }
  }
  amax = NanMax(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = NanMax(amax, __shfl_xor_sync(~0u, amax, 2));
  const float scale = ScaleOf(amax), inverse = 1.0f / scale;
  auto* y = static_cast<uint8_t*>(t.y) + int64_t(row) * t.y_ld + tile_n * 128;
#pragma unroll
  for (int g = 0; g < 2; ++g) {  // 64 columns
    uint32_t w[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {  // two groups of 8 columns a word: g * 8 + 2 x and + 1
      const int j = (g * 8 + 2 * x) * 2;
      w[x] = Pack4E4M3(v[j] * inverse, v[j + 1] * inverse, v[j + 2] * inverse, v[j + 3] * inverse);
    }
    Transpose4(w, quad);
    // Word l is lane l's two pairs of columns: 2 l .. of the first and of the second group of 8.
    const uint4 out = make_uint4(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                                 __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632));
    if (write) *reinterpret_cast<uint4*>(y + g * 64 + quad * 16) = out;
  }
  if (write && quad == 0) t.y_scale[RowScaleAt(row, tile_n, t.y_blocks)] = scale;
}

template <bool kFp8, bool kWide>
__device__ __forceinline__ void Produce(const Task& t, uint32_t base, uint32_t rank, uint32_t size, int first,
                                        int step) {
  using S = Shape<kFp8, kWide>;
  constexpr int kPer = kFp8 ? 128 : 64;  // values of a block of inputs
  const uint32_t full = base + S::kBars, empty = full + S::kStages * 8;
  const Walk<kWide> walk(t);
  const bool leader = (threadIdx.x & 127) == 0;
  int stage = 0, set = 0;
  uint32_t parity = 1;
  for (int item = first; item < walk.items; item += step) {
    if (leader) {
      const Item i = walk.At(item, rank);
      const int parts = kWide ? 1 : int(size), each = (t.k_blocks + parts - 1) / parts;
      const int k0 = kWide ? 0 : int(rank) * each, k1 = min(t.k_blocks, k0 + each);
      const bool two = t.up_row > 0;
      const int n0 = i.tile_n * (kWide && !two ? 256 : 128), n1 = two ? t.up_row + n0 : n0 + 128;
      const int wg = t.pieces.count > 0 ? t.pieces.w[i.group] : i.group;
      const int xg = t.pieces.count > 0 ? t.pieces.x[i.group] : t.heads ? i.group : 0;
      const int k_first = t.pieces.count > 0 ? t.pieces.k_block[i.group] : 0;
      for (int kb = k0; kb < k1; ++kb) {
        BarrierWait(empty + 8 * stage, parity);
        const uint32_t bar = full + 8 * stage, to = base + stage * S::kStage,
                       k = uint32_t(k_first + kb) * kPer;
        const bool scales = kFp8 && (kb - k0) % kScaleBlocks == 0;
        const int blocks = min(kScaleBlocks, k1 - kb);
        BarrierExpect(
            bar, uint32_t(S::kStage + (scales ? blocks * (S::kRows * 4 + (kWide && two ? 32 : 16)) : 0)));
        TileLoad(to, &t.a, int(k), i.tile_m * S::kRows, xg, bar);
        if constexpr (kWide) {
          if (i.shared) {
            TileLoadBoth(to + S::kA + rank * kBoxRows * kBlockBytes, &t.b, int(k), rank == 0 ? n0 : n1, wg,
                         bar);
          } else {
            TileLoad(to + S::kA, &t.b, int(k), n0, wg, bar);
            TileLoad(to + S::kA + kBoxRows * kBlockBytes, &t.b, int(k), n1, wg, bar);
          }
        } else {
          TileLoad(to + S::kA, &t.b, int(k), n0, wg, bar);
        }
        if (scales) {
          const uint32_t at = base + S::kScale + set * S::kSet;
          set = set + 1 == S::kSets ? 0 : set + 1;
          const int tile_m = i.tile_m < walk.tiles_m ? i.tile_m : 0;
#pragma unroll
          for (int half = 0; half < S::kRows / 64; ++half)
            BulkLoad(at + half * 256 * kScaleBlocks,
                     t.x_scale + (int64_t(tile_m * (S::kRows / 64) + half) * t.k_blocks + kb) * 64,
                     uint32_t(blocks) * 256, bar);
          const float* w = t.w_scale + (int64_t(i.group) * t.w_scale_sets * t.k_blocks + kb) * 4;
          BulkLoad(at + S::kRowScales * 4, w + int64_t(n0 / 256) * t.k_blocks * 4, uint32_t(blocks) * 16,
                   bar);
          if (kWide && two)
            BulkLoad(at + S::kRowScales * 4 + 16 * kScaleBlocks, w + int64_t(n1 / 256) * t.k_blocks * 4,
                     uint32_t(blocks) * 16, bar);
        }
        if (++stage == S::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    if (!kWide && size > 1) {
      __syncwarp();
      ClusterSync();
      ClusterSync();
    }
  }
}

template <bool kFp8, bool kWide, bool kPromote>
__device__ __forceinline__ void Consume(const Task& t, unsigned char* smem, uint32_t base, uint32_t rank,
                                        uint32_t size, int first, int step) {
  using S = Shape<kFp8, kWide>;
  constexpr int kHalves = kWide ? 2 : 1, kN = kWide ? 128 : 64, kRegs = kN / 2;
  const uint32_t full = base + S::kBars, empty = full + S::kStages * 8;
  const Walk<kWide> walk(t);
  const int wg = threadIdx.x >> 7, warp = (threadIdx.x & 127) >> 5, lane = threadIdx.x & 31, quad = lane & 3;
  const int row0 = (kWide ? wg * 64 : 0) + warp * 16 + (lane >> 2);
  int stage = 0, set = S::kSets - 1;
  uint32_t parity = 0;
  const auto release = [&](int s) {
    if constexpr (kWide) {
      if (lane < 2) RemoteArrive(Remote(empty + 8 * s, uint32_t(lane)));
    } else {
      if (lane == 0) BarrierArrive(empty + 8 * s);
    }
  };
  for (int item = first; item < walk.items; item += step) {
    const Item i = walk.At(item, rank);
    const int parts = kWide ? 1 : int(size), each = (t.k_blocks + parts - 1) / parts;
    const int k0 = kWide ? 0 : int(rank) * each, k1 = min(t.k_blocks, k0 + each);
    const bool two = t.up_row > 0;
    const int n0 = i.tile_n * (kWide && !two ? 256 : 128), n1 = two ? t.up_row + n0 : n0 + 128;
    float acc[kHalves][kRegs];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < kRegs; ++j) acc[h][j] = 0;
    }
    if constexpr (kPromote) {
      for (int kb = k0; kb < k1; ++kb) {
        BarrierWait(full + 8 * stage, parity);
        const uint32_t a = base + stage * S::kStage + (kWide ? wg * 64 * kBlockBytes : 0);
        const uint32_t b = base + stage * S::kStage + S::kA + (kWide ? 0 : wg * 64 * kBlockBytes);
        float sa[2] = {1, 1};
        const float* scales = nullptr;
        if constexpr (kFp8) {
          const int block = (kb - k0) % kScaleBlocks;
          if (block == 0) set = set + 1 == S::kSets ? 0 : set + 1;
          scales = reinterpret_cast<const float*>(smem + S::kScale + set * S::kSet);
          const float* s = scales + (row0 >> 6) * 64 * kScaleBlocks + block * 64 + (row0 & 63);
          sa[0] = s[0];
          sa[1] = s[8];
          scales += S::kRowScales + block * 4;
        }
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          float part[kRegs];
          float sb[2] = {1, 1};
          if constexpr (kFp8) {
            const float* s =
                scales + (h == 1 && two ? kScaleBlocks * 4 : 0) + (((h == 0 ? n0 : n1) / 64) & 3);
            sb[0] = kWide ? s[0] : s[wg];
            sb[1] = kWide ? s[1] : sb[0];
          }
          WgmmaFence();
#pragma unroll
          for (int kk = 0; kk < 4; ++kk)
            Wgmma<kFp8>(part, DescKMajor(a + kk * 32), DescKMajor(b + h * kBoxRows * kBlockBytes + kk * 32),
                        kk > 0);
          WgmmaCommit();
          WgmmaWait<0>();
          KeepRegisters(part);
          if (h == kHalves - 1) release(stage);
          const float s00 = sa[0] * sb[0], s10 = sa[1] * sb[0], s01 = sa[0] * sb[1], s11 = sa[1] * sb[1];
#pragma unroll
          for (int j = 0; j < kRegs; j += 4) {
            const float s0 = j < 32 ? s00 : s01, s1 = j < 32 ? s10 : s11;
            acc[h][j] = fmaf(part[j], s0, acc[h][j]);
            acc[h][j + 1] = fmaf(part[j + 1], s0, acc[h][j + 1]);
            acc[h][j + 2] = fmaf(part[j + 2], s1, acc[h][j + 2]);
            acc[h][j + 3] = fmaf(part[j + 3], s1, acc[h][j + 3]);
          }
        }
        if (++stage == S::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
    } else {
      int previous = -1;
      for (int kb = k0; kb < k1; ++kb) {
        BarrierWait(full + 8 * stage, parity);
        const uint32_t a = base + stage * S::kStage + (kWide ? wg * 64 * kBlockBytes : 0);
        const uint32_t b = base + stage * S::kStage + S::kA + (kWide ? 0 : wg * 64 * kBlockBytes);
        WgmmaFence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
            Wgmma<kFp8>(acc[h], DescKMajor(a + kk * 32), DescKMajor(b + h * kBoxRows * kBlockBytes + kk * 32),
                        true);
        }
        WgmmaCommit();
        WgmmaWait<1>();
        if (previous >= 0) release(previous);
        previous = stage;
        if (++stage == S::kStages) {
          stage = 0;
          parity ^= 1;
        }
      }
      WgmmaWait<0>();
#pragma unroll
      for (int h = 0; h < kHalves; ++h) KeepRegisters(acc[h]);
      if (previous >= 0) release(previous);
    }
    const int64_t y0 = t.tile_group == nullptr ? i.group * t.y_group : 0;
    if (!kWide && size > 1) {
      float* reduce = reinterpret_cast<float*>(smem + S::kReduce);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kN / 8; ++j)
          *reinterpret_cast<float2*>(&reduce[(row0 + half * 8) * kReduceLd + wg * 64 + j * 8 + quad * 2]) =
              make_float2(acc[0][j * 4 + half * 2], acc[0][j * 4 + half * 2 + 1]);
      }
      ClusterSync();
      const int count = 64 / int(size);
      for (int x = threadIdx.x; x < count * 32; x += kConsumers) {
        const int local = int(rank) * count + x / 32, c = i.tile_n * 128 + x % 32 * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        for (uint32_t r = 0; r < size; ++r) {
          const uint32_t at = Remote(base + S::kReduce + uint32_t(local * kReduceLd + x % 32 * 4) * 4, r);
          const float4 v = RemoteFloat4(at);
          sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        const int m = i.tile_m * 64 + local;
        if (!i.live || m >= t.rows) continue;
        const int64_t row = t.scatter != nullptr ? __ldg(t.scatter + m) : m;
        if (row < 0) continue;
        const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (c + e >= t.n) break;
          const int64_t at = y0 + row * t.y_ld + c + e;
          if (t.out == Out::kAct) {
            static_cast<__nv_bfloat16*>(t.y)[at] = __float2bfloat16_rn(v[e]);
          } else if (t.out == Out::kF32Add) {
            static_cast<float*>(t.y)[at] += v[e];
          } else {
            static_cast<float*>(t.y)[at] = v[e];
          }
        }
      }
      ClusterSync();
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = i.tile_m * S::kRows + row0 + half * 8;
      bool write = i.live && m < t.rows;
      int64_t row = m;
      if (t.scatter != nullptr && write) {
        row = __ldg(t.scatter + m);
        write = row >= 0;
      }
      if constexpr (kFp8 && kWide) {
        if (t.y_scale != nullptr) {
          StoreSilu(t, m, i.tile_n, write, quad, acc[0], acc[1], half);
          continue;
        }
      }
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        StoreRow<kN>(t, y0 + row * t.y_ld, kWide ? n0 + h * 128 : n0 + wg * 64, write, quad,
                     [&](int j, int e) { return acc[h][j * 4 + half * 2 + e]; });
    }
  }
}

template <bool kFp8, bool kWide, bool kPromote>
__global__ void __launch_bounds__(kThreads, 1) WgmmaGemmKernel(const __grid_constant__ Task t) {
  using S = Shape<kFp8, kWide>;
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t base = SharedAddress(smem), full = base + S::kBars, empty = full + S::kStages * 8;
  const uint32_t rank = ClusterRank(), size = ClusterSize();
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(full + 8 * i, 1);
      BarrierInit(empty + 8 * i, S::kWarps);
    }
    FenceBarrierInit();
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&t.a) : "memory");
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&t.b) : "memory");
  }
  __syncthreads();
  if (size > 1) ClusterSync();
  const int first = int(blockIdx.x / size), step = int(gridDim.x / size);
  if (threadIdx.x >= kConsumers) {
    if constexpr (kWide) RegistersDown<40>();
    Produce<kFp8, kWide>(t, base, rank, size, first, step);
    __syncwarp();
  } else {
    if constexpr (kWide) RegistersUp<232>();
    Consume<kFp8, kWide, kPromote>(t, smem, base, rank, size, first, step);
  }
  // No block ends while another may still signal its barriers.
  if (size > 1) ClusterSync();
}

}  // namespace sluice::cuda::gemm
