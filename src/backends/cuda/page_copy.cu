// Copies of whole pages, and of runs of any length, between device memory and mapped host memory. One thread
// a block moves bulk pieces through shared memory: loads and stores of several pieces are in flight at once,
// and no register holds data.
#include "backends/cuda/device.cuh"

namespace sluice::cuda {
namespace {

constexpr int kPiece = 16384;  // bytes of one stage
constexpr int kRing = 12;      // stages

template <typename Where>
__device__ __forceinline__ void CopyPieces(int64_t pieces, Where where) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) uint64_t full[kRing];
  if (threadIdx.x != 0) return;
  const uint32_t base = SharedAddress(ring), bars = SharedAddress(full);
  for (int i = 0; i < kRing; ++i) BarrierInit(bars + 8 * i, 1);
  FenceBarrierInit();
  FenceAsyncShared();
  const std::byte* src;
  std::byte* dst;
  uint32_t bytes;
  int64_t issued = blockIdx.x, done = blockIdx.x;
  int load_stage = 0, store_stage = 0, parity = 0;
  // kAhead loads are outstanding before a piece is stored; a stage is loaded again once its store has been
  // read out.
  constexpr int kAhead = kRing / 2;
  for (int i = 0; i < kAhead && issued < pieces; ++i, issued += gridDim.x) {
    where(issued, src, dst, bytes);
    BarrierExpect(bars + 8 * load_stage, bytes);
    BulkLoad(base + load_stage * kPiece, src, bytes, bars + 8 * load_stage);
    load_stage = load_stage + 1 == kRing ? 0 : load_stage + 1;
  }
  for (; done < pieces; done += gridDim.x) {
    BarrierWait(bars + 8 * store_stage, parity);
    where(done, src, dst, bytes);
    BulkStore(dst, base + store_stage * kPiece, bytes);
    BulkCommit();
    if (++store_stage == kRing) {
      store_stage = 0;
      parity ^= 1;
    }
    if (issued < pieces) {
      BulkWaitRead<kRing - kAhead>();
      where(issued, src, dst, bytes);
      BarrierExpect(bars + 8 * load_stage, bytes);
      BulkLoad(base + load_stage * kPiece, src, bytes, bars + 8 * load_stage);
      load_stage = load_stage + 1 == kRing ? 0 : load_stage + 1;
      issued += gridDim.x;
    }
  }
  BulkWait<0>();
}

__global__ void __launch_bounds__(32)
    PageCopyKernel(const std::byte* src, int64_t src_stride, const int32_t* src_index, std::byte* dst,
                   int64_t dst_stride, const int32_t* dst_index, int n, int64_t bytes) {
  const int64_t per = (bytes + kPiece - 1) / kPiece;
  CopyPieces(n * per, [&](int64_t piece, const std::byte*& from, std::byte*& to, uint32_t& count) {
    const int64_t page = piece / per, at = piece % per * kPiece;
    from = src + int64_t(src_index[page]) * src_stride + at;
    to = dst + int64_t(dst_index[page]) * dst_stride + at;
    count = uint32_t(bytes - at < kPiece ? bytes - at : kPiece);
  });
}

// Inside device memory: a block a page, all its loads in flight before the first store.
constexpr int kGatherThreads = 512, kGatherFlight = 6;
__global__ void __launch_bounds__(kGatherThreads)
    DevicePageCopyKernel(const std::byte* src, int64_t src_stride, const int32_t* src_index, std::byte* dst,
                         int64_t dst_stride, const int32_t* dst_index, int64_t words) {
  const auto* from =
      reinterpret_cast<const uint4*>(src + int64_t(__ldg(src_index + blockIdx.x)) * src_stride);
  auto* to = reinterpret_cast<uint4*>(dst + int64_t(__ldg(dst_index + blockIdx.x)) * dst_stride);
  for (int64_t base = threadIdx.x; base < words; base += kGatherThreads * kGatherFlight) {
    uint4 v[kGatherFlight];
#pragma unroll
    for (int j = 0; j < kGatherFlight; ++j) {
      if (base + j * kGatherThreads < words) v[j] = __ldcs(from + base + j * kGatherThreads);
    }
#pragma unroll
    for (int j = 0; j < kGatherFlight; ++j) {
      if (base + j * kGatherThreads < words) __stcs(to + base + j * kGatherThreads, v[j]);
    }
  }
}

// Runs are cut by whole blocks: a run is one block's, piece after piece.
__global__ void __launch_bounds__(128) RunCopyKernel(const Run* runs, int n) {
  for (int r = blockIdx.x; r < n; r += gridDim.x) {
    const Run run = runs[r];
    const int64_t words = run.bytes / 16;
    const auto* from = reinterpret_cast<const uint4*>(run.src);
    auto* to = reinterpret_cast<uint4*>(run.dst);
    int64_t i = threadIdx.x;
    for (; i + 3 * 128 < words; i += 4 * 128) {
      const uint4 a = from[i], b = from[i + 128], c = from[i + 256], d = from[i + 384];
      to[i] = a;
      to[i + 128] = b;
      to[i + 256] = c;
      to[i + 384] = d;
    }
    for (; i < words; i += 128) to[i] = from[i];
    for (int64_t j = words * 16 + threadIdx.x; j < run.bytes; j += 128) run.dst[j] = run.src[j];
  }
}

}  // namespace

void LaunchPageCopy(cudaStream_t s, const std::byte* src, int64_t src_stride, const int32_t* src_index,
                    std::byte* dst, int64_t dst_stride, const int32_t* dst_index, int n, int64_t bytes,
                    int blocks) {
  if (n == 0) return;
  if (blocks == 0) {
    DevicePageCopyKernel<<<n, kGatherThreads, 0, s>>>(src, src_stride, src_index, dst, dst_stride, dst_index,
                                                      bytes / 16);
    return;
  }
  static const cudaError_t sized =
      cudaFuncSetAttribute(PageCopyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kPiece * kRing);
  if (sized == cudaSuccess)
    PageCopyKernel<<<blocks, 32, kPiece * kRing, s>>>(src, src_stride, src_index, dst, dst_stride, dst_index,
                                                      n, bytes);
}

void LaunchRunCopy(cudaStream_t s, const Run* runs, int n, int blocks) {
  if (n == 0) return;
  const int grid = n < blocks ? n : blocks;
  RunCopyKernel<<<grid, 128, 0, s>>>(runs, n);
}

}  // namespace sluice::cuda
