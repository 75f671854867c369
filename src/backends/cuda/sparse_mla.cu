// MLA of up to 64 heads over chosen latent rows of 512 + 64 values, stored as fp8 or bf16. One block is one
// batch row, or one part of its list; the parts of a row are a cluster and merge through each other's shared
// memory.
//
// One warpgroup gathers rows and turns them into bf16 tiles (blocks of 64 keys, two of them in shared
// memory), two more multiply. These score blocks in turn, group g those of stage g, and each keeps 256 of the
// 512 output columns of all 64 heads in registers: while one turns scores into probabilities, the other
// multiplies. Probabilities go to the own products in registers and to the other group's through the tile of
// the block's rope values, which nobody reads once the block is scored. There are three of these tiles, so
// that the next block's rope values come while both stages are in use.
//
// Maxima run through the blocks in order, from group to group, and follow a row's scores only when these pass
// them by 2^8: what is summed grows to at most that, and the sums are hardly ever rescaled.
#include <array>

#include "backends/cuda/device.cuh"
#include "backends/cuda/wgmma.cuh"

namespace sluice::cuda {
namespace {

constexpr int kHeads = 64, kLora = 512, kDim = 576, kTiles = kDim / 64, kKeys = 64;
constexpr int kTileBytes = 64 * 128, kStageBytes = (kTiles - 1) * kTileBytes;
constexpr int kQ = 0, kK = kTiles * kTileBytes, kRopes = kK + 2 * kStageBytes,
              kMisc = kRopes + 3 * kTileBytes;
// A stage fills in four steps: two tiles each, the last with the rope values too.
constexpr int kSteps = 4;
// After the tiles: maxima of both stages' last blocks, sums of both groups, barriers.
constexpr int kMaxima = kMisc, kSums = kMaxima + 512, kBars = kSums + 512, kBytes = kBars + 128;
constexpr int kMergeLd = kLora + 8;  // of a part's sums, over the K tiles
constexpr int kFp8Row = kLora + 16 + 128, kBF16Row = kDim * 2;
constexpr float kSlack = 8;  // log2
constexpr int kThreads = 384;
// Both kinds of groups together ask for no more registers than the block starts with: 384 * 168.
template <bool kFp8>
constexpr int kProducerRegisters = kFp8 ? 120 : 88;
template <bool kFp8>
constexpr int kConsumerRegisters = kFp8 ? 192 : 208;
// Warps that fill a stage. bf16 rows are copied by two warps a stage, which wait for their copies apart from
// the other two.
template <bool kFp8>
constexpr int kFillingWarps = kFp8 ? 4 : 2;

__device__ __forceinline__ uint32_t RopeTile(int block) { return uint32_t(kRopes + block % 3 * kTileBytes); }

// Barriers of a part of the block: probabilities of stage 0 and 1, and the multiplying groups.
template <int kBarrier>
__device__ __forceinline__ void Join() {
  asm volatile("bar.sync %0, 256;\n" ::"n"(kBarrier) : "memory");
}
template <int kBarrier>
__device__ __forceinline__ void Announce() {
  asm volatile("bar.arrive %0, 256;\n" ::"n"(kBarrier) : "memory");
}
constexpr int kConsumers = 3;

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The list of a row's keys. A key's position, its page's number and its row's address are read or made one
// block after another, so that none is waited for; a lane keeps them for one row of a block.
struct Keys {
  const Attend& a;
  const int32_t* pages;
  const int32_t* selected;
  int begin, end;
  __device__ Keys(const Attend& attend, int r, int seq, int first, int past)
      : a(attend),
        pages(attend.seqs.pages + attend.seqs.page_begin[seq]),
        selected(attend.selected == nullptr ? nullptr : attend.selected + int64_t(r) * attend.topk),
        begin(first),
        end(past) {}
  // Slot of the sequence; -1 past the end.
  __device__ __forceinline__ int Slot(int block, int row) const {
    const int j = begin + block * kKeys + row;
    return j >= end ? -1 : (selected != nullptr ? __ldg(selected + j) : j) + a.seqs.slot_shift;
  }
  __device__ __forceinline__ int Page(int slot) const { return slot < 0 ? 0 : __ldg(pages + (slot >> 6)); }
  // Of no row: memory that may be read.
  __device__ __forceinline__ uint64_t Address(int slot, int page, int row_bytes) const {
    return slot < 0 ? reinterpret_cast<uint64_t>(a.q)
                    : reinterpret_cast<uint64_t>(PageAddress(a.slab, page)) +
                          uint64_t(slot & 63) * uint64_t(row_bytes);
  }
};

// A load that stays where it is written, among the conversions.
__device__ __forceinline__ uint4 Load16(uint64_t address) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ void Filled(uint32_t bar, int lane) {
  FenceAsyncShared();
  __syncwarp();
  if (lane == 0) BarrierArrive(bar);
}

// A warp fills 16 rows of each block; lane l holds the address of row l % 16. The next block's values are
// loaded while this one's are converted; the rope values need no conversion and are copied meanwhile.
__device__ __forceinline__ void ProduceFp8(const Attend& a, const Keys& keys, unsigned char* smem,
                                           uint32_t full, uint32_t empty) {
  constexpr int kRows = 4;  // of a lane
  const int t = threadIdx.x & 127, warp = t >> 5, lane = t & 31, piece = lane & 7;
  const int blocks = (keys.end - keys.begin + kKeys - 1) / kKeys, mine = warp * 16 + (lane & 15);
  const uint64_t none = reinterpret_cast<uint64_t>(a.q);
  const auto row_of = [&](uint64_t addresses, int i) {
    return __shfl_sync(~0u, addresses, i * 4 + (lane >> 3)) + uint64_t(piece * 16);
  };
  uint4 v[kRows][4];
  uint32_t scale[kRows];  // of tile `piece` % 4
  const auto load_scale = [&](uint64_t row) -> uint32_t {
    return row == none + uint64_t(piece * 16)
               ? 0u
               : __ldg(reinterpret_cast<const uint32_t*>(row - uint64_t(piece * 16) + kLora) + (piece & 3));
  };
  const auto copy_rope = [&](const uint64_t(&row)[kRows], int block) {
    const uint32_t tile = SharedAddress(smem) + RopeTile(block);
#pragma unroll
    for (int i = 0; i < kRows && block < blocks; ++i) {
      const int at = warp * 16 + i * 4 + (lane >> 3);
      CpAsync16(tile + at * 128 + ((piece ^ (at & 7)) << 4),
                reinterpret_cast<const void*>(row[i] + kLora + 16), row[i] != none + uint64_t(piece * 16));
    }
    CpAsyncCommit();
  };
  // Rows are asked into L2 two blocks ahead.
  const auto announce = [&](uint64_t row) {
    if (lane < 16 && row != none)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(row), "n"(kFp8Row) : "memory");
  };
  int slot2 = keys.Slot(2, mine), slot3 = keys.Slot(3, mine), page2;
  uint64_t ahead;
  {
    const int slot = keys.Slot(0, mine), slot1 = keys.Slot(1, mine);
    const int page = keys.Page(slot), page1 = keys.Page(slot1);
    page2 = keys.Page(slot2);
    const uint64_t rows = keys.Address(slot, page, kFp8Row);
    uint64_t row[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row[i] = row_of(rows, i);
      scale[i] = load_scale(row[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i][j] = Load16(row[i] + uint64_t(j * 128));
    }
    copy_rope(row, 0);
    ahead = keys.Address(slot1, page1, kFp8Row);
    announce(ahead);
  }
  for (int b = 0; b < blocks; ++b) {
    const int stage = b & 1;
    unsigned char* buffer = smem + kK + stage * kStageBytes;
    const uint64_t rows = ahead;
    ahead = keys.Address(slot2, page2, kFp8Row);
    announce(ahead);
    slot2 = slot3;
    page2 = keys.Page(slot2);
    slot3 = keys.Slot(b + 4, mine);
    BarrierWait(empty + 8 * stage, (b >> 1 & 1) ^ 1);
    uint64_t next[kRows];
    uint32_t both[kRows];  // the scale as two bf16
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next[i] = row_of(rows, i);
      __nv_bfloat162 large2, small2;
      SplitScale(__uint_as_float(scale[i]), large2, small2);
      both[i] = __byte_perm(*reinterpret_cast<const uint32_t*>(&large2),
                            *reinterpret_cast<const uint32_t*>(&small2), 0x5410);
      scale[i] = load_scale(next[i]);
    }
    copy_rope(next, b + 1);
    const auto convert = [&](int i, int j, uint32_t of_tile) {
      const int at = warp * 16 + i * 4 + (lane >> 3);
      const uint32_t l = __byte_perm(of_tile, 0, 0x1010), s = __byte_perm(of_tile, 0, 0x3232);
      const __nv_bfloat162 large2 = *reinterpret_cast<const __nv_bfloat162*>(&l);
      const __nv_bfloat162 small2 = *reinterpret_cast<const __nv_bfloat162*>(&s);
      uint4 lo, hi;
      Dequantise(v[i][j].x, large2, small2, lo.x, lo.y);
      Dequantise(v[i][j].y, large2, small2, lo.z, lo.w);
      Dequantise(v[i][j].z, large2, small2, hi.x, hi.y);
      Dequantise(v[i][j].w, large2, small2, hi.z, hi.w);
      v[i][j] = Load16(next[i] + uint64_t(j * 128));
      // Values 16 * piece ..: half a tile row each for pieces 0-3 and 4-7, which write in opposite order so
      // that eight threads never meet in a bank.
      unsigned char* tile = buffer + at * 128 + (j * 2 + (piece >> 2)) * kTileBytes;
      const int p0 = (piece & 3) * 2, second = piece >> 2;
      *reinterpret_cast<uint4*>(tile + (((p0 + second) ^ (at & 7)) << 4)) = second ? hi : lo;
      *reinterpret_cast<uint4*>(tile + (((p0 + (second ^ 1)) ^ (at & 7)) << 4)) = second ? lo : hi;
    };
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      uint32_t of_tile[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) of_tile[i] = __shfl_sync(~0u, both[i], (lane & 24) + j);
#pragma unroll
      for (int i = 0; i < kRows; ++i) convert(i, j, of_tile[i]);
      if (j == kSteps - 1) CpAsyncWait<1>();
      Filled(full + 8 * (stage * kSteps + j), lane);
    }
  }
}

