// Memory of one device. Private to backends/cuda.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "backends/cuda/kernels.h"
#include "tensor/device_memory.h"

namespace sluice::cuda {

Status FromCuda(cudaError_t error, const char* what);

class CudaMemory final : public DeviceMemory {
 public:
  static StatusOr<std::unique_ptr<CudaMemory>> Make();
  ~CudaMemory() override;
  StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes, const char* what) override;
  StatusOr<std::shared_ptr<std::byte>> AllocateShared(int64_t bytes, const char* what) override;
  StatusOr<std::shared_ptr<void>> Pin(std::byte* host, int64_t bytes) override;
  void Copy(void* dst, const void* src, int64_t bytes) override;
  void CopyRuns(std::span<const MemoryRun> runs) override;
  void Fill(void* dst, uint8_t value, int64_t bytes) override;
  int64_t free_bytes() const override;
  StatusOr<std::unique_ptr<DeviceCopier>> MakeCopier() override;

 private:
  CudaMemory() = default;
  std::mutex mutex_;  // of the stream and the run list
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<std::byte> runs_;  // shared memory
};

}  // namespace sluice::cuda
