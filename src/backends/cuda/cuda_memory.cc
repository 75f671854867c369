#include "backends/cuda/cuda_memory.h"

#include <algorithm>

#include "base/end_process.h"

namespace sluice::cuda {
namespace {
constexpr int64_t kRunsALaunch = 8192;
constexpr int kCopyBlocks = 32;
constexpr int kIndexedBlocks = 8;  // bulk copies of whole pages need no more
}  // namespace

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return OkStatus();
  return Internal("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Make(const DeviceFacts& facts) {
  std::unique_ptr<CudaMemory> m(new CudaMemory());
  m->facts_ = facts;
  RETURN_IF_ERROR(FromCuda(cudaStreamCreateWithFlags(&m->stream_, cudaStreamNonBlocking), "copy stream"));
  ASSIGN_OR_RETURN(m->runs_, m->AllocateShared(kRunsALaunch * int64_t(sizeof(Run)), "copy lists"));
  return m;
}

CudaMemory::~CudaMemory() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

StatusOr<std::shared_ptr<std::byte>> CudaMemory::Allocate(int64_t bytes, const char* what) {
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, size_t(std::max<int64_t>(bytes, 16)));
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Exhausted("{}: {} bytes of device memory cannot be allocated ({} are free): {}", what, bytes,
                     free_bytes(), cudaGetErrorString(error));
  }
  {
    std::lock_guard lock(ranges_->mutex);
    ranges_->bytes[static_cast<std::byte*>(p)] = std::max<int64_t>(bytes, 16);
  }
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(p), [ranges = ranges_](std::byte* q) {
    {
      std::lock_guard lock(ranges->mutex);
      ranges->bytes.erase(q);
    }
    cudaFree(q);
  });
}

StatusOr<std::shared_ptr<std::byte>> CudaMemory::AllocateShared(int64_t bytes, const char* what) {
  void* p = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&p, size_t(std::max<int64_t>(bytes, 16)), cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Exhausted("{}: {} bytes of pinned host memory cannot be allocated: {}", what, bytes,
                     cudaGetErrorString(error));
  }
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(p), [](std::byte* q) { cudaFreeHost(q); });
}

StatusOr<std::shared_ptr<void>> CudaMemory::Pin(std::byte* host, int64_t bytes) {
  RETURN_IF_ERROR(CheckFeature(Feature::kPinnedHostPool, facts_));
  const cudaError_t error =
      cudaHostRegister(host, size_t(bytes), cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Exhausted("host tier: {} bytes cannot be pinned: {}; lower --hicache-size", bytes,
                     cudaGetErrorString(error));
  }
  ++*pinned_;
  return std::shared_ptr<void>(host, [count = pinned_](void* p) {
    const cudaError_t gone = cudaHostUnregister(p);
    if (gone == cudaSuccess) --*count;
    cudaGetLastError();
  });
}

void CudaMemory::Finish(cudaError_t error, const char* what, int64_t amount) {
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
  if (error == cudaSuccess) return;
  const std::string where = Where();
  EndProcess(fmt::format("the device has failed and the process ends: {} {}: {} ({}){}{}", what, amount,
                         cudaGetErrorString(error), cudaGetErrorName(error),
                         where.empty() ? "" : "; it was at: ", where));
}

void CudaMemory::Register(const ops::Queue* queue) {
  std::lock_guard lock(queues_mutex_);
  queues_.push_back(queue);
}

void CudaMemory::Forget(const ops::Queue* queue) {
  std::lock_guard lock(queues_mutex_);
  std::erase(queues_, queue);
}

std::string CudaMemory::Where() const {
  std::lock_guard lock(queues_mutex_);
  std::string text;
  for (const ops::Queue* queue : queues_) {
    const std::string where = queue->Where();
    if (!where.empty()) text += (text.empty() ? "" : "; ") + where;
  }
  return text;
}

void CudaMemory::Copy(void* dst, const void* src, int64_t bytes) {
  std::lock_guard lock(mutex_);
  Finish(cudaMemcpyAsync(dst, src, size_t(bytes), cudaMemcpyDefault, stream_), "bytes to copy:", bytes);
}

void CudaMemory::CopyRuns(std::span<const MemoryRun> runs) {
  static_assert(sizeof(MemoryRun) == sizeof(Run));
  std::lock_guard lock(mutex_);
  auto* list = reinterpret_cast<Run*>(runs_.get());
  for (size_t at = 0; at < runs.size(); at += size_t(kRunsALaunch)) {
    const size_t n = std::min(runs.size() - at, size_t(kRunsALaunch));
    for (size_t i = 0; i < n; ++i) list[i] = {runs[at + i].src, runs[at + i].dst, runs[at + i].bytes};
    LaunchRunCopy(stream_, list, int(n), kCopyBlocks);
    Finish(cudaGetLastError(), "runs to copy:", int64_t(n));
  }
}

void CudaMemory::CopyIndexed(std::span<const IndexedPages> copies) {
  std::lock_guard lock(mutex_);
  for (const IndexedPages& c : copies) {
    if (c.rows == 1 && c.row_bytes % 16 == 0 && c.src_page % 16 == 0 && c.dst_page % 16 == 0) {
      LaunchPageCopy(stream_, c.src, c.src_page, c.src_index, c.dst, c.dst_page, c.dst_index, int(c.count),
                     c.row_bytes, kIndexedBlocks);
      continue;
    }
    LaunchPageRows(stream_,
                   {c.src, c.dst, c.src_page, c.dst_page, c.src_index, c.dst_index, c.count, c.rows,
                    c.row_bytes, c.src_row, c.dst_row},
                   kCopyBlocks);
  }
  Finish(cudaGetLastError(), "lists of pages to copy:", int64_t(copies.size()));
}

void CudaMemory::Fill(void* dst, uint8_t value, int64_t bytes) {
  std::lock_guard lock(mutex_);
  Finish(cudaMemsetAsync(dst, value, size_t(bytes), stream_), "bytes to fill:", bytes);
}

bool CudaMemory::Holds(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  std::lock_guard lock(ranges_->mutex);
  auto next = ranges_->bytes.upper_bound(at);
  if (next == ranges_->bytes.begin()) return false;
  --next;
  return at < next->first + next->second;
}

int64_t CudaMemory::free_bytes() const {
  size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? int64_t(free) : 0;
}

}  // namespace sluice::cuda
