#include "batch/rank_split.h"

#include <algorithm>

#include "cp/split.h"
#include "kv/device_pool.h"

namespace sluice {

ForwardMode ModeOf(const ForwardBatch& batch) {
  bool extend = false, decode = false;
  for (const BatchSeq& s : batch.seqs) (s.decode ? decode : extend) = true;
  if (extend) return decode ? ForwardMode::kMixed : ForwardMode::kPrefill;
  return decode ? ForwardMode::kDecode : ForwardMode::kIdle;
}

Status ValidatePagePlan(const ForwardBatch& batch, const BatchSeq& s, int32_t ranks, int64_t pages_per_lane,
                        std::vector<PageId>* scratch) {
  const int64_t end = int64_t(s.start) + s.num_rows;
  if (s.num_rows < 1 || s.start < 0)
    return Internal("slot {}: {} rows from position {}", s.slot.value, s.num_rows, s.start);
  if (s.num_pages != CeilDiv(end, kPageTokens))
    return Internal("slot {}: {} pages for {} positions, {} needed", s.slot.value, s.num_pages, end,
                    CeilDiv(end, kPageTokens));
  if (s.page_begin < 0 || size_t(s.page_begin) + size_t(s.num_pages) > batch.pages.size())
    return Internal("slot {}: pages [{}, {}) of a batch that lists {}", s.slot.value, s.page_begin,
                    s.page_begin + s.num_pages, batch.pages.size());
  if (s.cached % kPageTokens != 0)
    return Internal("slot {}: the cached prefix of {} tokens does not end on a page", s.slot.value, s.cached);
  if (s.cached > s.start + s.known)
    return Internal("slot {}: the cached prefix of {} tokens reaches past the first row at {}", s.slot.value,
                    s.cached, s.start);
  if (s.row_begin < 0 || int64_t(s.row_begin) + s.num_rows > batch.rows())
    return Internal("slot {}: rows [{}, {}) of a batch of {}", s.slot.value, s.row_begin,
                    s.row_begin + s.num_rows, batch.rows());
  const auto pages = std::span(batch.pages).subspan(size_t(s.page_begin), size_t(s.num_pages));
  for (const PageId p : pages) {
    if (!p.valid() || PageLocal(p, ranks) < 1 || PageLocal(p, ranks) >= pages_per_lane)
      return Internal("slot {}: page {} is local page {} of lane {}, which holds [1, {})", s.slot.value,
                      p.value, p.valid() ? PageLocal(p, ranks) : -1, p.valid() ? PageOwner(p, ranks) : -1,
                      pages_per_lane);
  }
  scratch->assign(pages.begin(), pages.end());
  std::sort(scratch->begin(), scratch->end());
  const auto twice = std::adjacent_find(scratch->begin(), scratch->end());
  if (twice != scratch->end())
    return Internal("slot {}: page {} is listed twice", s.slot.value, twice->value);
  const int32_t compute = 2 * cp::SegmentComputeRows(s.num_rows, ranks) * ranks;
  if (s.num_rows > compute)
    return Internal("slot {}: {} valid rows in {} compute rows", s.slot.value, s.num_rows, compute);
  return OkStatus();
}

Status RankSplit::Plan(const ForwardBatch& batch, int32_t ranks, int64_t pages_per_lane) {
  mode_ = ModeOf(batch);
  split_ = IsSplit(mode_, ranks);
  parts_.resize(size_t(ranks));
  for (RankPart& p : parts_) {
    p.seqs.clear();
    p.batch_row.clear();
    p.compute_row.clear();
    p.compute_of_seq.clear();
    p.prefix_of_seq.clear();
  }
  where_.assign(size_t(batch.rows()), RankRow());
  compute_rows_ = 0;

  const auto add = [&](Rank rank, const BatchSeq& whole, int32_t first, int32_t count, int32_t compute_begin,
                       int32_t compute) {
    RankPart& part = parts_[size_t(rank.value)];
    BatchSeq s = whole;
    s.row_begin = part.valid_rows();
    s.start = whole.start + first;
    s.num_rows = count;
    s.known = std::clamp(whole.known - first, 0, count);
    s.num_pages = int32_t(CeilDiv(int64_t(s.start) + count, kPageTokens));
    part.seqs.push_back(s);
    part.compute_of_seq.push_back(compute);
    part.prefix_of_seq.push_back(whole.start + whole.known);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t row = whole.row_begin + first + i;
      where_[size_t(row)] = {rank, part.valid_rows()};
      part.batch_row.push_back(row);
      part.compute_row.push_back(cp::ComputeRow(compute_begin + i));
    }
  };

  if (split_) {
    for (const BatchSeq& s : batch.seqs)
      if (!s.decode) RETURN_IF_ERROR(ValidatePagePlan(batch, s, ranks, pages_per_lane, &seen_));
    // A rank's rows: early segments of all requests, then late ones (cp/split.h); then its home rows.
    for (const bool late : {false, true}) {
      for (const BatchSeq& s : batch.seqs) {
        if (s.decode) continue;
        const int32_t compute = cp::SegmentComputeRows(s.num_rows, ranks);
        for (int32_t r = 0; r < ranks; ++r) {
          const int32_t index = late ? 2 * ranks - 1 - r : r;
          const int32_t count = cp::SegmentLength(s.num_rows, ranks, index);
          if (count > 0)
            add(Rank(r), s, cp::SegmentBegin(s.num_rows, ranks, index).value, count, compute_rows_, compute);
        }
        compute_rows_ += compute;
      }
    }
  }
  home_rows_.assign(size_t(ranks), 0);
  for (const BatchSeq& s : batch.seqs) {
    if (split_ && !s.decode) continue;
    const Rank home = HomeRank(s.slot, ranks);
    add(home, s, 0, s.num_rows, compute_rows_ + home_rows_[size_t(home.value)], s.num_rows);
    home_rows_[size_t(home.value)] += s.num_rows;
  }
  compute_rows_ += *std::max_element(home_rows_.begin(), home_rows_.end());
  return OkStatus();
}

int64_t RankSplit::table_bytes() const {
  int64_t bytes = int64_t(where_.size() * sizeof(RankRow));
  for (const RankPart& p : parts_)
    bytes += int64_t(p.seqs.size() * sizeof(BatchSeq) + p.batch_row.size() * sizeof(int32_t) +
                     p.compute_row.size() * sizeof(cp::ComputeRow) +
                     (p.compute_of_seq.size() + p.prefix_of_seq.size()) * sizeof(int32_t));
  return bytes;
}

}  // namespace sluice
