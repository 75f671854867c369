// What a backend must be able to do beside ops::Backend so that experts can be spread over ranks.
#pragma once

#include <cstdint>

#include "ops/backend.h"

namespace sluice::ops {

// y[r] += sum over slots in order of weight * row, in the arithmetic of Backend::Moe: adding rows that come
// from other ranks gives the bits of computing them here.
struct SumSlotsArgs {
  int64_t rows = 0, topk = 0, hidden = 0;
  const float* const* row = nullptr;  // [rows, topk] each [hidden]; null: no expert in this slot
  const float* weight = nullptr;      // [rows, topk]
  float* y = nullptr;                 // [rows, hidden], added to
};

// A backend that offers it derives from this too; asked for by dynamic_cast, once, at start.
class SlotSum {
 public:
  virtual ~SlotSum() = default;
  virtual void SumSlots(Queue&, const SumSlotsArgs&) = 0;
};

}  // namespace sluice::ops
