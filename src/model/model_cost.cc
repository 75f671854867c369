#include "model/model_cost.h"

#include <algorithm>
#include <cmath>

namespace sluice {

double ModelCost::WeightMacsPerToken() const {
  double macs = 0;
  const double hidden = double(c_.hidden), query = double(c_.num_heads * (c_.qk_nope + c_.qk_rope));
  for (int64_t i = 0; i < c_.num_layers; ++i) {
    macs += c_.q_lora_rank > 0 ? double(c_.q_lora_rank) * (hidden + query) : hidden * query;
    macs += hidden * double(c_.latent_dim()) + double(c_.num_heads * c_.v_head) * hidden;
    if (c_.IsFullIndexLayer(LogicalLayer(int32_t(i)))) {
      macs += double(c_.q_lora_rank * c_.index.num_heads * c_.index.head_dim) +
              hidden * double(c_.index.head_dim + c_.index.num_heads);
    }
    if (c_.layer_is_moe[size_t(i)]) {
      macs += hidden * double(c_.moe.num_experts) +
              3.0 * hidden * double((c_.moe.experts_per_token + c_.moe.num_shared) * c_.moe.intermediate);
    } else {
      macs += 3.0 * hidden * double(c_.dense_intermediate);
    }
  }
  return macs;
}

double ModelCost::Keys(int64_t n) const {
  const double all = double(n) * double(n + 1) / 2;
  if (!c_.sparse() || n <= c_.index.topk) return all;
  const double k = double(c_.index.topk);
  return k * (k + 1) / 2 + k * double(n - c_.index.topk);
}

double ModelCost::IndexPairs(int64_t n) const {
  if (!c_.sparse() || n <= c_.index.topk) return 0;
  return double(n) * double(n + 1) / 2 - double(c_.index.topk) * double(c_.index.topk + 1) / 2;
}

double ModelCost::PrefillFlops(int64_t n) const {
  const double layers = double(c_.num_layers), heads = double(c_.num_heads);
  double full_layers = 0;
  for (bool f : c_.index.computes) full_layers += f;
  double macs = WeightMacsPerToken() * double(n) + double(c_.hidden * c_.vocab_size);
  macs += layers * double(n) * heads * double((c_.qk_nope + c_.v_head) * c_.kv_lora_rank);
  macs += layers * heads * Keys(n) * double(c_.latent_dim() + c_.kv_lora_rank);
  macs += full_layers * IndexPairs(n) * double(c_.index.num_heads * c_.index.head_dim);
  return 2 * macs;
}

double ModelCost::PrefillFlopsExpanded(int64_t n) const {
  const double layers = double(c_.num_layers), heads = double(c_.num_heads);
  return PrefillFlops(n) -
         2 * layers * heads * Keys(n) *
             double(c_.latent_dim() + c_.kv_lora_rank - (c_.qk_nope + c_.qk_rope + c_.v_head));
}

double ModelCost::DecodeBytes(int64_t batch, int64_t context) const {
  double bytes = 0;
  const double experts = double(std::max<int64_t>(c_.moe.num_experts, 1));
  const double touched = 1 - std::pow(1 - double(c_.moe.experts_per_token) / experts, double(batch));
  for (const Model::KernelLine& k : model_.kernels()) {
    const bool routed = k.matrix.starts_with("experts");
    const bool draft = k.matrix.starts_with("draft");
    bytes += double(k.bytes) * (routed ? touched : draft ? 0 : 1);
  }
  const auto layout = KvLayout::Make(c_, kv_);
  if (!layout.ok()) return bytes;
  const int64_t rows = c_.sparse() ? std::min(context, c_.index.topk) : context;
  bytes += double(batch) * double(c_.num_layers) * double(rows) * double(layout->latent_row_bytes());
  if (c_.sparse() && context > c_.index.topk) {
    bytes += double(batch) * double(layout->index_layers().size()) * double(context) *
             double(layout->index_page_bytes()) / kPageTokens;
  }
  return bytes;
}

}  // namespace sluice