// Two warps a stage, 32 rows each; lane l of a warp holds the address of its row l.
__device__ __forceinline__ void ProduceBF16(const Attend& a, const Keys& keys, unsigned char* smem,
                                            uint32_t full, uint32_t empty) {
  const int t = threadIdx.x & 127, stage = t >> 6, lane = t & 31, first = t & 32, piece = lane & 7;
  const int blocks = (keys.end - keys.begin + kKeys - 1) / kKeys, mine = first + lane;
  const uint64_t none = reinterpret_cast<uint64_t>(a.q);
  const uint32_t buffer = SharedAddress(smem) + kK + stage * kStageBytes;
  int slot = keys.Slot(stage, mine), slot1 = keys.Slot(stage + 2, mine), page = keys.Page(slot);
  for (int b = stage; b < blocks; b += 2) {
    const uint64_t rows = keys.Address(slot, page, kBF16Row);
    slot = slot1;
    page = keys.Page(slot);
    slot1 = keys.Slot(b + 4, mine);
    uint64_t from[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) from[i] = __shfl_sync(~0u, rows, i * 4 + (lane >> 3));
    const uint32_t rope = SharedAddress(smem) + RopeTile(b);
    BarrierWait(empty + 8 * stage, (b >> 1 & 1) ^ 1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = first + i * 4 + (lane >> 3);
#pragma unroll
        for (int j = step * 2; j < (step == kSteps - 1 ? kTiles : step * 2 + 2); ++j)
          CpAsync16((j < kTiles - 1 ? buffer + j * kTileBytes : rope) + at * 128 + ((piece ^ (at & 7)) << 4),
                    reinterpret_cast<const void*>(from[i] + uint64_t(j * 128 + piece * 16)), from[i] != none);
      }
      CpAsyncCommit();
    }
    const uint32_t bars = full + 8 * stage * kSteps;
    CpAsyncWait<3>();
    Filled(bars, lane);
    CpAsyncWait<2>();
    Filled(bars + 8, lane);
    CpAsyncWait<1>();
    Filled(bars + 16, lane);
    CpAsyncWait<0>();
    Filled(bars + 24, lane);
  }
}

