// MLA of up to 64 heads over chosen latent rows of 512 + 64 values, stored as fp8 or bf16. One block is one
// batch row, or one part of its list. One or two warpgroups gather rows and turn them into bf16 tiles (64
// rows, double buffered), two more multiply. The multiplying groups each score 32 of a block's 64 keys,
// exchange maxima and probabilities through shared memory, and each keep 256 of the 512 output columns of all
// 64 heads in registers.
#include "backends/cuda/device.cuh"
#include "backends/cuda/wgmma.cuh"

namespace sluice::cuda {
namespace {

constexpr int kHeads = 64, kLora = 512, kDim = 576, kTiles = kDim / 64, kKeys = 64;
constexpr int kTileBytes = 64 * 128;
constexpr int kQ = 0, kK = kTiles * kTileBytes, kP = 3 * kTiles * kTileBytes, kMisc = kP + kTileBytes;
constexpr int kBytes = kMisc + 1024;
// Turning fp8 into bf16 takes two gathering groups, which leaves fewer registers to the multiplying ones.
template <bool kFp8>
constexpr int kProducers = kFp8 ? 2 : 1;
constexpr int kFp8Row = kLora + 16 + 128, kBF16Row = kDim * 2;

__device__ __forceinline__ void ConsumerBarrier() { asm volatile("bar.sync 1, 256;\n" ::: "memory"); }

// Gathers the blocks of one buffer. Positions are read two blocks ahead and turned into addresses one block
// ahead, so that the chain position > page > row is never waited for in one piece; lane l of a warp holds the
// address of its row l % 16.
template <bool kFp8>
__device__ __forceinline__ void Produce(const Attend& a, unsigned char* smem, uint32_t full, uint32_t empty,
                                        int producer, int r, int seq, int begin, int end) {
  constexpr int kStep = kProducers<kFp8>;
  const int t = threadIdx.x & 127, warp = t >> 5, lane = t & 31, piece = lane & 7;
  const int blocks = (end - begin + kKeys - 1) / kKeys;
  const int32_t* pages = a.seqs.pages + a.seqs.page_begin[seq];
  const int32_t* selected = a.selected == nullptr ? nullptr : a.selected + int64_t(r) * a.topk;
  const auto position_of = [&](int b) -> int {
    const int j = begin + b * kKeys + warp * 16 + (lane & 15);
    return j >= end ? -1 : selected != nullptr ? __ldg(selected + j) : j;
  };
  const auto address_of = [&](int position) -> uint64_t {
    if (position < 0) return 0;
    const int slot = position + a.seqs.slot_shift;
    return reinterpret_cast<uint64_t>(PageAddress(a.slab, __ldg(pages + (slot >> 6)))) +
           uint64_t(slot & 63) * (kFp8 ? kFp8Row : kBF16Row);
  };
  uint64_t rows = address_of(position_of(producer));
  int next_position = position_of(producer + kStep);
  if constexpr (kFp8) {
    uint4 v[2][5];
    float scale[2];  // of tile `piece` % 4
    const auto fetch = [&](uint64_t addresses, int i, uint4(&x)[5], float& s) {
      const auto* row = reinterpret_cast<const uint4*>(__shfl_sync(~0u, addresses, i * 4 + (lane >> 3)));
      if (row == nullptr) {
#pragma unroll
        for (int j = 0; j < 5; ++j) x[j] = make_uint4(0, 0, 0, 0);
        s = 0;
        return;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = __ldg(row + j * 8 + piece);
      x[4] = __ldg(row + (kLora + 16) / 16 + piece);
      s = __ldg(reinterpret_cast<const float*>(row + kLora / 16) + (piece & 3));
    };
    fetch(rows, 0, v[0], scale[0]);
    for (int b = producer; b < blocks; b += kStep) {
      const uint64_t next_rows = address_of(next_position);
      next_position = position_of(b + 2 * kStep);
      const int stage = b & 1;
      unsigned char* buffer = smem + kK + stage * kTiles * kTileBytes;
      BarrierWait(empty + 8 * stage, (b >> 1 & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < 3) {
          fetch(rows, i + 1, v[(i + 1) & 1], scale[(i + 1) & 1]);
        } else {
          fetch(next_rows, 0, v[0], scale[0]);
        }
        const uint4(&x)[5] = v[i & 1];
        const int row = warp * 16 + i * 4 + (lane >> 3);
        unsigned char* out = buffer + row * 128;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          __nv_bfloat162 large2, small2;
          SplitScale(__shfl_sync(~0u, scale[i & 1], (lane & 24) + j), large2, small2);
          uint4 lo, hi;
          Dequantise(x[j].x, large2, small2, lo.x, lo.y);
          Dequantise(x[j].y, large2, small2, lo.z, lo.w);
          Dequantise(x[j].z, large2, small2, hi.x, hi.y);
          Dequantise(x[j].w, large2, small2, hi.z, hi.w);
          // Values 16 * piece ..: half a tile row each for pieces 0-3 and 4-7, which write in opposite order
          // so that eight threads never meet in a bank.
          unsigned char* tile = out + (j * 2 + (piece >> 2)) * kTileBytes;
          const int p0 = (piece & 3) * 2, second = piece >> 2;
          *reinterpret_cast<uint4*>(tile + (((p0 + second) ^ (row & 7)) << 4)) = second ? hi : lo;
          *reinterpret_cast<uint4*>(tile + (((p0 + (second ^ 1)) ^ (row & 7)) << 4)) = second ? lo : hi;
        }
        *reinterpret_cast<uint4*>(out + 8 * kTileBytes + ((piece ^ (row & 7)) << 4)) = x[4];
      }
      rows = next_rows;
      FenceAsyncShared();
      BarrierArrive(full + 8 * stage);
    }
  } else {
    for (int b = producer; b < blocks; b += kStep) {
      const uint64_t next_rows = address_of(next_position);
      next_position = position_of(b + 2 * kStep);
      const int stage = b & 1;
      unsigned char* buffer = smem + kK + stage * kTiles * kTileBytes;
      BarrierWait(empty + 8 * stage, (b >> 1 & 1) ^ 1);
      const uint32_t shared = SharedAddress(buffer);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 16 + i * 4 + (lane >> 3);
        const auto* from = reinterpret_cast<const uint4*>(__shfl_sync(~0u, rows, i * 4 + (lane >> 3)));
        const bool valid = from != nullptr;
        if (!valid) from = reinterpret_cast<const uint4*>(a.q);
#pragma unroll
        for (int j = 0; j < 9; ++j)
          CpAsync16(shared + row * 128 + j * kTileBytes + ((piece ^ (row & 7)) << 4),
                    from + (valid ? j * 8 + piece : 0), valid);
      }
      CpAsyncCommit();
      rows = next_rows;
      CpAsyncWait<0>();
      FenceAsyncShared();
      BarrierArrive(full + 8 * stage);
    }
  }
}

__device__ __forceinline__ void Multiply(const Attend& a, unsigned char* smem, float* exchange, uint32_t base,
                                         uint32_t full, uint32_t empty, int group, int r, int part, int n,
                                         int begin, int end) {
  const int t = threadIdx.x;
  const int warp = (t & 127) >> 5, lane = t & 31, quad = lane & 3;
  float o[2][64];  // columns 0 .. 127 and 128 .. 255 of the group's half
#pragma unroll
  for (int i = 0; i < 64; ++i) o[0][i] = o[1][i] = 0;
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const float log2_scale = a.scale * 1.4426950408889634f;
  const int blocks = (end - begin + kKeys - 1) / kKeys;
  const int row = warp * 16 + (lane >> 2);
  for (int b = 0; b < blocks; ++b) {
    const int stage = b & 1;
    BarrierWait(full + 8 * stage, (b >> 1) & 1);
    const uint32_t k = base + kK + stage * kTiles * kTileBytes;
    float s[16];
    WgmmaFence();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        WgmmaN32(s, DescKMajor(base + kQ + tile * kTileBytes + kk * 32),
                 DescKMajor(k + tile * kTileBytes + group * 4096 + kk * 32), tile + kk > 0);
      }
    }
    WgmmaCommit();
    WgmmaWait<0>();
    KeepRegisters(s);
    const int valid = end - begin - b * kKeys - group * 32;  // keys of this half
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int key = (j >> 2) * 8 + quad * 2 + (j & 1);
      s[j] = key < valid ? s[j] * log2_scale : -INFINITY;
      top[(j >> 1) & 1] = fmaxf(top[(j >> 1) & 1], s[j]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
      if (quad == 0) exchange[group * 64 + row + i * 8] = top[i];
    }
    ConsumerBarrier();
    float alpha[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = fmaxf(max[i], fmaxf(top[i], exchange[(group ^ 1) * 64 + row + i * 8]));
      alpha[i] = exp2f(max[i] - m);
      max[i] = m;
      sum[i] *= alpha[i];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = exp2f(s[j * 4 + i * 2] - max[i]), y = exp2f(s[j * 4 + i * 2 + 1] - max[i]);
        const __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
        // What is multiplied is what is summed.
        sum[i] += __low2float(p) + __high2float(p);
        const int h = row + i * 8;
        *reinterpret_cast<__nv_bfloat162*>(smem + kP + h * 128 + (((group * 4 + j) ^ (h & 7)) << 4) +
                                           quad * 4) = p;
      }
    }
