#include "cp/split.h"

#include <cstring>

namespace sluice::cp {

int32_t SegmentLength(int32_t length, int32_t ranks, int32_t index) {
  const int32_t segments = 2 * ranks;
  return length / segments + (index < length % segments ? 1 : 0);
}

RequestRow SegmentBegin(int32_t length, int32_t ranks, int32_t index) {
  const int32_t segments = 2 * ranks;
  const int32_t longer = index < length % segments ? index : length % segments;
  return RequestRow(index * (length / segments) + longer);
}

int32_t SegmentComputeRows(int32_t length, int32_t ranks) { return int32_t(CeilDiv(length, 2 * ranks)); }

Rank SegmentRank(int32_t ranks, int32_t index) { return Rank(index < ranks ? index : 2 * ranks - 1 - index); }

StatusOr<CpPlan> PlanSplit(std::span<const int32_t> lengths, int32_t ranks) {
  if (ranks < 1) return Invalid("attn-cp-size: {} ranks; need at least 1", ranks);
  CpPlan plan;
  plan.ranks = ranks;
  plan.lengths.assign(lengths.begin(), lengths.end());
  int32_t tokens = 0;
  for (size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] < 1)
      return Invalid("request {} of the batch has {} new tokens; a prefill row set needs at least 1", b,
                     lengths[b]);
    plan.request_begin.push_back(GlobalRow(tokens));
    tokens += lengths[b];
    plan.rows_per_rank += 2 * SegmentComputeRows(lengths[b], ranks);
  }
  plan.gathered_of_global.assign(size_t(tokens), GatheredRow());
  plan.rank.resize(size_t(ranks));
  for (int32_t r = 0; r < ranks; ++r) {
    RankPlan& rank = plan.rank[size_t(r)];
    rank.global_of_row.assign(size_t(plan.rows_per_rank), GlobalRow());
    rank.segments.reserve(2 * lengths.size());
    int32_t row = 0;
    for (const bool late : {false, true}) {
      const int32_t index = late ? 2 * ranks - 1 - r : r;
      for (size_t b = 0; b < lengths.size(); ++b) {
        Segment s;
        s.request = int32_t(b);
        s.index = index;
        s.token_begin = SegmentBegin(lengths[b], ranks, index);
        s.valid = SegmentLength(lengths[b], ranks, index);
        s.compute = SegmentComputeRows(lengths[b], ranks);
        s.row_begin = ComputeRow(row);
        s.valid_begin = ValidRow(rank.valid_rows);
        for (int32_t i = 0; i < s.valid; ++i) {
          const int32_t global = plan.request_begin[b].value + s.token_begin.value + i;
          rank.global_of_row[size_t(row + i)] = GlobalRow(global);
          plan.gathered_of_global[size_t(global)] = GatheredRow(r * plan.rows_per_rank + row + i);
        }
        rank.valid_rows += s.valid;
        row += s.compute;
        rank.segments.push_back(s);
      }
    }
  }
  return plan;
}

RowLocation LastToken(const CpPlan& plan, int32_t request) {
  const int32_t global = plan.request_begin[size_t(request)].value + plan.lengths[size_t(request)] - 1;
  const int32_t gathered = plan.gathered_of_global[size_t(global)].value;
  return {Rank(gathered / plan.rows_per_rank), ComputeRow(gathered % plan.rows_per_rank)};
}

void Rerange(const CpPlan& plan, const std::byte* src, size_t row_bytes, std::byte* dst) {
  for (int32_t r = 0; r < plan.ranks; ++r) {
    for (const Segment& s : plan.rank[size_t(r)].segments) {
      if (s.valid == 0) continue;
      const size_t from = size_t(r) * size_t(plan.rows_per_rank) + size_t(s.row_begin.value);
      const size_t to = size_t(plan.request_begin[size_t(s.request)].value) + size_t(s.token_begin.value);
      std::memcpy(dst + to * row_bytes, src + from * row_bytes, size_t(s.valid) * row_bytes);
    }
  }
}

}  // namespace sluice::cp
