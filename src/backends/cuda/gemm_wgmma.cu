// Launches of the kernels of gemm_kernel.cuh: tensor maps, the choice of shape, clusters.
#include <algorithm>
#include <array>

#include "backends/cuda/gemm_e4m3_kernel.cuh"

namespace sluice::cuda {
namespace {

using namespace gemm;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                            CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
Encode TensorMapEncoder() {
  static const Encode encode = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      return Encode(nullptr);
    }
    return reinterpret_cast<Encode>(p);
  }();
  return encode;
}

// [groups, rows, k] values; strides in values.
bool MapTiles(CUtensorMap* map, const void* p, bool fp8, int64_t k, int64_t rows, int64_t groups,
              int64_t row_stride, int64_t group_stride, int box_rows) {
  const int64_t item = fp8 ? 1 : 2;
  const cuuint64_t dims[3] = {cuuint64_t(k), cuuint64_t(rows), cuuint64_t(groups)};
  const cuuint64_t strides[2] = {cuuint64_t(row_stride * item), cuuint64_t(group_stride * item)};
  const cuuint32_t box[3] = {cuuint32_t(kBlockBytes / item), cuuint32_t(box_rows), 1}, steps[3] = {1, 1, 1};
  return TensorMapEncoder()(map, fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                            const_cast<void*>(p), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Rows of n values as boxes of 16 rows of 128 bytes.
bool MapRows(CUtensorMap* map, void* p, int64_t item, int64_t n, int64_t rows, int64_t ld) {
  const cuuint64_t dims[2] = {cuuint64_t(n), cuuint64_t(rows)}, strides[1] = {cuuint64_t(ld * item)};
  const cuuint32_t box[2] = {cuuint32_t(128 / item), 16}, steps[2] = {1, 1};
  return TensorMapEncoder()(
             map, item == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, p, dims,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Clusters of `size` blocks that run at once: fewer than the multiprocessors would hold, since a cluster
// stays in one part of the chip.
template <typename Kernel>
int ActiveClusters(Kernel kernel, int size, int bytes) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(size));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = size_t(bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int n = 0;
  if (cudaOccupancyMaxActiveClusters(&n, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    n = 1;
  }
  return std::max(n, 1);
}

// `tiles` go over clusters of two blocks (wide), of one, or of as many as leave no tile waiting when `split`.
template <bool kFp8, bool kWide, bool kPromote>
cudaError_t Start(cudaStream_t s, const Task& t, int64_t tiles, bool split) {
  using S = Shape<kFp8, kWide>;
  const auto kernel = WgmmaGemmKernel<kFp8, kWide, kPromote>;
  static const cudaError_t sized =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (sized != cudaSuccess) return sized;
  static const std::array<int, 4> active = {
      ActiveClusters(kernel, 1, S::kBytes), ActiveClusters(kernel, 2, S::kBytes),
      ActiveClusters(kernel, 4, S::kBytes), ActiveClusters(kernel, 8, S::kBytes)};
  int power = kWide ? 1 : 0;
  while (!kWide && split && power < 3 && tiles <= active[size_t(power + 1)] && t.k_blocks >= (8 << power))
    ++power;
  const int cluster = 1 << power, clusters = int(std::min<int64_t>(tiles, active[size_t(power)]));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(cluster * clusters));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = S::kBytes;
  config.stream = s;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, WgmmaGemmKernel<kFp8, kWide, kPromote>, t);
}

cudaError_t StartE4M3(cudaStream_t s, const Task& t, int64_t tiles) {
  static const cudaError_t sized =
      cudaFuncSetAttribute(E4M3GemmKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, E4M3Shape::kBytes);
  if (sized != cudaSuccess) return sized;
  static const int active = ActiveClusters(E4M3GemmKernel, 2, E4M3Shape::kBytes);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 2;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(2 * std::min<int64_t>(tiles, active)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = E4M3Shape::kBytes;
  config.stream = s;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, E4M3GemmKernel, t);
}

int Multiprocessors() {
  static const int count = [] {
    int device = 0, n = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    return std::max(n, 2);
  }();
  return count;
}

}  // namespace

bool WgmmaGemmFits(const Gemm& g) {
  const int64_t item = g.x_fp8 ? 1 : 2;
  const auto aligned = [](const void* p, uintptr_t to) {
    return (reinterpret_cast<uintptr_t>(p) & (to - 1)) == 0;
  };
  const int y_item = g.out == Out::kAct ? 2 : 4;
  return !g.f32 && g.w_fp8 == g.x_fp8 && g.k * item % 16 == 0 && g.x_ld * item % 16 == 0 &&
         g.x_group * item % 16 == 0 && aligned(g.x, 16) && aligned(g.w, 16) &&
         aligned(g.y, uintptr_t(2 * y_item)) && g.n % 2 == 0 && g.y_ld % 2 == 0 && g.y_group % 2 == 0 &&
         !g.gather && TensorMapEncoder() != nullptr;
}

cudaError_t LaunchWgmmaGemm(cudaStream_t s, const Gemm& g) {
  if (g.rows == 0 || g.n == 0) return cudaSuccess;
  const int sms = Multiprocessors();
  Task t;
  const bool fused = g.y_scale != nullptr;
  const int64_t per = g.x_fp8 ? 128 : 64;
  const bool grouped = g.tile_group != nullptr;
  bool wide = grouped ? g.tile_rows == 128 : g.rows > 64;
  if (!grouped && !fused && wide) {
    const int64_t tiles = int64_t((g.rows + 127) / 128) * ((g.n + 255) / 256) * g.groups;
    wide = tiles >= sms / 2 || (g.x_fp8 && g.rows >= kE4M3ManyRows);
  }
  const int tile_rows = wide ? 128 : 64;
  t.x_scale = g.x_scale;
  t.w_scale = g.scale64;
  t.w_scale_sets = int(((fused ? 2 * g.n : g.n) + 255) / 256);
  t.tile_group = g.tile_group;
  t.tiles_used = g.tiles_used;
  t.scatter = g.scatter ? g.sorted : nullptr;
  t.y = g.y;
  t.y_scale = g.y_scale;
  t.y_blocks = (g.n + 127) / 128;
  t.y_ld = g.y_ld;
  t.y_group = g.y_group;
  t.rows = g.rows;
  t.n = g.n;
  t.pieces = g.pieces;
  const int k = g.pieces.count > 0 ? g.pieces.k : g.k;  // inputs of one sum
  t.k_blocks = int((k + per - 1) / per);
  t.groups = g.pieces.count > 0 ? g.pieces.count : g.groups;
  t.up_row = fused ? g.n : 0;
  t.heads = !grouped && g.groups > 1;
  t.out = g.out;
  t.tiles_m = (g.rows + tile_rows - 1) / tile_rows;
  const bool columns192 = g.x_fp8 && wide && !fused && !grouped && t.groups == 1 &&
                          PlanE4M3(g.rows, g.n, sms).columns == kE4M3Columns;
  const int tile_columns = columns192 ? kE4M3Columns : wide && !fused ? 256 : 128;
  t.tiles_n = (g.n + tile_columns - 1) / tile_columns;
  t.aligned16 = (reinterpret_cast<uintptr_t>(g.y) & 15) == 0 && g.y_ld % 8 == 0 && g.y_group % 8 == 0;
  const int64_t x_groups = g.pieces.count > 0 ? 3 : t.heads ? g.groups : 1;
  const int64_t w_rows = fused ? 2 * g.n : g.n, w_groups = g.pieces.count > 0 ? 3 : g.groups;
  if (!MapTiles(&t.a, g.x, g.x_fp8, g.k, g.rows, x_groups, g.x_ld, x_groups > 1 ? g.x_group : g.x_ld,
                tile_rows) ||
      !MapTiles(&t.b, g.w, g.x_fp8, g.k, w_rows, w_groups, g.k, w_rows * g.k,
                columns192 ? E4M3Shape::kHalf : kBoxRows))
    return cudaErrorInvalidValue;
  const int64_t tiles =
      int64_t(wide ? (t.tiles_m + 1) / 2 : t.tiles_m) * t.tiles_n * (grouped ? 1 : t.groups);
  const bool split = g.split && !grouped && g.pieces.count == 0;
  const bool promote = g.x_fp8 || g.pieces.count > 0;
  if (columns192) {
    const int64_t item = g.out == Out::kAct ? 2 : 4;
    t.staged = g.y_ld * item % 16 == 0 && (reinterpret_cast<uintptr_t>(g.y) & 15) == 0;
    if (t.staged && !MapRows(&t.y_map, g.y, item, g.n, g.rows, g.y_ld)) return cudaErrorInvalidValue;
    return StartE4M3(s, t, tiles);
  }
  if (g.x_fp8)
    return wide ? Start<true, true, true>(s, t, tiles, split) : Start<true, false, true>(s, t, tiles, split);
  if (promote)
    return wide ? Start<false, true, true>(s, t, tiles, split)
                : Start<false, false, true>(s, t, tiles, split);
  return wide ? Start<false, true, false>(s, t, tiles, split)
              : Start<false, false, false>(s, t, tiles, split);
}

}  // namespace sluice::cuda
