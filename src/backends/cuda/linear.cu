// Matrix products that the warpgroup units cannot take (gemm_wgmma.cu): f32, rows of any alignment or through
// a list, and bf16 rows with e4m3 weights of one scale per 128 inputs and output row, decoded on chip. Every
// output element is summed over k in one fixed order, so no row's bits depend on the number of rows.
#include "backends/cuda/device.cuh"

namespace sluice::cuda {
namespace {

constexpr int kBM = kGemmTileRows, kBN = 64, kBK = 64, kStages = 3;

template <bool kFp8>
struct Shared {
  // Rows of 64 values are padded so that 8-byte fragment loads of a half-warp touch every bank once.
  static constexpr int kALd = kBK + 16;                    // bf16
  static constexpr int kWLd = kFp8 ? kBK + 16 : kBK + 16;  // bytes or bf16
  __nv_bfloat16 a[kStages][kBM][kALd];
  typename std::conditional<kFp8, uint8_t, __nv_bfloat16>::type w[kStages][kBN][kWLd];
  int32_t row[kBM];  // of x, -1: none
};

__device__ __forceinline__ void Store(const Gemm& g, int64_t at, float v) {
  if (g.out == Out::kAct) {
    if (g.f32) {
      static_cast<float*>(g.y)[at] = v;
    } else {
      static_cast<__nv_bfloat16*>(g.y)[at] = __float2bfloat16_rn(v);
    }
  } else if (g.out == Out::kF32Add) {
    static_cast<float*>(g.y)[at] += v;
  } else {
    static_cast<float*>(g.y)[at] = v;
  }
}

// Four warps, each 32 x 32. k is permuted inside groups of 16 (thread c of a quad holds values 4c .. 4c + 3),
// alike in x and w, so that a fragment is one 8-byte (w e4m3: 4-byte) load.
template <bool kFp8>
__global__ void __launch_bounds__(128) GemmKernel(const __grid_constant__ Gemm g) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& sm = *reinterpret_cast<Shared<kFp8>*>(raw);
  const int tile_m = blockIdx.y, n0 = blockIdx.x * kBN, t = threadIdx.x, warp = t >> 5, lane = t & 31;
  int group = blockIdx.z;
  if (g.tile_group != nullptr) {
    group = g.tile_group[tile_m];
    if (group < 0) return;
  }
  const int m0 = tile_m * kBM;
  if (t < kBM) {
    int row = m0 + t < g.rows ? m0 + t : -1;
    if (g.sorted != nullptr && row >= 0) {
      const int pair = g.sorted[row];
      if (pair < 0)
        row = -1;
      else if (g.gather)
        row = pair / g.divide_x;
    }
    sm.row[t] = row;
  }
  __syncthreads();
  const auto* x = static_cast<const __nv_bfloat16*>(g.x) + (g.tile_group == nullptr ? group * g.x_group : 0);
  const int64_t w_group = int64_t(group) * g.n * g.k;
  const int tiles_k = g.k / kBK;

  const auto load = [&](int stage, int kt) {
    const int k0 = kt * kBK;
#pragma unroll
    for (int i = 0; i < kBM * kBK / 8 / 128; ++i) {
      const int c = i * 128 + t, r = c / (kBK / 8), k = c % (kBK / 8) * 8;
      const int row = sm.row[r];
      CpAsync16(SharedAddress(&sm.a[stage][r][k]), x + (row < 0 ? 0 : int64_t(row) * g.x_ld + k0 + k),
                row >= 0);
    }
    constexpr int kPer = kFp8 ? 16 : 8;
#pragma unroll
    for (int i = 0; i < kBN * kBK / kPer / 128; ++i) {
      const int c = i * 128 + t, r = c / (kBK / kPer), k = c % (kBK / kPer) * kPer;
      const bool valid = n0 + r < g.n;
      const int64_t at = w_group + (valid ? int64_t(n0 + r) * g.k + k0 + k : 0);
      if constexpr (kFp8) {
        CpAsync16(SharedAddress(&sm.w[stage][r][k]), static_cast<const uint8_t*>(g.w) + at, valid);
      } else {
        CpAsync16(SharedAddress(&sm.w[stage][r][k]), static_cast<const __nv_bfloat16*>(g.w) + at, valid);
      }
    }
    CpAsyncCommit();
  };

