// What threads that move pages get of a device: events to wait for, and copies on a stream of their own.
// Private to backends/cuda.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "tensor/device_memory.h"

namespace sluice::cuda {

class CudaEvent final : public DeviceEvent {
 public:
  CudaEvent();
  ~CudaEvent() override;
  void Record(cudaStream_t stream);
  Status Wait() override;

 private:
  cudaEvent_t event_ = nullptr;
  cudaError_t made_;
};

// `list`: shared memory of at least one run. device: as cudaSetDevice takes it.
StatusOr<std::unique_ptr<DeviceCopier>> MakeCudaCopier(int device, std::shared_ptr<std::byte> list,
                                                       int64_t list_bytes);

}  // namespace sluice::cuda