struct Consumer {
  unsigned char* smem;
  uint32_t base;
  float log2_scale;
  int warp, lane, quad, row;
  float o[2][64];  // columns 0 .. 127 and 128 .. 255 of the group's half
  float max[2], sum[2];

  // Starts the scores of the 64 keys of a stage as it fills.
  __device__ __forceinline__ void Score(float (&s)[32], int block, uint32_t full) const {
    const int stage = block & 1;
    const uint32_t parity = (block >> 1) & 1, rope = base + RopeTile(block);
    const uint32_t k = base + kK + stage * kStageBytes;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile % 2 == 0 && tile < kTiles - 1) {
        BarrierWait(full + 8 * (stage * kSteps + tile / 2), parity);
        WgmmaFence();
      }
#pragma unroll
      for (int kk = 0; kk < 4; ++kk)
        WgmmaN64(s, DescKMajor(base + kQ + tile * kTileBytes + kk * 32),
                 DescKMajor((tile < kTiles - 1 ? k + tile * kTileBytes : rope) + kk * 32), tile + kk > 0);
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void Rescale(const float (&alpha)[2]) {
    sum[0] *= alpha[0];
    sum[1] *= alpha[1];
    RescaleProducts(alpha);
  }
  // The maxima that the other group chose for its block.
  __device__ __forceinline__ void Follow(int stage, float (&alpha)[2]) {
    const float* maxima = reinterpret_cast<const float*>(smem + kMaxima) + stage * kHeads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = maxima[row + i * 8];
      alpha[i] = m == max[i] ? 1.0f : Exp2(max[i] - m);
      max[i] = m;
    }
  }
  // Scores of the block's first `valid` keys as probabilities, in p and for the other group in the block's
  // rope tile. The sum is rescaled with alpha here, the products are not.
  __device__ __forceinline__ void Softmax(float (&s)[32], int block, int valid, uint32_t (&p)[4][4],
                                          float (&alpha)[2]) {
    float* maxima = reinterpret_cast<float*>(smem + kMaxima) + (block & 1) * kHeads;
    if (valid < kKeys) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        if ((j >> 2) * 8 + quad * 2 + (j & 1) >= valid) s[j] = -INFINITY;
      }
    }
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 32; ++j) top[(j >> 1) & 1] = fmaxf(top[(j >> 1) & 1], s[j]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2)) * log2_scale;
      const float m = top[i] > max[i] + kSlack ? top[i] : max[i];
      alpha[i] = m == max[i] ? 1.0f : Exp2(max[i] - m);
      max[i] = m;
      if (quad == 0) maxima[row + i * 8] = m;
    }
    float add[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __nv_bfloat162 x = __floats2bfloat162_rn(Exp2(fmaf(s[j * 4 + i * 2], log2_scale, -max[i])),
                                                       Exp2(fmaf(s[j * 4 + i * 2 + 1], log2_scale, -max[i])));
        // What is multiplied is what is summed.
        add[i] += __low2float(x) + __high2float(x);
        p[j >> 1][(j & 1) * 2 + i] = *reinterpret_cast<const uint32_t*>(&x);
      }
    }
    const int h = warp * 16 + (lane & 15);
    const uint32_t tile = base + RopeTile(block) + h * 128;
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) StMatrix4(p[kk], tile + (((kk * 2 + (lane >> 4)) ^ (h & 7)) << 4));
    sum[0] = fmaf(sum[0], alpha[0], add[0]);
    sum[1] = fmaf(sum[1], alpha[1], add[1]);
    FenceAsyncShared();
  }
  __device__ __forceinline__ void RescaleProducts(const float (&alpha)[2]) {
    if (!__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < 64; ++j) {
      o[0][j] *= alpha[(j >> 1) & 1];
      o[1][j] *= alpha[(j >> 1) & 1];
    }
  }
  // Start the products of a stage's probabilities with the group's half of its values.
  __device__ __forceinline__ void Add(const uint32_t (&p)[4][4], int block, int group) {
    const uint32_t k = base + kK + (block & 1) * kStageBytes + group * 4 * kTileBytes;
    KeepProducts();
    WgmmaFence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      WgmmaN128TR(o[0], p[kk], DescNMajor(k + kk * 2048, kTileBytes));
      WgmmaN128TR(o[1], p[kk], DescNMajor(k + kk * 2048 + 2 * kTileBytes, kTileBytes));
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void AddOther(int block, int group) {
    const uint32_t k = base + kK + (block & 1) * kStageBytes + group * 4 * kTileBytes;
    KeepProducts();
    WgmmaFence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const uint64_t p = DescKMajor(base + RopeTile(block) + kk * 32);
      WgmmaN128T(o[0], p, DescNMajor(k + kk * 2048, kTileBytes), true);
      WgmmaN128T(o[1], p, DescNMajor(k + kk * 2048 + 2 * kTileBytes, kTileBytes), true);
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void KeepProducts() {
    KeepRegisters(o[0]);
    KeepRegisters(o[1]);
  }
  __device__ __forceinline__ void Release(uint32_t bar) const {
    if (lane == 0) BarrierArrive(bar);
  }
};

// Scores the even blocks.
__device__ __forceinline__ void MultiplyEven(Consumer& c, uint32_t full, uint32_t empty, int keys) {
  const int blocks = (keys + kKeys - 1) / kKeys;
  for (int b = 0; b < blocks; b += 2) {
    float s[32];
    uint32_t p[4][4];
    float alpha[2];
    c.Score(s, b, full);
    WgmmaWait<0>();
    KeepRegisters(s);
    c.Softmax(s, b, keys - b * kKeys, p, alpha);
    Announce<1>();
    c.RescaleProducts(alpha);
    c.Add(p, b, 0);
    if (b + 1 < blocks) Join<2>();
    WgmmaWait<0>();
    c.KeepProducts();
    c.Release(empty);
    if (b + 1 >= blocks) return;
    c.Follow(1, alpha);
    c.Rescale(alpha);
    c.AddOther(b + 1, 0);
    WgmmaWait<0>();
    c.KeepProducts();
    c.Release(empty + 8);
  }
}

// Scores the odd blocks. The products of the even block before run while its own scores become
// probabilities.
__device__ __forceinline__ void MultiplyOdd(Consumer& c, uint32_t full, uint32_t empty, int keys) {
  const int blocks = (keys + kKeys - 1) / kKeys;
  for (int b = 0; b < blocks; b += 2) {
    const bool own = b + 1 < blocks;
    float s[32];
    uint32_t p[4][4];
    float alpha[2];
    if (own) {
      c.Score(s, b + 1, full);
      Join<1>();
      c.Follow(0, alpha);
      c.Rescale(alpha);
      c.AddOther(b, 1);
      WgmmaWait<1>();
      KeepRegisters(s);
      c.Softmax(s, b + 1, keys - (b + 1) * kKeys, p, alpha);
      Announce<2>();
      WgmmaWait<0>();
      c.KeepProducts();
      c.Release(empty);
      c.RescaleProducts(alpha);
      c.Add(p, b + 1, 1);
      WgmmaWait<0>();
      c.KeepProducts();
      c.Release(empty + 8);
    } else {
      Join<1>();
      c.Follow(0, alpha);
      c.Rescale(alpha);
      c.AddOther(b, 1);
      WgmmaWait<0>();
      c.KeepProducts();
    }
  }
}

// Merges this block's share of the heads from the parts of all blocks of the cluster, part after part.
template <int kParts>
__device__ __forceinline__ void Merge(const Attend& a, const Consumer& c, int r) {
  // What each part counts for each of this block's heads, over the queries.
  float* weights = reinterpret_cast<float*>(c.smem + kQ);  // [part][head]
  const int t = threadIdx.x, each = kHeads / kParts, first = int(blockIdx.y) * each;
  if (t < each) {
    float sum[kParts], factor[kParts], top = -INFINITY, total = 0;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint32_t at = uint32_t(first + t) * 4;
      sum[p] = RemoteFloat(Remote(c.base + kSums + at, uint32_t(p))) +
               RemoteFloat(Remote(c.base + kSums + kHeads * 4 + at, uint32_t(p)));
      factor[p] = RemoteFloat(Remote(c.base + kMaxima + at, uint32_t(p)));
      if (sum[p] != 0) top = fmaxf(top, factor[p]);
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      factor[p] = sum[p] == 0 ? 0.0f : Exp2(factor[p] - top);  // an empty part; NaN goes on
      total = fmaf(sum[p], factor[p], total);
    }
    const float inverse = total == 0 ? 0.0f : 1.0f / total;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      weights[p * kHeads + t] = factor[p] * inverse;
    }
  }
  Join<kConsumers>();
  const int column = (t & 127) * 4, heads = min(each, a.heads - first);
