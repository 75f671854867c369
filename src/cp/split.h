// Which rank computes which rows of a prefill, as pure functions of the lengths. No communication, no state.
//
// The NEW tokens of a request (after its cached prefix) are cut into S = 2 * ranks segments: L / S tokens
// each, the first L % S one more. Rank r computes segments r and S - 1 - r (zigzag), so that causal work is
// balanced. Every segment is padded to ceil(L / S) compute rows, so any length >= 1 keeps context parallelism
// on and collectives have equal sizes. A rank's rows: the early segments of all requests, then the late
// segments of all requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "cp/row_spaces.h"

namespace sluice::cp {

struct Segment {
  int32_t request = 0;
  int32_t index = 0;       // 0 .. 2 * ranks - 1 in token order
  RequestRow token_begin;  // first token of the segment
  int32_t valid = 0;       // tokens
  int32_t compute = 0;     // rows incl. dummies; the dummies follow the valid rows of the segment
  ComputeRow row_begin;    // first row on its rank
  ValidRow valid_begin;    // first row on its rank when dummies are taken out
};

// Positions the segment's rows may see: its request's prefix and every token up to the segment's end.
inline int32_t CausalLength(const Segment& s, int32_t prefix) {
  return prefix + s.token_begin.value + s.valid;
}

struct RankPlan {
  std::vector<Segment> segments;         // early of all requests, then late of all requests
  std::vector<GlobalRow> global_of_row;  // [rows_per_rank] indexed by ComputeRow; invalid() for a dummy row
  int32_t valid_rows = 0;
};

struct RowLocation {
  Rank rank;
  ComputeRow row;
};

struct CpPlan {
  int32_t ranks = 0;
  int32_t rows_per_rank = 0;                    // compute rows, equal on every rank
  std::vector<int32_t> lengths;                 // new tokens per request
  std::vector<GlobalRow> request_begin;         // first global row of each request
  std::vector<RankPlan> rank;                   // [ranks]
  std::vector<GatheredRow> gathered_of_global;  // where the all-gathered compute rows hold each token

  int32_t total_tokens() const { return int32_t(gathered_of_global.size()); }
};

// Tokens of segment `index` of a request with `length` new tokens.
int32_t SegmentLength(int32_t length, int32_t ranks, int32_t index);
RequestRow SegmentBegin(int32_t length, int32_t ranks, int32_t index);
// Compute rows of every segment of such a request.
int32_t SegmentComputeRows(int32_t length, int32_t ranks);
// The rank that computes a segment.
Rank SegmentRank(int32_t ranks, int32_t index);

// Invalid when ranks < 1 or a length < 1, with the values named.
StatusOr<CpPlan> PlanSplit(std::span<const int32_t> lengths, int32_t ranks);

// Where the hidden state of a request's last new token lies (its logits are computed there).
RowLocation LastToken(const CpPlan& plan, int32_t request);

// Moves rows of the all-gathered compute buffers (source offsets by COMPUTE lengths) to global order
// (destination offsets by VALID lengths); dummy rows are left out. src [ranks * rows_per_rank, row_bytes],
// dst [total_tokens, row_bytes].
void Rerange(const CpPlan& plan, const std::byte* src, size_t row_bytes, std::byte* dst);

}  // namespace sluice::cp
