// Device memory that a queue's ops use in turn, planned once from limits. Pure arithmetic.
#pragma once

#include <array>
#include <cstdint>

#include "ops/backend.h"

namespace sluice::cuda {

enum ScratchSlot {
  kIndexQuery,
  kIndexWeight,
  kScores,
  kSorted,
  kTileGroup,
  kBegins,
  kGateUp,
  kExpertAct,
  kExpertOut,
  kGateScores,
  kGatePlanes,
  kInput8,
  kInputScale,
  kExpert8,
  kExpertScale,
  kFullRows,
  kFullPlaces,
  kScratchSlots
};

using ScratchPlan = std::array<int64_t, kScratchSlots>;  // bytes

struct ScratchShape {
  bool f32 = false;
  bool fp8_experts = false;  // experts take e4m3 rows
};

// Rows whose scores fit the budget together; a row's choice does not depend on how rows are taken together.
int64_t ScorePiece(int64_t score_bytes, int64_t row_scores, int64_t rows);
// Pages of a batch that may be dequantised as a whole.
int64_t MostWholePages(int64_t rows);

ScratchPlan PlanScratch(const ops::Limits& limits, const ScratchShape& shape);

}  // namespace sluice::cuda
