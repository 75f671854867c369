// Experts spread over ranks: each rank holds a share of every layer's experts and computes the rows that
// chose them, wherever those rows are at home.
//
//   gate at home > fence > each owner fetches the rows that chose its experts, in (rank, row, slot) order >
//   two products > fence > each rank fetches its slots' outputs and adds them in slot order
//
// Rows move, not sums, so a row's result has the bits of one rank. Only valid rows take part. Rows go in
// rounds of a fixed number per rank, which bounds the buffers whatever the routing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "ops/backend.h"
#include "ops/slot_sum.h"

namespace sluice {

struct ExpertExchangeOptions {
  int32_t ranks = 1;
  int64_t hidden = 0, topk = 0, experts = 0;
  int64_t act_bytes = 2;
  int64_t buffer_bytes = 64 << 20;  // of one rank; decides the rows of a round
};

// The rank that holds an expert: runs of neighbours, sizes differ by at most one.
Rank ExpertOwner(int32_t expert, int64_t experts, int32_t ranks);

// Of all ranks of a process; each rank calls Run from its own thread.
class ExpertExchange {
 public:
  // Unsupported when the backend cannot add up rows of other ranks.
  static StatusOr<std::unique_ptr<ExpertExchange>> Make(ops::Backend& backend,
                                                        const ExpertExchangeOptions& options);

  // In the place of Backend::Moe. Collective: every rank calls it for every MoE layer, also without rows.
  void Run(Rank rank, ops::Queue& queue, const ops::MoeArgs& args, Communicator& comm);

  int64_t rows_per_round() const { return round_; }
  int64_t bytes() const;  // buffers of all ranks

 private:
  struct RankBuffers {
    // What others read between the fences.
    ops::MoeArgs shown;
    std::vector<int32_t> base;  // [ranks + 1] this rank's first pair of each rank's rows in this round
    std::vector<float> out;     // [pairs, hidden] unweighted expert outputs
    // Own work.
    std::vector<int32_t> expert;       // [round, topk] of one peer
    std::vector<std::byte> x;          // [pairs, hidden] Act
    std::vector<int32_t> pair_expert;  // [pairs]
    std::vector<float> one;            // [pairs] weights of 1
    std::vector<float> slots;          // [round, topk, hidden] fetched outputs
    std::vector<const float*> row;     // [round, topk]
    std::vector<int32_t> next;         // [ranks]
  };
  ExpertExchange(ops::Backend& backend, ops::SlotSum& sum, const ExpertExchangeOptions& options);
  void Fetch(RankBuffers& b, Rank rank, int64_t first, Communicator& comm);
  void Add(RankBuffers& b, Rank rank, int64_t first, ops::Queue& queue, Communicator& comm);
  int64_t RowsIn(const RankBuffers& b, int64_t first) const;

  ops::Backend& backend_;
  ops::SlotSum& sum_;
  const ExpertExchangeOptions o_;
  int64_t round_ = 0;
  std::vector<RankBuffers> ranks_;
};

}  // namespace sluice