#pragma unroll(8 / kParts)
  for (int h = t >> 7; h < heads; h += 2) {
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const float w = weights[p * kHeads + h];
      const float4 x =
          RemoteFloat4(Remote(c.base + kK + uint32_t((first + h) * kMergeLd + column) * 4, uint32_t(p)));
      v = make_float4(fmaf(x.x, w, v.x), fmaf(x.y, w, v.y), fmaf(x.z, w, v.z), fmaf(x.w, w, v.w));
    }
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) +
                              (int64_t(r) * a.heads + first + h) * kLora + column) =
        *reinterpret_cast<const uint2*>(pairs);
  }
}

// Ends the row: writes it, or merges it with the other parts of its cluster, part after part.
__device__ __forceinline__ void Finish(const Attend& a, Consumer& c, int group, int r, int n) {
  float* sums = reinterpret_cast<float*>(c.smem + kSums);
  float* maxima = reinterpret_cast<float*>(c.smem + kMaxima);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    c.sum[i] += __shfl_xor_sync(~0u, c.sum[i], 1);
    c.sum[i] += __shfl_xor_sync(~0u, c.sum[i], 2);
    if (c.quad == 0) sums[group * kHeads + c.row + i * 8] = c.sum[i];
  }
  Join<kConsumers>();  // also: nobody reads the tiles any more
  if (a.splits == 1) {
    auto* out = static_cast<__nv_bfloat16*>(a.out) + int64_t(r) * a.heads * kLora + group * 256;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int h = c.row + i * 8;
      const float inverse = n > 0 ? 1.0f / (sums[h] + sums[kHeads + h]) : 0.0f;
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        uint32_t w[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const float* o = &c.o[j >> 4][((j & 15) + x) * 4 + i * 2];
          const __nv_bfloat162 pair = __floats2bfloat162_rn(o[0] * inverse, o[1] * inverse);
          w[x] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        Transpose4(w, c.quad);
        if (h < a.heads)
          *reinterpret_cast<uint4*>(out + int64_t(h) * kLora + (j + c.quad) * 8) =
              make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
    return;
  }
  float* part = reinterpret_cast<float*>(c.smem + kK);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 32; ++j)
      *reinterpret_cast<float2*>(part + (c.row + i * 8) * kMergeLd + group * 256 + j * 8 + c.quad * 2) =
          make_float2(c.o[j >> 4][(j & 15) * 4 + i * 2], c.o[j >> 4][(j & 15) * 4 + i * 2 + 1]);
    if (group == 0 && c.quad == 0) maxima[c.row + i * 8] = c.max[i];
  }
  ClusterSync();
  if (a.splits == 2) Merge<2>(a, c, r);
  if (a.splits == 4) Merge<4>(a, c, r);
  if (a.splits == 8) Merge<8>(a, c, r);
  ClusterSync();  // no block ends while another reads its memory
}