#pragma unroll
    for (int j = 0; j < 64; ++j) {
      o[0][j] *= alpha[(j >> 1) & 1];
      o[1][j] *= alpha[(j >> 1) & 1];
    }
    FenceAsyncShared();
    ConsumerBarrier();
    WgmmaFence();
    KeepRegisters(o[0]);
    KeepRegisters(o[1]);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      const uint64_t p = DescKMajor(base + kP + kk * 32);
      const uint32_t v = k + group * 4 * kTileBytes + kk * 2048;
      WgmmaN128T(o[0], p, DescNMajor(v, kTileBytes), true);
      WgmmaN128T(o[1], p, DescNMajor(v + 2 * kTileBytes, kTileBytes), true);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    KeepRegisters(o[0]);
    KeepRegisters(o[1]);
    BarrierArrive(empty + 8 * stage);
  }
  // The other half's sums.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
  }
  ConsumerBarrier();
  if (quad == 0) {
    exchange[group * 64 + row] = sum[0];
    exchange[group * 64 + row + 8] = sum[1];
  }
  ConsumerBarrier();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int h = row + i * 8;
    const float other = exchange[(group ^ 1) * 64 + h];
    // In one order for both groups.
    const float total = group == 0 ? sum[i] + other : other + sum[i];
    if (h >= a.heads) continue;
    if (a.splits == 1) {
      const float inverse = n > 0 ? 1.0f / total : 0.0f;
      auto* out =
          static_cast<__nv_bfloat16*>(a.out) + (int64_t(r) * a.heads + h) * kLora + group * 256 + quad * 2;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        *reinterpret_cast<__nv_bfloat162*>(out + j * 8) = __floats2bfloat162_rn(
            o[j >> 4][(j & 15) * 4 + i * 2] * inverse, o[j >> 4][(j & 15) * 4 + i * 2 + 1] * inverse);
    } else {
      float* out = a.partial + ((int64_t(r) * a.splits + part) * kHeads + h) * (kLora + 2);
#pragma unroll
      for (int j = 0; j < 32; ++j)
        *reinterpret_cast<float2*>(out + group * 256 + j * 8 + quad * 2) =
            make_float2(o[j >> 4][(j & 15) * 4 + i * 2], o[j >> 4][(j & 15) * 4 + i * 2 + 1]);
      if (group == 0 && quad == 0) *reinterpret_cast<float2*>(out + kLora) = make_float2(max[i], total);
    }
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(256 + 128 * kProducers<kFp8>, 1)
    SparseMlaKernel(const __grid_constant__ Attend a) {
  extern __shared__ __align__(1024) unsigned char smem[];
  float* exchange = reinterpret_cast<float*>(smem + kMisc);  // [2][64]
  const uint32_t base = SharedAddress(smem), full = base + kMisc + 512, empty = full + 16;
  const int r = blockIdx.x, part = blockIdx.y, t = threadIdx.x, group = t >> 7;
  const int seq = a.seqs.seq_of_row[r];
  const int n = seq < 0 ? 0 : a.selected != nullptr ? a.count[r] : a.seqs.positions[r] + 1;
  // Parts are whole blocks of keys, the same whatever else is in the batch.
  const int all_blocks = (n + kKeys - 1) / kKeys, each = (all_blocks + a.splits - 1) / a.splits;
  const int begin = min(n, part * each * kKeys), end = min(n, begin + each * kKeys);
  if (t == 0) {
    for (int i = 0; i < 2; ++i) {
      BarrierInit(full + 8 * i, 128);
      BarrierInit(empty + 8 * i, 256);
    }
    FenceBarrierInit();
  }
  const auto* q = static_cast<const uint4*>(a.q) + int64_t(r) * a.heads * (kDim / 8);
  for (int i = t; i < kHeads * kDim / 8; i += 256 + 128 * kProducers<kFp8>) {
    const int h = i / (kDim / 8), p = i % (kDim / 8);
    const uint4 v = h < a.heads ? __ldg(q + i) : make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(smem + kQ + (p >> 3) * kTileBytes + h * 128 + (((p & 7) ^ (h & 7)) << 4)) = v;
  }
  FenceAsyncShared();
  __syncthreads();
  if (group >= 2) {
    RegistersDown<kFp8 ? 88 : 104>();
    if (begin < end) Produce<kFp8>(a, smem, full, empty, group - 2, r, seq, begin, end);
  } else {
    RegistersUp<kFp8 ? 168 : 200>();
    Multiply(a, smem, exchange, base, full, empty, group, r, part, n, begin, end);
  }
}

