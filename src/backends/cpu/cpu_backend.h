// The CPU backend: ops::Backend on AVX512-BF16, AVX-512, AVX2 or portable vectors, chosen at run time.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "ops/backend.h"

namespace sluice::cpu {

struct CpuOptions {
  DType act = DType::kBF16;  // kBF16 or kF32
  std::string isa = "auto";  // auto, portable, avx2, avx512, avx512_bf16
};

// Fails when the processor lacks the instruction class or the type is neither.
StatusOr<std::unique_ptr<ops::Backend>> MakeCpuBackend(const CpuOptions& options);

// The selection step of IndexSelect alone, for benchmarks: out[r] = the k best of scores[r], ascending
// positions.
void SelectTopKRows(const ops::Backend& backend, ops::Queue& queue, const float* scores, int64_t rows,
                    int64_t n, int64_t k, int32_t* out);

// Ceilings of this machine, measured now on the queue's threads (a queue that the CPU backend made).
double MeasurePeakFlops(const ops::Backend& backend,
                        ops::Queue& queue);  // multiply-adds in registers, FLOP/s
double MeasureReadBytesPerSecond(ops::Queue& queue, std::span<const std::byte> memory);  // one pass over it

}  // namespace sluice::cpu