template <bool kFp8>
__global__ void __launch_bounds__(kThreads, 1) SparseMlaKernel(const __grid_constant__ Attend a) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t base = SharedAddress(smem), full = base + kBars, empty = full + 8 * 2 * kSteps;
  const int r = blockIdx.x, part = blockIdx.y, t = threadIdx.x, group = t >> 7;
  if (t == 0) {
    for (int i = 0; i < 2 * kSteps; ++i) BarrierInit(full + 8 * i, kFillingWarps<kFp8>);
    for (int i = 0; i < 2; ++i) BarrierInit(empty + 8 * i, 8);
    FenceBarrierInit();
  }
  const int seq = a.seqs.seq_of_row[r];
  const int length = a.selected != nullptr ? a.count[r] : a.seqs.positions[r] + 1;  // both loads together
  const int n = seq < 0 ? 0 : length;
  // Parts are whole blocks of keys, the same whatever else is in the batch.
  const int all_blocks = (n + kKeys - 1) / kKeys, each = (all_blocks + a.splits - 1) / a.splits;
  const int begin = min(n, part * each * kKeys), end = min(n, begin + each * kKeys);
  __syncthreads();
  if (group >= 2) {
    RegistersDown<kProducerRegisters<kFp8>>();
    if (begin < end) {
      const Keys keys(a, r, seq, begin, end);
      if constexpr (kFp8) {
        ProduceFp8(a, keys, smem, full, empty);
      } else {
        ProduceBF16(a, keys, smem, full, empty);
      }
    }
    __syncwarp();
    if (a.splits > 1) {
      ClusterSync();
      ClusterSync();
    }
  } else {
    RegistersUp<kConsumerRegisters<kFp8>>();
    const auto* q = static_cast<const uint4*>(a.q) + int64_t(r) * a.heads * (kDim / 8);
#pragma unroll
    for (int k = 0; k < kHeads * kDim / 8 / 256; ++k) {
      const int i = k * 256 + t, h = i / (kDim / 8), p = i % (kDim / 8);
      CpAsync16(base + kQ + (p >> 3) * kTileBytes + h * 128 + (((p & 7) ^ (h & 7)) << 4),
                h < a.heads ? q + i : q, h < a.heads);
    }
    CpAsyncCommit();
    CpAsyncWait<0>();
    FenceAsyncShared();
    Join<kConsumers>();
    Consumer c;
    c.smem = smem;
    c.base = base;
    c.log2_scale = a.scale * 1.4426950408889634f;
    c.warp = (t & 127) >> 5;
    c.lane = t & 31;
    c.quad = t & 3;
    c.row = c.warp * 16 + (c.lane >> 2);
#pragma unroll
    for (int i = 0; i < 64; ++i) c.o[0][i] = c.o[1][i] = 0;
    c.max[0] = c.max[1] = -INFINITY;
    c.sum[0] = c.sum[1] = 0;
    if (group == 0) {
      MultiplyEven(c, full, empty, end - begin);
    } else {
      MultiplyOdd(c, full, empty, end - begin);
    }
    Finish(a, c, group, r, n);
  }
}

