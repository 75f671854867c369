#include "weights/tensor_catalogue.h"

#include "fmt/format.h"

namespace sluice {
namespace {

class Catalogue {
 public:
  explicit Catalogue(const ModelConfig& config) : c_(config) {}

  void Add(std::string_view name, TensorRole role, std::vector<int64_t> shape) {
    tensors_.push_back({prefix_ + std::string(name), role, std::move(shape), layer_, indexer_});
  }
  void Linear(std::string_view name, int64_t out, int64_t in) {
    Add(std::string(name) + ".weight", TensorRole::kLinear, {out, in});
  }
  void Norm(std::string_view name, int64_t dim) {
    Add(std::string(name) + ".weight", TensorRole::kNorm, {dim});
  }

  void Mlp(const std::string& at, int64_t intermediate) {
    Linear(at + "gate_proj", intermediate, c_.hidden);
    Linear(at + "up_proj", intermediate, c_.hidden);
    Linear(at + "down_proj", c_.hidden, intermediate);
  }

  void Layer(LogicalLayer layer) {
    layer_ = layer;
    prefix_ = LayerPrefix(layer);
    Norm("input_layernorm", c_.hidden);
    const int64_t query = c_.num_heads * (c_.qk_nope + c_.qk_rope);
    if (c_.q_lora_rank > 0) {
      Linear("self_attn.q_a_proj", c_.q_lora_rank, c_.hidden);
      Norm("self_attn.q_a_layernorm", c_.q_lora_rank);
      Linear("self_attn.q_b_proj", query, c_.q_lora_rank);
    } else {
      Linear("self_attn.q_proj", query, c_.hidden);
    }
    Linear("self_attn.kv_a_proj_with_mqa", c_.latent_dim(), c_.hidden);
    Norm("self_attn.kv_a_layernorm", c_.kv_lora_rank);
    Linear("self_attn.kv_b_proj", c_.num_heads * (c_.qk_nope + c_.v_head), c_.kv_lora_rank);
    Linear("self_attn.o_proj", c_.hidden, c_.num_heads * c_.v_head);
    if (c_.IsFullIndexLayer(layer)) {
      indexer_ = true;
      Linear("self_attn.indexer.wq_b", c_.index.num_heads * c_.index.head_dim, c_.q_lora_rank);
      Linear("self_attn.indexer.wk", c_.index.head_dim, c_.hidden);
      Norm("self_attn.indexer.k_norm", c_.index.head_dim);
      Add("self_attn.indexer.k_norm.bias", TensorRole::kBias, {c_.index.head_dim});
      Add("self_attn.indexer.weights_proj.weight", TensorRole::kUnquantized, {c_.index.num_heads, c_.hidden});
      indexer_ = false;
    }
    Norm("post_attention_layernorm", c_.hidden);
    const bool moe =
        layer.value < c_.num_layers ? bool(c_.layer_is_moe[size_t(layer.value)]) : c_.moe.num_experts > 0;
    if (!moe) {
      Mlp("mlp.", c_.dense_intermediate);
      return;
    }
    Add("mlp.gate.weight", TensorRole::kUnquantized, {c_.moe.num_experts, c_.hidden});
    if (c_.moe.has_bias) Add("mlp.gate.e_score_correction_bias", TensorRole::kBias, {c_.moe.num_experts});
    for (int64_t e = 0; e < c_.moe.num_experts; ++e)
      Mlp(fmt::format("mlp.experts.{}.", e), c_.moe.intermediate);
    if (c_.moe.num_shared > 0) Mlp("mlp.shared_experts.", c_.moe.num_shared * c_.moe.intermediate);
  }

  void Outside() {
    layer_ = LogicalLayer();
    prefix_.clear();
  }

  std::vector<ExpectedTensor> Take() { return std::move(tensors_); }

 private:
  const ModelConfig& c_;
  LogicalLayer layer_;
  std::string prefix_;
  bool indexer_ = false;
  std::vector<ExpectedTensor> tensors_;
};

}  // namespace

std::string LayerPrefix(LogicalLayer layer) { return fmt::format("model.layers.{}.", layer.value); }

std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config, bool with_draft) {
  Catalogue k(config);
  k.Add("model.embed_tokens.weight", TensorRole::kUnquantized, {config.vocab_size, config.hidden});
  for (int64_t i = 0; i < config.num_layers; ++i) k.Layer(LogicalLayer(int32_t(i)));
  if (with_draft) {
    k.Layer(config.draft_layer());
    k.Norm("enorm", config.hidden);
    k.Norm("hnorm", config.hidden);
    k.Add("eh_proj.weight", TensorRole::kUnquantized, {config.hidden, 2 * config.hidden});
    k.Norm("shared_head.norm", config.hidden);
  }
  k.Outside();
  k.Norm("model.norm", config.hidden);
  if (!config.tie_embeddings)
    k.Add("lm_head.weight", TensorRole::kUnquantized, {config.vocab_size, config.hidden});
  return k.Take();
}

}  // namespace sluice
