// The part of CudaBackend that hands products of fp8 weights to cuBLASLt: the weights' scales as the library
// reads them, its kernels chosen and loaded before the first step, and the choice of each product.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/cublaslt_gemm.h"
#include "backends/cuda/cuda_memory.h"
#include "backends/cuda/cuda_queue.h"
#include "ops/backend.h"

namespace sluice::cuda {

// Pack and Prepare are called by one thread, before any Launch; Launch by any.
class CublasLtLinear {
 public:
  // Null without an error: the own kernel multiplies alone. Unavailable: `fp8_gemm` is "cublaslt" and there
  // is none.
  static StatusOr<std::unique_ptr<CublasLtLinear>> Make(const std::string& fp8_gemm, int multiprocessors,
                                                        CudaMemory& memory);
  // What `sluice inspect` says of a weight that may go there.
  std::string Name() const;
  // The scales of w [out, in], whose parts start at whole blocks of 128 outputs; null where they do not, or
  // where the library does not take the shape.
  StatusOr<std::shared_ptr<std::byte>> Pack(const std::vector<ops::WeightView>& parts, int64_t out,
                                            int64_t in, const std::shared_ptr<std::byte>& w);
  // Chooses and loads the kernels for all that was packed and up to max_rows rows.
  Status Prepare(int64_t max_rows);
  // g: bf16 rows times the packed weight. False: nothing was enqueued that matters, the own kernel is to do
  // it.
  bool Launch(CudaQueue& q, const Gemm& g, const std::byte* scales) const;

 private:
  CublasLtLinear(std::unique_ptr<CublasLtGemm> gemm, bool always, int multiprocessors, CudaMemory& memory)
      : gemm_(std::move(gemm)), always_(always), multiprocessors_(multiprocessors), memory_(memory) {}
  const std::unique_ptr<CublasLtGemm> gemm_;
  const bool always_;  // also where the own kernel is faster
  const int multiprocessors_;
  CudaMemory& memory_;
  // Weight and scales of one weight of each shape.
  std::map<std::pair<int64_t, int64_t>, std::pair<std::weak_ptr<std::byte>, std::weak_ptr<std::byte>>>
      packed_;
};

}  // namespace sluice::cuda