  float acc[2][4][4] = {}, part[2][4][4] = {};
  const int wm = (warp >> 1) * 32, wn = (warp & 1) * 32, row = lane >> 2, quad = lane & 3;
  const int blocks_k = (g.k + 127) / 128;
  const float* scale = kFp8 ? g.scale + int64_t(group) * blocks_k * g.n : nullptr;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < tiles_k) {
      load(i, i);
    } else {
      CpAsyncCommit();
    }
  }
  for (int kt = 0; kt < tiles_k; ++kt) {
    CpAsyncWait<kStages - 2>();
    __syncthreads();
    if (kt + kStages - 1 < tiles_k) {
      load((kt + kStages - 1) % kStages, kt + kStages - 1);
    } else {
      CpAsyncCommit();
    }
    const int stage = kt % kStages;
#pragma unroll
    for (int kk = 0; kk < kBK; kk += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 lo = *reinterpret_cast<const uint2*>(&sm.a[stage][wm + i * 16 + row][kk + quad * 4]);
        const uint2 hi = *reinterpret_cast<const uint2*>(&sm.a[stage][wm + i * 16 + row + 8][kk + quad * 4]);
        a[i][0] = lo.x;
        a[i][1] = hi.x;
        a[i][2] = lo.y;
        a[i][3] = hi.y;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t b0, b1;
        if constexpr (kFp8) {
          E4M3x4ToBF16(*reinterpret_cast<const uint32_t*>(&sm.w[stage][wn + j * 8 + row][kk + quad * 4]), b0,
                       b1);
        } else {
          const uint2 b = *reinterpret_cast<const uint2*>(&sm.w[stage][wn + j * 8 + row][kk + quad * 4]);
          b0 = b.x;
          b1 = b.y;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) MmaBF16(kFp8 ? part[i][j] : acc[i][j], a[i], b0, b1);
      }
    }
    if constexpr (kFp8) {
      if ((kt & 1) == 1 || kt + 1 == tiles_k) {  // the end of a block of 128 inputs
        const float* s = scale + int64_t(kt >> 1) * g.n;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = n0 + wn + j * 8 + quad * 2;
          const float s0 = n < g.n ? s[n] : 0.0f, s1 = n + 1 < g.n ? s[n + 1] : 0.0f;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            acc[i][j][0] += part[i][j][0] * s0;
            acc[i][j][1] += part[i][j][1] * s1;
            acc[i][j][2] += part[i][j][2] * s0;
            acc[i][j][3] += part[i][j][3] * s1;
            part[i][j][0] = part[i][j][1] = part[i][j][2] = part[i][j][3] = 0;
          }
        }
      }
    }
  }
  const int64_t y0 = g.tile_group == nullptr ? group * g.y_group : 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = wm + i * 16 + half * 8 + row;
      if (sm.row[local] < 0) continue;
      const int64_t out_row = g.scatter ? g.sorted[m0 + local] : m0 + local;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int n = n0 + wn + j * 8 + quad * 2;
        if (n < g.n) Store(g, y0 + out_row * g.y_ld + n, acc[i][j][half * 2]);
        if (n + 1 < g.n) Store(g, y0 + out_row * g.y_ld + n + 1, acc[i][j][half * 2 + 1]);
      }
    }
  }
}

