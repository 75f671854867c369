// The device's op catalogue: what `sluice bench ops --device cuda` runs.
#pragma once

#include <string>

#include "base/status.h"
#include "tools/cuda/op_report.h"

namespace sluice {

// Unsupported without a CUDA backend in this build or a device on this machine; InvalidArgument when no part
// has `only` in its name.
StatusOr<cuda::OpReport> BenchDeviceOps(const cuda::OpCatalogueOptions& options);

}  // namespace sluice
