#include "backends/cuda/device_features.h"

#include <cuda_runtime.h>

namespace sluice::cuda {
namespace {

std::string Version(int v) { return v == 0 ? "none" : fmt::format("{}.{}", v / 1000, v % 1000 / 10); }

}  // namespace

Status CheckFeature(Feature feature, const DeviceFacts& f) {
  switch (feature) {
    case Feature::kKernels:
      if (f.major != 9 || f.minor != 0)
        return Unsupported(
            "--device cuda: the kernels of this build need compute capability 9.0 (H100, H200), found {}.{} "
            "({}); use "
            "--device cpu",
            f.major, f.minor, f.name);
      break;
    case Feature::kPinnedHostPool:
      if (!f.maps_host_memory)
        return Unsupported(
            "--enable-hierarchical-cache: the host tier needs a device that maps pinned host memory, and {} "
            "does not; "
            "leave the flag out",
            f.name);
      break;
  }
  return OkStatus();
}

StatusOr<DeviceFacts> ReadDeviceFacts() {
  DeviceFacts f;
  cudaDriverGetVersion(&f.driver);
  cudaRuntimeGetVersion(&f.runtime);
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    cudaGetLastError();
    return Unavailable(
        "--device cuda: no usable GPU on this machine (the driver says: {}; a driver for CUDA {} or newer is "
        "needed, "
        "found: {}); use --device cpu",
        error != cudaSuccess ? cudaGetErrorString(error) : "no device", Version(f.runtime),
        Version(f.driver));
  }
  int device = 0;
  cudaDeviceProp properties;
  cudaError_t read = cudaGetDevice(&device);
  if (read == cudaSuccess) read = cudaGetDeviceProperties(&properties, device);
  if (read != cudaSuccess) return Internal("device properties: {}", cudaGetErrorString(read));
  f.name = properties.name;
  f.major = properties.major;
  f.minor = properties.minor;
  f.multiprocessors = properties.multiProcessorCount;
  f.maps_host_memory = properties.canMapHostMemory != 0;
  return f;
}

}  // namespace sluice::cuda
