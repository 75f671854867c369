// A stand-in for the model: the KV row of a position is (hash of the row before, token). The hash a step
// continues from is recomputed from every row it can read, so an aliased, stale, early or wrong page changes
// the output or is reported. Logits are a function of the hash; sampling is the product's sampler.
#pragma once

#include <string>
#include <vector>

#include "base/random.h"
#include "batch/forward_batch.h"
#include "exec/executor.h"
#include "request/request.h"
#include "sampling/sampler.h"

namespace sluice {

constexpr int32_t kChainVocab = 64;
constexpr int32_t kChainEos = 63;
constexpr int32_t kChainNan = 62;  // a prompt that ends in this token gets NaN logits

class ChainRunner final : public StepRunner {
 public:
  ChainRunner(int64_t pages, int32_t num_slots, int64_t host_pages = 0);
  void Run(const ForwardBatch& batch, StepResult* result) override;
  void Poison(PageId page);

  std::vector<std::string> violations;
  int64_t steps = 0, rows = 0, mixed_steps = 0, largest_step = 0;
  int64_t loaded_pages = 0, backed_up_pages = 0;
  double load_failure_share = 0;   // of load plans that do nothing and report failure
  std::vector<Status> fail_steps;  // statuses of the next steps, popped from the back; Ok runs

 private:
  struct Row {
    uint64_t hash = 0;
    int32_t token = -1;
    bool written = false;
    bool lost =
        false;  // of a step that failed, or after a token that was never sampled: whoever reads it is dropped
  };
  void Copy(const CopyPlan& plan, StepResult* result);
  void LoseRows(const ForwardBatch& batch);
  Row& At(const ForwardBatch& batch, const BatchSeq& seq, int32_t position);

  std::vector<Row> rows_;
  std::vector<Row> host_rows_;
  SeededStream random_{7};
  Sampler sampler_;
  std::vector<float> logits_;
};

// Forces most tokens of an answer by their place in it, the rest are free; ends are never among them.
std::shared_ptr<const TokenConstraint> ChainConstraint(uint64_t seed);

uint64_t ChainHash(uint64_t before, int32_t token);
void ChainLogits(uint64_t hash, bool nan, std::vector<float>* logits);

// What the engine must answer for one choice of a request, computed alone: tokens and the joined logits hash.
struct ChainAnswer {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kNone;
  uint64_t logits_hash = 0;
};
ChainAnswer ChainOracle(const Request& request, int32_t choice, int64_t token_limit);

}  // namespace sluice
