// Attention of a few neighbouring rows of a sequence whose selections overlap: drafted tokens under
// verification, short extends. A cache row that several of them selected is loaded and scored once; each row
// then takes its own scores in its own blocks of 64, so that it gets the bits that it has alone.
//
// Lives for one call of the op; its tables are the queue's.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/cpu/attention_context.h"

namespace sluice::cpu {

class OverlappingRows {
 public:
  // Takes those rows of the sequences [seq_begin, seq_end) for which sharing pays.
  OverlappingRows(const AttentionContext& c, int64_t seq_begin, int64_t seq_end);
  // Whether a row was taken.
  bool Has(int64_t seq, int64_t row) const {
    const int32_t at = lists_[size_t(seq - seq_begin_)];
    return at >= 0 && row >= lists_[size_t(at)];
  }
  void Run();

 private:
  struct Group;
  void Offer(int64_t seq);
  Group GroupAt(int64_t seq) const;

  const AttentionContext& c_;
  const int64_t seq_begin_, seq_end_;
  // [sequences] where the group of a sequence begins or -1, then the groups: first row, rows, size of the
  // union, the union's positions in order, and for each row the places of its own keys in the union.
  std::vector<int32_t>& lists_;
  bool any_ = false;
};

}  // namespace sluice::cpu
