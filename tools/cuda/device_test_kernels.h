// Kernels that do what none should, for device_test.
#pragma once

#include "backends/cuda/kernels.h"

namespace sluice::cuda {

// Runs until *go (mapped pinned host memory) is not 0.
void LaunchSpin(cudaStream_t s, const uint32_t* go);
// Writes where nothing is mapped.
void LaunchWildWrite(cudaStream_t s);

}  // namespace sluice::cuda
