// The CPU backend: ops::Backend on AVX512-BF16, AVX-512, AVX2 or portable vectors, chosen at run time.
#pragma once

#include <memory>
#include <string>

#include "ops/backend.h"

namespace sluice::cpu {

struct CpuOptions {
  DType act = DType::kBF16;  // kBF16 or kF32
  std::string isa = "auto";  // auto, portable, avx2, avx512, avx512_bf16
};

// Fails when the processor lacks the instruction class or the type is neither.
StatusOr<std::unique_ptr<ops::Backend>> MakeCpuBackend(const CpuOptions& options);

}  // namespace sluice::cpu
