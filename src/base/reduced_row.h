// What a row of logits comes down to where it lies, so that the sampler needs no more of it. Plain data that
// a device writes and the host reads. Every value has the bits that sampling/row_math.h gives (but near_sum),
// so that a token never tells where it was chosen.
#pragma once

#include <cstdint>

namespace sluice {

constexpr int32_t kMostCandidates = 2048;  // listed of one row; a row with more of them is read as a whole
constexpr float kNearRange = 14;           // values this far below the greatest are left out of near_sum

struct RowRequest {
  int32_t place = 0;      // which row of the logits
  float temperature = 0;  // 0: the greatest value is all that is wanted
  bool filtered = false;  // top_k, top_p or min_p: candidates; else one draw among all tokens
  bool hash = false;      // hash_lane and hash_tail
  bool near = false;      // near_sum
  int32_t top_k = 0;      // 0: off
  float top_p = 1, min_p = 0;
  double uniform = 0;  // of the draw among all
};

struct ReducedRow {
  double total = 0;  // with temperature > 0: of all weights, by blocks in order
  uint64_t hash_lane[4] = {};
  float hash_tail[8] = {};  // the last vocab % 8 values
  float max = 0;
  int32_t best = -1;      // lowest id of the greatest value
  bool unusable = false;  // a NaN or +inf, or nothing but -inf
  int32_t drawn = -1;     // with temperature > 0, not filtered
  float drawn_value = 0;  // its logit
  float near_sum = 0;     // of exp(x - max) over values near the greatest; any order, any exp
  // Filtered: candidates are all tokens whose weight is at least `threshold` and above 0; how many there are.
  // The first kMostCandidates that were met are listed, in no order.
  float threshold = 0;
  int32_t candidates = 0;
};

struct RowCandidate {
  float weight = 0;  // exp((x - max) / temperature)
  int32_t token = -1;
};

}  // namespace sluice
