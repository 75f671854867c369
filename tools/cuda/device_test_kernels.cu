#include "tools/cuda/device_test_kernels.h"

namespace sluice::cuda {
namespace {

__global__ void SpinKernel(const volatile uint32_t* go) {
  while (*go == 0) __nanosleep(1000);
}
__global__ void WildWriteKernel(uintptr_t where) { *reinterpret_cast<volatile uint32_t*>(where) = 1; }

}  // namespace

void LaunchSpin(cudaStream_t s, const uint32_t* go) { SpinKernel<<<1, 1, 0, s>>>(go); }
void LaunchWildWrite(cudaStream_t s) { WildWriteKernel<<<1, 1, 0, s>>>(uintptr_t(1) << 20); }

}  // namespace sluice::cuda
