// Compares a model with stored outputs of an independent implementation (`sluice eval MODEL --golden DIR`).
//
// Two kinds of folder:
//   golden.json + golden.safetensors   logits<i> of every position of prompt i, greedy continuations
//   prompts.json + logits.safetensors  logits of the last positions of each prompt, greedy continuations;
//     topk.safetensors                 sorted top-k sets of the last queries of one prompt, per full layer,
//     with the gap
//                                      between the last score chosen and the first left out
//     mtp.safetensors                  draft logits (when the model has its draft layer loaded)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/sequence_runner.h"

namespace sluice {

struct GoldenReport {
  int64_t prompts = 0;
  double max_rel_err = 0;           // largest |difference| / largest |golden logit| of a prompt
  bool greedy_equal = true;         // all continuations, token by token
  int64_t greedy_tokens = 0;        // continued tokens that were equal before the first difference
  bool has_topk = false;            // the folder holds sets, and the model selects
  int64_t topk_rows = 0;            // compared sets
  int64_t topk_rows_differing = 0;  // with a golden gap >= kTopkGap
  int64_t topk_rows_near = 0;       // differing with a smaller gap
  int64_t topk_near_entries = 0;    // largest number of entries in which such a row differs
  // Positions whose best golden logit leads by >= kMargin, and those of them with the same greedy token here.
  int64_t margin_positions = 0, margin_equal = 0;
  int64_t draft_prompts = 0;
  double draft_max_rel_err = 0;
};

constexpr double kTopkGap = 1e-4;
constexpr double kMargin = 1.0;

StatusOr<GoldenReport> CompareWithGolden(const Model& model, SequenceRunner& runner,
                                         const std::string& folder);
// The prompts of a golden folder, as token ids.
StatusOr<std::vector<std::vector<int32_t>>> GoldenPrompts(const std::string& folder);
// Tokens of the longest prompt plus its continuation: what max_context must hold.
StatusOr<int64_t> GoldenContext(const std::string& folder);

}  // namespace sluice