cudaLaunchConfig_t ConfigOf(cudaStream_t s, int rows, int splits, cudaLaunchAttribute& cluster) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1;
  cluster.val.clusterDim.y = unsigned(splits);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(rows), unsigned(splits));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = s;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return config;
}

template <bool kFp8>
bool Sized() {
  static const cudaError_t sized =
      cudaFuncSetAttribute(SparseMlaKernel<kFp8>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  return sized == cudaSuccess;
}

template <bool kFp8>
void Launch(cudaStream_t s, const Attend& a) {
  if (!Sized<kFp8>()) return;
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = ConfigOf(s, a.seqs.rows, a.splits, cluster);
  cudaLaunchKernelEx(&config, SparseMlaKernel<kFp8>, a);
}

}  // namespace

bool SparseMlaFits(const Attend& a) {
  return !a.f32 && a.kv_lora == kLora && a.rope == kDim - kLora && a.heads <= kHeads &&
         (a.slab.format == Elem::kE4M3 || a.slab.format == Elem::kBF16);
}

int SparseMlaSplits(int rows) {
  static const std::array<int, 3> active = [] {  // clusters of 2, 4 and 8 blocks that run at once
    std::array<int, 3> n = {};
    for (int i = 0; i < 3 && Sized<true>(); ++i) {
      cudaLaunchAttribute cluster;
      const cudaLaunchConfig_t config = ConfigOf(nullptr, 1, 2 << i, cluster);
      if (cudaOccupancyMaxActiveClusters(&n[size_t(i)], SparseMlaKernel<true>, &config) != cudaSuccess) {
        cudaGetLastError();
        n[size_t(i)] = 0;
      }
    }
    return n;
  }();
  for (int i = 2; i >= 0; --i) {
    if (rows <= active[size_t(i)]) return 2 << i;
  }
  return 1;
}

void LaunchSparseMla(cudaStream_t s, const Attend& a) {
  if (a.seqs.rows == 0) return;
  if (a.slab.format == Elem::kE4M3) {
    Launch<true>(s, a);
  } else {
    Launch<false>(s, a);
  }
}

}  // namespace sluice::cuda
