// The arithmetic and memory traffic of a forward pass, from the config alone: what a measured time is
// compared with.
#pragma once

#include <cstdint>

#include "config/model_config.h"
#include "kv/kv_layout.h"
#include "model/model.h"

namespace sluice {

class ModelCost {
 public:
  ModelCost(const ModelConfig& config, const Model& model, const KvLayoutOptions& kv)
      : c_(config), model_(model), kv_(kv) {}

  // One prompt of n tokens with one row of logits: matrix products of the active weights, attention and
  // indexer scores in the absorbed form in which they run.
  double PrefillFlops(int64_t n) const;
  // The same with attention counted in the expanded form (per-head keys and values), the least that the model
  // needs.
  double PrefillFlopsExpanded(int64_t n) const;
  // Bytes that one decode step of `batch` sequences of `context` tokens reads: packed weights (experts as
  // many as a uniform choice touches) and cache rows.
  double DecodeBytes(int64_t batch, int64_t context) const;

 private:
  double WeightMacsPerToken() const;  // without the head and kv_b
  double Keys(int64_t n) const;       // (row, key) pairs of one layer's attention over n rows
  double IndexPairs(int64_t n) const;
  const ModelConfig& c_;
  const Model& model_;
  KvLayoutOptions kv_;
};

}  // namespace sluice
