#include "backends/cuda/scratch_plan.h"

#include <algorithm>

#include "backends/cuda/kernels.h"

namespace sluice::cuda {
namespace {
constexpr int64_t kMostPages = 32768, kPagesARow = 8;
}  // namespace

int64_t ScorePiece(int64_t score_bytes, int64_t row_scores, int64_t rows) {
  return std::clamp<int64_t>(score_bytes / (row_scores * 4), 1, std::max<int64_t>(rows, 1));
}

int64_t MostWholePages(int64_t rows) { return std::min(kMostPages, rows * kPagesARow); }

ScratchPlan PlanScratch(const ops::Limits& l, const ScratchShape& shape) {
  ScratchPlan p{};
  const int64_t rows = l.max_rows, act = shape.f32 ? 4 : 2;
  if (l.max_index_heads > 0) {
    const int64_t heads = std::max<int64_t>(l.max_index_heads, 32);
    p[kIndexQuery] = rows * heads * l.index_dim * 4;
    p[kIndexWeight] = rows * heads * 4;
    p[kScores] = std::max(l.score_bytes, l.ScoreRowBytes());
  }
  if (l.experts > 0) {
    const int64_t pairs = rows * l.expert_topk, inter = l.expert_intermediate;
    const int64_t small = MaxSortedRows(pairs, int(l.experts), 64),
                  large = MaxSortedRows(pairs, int(l.experts), 128), most = std::max(small, large);
    p[kSorted] = most * 4;
    p[kTileGroup] = (most / 64 + 1) * 4;
    p[kBegins] = l.experts * 4;
    const int parts = shape.f32 ? 1 : std::max(1, GateScoreParts(int(l.hidden)));
    p[kGateScores] = parts * rows * l.experts * 4;
    p[kGatePlanes] = shape.f32 ? 0 : 3 * rows * l.hidden * 2;
    if (shape.fp8_experts) {
      // Tiles of 64 rows, whose first product is kept, are for fewer than 64 pairs an expert.
      const int64_t few = std::min(pairs, l.experts * 64);
      p[kGateUp] = MaxSortedRows(few, int(l.experts), 64) * 2 * inter * 4;
      p[kInput8] = most * l.hidden;
      p[kInputScale] = RowScales(most, l.hidden) * 4;
      p[kExpert8] = most * inter;
      p[kExpertScale] = RowScales(most, inter) * 4;
      p[kExpertOut] = pairs * l.hidden * 2;
    } else {
      p[kGateUp] = small * 2 * inter * 4;
      p[kExpertAct] = small * inter * act;
      p[kExpertOut] = pairs * l.hidden * 4;
    }
  }
  if (!shape.f32) {
    p[kInput8] = std::max(p[kInput8], rows * l.widest_input);
    p[kInputScale] = std::max(p[kInputScale], RowScales(rows, l.widest_input) * 4);
    const int64_t pages = std::min(MostWholePages(rows), l.max_pages);
    p[kFullRows] = pages * kBF16PageBytes;
    p[kFullPlaces] = pages * 4;
  }
  return p;
}

}  // namespace sluice::cuda
