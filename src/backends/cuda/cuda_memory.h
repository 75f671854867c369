// Memory of one device. Private to backends/cuda.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/cuda/device_features.h"
#include "backends/cuda/kernels.h"
#include "ops/backend.h"
#include "tensor/device_memory.h"

namespace sluice::cuda {

Status FromCuda(cudaError_t error, const char* what);

// A fault of the device in a copy ends the process with a report, in which the queues say what they were at:
// nothing that lies on the device can be trusted.
class CudaMemory final : public DeviceMemory {
 public:
  static StatusOr<std::unique_ptr<CudaMemory>> Make(const DeviceFacts& facts);
  ~CudaMemory() override;
  StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes, const char* what) override;
  StatusOr<std::shared_ptr<std::byte>> AllocateShared(int64_t bytes, const char* what) override;
  StatusOr<std::shared_ptr<void>> Pin(std::byte* host, int64_t bytes) override;
  void Copy(void* dst, const void* src, int64_t bytes) override;
  void CopyRuns(std::span<const MemoryRun> runs) override;
  void CopyIndexed(std::span<const IndexedPages> copies) override;
  void Fill(void* dst, uint8_t value, int64_t bytes) override;
  int64_t free_bytes() const override;
  StatusOr<std::unique_ptr<DeviceCopier>> MakeCopier() override;
  bool Holds(const void* address) const override;
  int64_t pinned_ranges() const override { return pinned_->load(); }
  // Queues of this device, from their making to their end.
  void Register(const ops::Queue* queue);
  void Forget(const ops::Queue* queue);
  std::string Where() const;  // what the registered ones are at; "" when nothing runs

 private:
  // Allocations alive, by their first byte, so that nothing has to ask the runtime whose an address is.
  struct Ranges {
    std::mutex mutex;
    std::map<const std::byte*, int64_t> bytes;
  };
  CudaMemory() = default;
  // Waits for stream_.
  void Finish(cudaError_t error, const char* what, int64_t amount);
  std::mutex mutex_;  // of the stream and the run list
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<std::byte> runs_;  // shared memory
  DeviceFacts facts_;
  mutable std::mutex queues_mutex_;
  std::vector<const ops::Queue*> queues_;
  // Both outlive the memory, as what was allocated and registered may.
  std::shared_ptr<Ranges> ranges_ = std::make_shared<Ranges>();
  std::shared_ptr<std::atomic<int64_t>> pinned_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace sluice::cuda
