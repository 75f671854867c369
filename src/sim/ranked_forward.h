// One forward on several context-parallel ranks that take their turns in any order: the product's split,
// padding, row exchange and page lists, with fingerprint rows in the place of KV.
//
// For each piece of a layer a rank fills its padded rows, waits for all, stores the rows of the pages it owns
// out of the ranks' rows, waits for all, and then reads what its rows see: each cached row and each row of
// this forward. A rank writes into its own lane only. Which rank goes next comes from the seed; a slow one
// goes seldom, a stalled one only when nobody else can.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/random.h"
#include "batch/row_exchange.h"
#include "sim/fingerprint.h"
#include "sim/report.h"

namespace sluice::sim {

class RankedForward {
 public:
  RankedForward(const DevicePool* pool, const FingerprintRows* rows, Journal* journal, uint64_t seed)
      : pool_(pool), rows_(rows), journal_(journal), random_(seed), ranks_(pool->lanes()) {}

  // What a sequence of the batch holds: chain and token of each position up to its last row. Lost ones are
  // not checked.
  struct Sequence {
    const std::vector<uint64_t>* chain = nullptr;
    const std::vector<int32_t>* tokens = nullptr;
    bool lost = false;
  };

  // `batch` and the vectors outlive the forward. need_layer is called before a layer's rows are read.
  void Begin(const ForwardBatch& batch, std::vector<Sequence> sequences,
             std::function<void(LogicalLayer)> need_layer);
  bool active() const { return batch_ != nullptr; }
  // At most `turns` turns; all that is left when negative.
  void Run(int64_t turns);
  void Abandon() { batch_ = nullptr; }

 private:
  enum class Phase : uint8_t { kFill, kStore, kCheck };
  struct Row {
    uint64_t chain = 0;
    int32_t token = 0, position = 0;
  };
  struct RankState {
    Phase phase = Phase::kFill;
    int piece = 0;
    std::vector<Row> rows;  // padded, of the piece it has filled last
    uint64_t weight = 1;
  };
  bool Runnable(const RankState& r) const;
  void Turn(int32_t rank);
  void Fill(int32_t rank);
  void Store(int32_t rank);
  void Check(int32_t rank);
  const Sequence& Of(const BatchSeq& part) const;
  void Cover();

  const DevicePool* pool_;
  const FingerprintRows* rows_;
  Journal* journal_;
  SeededStream random_;
  const int32_t ranks_;
  const ForwardBatch* batch_ = nullptr;
  std::vector<Sequence> sequences_;
  std::function<void(LogicalLayer)> need_layer_;
  RankSplit split_;
  RowExchange exchange_;
  std::vector<RankState> state_;
  std::vector<PageRead> seen_;
};

}  // namespace sluice::sim
