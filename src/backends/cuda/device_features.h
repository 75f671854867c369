// What single features need of driver, library and card. Each is asked for where the feature is: a machine
// that lacks one loses that feature only. Pure values, so that a machine without a GPU can test it.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace sluice::cuda {

struct DeviceFacts {
  std::string name;
  int driver = 0, runtime = 0;  // as CUDA numbers them: 13000 is 13.0; driver 0: none is loaded
  int major = 0, minor = 0;     // compute capability
  int multiprocessors = 0;
  bool maps_host_memory = true;
};

enum class Feature : uint8_t {
  kKernels,         // this build's kernels
  kPinnedHostPool,  // a host tier that the device reads and writes
};

// Unsupported: names the feature's flag, what it needs and what was found, and what to do without it.
Status CheckFeature(Feature feature, const DeviceFacts& facts);

// Facts of the current device, and why there is none: Unavailable with driver and runtime named.
StatusOr<DeviceFacts> ReadDeviceFacts();

}  // namespace sluice::cuda