// Parts in order; one block a (row, head).
__global__ void __launch_bounds__(128) MergeKernel(const __grid_constant__ Attend a) {
  const int r = blockIdx.x, h = blockIdx.y, t = threadIdx.x;
  const float* in = a.partial + (int64_t(r) * a.splits * kHeads + h) * (kLora + 2);
  const int64_t step = int64_t(kHeads) * (kLora + 2);
  float max = -INFINITY;
  for (int p = 0; p < a.splits; ++p) {
    if (in[p * step + kLora + 1] > 0) max = fmaxf(max, in[p * step + kLora]);
  }
  float total = 0;
  float2 v[2] = {};
  for (int p = 0; p < a.splits; ++p) {
    const float l = in[p * step + kLora + 1];
    if (l == 0) continue;  // an empty part; NaN goes on
    const float f = exp2f(in[p * step + kLora] - max);
    total += l * f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = *reinterpret_cast<const float2*>(in + p * step + i * 256 + t * 2);
      v[i].x += x.x * f;
      v[i].y += x.y * f;
    }
  }
  const float inverse = total == 0 ? 0.0f : 1.0f / total;
  auto* out = static_cast<__nv_bfloat16*>(a.out) + (int64_t(r) * a.heads + h) * kLora + t * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    *reinterpret_cast<__nv_bfloat162*>(out + i * 256) =
        __floats2bfloat162_rn(v[i].x * inverse, v[i].y * inverse);
}

template <bool kFp8>
void Launch(cudaStream_t s, const Attend& a) {
  static const cudaError_t sized =
      cudaFuncSetAttribute(SparseMlaKernel<kFp8>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (sized != cudaSuccess) return;
  SparseMlaKernel<kFp8>
      <<<dim3(unsigned(a.seqs.rows), unsigned(a.splits)), 256 + 128 * kProducers<kFp8>, kBytes, s>>>(a);
  if (a.splits > 1) MergeKernel<<<dim3(unsigned(a.seqs.rows), unsigned(a.heads)), 128, 0, s>>>(a);
}

}  // namespace

bool SparseMlaFits(const Attend& a) {
  return !a.f32 && a.kv_lora == kLora && a.rope == kDim - kLora && a.heads <= kHeads &&
         (a.slab.format == Elem::kE4M3 || a.slab.format == Elem::kBF16);
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
