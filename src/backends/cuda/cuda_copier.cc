#include "backends/cuda/cuda_copier.h"

#include <algorithm>

#include "backends/cuda/cuda_memory.h"

namespace sluice::cuda {
namespace {

// Few blocks fill the link, and the others stay with the forward that runs meanwhile.
constexpr int kBlocks = 16;
constexpr int64_t kListBytes = 4096 * int64_t(sizeof(Run));

class CudaCopier final : public DeviceCopier {
 public:
  CudaCopier(int device, std::shared_ptr<std::byte> list, int64_t list_bytes)
      : device_(device), list_(std::move(list)), most_(size_t(list_bytes) / sizeof(Run)) {}
  ~CudaCopier() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  Status Bind() override {
    RETURN_IF_ERROR(FromCuda(cudaSetDevice(device_), "binding a transfer thread to its device"));
    if (stream_ != nullptr) return OkStatus();
    RETURN_IF_ERROR(
        FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream of a transfer thread"));
    // Brings the kernel to the device: its first launch would wait for all that runs there.
    const MemoryRun nothing{list_.get(), list_.get(), 0};
    return CopyRuns({&nothing, 1});
  }

  Status CopyRuns(std::span<const MemoryRun> runs) override {
    auto* list = reinterpret_cast<Run*>(list_.get());
    for (size_t at = 0; at < runs.size(); at += most_) {
      const size_t n = std::min(runs.size() - at, most_);
      for (size_t i = 0; i < n; ++i) list[i] = {runs[at + i].src, runs[at + i].dst, runs[at + i].bytes};
      LaunchRunCopy(stream_, list, int(n), kBlocks);
      cudaError_t error = cudaGetLastError();
      if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
      RETURN_IF_ERROR(FromCuda(error, "copy of a transfer's pages"));
    }
    return OkStatus();
  }

 private:
  const int device_;
  const std::shared_ptr<std::byte> list_;
  const size_t most_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

// A waiter sleeps: it shares its cores with the forward's thread.
CudaEvent::CudaEvent()
    : made_(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync)) {}

CudaEvent::~CudaEvent() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

void CudaEvent::Record(cudaStream_t stream) {
  if (event_ != nullptr) made_ = cudaEventRecord(event_, stream);
}

Status CudaEvent::Wait() {
  return FromCuda(made_ != cudaSuccess ? made_ : cudaEventSynchronize(event_), "waiting for a layer");
}

StatusOr<std::unique_ptr<DeviceCopier>> MakeCudaCopier(int device, std::shared_ptr<std::byte> list,
                                                       int64_t list_bytes) {
  return std::unique_ptr<DeviceCopier>(std::make_unique<CudaCopier>(device, std::move(list), list_bytes));
}

StatusOr<std::unique_ptr<DeviceCopier>> CudaMemory::MakeCopier() {
  int device = 0;
  RETURN_IF_ERROR(FromCuda(cudaGetDevice(&device), "device of a transfer"));
  ASSIGN_OR_RETURN(auto list, AllocateShared(kListBytes, "copy lists"));
  return MakeCudaCopier(device, std::move(list), kListBytes);
}

}  // namespace sluice::cuda
