#include "bench_device_ops.h"

#include <algorithm>

#include "fmt/ranges.h"

namespace sluice {

#ifdef SLUICE_HAS_CUDA
StatusOr<cuda::OpReport> BenchDeviceOps(const cuda::OpCatalogueOptions& options) {
  const auto has = [&](const std::string& part) { return part.find(options.only) != std::string::npos; };
  if (std::ranges::none_of(cuda::OpParts(), has)) {
    return Invalid("--only {}: no part of the device's catalogue; it has {}", options.only,
                   fmt::join(cuda::OpParts(), ", "));
  }
  cuda::OpReport report;
  if (!cuda::RunOpCatalogue(options, &report)) {
    return Unsupported("--device cuda: no CUDA device on this machine; use --device cpu");
  }
  return report;
}
#else
StatusOr<cuda::OpReport> BenchDeviceOps(const cuda::OpCatalogueOptions&) {
  return Unsupported(
      "--device cuda: this build has no CUDA backend; build with -DSLUICE_CUDA=ON, or use --device cpu");
}
#endif

}  // namespace sluice
