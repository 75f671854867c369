// The backend for one NVIDIA GPU of the Hopper generation.
//
// Weights, pages and working buffers lie in the device's memory (Backend::memory()); ops enqueue on the
// queue's stream and return. Scratch is planned from limits (Plan) and taken with the queue; without a plan
// it grows in the queue at the first forward of a larger shape and stays. fp8 weights stay fp8.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "ops/backend.h"

namespace sluice::cuda {

struct CudaOptions {
  DType act = DType::kBF16;    // or kF32: plain f32 arithmetic, slow
  bool deterministic = false;  // attention is cut into the same parts for every batch
  // Which kernels multiply e4m3 rows: "auto": cuBLASLt where it is there and faster, "cublaslt": wherever it
  // can, else the own one. With `deterministic` always the own one.
  std::string fp8_gemm = "auto";
  int64_t graph_rows = 0;    // rows of the largest forward that a queue records and replays; 0: none
  bool check_steps = false;  // after the warm-up, steps that allocate or wait too often are refused
};

// Unavailable: no driver or no device; the message says what the driver answered. Unsupported: another
// generation (found and required are named), or another activation type.
StatusOr<std::unique_ptr<ops::Backend>> MakeCudaBackend(const CudaOptions& options);

}  // namespace sluice::cuda