// Plain f32 arithmetic for any shape and either activation type: 64 x 64 tiles, 4 x 4 values a thread.
template <typename T>
__global__ void __launch_bounds__(256) GemmAnyKernel(const __grid_constant__ Gemm g) {
  __shared__ float a[16][kBM + 4], b[16][64 + 4];
  __shared__ int32_t rows[kBM];
  const int tile_m = blockIdx.y, n0 = blockIdx.x * 64, t = threadIdx.x;
  int group = blockIdx.z;
  if (g.tile_group != nullptr) {
    group = g.tile_group[tile_m];
    if (group < 0) return;
  }
  const int m0 = tile_m * kBM;
  if (t < kBM) {
    int row = m0 + t < g.rows ? m0 + t : -1;
    if (g.sorted != nullptr && row >= 0) {
      const int pair = g.sorted[row];
      if (pair < 0)
        row = -1;
      else if (g.gather)
        row = pair / g.divide_x;
    }
    rows[t] = row;
  }
  __syncthreads();
  const T* x = static_cast<const T*>(g.x) + (g.tile_group == nullptr ? group * g.x_group : 0);
  const int64_t w_group = int64_t(group) * g.n * g.k;
  const int blocks_k = (g.k + 127) / 128;
  const auto weight = [&](int n, int k) -> float {
    const int64_t at = w_group + int64_t(n) * g.k + k;
    if (g.w_fp8)
      return E4M3Value(static_cast<const uint8_t*>(g.w)[at]) *
             g.scale[(int64_t(group) * blocks_k + k / 128) * g.n + n];
    return ToFloat(static_cast<const T*>(g.w)[at]);
  };
  float acc[4][4] = {};
  const int tr = t / 16 * 4, tc = t % 16 * 4;
  for (int k0 = 0; k0 < g.k; k0 += 16) {
    for (int i = t; i < kBM * 16; i += 256) {
      const int r = i / 16, k = k0 + i % 16;
      a[i % 16][r] = rows[r] >= 0 && k < g.k ? ToFloat(x[int64_t(rows[r]) * g.x_ld + k]) : 0.0f;
      b[i % 16][r] = n0 + r < g.n && k < g.k ? weight(n0 + r, k) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(a[k][tr + i], b[k][tc + j], acc[i][j]);
      }
    }
    __syncthreads();
  }
  const int64_t y0 = g.tile_group == nullptr ? group * g.y_group : 0;
  for (int i = 0; i < 4; ++i) {
    if (rows[tr + i] < 0) continue;
    const int64_t out_row = g.scatter ? g.sorted[m0 + tr + i] : m0 + tr + i;
    for (int j = 0; j < 4; ++j) {
      if (n0 + tc + j < g.n) Store(g, y0 + out_row * g.y_ld + n0 + tc + j, acc[i][j]);
    }
  }
}

}  // namespace

cudaError_t LaunchGemm(cudaStream_t s, const Gemm& g) {
  if (g.rows == 0 || g.n == 0) return cudaSuccess;
  if (WgmmaGemmFits(g)) return LaunchWgmmaGemm(s, g);
  if (g.x_fp8 || g.y_scale != nullptr || g.pieces.count > 0 || g.tile_rows != kGemmTileRows)
    return cudaErrorInvalidValue;
  const dim3 grid(unsigned((g.n + kBN - 1) / kBN), unsigned((g.rows + kBM - 1) / kBM),
                  unsigned(g.tile_group != nullptr ? 1 : g.groups));
  const bool aligned =
      g.k % kBK == 0 && g.x_ld % 8 == 0 && g.x_group % 8 == 0 && (reinterpret_cast<uintptr_t>(g.x) & 15) == 0;
  if (g.f32) {
    GemmAnyKernel<float><<<grid, 256, 0, s>>>(g);
  } else if (!aligned) {
    GemmAnyKernel<__nv_bfloat16><<<grid, 256, 0, s>>>(g);
  } else if (g.w_fp8) {
    static const cudaError_t sized = cudaFuncSetAttribute(
        GemmKernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared<true>)));
    if (sized != cudaSuccess) return sized;
    GemmKernel<true><<<grid, 128, sizeof(Shared<true>), s>>>(g);
  } else {
    static const cudaError_t sized = cudaFuncSetAttribute(
        GemmKernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared<false>)));
    if (sized != cudaSuccess) return sized;
    GemmKernel<false><<<grid, 128, sizeof(Shared<false>), s>>>(g);
  }
  return cudaGetLastError();
}

}  // namespace sluice::cuda
