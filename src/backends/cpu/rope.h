// Rotation of one row's pairs by its position. interleave: pairs (2i, 2i + 1); else (i, i + half). The order
// of the values stays as it was, in queries and keys alike.
#pragma once

#include <cstdint>

#include "ops/backend.h"

namespace sluice::cpu {

// y may be x.
inline void Rope(const float* x, int64_t position, const ops::RopeTable& table, bool interleave, float* y) {
  const float* c = table.cos + position * table.half;
  const float* s = table.sin + position * table.half;
  const int64_t step = interleave ? 2 : 1, other = interleave ? 1 : table.half;
  for (int64_t i = 0; i < table.half; ++i) {
    const float a = x[i * step], b = x[i * step + other];
    y[i * step] = a * c[i] - b * s[i];
    y[i * step + other] = b * c[i] + a * s[i];
  }
}

}  // namespace sluice::cpu
