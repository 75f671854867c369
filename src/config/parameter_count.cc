#include "config/parameter_count.h"

#include "base/ids.h"

namespace sluice {
namespace {

int64_t AttentionParameters(const ModelConfig& m, bool computes_index) {
  const int64_t qk = m.qk_nope + m.qk_rope;
  int64_t n = m.hidden * (m.kv_lora_rank + m.qk_rope)                  // kv_a
              + m.kv_lora_rank * m.num_heads * (m.qk_nope + m.v_head)  // kv_b
              + m.num_heads * m.v_head * m.hidden;                     // o
  n += m.q_lora_rank > 0 ? m.hidden * m.q_lora_rank + m.q_lora_rank * m.num_heads * qk
                         : m.hidden * m.num_heads * qk;
  if (m.sparse() && computes_index) {
    n += m.q_lora_rank * m.index.num_heads * m.index.head_dim + m.hidden * m.index.head_dim +
         m.hidden * m.index.num_heads;
  }
  return n;
}

int64_t ExpertParameters(const ModelConfig& m) { return 3 * m.hidden * m.moe.intermediate; }

}  // namespace

ParameterCount CountParameters(const ModelConfig& m) {
  ParameterCount c;
  c.embedding = m.vocab_size * m.hidden * (m.tie_embeddings ? 1 : 2);
  for (int64_t l = 0; l < m.num_layers; ++l) {
    c.attention += AttentionParameters(m, m.IsFullIndexLayer(LogicalLayer(int32_t(l))));
    if (m.layer_is_moe[size_t(l)]) {
      c.routed_experts += m.moe.num_experts * ExpertParameters(m);
      c.dense_mlp += m.moe.num_shared * ExpertParameters(m) + m.moe.num_experts * m.hidden;
    } else {
      c.dense_mlp += 3 * m.hidden * m.dense_intermediate;
    }
  }
  if (m.num_draft_layers > 0) {
    c.draft_experts = m.moe.num_experts * ExpertParameters(m);
    c.draft = AttentionParameters(m, true) + c.draft_experts + m.moe.num_shared * ExpertParameters(m) +
              m.moe.num_experts * m.hidden + 2 * m.hidden * m.hidden;
  }
  return c;
}

int64_t ParametersPerRank(const ParameterCount& c, int64_t ep, bool with_draft) {
  int64_t n = c.embedding + c.attention + c.dense_mlp + CeilDiv(c.routed_experts, ep);
  if (with_draft) n += c.draft - c.draft_experts + CeilDiv(c.draft_experts, ep);
  return n;
}

}  // namespace sluice
