// Plain loops over one row of logits. Same bits on every x86-64: no contraction, fixed order of every sum.
#pragma once

#include <cstdint>

#include "base/reduced_row.h"

namespace sluice {

struct RowScan {
  float max = 0;          // greatest value; meaningless when `unusable`
  bool unusable = false;  // a NaN or +inf is in the row, or nothing but -inf
};

// n >= 1.
RowScan ScanRow(const float* x, int32_t n);
// Lowest index of `max`, which must be in the row. -0 equals +0.
int32_t FirstIndexOf(const float* x, int32_t n, float max);
// w[i] = exp((x[i] - max) / temperature), 0 below exp(-87). REQUIRES temperature > 0, x[i] <= max, max
// finite.
void ExpWeights(const float* x, int32_t n, float max, float temperature, float* w);
// Sum of blocks of 64 in order, each block summed in order, in double.
double SumBlocks(const float* w, int32_t n);
// log(sum(exp(x))). `w` is scratch for n values.
double LogSumExp(const float* x, int32_t n, float max, float* w);
// Share of x[of] in the softmax, to about a hundredth: values far below the greatest are left out of the sum.
float ShareOf(const float* x, int32_t n, float max, int32_t of);
// No NaN and no infinity among n values.
bool AllFinite(const float* x, int64_t n);
// 64-bit hash of the row's bits.
uint64_t HashRow(const float* x, int32_t n);
// The same from the four chains over its values of eight and the n % 8 that are left.
uint64_t FinishHash(const uint64_t lane[4], const float* tail, int32_t n);

}  // namespace sluice
