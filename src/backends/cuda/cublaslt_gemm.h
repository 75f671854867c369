// cuBLASLt's product of e4m3 operands with one scale per row, or 128 outputs, and 128 inputs. The library is
// opened at run time: a process that does not want it neither needs it nor loads it. It sums blocks of 128
// inputs on the matrix units and adds them times their scales in f32, as this backend's own kernel does; the
// op catalogue compares the bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "backends/cuda/kernels.h"

namespace sluice::cuda {

struct BlockScaledProduct {
  int rows = 0, n = 0, k = 0;
  const void* x = nullptr;         // [rows, k] e4m3
  const float* x_scale = nullptr;  // [k / 128][rows]
  const void* w = nullptr;         // [n, k] e4m3
  const float* w_scale = nullptr;  // [ceil(n / 128)][k / 128, rounded up to 4]
  void* y = nullptr;               // [rows, n]
  int64_t y_ld = 0;
  Out out = Out::kF32;
};
inline int64_t BlockScaleLd(int64_t k) { return (k / 128 + 3) / 4 * 4; }
inline int64_t BlockScales(int64_t n, int64_t k) { return (n + 127) / 128 * BlockScaleLd(k); }

// Any thread may call; it holds no device memory and no workspace.
class CublasLtGemm {
 public:
  // Null: `why` names what is required and what was found.
  static std::unique_ptr<CublasLtGemm> Open(std::string* why);
  ~CublasLtGemm();
  std::string version() const;  // "13.1.0"
  const std::string& path() const { return path_; }
  // What a product must be like: rows a multiple of 4, addresses and strides of 16 bytes.
  static bool Fits(const BlockScaledProduct& p);
  // Chooses the kernels for products of n outputs and k inputs with up to max_rows rows. Not while Launch
  // runs.
  void Prepare(int n, int k, int max_rows);
  // Runs each kernel that was chosen for p.n and p.k once, on p's few rows, so that no step loads one.
  void Load(cudaStream_t s, BlockScaledProduct p) const;
  // False: nothing was enqueued, since no kernel was chosen or the library refuses.
  bool Launch(cudaStream_t s, const BlockScaledProduct& p) const;

 private:
  struct Library;
  CublasLtGemm();
  std::unique_ptr<Library> lib_;
  std::string path_;
};

}  // namespace sluice::cuda
