#include "backends/cuda/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::cuda {
namespace {

TEST(CudaBackend, NamesTheFlagAndTheRemedyWhereThereIsNoGpu) {
  const auto backend = MakeCudaBackend({});
  if (backend.ok()) {
    EXPECT_EQ((*backend)->info().device, "cuda");
    EXPECT_NE((*backend)->memory(), nullptr);
    return;
  }
  EXPECT_THAT(std::string(Message(backend.status())), testing::HasSubstr("--device c"));
}

TEST(CudaBackend, RefusesAnActivationTypeThatNoKernelHas) {
  const auto backend = MakeCudaBackend({.act = DType::kF16});
  ASSERT_FALSE(backend.ok());
  EXPECT_THAT(std::string(Message(backend.status())), testing::HasSubstr("float16"));
}

}  // namespace
}  // namespace sluice::cuda
