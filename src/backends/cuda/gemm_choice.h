// Which kernel multiplies e4m3 rows by e4m3 weights: pure rules by the shape, from the times of
// docs/kernels/NOTES.md.
#pragma once

#include <cstdint>

namespace sluice::cuda {

constexpr int kE4M3Columns = 192;  // of a tile of the kernel of gemm_e4m3_kernel.cuh

// What the own kernel needs for a product of many rows, in columns of a tile that one multiprocessor goes
// through: pairs of row tiles times column tiles, in waves. A tile of 256 columns (gemm_kernel.cuh) costs 7%
// more a column.
struct E4M3Plan {
  int columns = 0;   // of a tile: kE4M3Columns or 256
  int64_t cost = 0;  // in hundredths
};
inline E4M3Plan PlanE4M3(int64_t rows, int64_t n, int multiprocessors) {
  const int64_t pairs = (rows + 255) / 256, at_once = multiprocessors / 2;
  const auto cost = [&](int64_t columns, int64_t each) {
    const int64_t tiles = pairs * ((n + columns - 1) / columns);
    return (tiles + at_once - 1) / at_once * columns * each;
  };
  const int64_t narrow = cost(kE4M3Columns, 100), wide = cost(256, 107);
  return wide < narrow ? E4M3Plan{256, wide} : E4M3Plan{kE4M3Columns, narrow};
}

// From how many rows on the own product is one of many rows even if it fills half of the device only.
constexpr int kE4M3ManyRows = 257;

// Whether cuBLASLt was measured to be faster: its tiles are 128 x 128, its columns cost 9% less.
inline bool CublasLtIsFaster(int64_t rows, int64_t n, int multiprocessors) {
  if (rows < 128) return false;
  if (rows == 128) return n >= 16384;
  if (rows < kE4M3ManyRows) return true;
  const int64_t tiles = (rows + 127) / 128 * ((n + 127) / 128);
  const int64_t theirs = (tiles + multiprocessors - 1) / multiprocessors * 128 * 100;
  return theirs * 100 <= PlanE4M3(rows, n, multiprocessors).cost * 109;
}

}  // namespace sluice::cuda
