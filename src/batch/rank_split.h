// Which rank computes which rows of a batch: one planner decides, every rank follows the result.
//
// Extend rows are split over all ranks by the zigzag cut of cp/split.h; decode and verify rows run on their
// sequence's home rank. A rank's part is a list of BatchSeq again (segments of the batch's sequences, over
// the batch's own page lists), so a rank runs it as it would run a batch of its own. Page tables are shared
// by all ranks and layers: nothing here grows with the pool or with ranks x pages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "batch/forward_batch.h"
#include "cp/row_spaces.h"

namespace sluice {

// Prefill: extend rows only. Decode: one or more rows of running sequences (verify included) only. Mixed:
// both. Idle: no row.
enum class ForwardMode : uint8_t { kIdle, kPrefill, kDecode, kMixed };
ForwardMode ModeOf(const ForwardBatch& batch);
// Decided before anything is validated: only extend rows are split and carry a page plan.
inline bool IsSplit(ForwardMode mode, int32_t ranks) {
  return ranks > 1 && (mode == ForwardMode::kPrefill || mode == ForwardMode::kMixed);
}

// Fixed while the sequence holds its slot; the scheduler hands out the lowest free slots, so homes stay
// balanced.
inline Rank HomeRank(SlotId slot, int32_t ranks) { return Rank(slot.value % ranks); }

struct RankPart {
  std::vector<BatchSeq> seqs;      // row_begin counts this rank's valid rows; pages refer to the batch's list
  std::vector<int32_t> batch_row;  // [valid rows] row of the batch
  std::vector<cp::ComputeRow> compute_row;  // [valid rows] place in this rank's padded buffers (collectives)
  std::vector<int32_t> compute_of_seq;      // [seqs] compute rows: num_rows and the dummies behind them
  std::vector<int32_t> prefix_of_seq;       // [seqs] positions that the request held before this forward
  int32_t valid_rows() const { return int32_t(batch_row.size()); }
};

struct RankRow {
  Rank rank;
  int32_t row = 0;  // among the rank's valid rows
};

// Reused from step to step: Plan allocates only while it grows.
class RankSplit {
 public:
  // Invalid when a rule of the page plan is broken; the message names the sequence and the values.
  Status Plan(const ForwardBatch& batch, int32_t ranks, int64_t pages_per_lane);

  bool split() const { return split_; }
  ForwardMode mode() const { return mode_; }
  const RankPart& part(Rank rank) const { return parts_[size_t(rank.value)]; }
  int32_t compute_rows_per_rank() const { return compute_rows_; }  // equal on every rank
  RankRow Where(int32_t batch_row) const { return where_[size_t(batch_row)]; }
  const std::vector<RankRow>& where() const { return where_; }  // [batch rows]
  // Bytes of all tables of the plan, against 4 bytes a page of the plain page lists.
  int64_t table_bytes() const;

 private:
  bool split_ = false;
  ForwardMode mode_ = ForwardMode::kIdle;
  int32_t compute_rows_ = 0;
  std::vector<RankPart> parts_;
  std::vector<RankRow> where_;  // [batch rows]
  std::vector<PageId> seen_;
  std::vector<int32_t> home_rows_;  // [ranks]
};

// The rules that a sequence's pages must keep before its rows are split; each has a test.
//  - the pages hold every position of prefix and suffix, and no page twice
//  - every page exists: owner lane page % ranks, local index page / ranks in [1, pages_per_lane) (0 is the
//  scratch page)
//  - the cached prefix ends on a page and does not reach past the first computed row
//  - rows are counted once and valid rows do not exceed compute rows
Status ValidatePagePlan(const ForwardBatch& batch, const BatchSeq& seq, int32_t ranks, int64_t pages_per_lane,
                        std::vector<PageId>* scratch);

}  // namespace sluice
