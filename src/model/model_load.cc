#include <algorithm>

#include "model/layer.h"

namespace sluice {
namespace {

ops::WeightView View(const StoredMatrix& m) {
  ops::WeightView v;
  v.dtype = m.dtype;
  v.out = m.out;
  v.in = m.in;
  v.data = m.data;
  v.scale = m.scale;
  v.scale_block_n = m.block_n;
  v.scale_block_k = m.block_k;
  return v;
}

}  // namespace

Model::Model(const ModelConfig& config, ops::Backend& backend) : config_(config), backend_(backend) {}
Model::~Model() = default;

void Model::Record(std::string_view kind, const ops::Linear& linear) {
  packed_bytes_ += linear.packed_bytes;
  const std::string shape = linear.groups == 1
                                ? fmt::format("{}x{}", linear.out, linear.in)
                                : fmt::format("{} x {}x{}", linear.groups, linear.out, linear.in);
  for (KernelLine& k : kernels_) {
    if (k.matrix == kind && k.shape == shape && k.kernel == linear.kernel) {
      ++k.count;
      k.bytes += linear.packed_bytes;
      return;
    }
  }
  kernels_.push_back({std::string(kind), shape, linear.kernel, 1, linear.packed_bytes});
}

std::vector<Model::KernelLine> Model::kernels() const { return kernels_; }

StatusOr<std::unique_ptr<ops::Linear>> Model::Pack(std::string_view kind,
                                                   std::span<const std::string> names) {
  std::vector<ops::WeightView> views;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const StoredMatrix m, checkpoint_->Matrix(name));
    views.push_back(View(m));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<ops::Linear> packed, backend_.Pack(views));
  Record(kind, *packed);
  return packed;
}

StatusOr<std::unique_ptr<ops::Linear>> Model::PackExperts(std::string_view kind, const std::string& prefix,
                                                          std::span<const std::string_view> parts) {
  std::vector<std::vector<ops::WeightView>> groups;
  for (int64_t e = 0; e < config_.moe.num_experts; ++e) {
    groups.emplace_back();
    for (std::string_view part : parts) {
      ASSIGN_OR_RETURN(const StoredMatrix m,
                       checkpoint_->Matrix(fmt::format("{}{}.{}.weight", prefix, e, part)));
      groups.back().push_back(View(m));
    }
  }
  ASSIGN_OR_RETURN(std::unique_ptr<ops::Linear> packed, backend_.PackGroups(groups));
  Record(kind, *packed);
  return packed;
}

// kv_b_proj is [heads, nope + v, kv_lora]: the nope rows of a head fold its query into the latent space, the
// v rows unfold its output. FP8 blocks do not end at heads, so both are made from the dequantised matrix.
Status Model::PackLatentHeads(const std::string& name, Layer& layer) {
  ASSIGN_OR_RETURN(const std::vector<float> w, checkpoint_->MatrixF32(name));
  const int64_t heads = config_.num_heads, nope = config_.qk_nope, v = config_.v_head,
                lora = config_.kv_lora_rank;
  std::vector<float> transposed(size_t(heads * nope * lora));
  std::vector<std::vector<ops::WeightView>> fold(size_t(heads), std::vector<ops::WeightView>(1));
  std::vector<std::vector<ops::WeightView>> unfold = fold;
  for (int64_t h = 0; h < heads; ++h) {
    const float* rows = w.data() + h * (nope + v) * lora;
    float* t = transposed.data() + h * nope * lora;
    for (int64_t i = 0; i < nope; ++i) {
      for (int64_t j = 0; j < lora; ++j) t[j * nope + i] = rows[i * lora + j];
    }
    ops::WeightView& f = fold[size_t(h)][0];
    f.out = lora;
    f.in = nope;
    f.data = t;
    ops::WeightView& u = unfold[size_t(h)][0];
    u.out = v;
    u.in = lora;
    u.data = rows + nope * lora;
  }
  ASSIGN_OR_RETURN(layer.fold, backend_.PackGroups(fold));
  Record("kv_b (query fold)", *layer.fold);
  ASSIGN_OR_RETURN(layer.unfold, backend_.PackGroups(unfold));
  Record("kv_b (value unfold)", *layer.unfold);
  return OkStatus();
}

StatusOr<std::unique_ptr<Model::Layer>> Model::LoadLayer(LogicalLayer id, bool moe) {
  auto layer = std::make_unique<Layer>();
  Layer& l = *layer;
  l.id = id;
  l.moe = moe;
  l.computes_index = config_.IsFullIndexLayer(id);
  const std::string at = LayerPrefix(id), attn = at + "self_attn.", mlp = at + "mlp.";
  const auto vector = [&](const std::string& name) -> StatusOr<ops::Constant> {
    ASSIGN_OR_RETURN(std::vector<float> values, checkpoint_->Vector(name));
    return backend_.Keep(std::move(values));
  };
  ASSIGN_OR_RETURN(l.input_norm, vector(at + "input_layernorm.weight"));
  ASSIGN_OR_RETURN(l.post_norm, vector(at + "post_attention_layernorm.weight"));
  ASSIGN_OR_RETURN(l.kv_latent_norm, vector(attn + "kv_a_layernorm.weight"));

  std::vector<std::string> in_names;
  if (config_.q_lora_rank > 0) {
    ASSIGN_OR_RETURN(l.q_latent_norm, vector(attn + "q_a_layernorm.weight"));
    in_names.push_back(attn + "q_a_proj.weight");
    ASSIGN_OR_RETURN(l.q, Pack("q_b", std::vector{attn + "q_b_proj.weight"}));
  } else {
    ASSIGN_OR_RETURN(l.q, Pack("q", std::vector{attn + "q_proj.weight"}));
  }
  in_names.push_back(attn + "kv_a_proj_with_mqa.weight");
  if (l.computes_index) {
    const std::string index = attn + "indexer.";
    in_names.push_back(index + "wk.weight");
    ASSIGN_OR_RETURN(l.index_norm, vector(index + "k_norm.weight"));
    ASSIGN_OR_RETURN(l.index_norm_bias, vector(index + "k_norm.bias"));
    ASSIGN_OR_RETURN(l.index_q, Pack("indexer wq_b", std::vector{index + "wq_b.weight"}));
    ASSIGN_OR_RETURN(l.index_w, Pack("indexer weights_proj", std::vector{index + "weights_proj.weight"}));
  }
  bool alike = true;
  std::vector<StoredMatrix> stored;
  for (const std::string& name : in_names) {
    ASSIGN_OR_RETURN(const StoredMatrix m, checkpoint_->Matrix(name));
    stored.push_back(m);
    alike = alike && m.dtype == stored[0].dtype;
  }
  if (alike) {
    ASSIGN_OR_RETURN(auto packed, Pack("q_a | kv_a | indexer wk", in_names));
    l.in.push_back({std::move(packed), 0});
  } else {
    int64_t column = 0;
    for (size_t i = 0; i < in_names.size(); ++i) {
      ASSIGN_OR_RETURN(auto packed, Pack("q_a | kv_a | indexer wk", std::vector{in_names[i]}));
      l.in.push_back({std::move(packed), column});
      column += stored[i].out;
    }
  }
  RETURN_IF_ERROR(PackLatentHeads(attn + "kv_b_proj.weight", l));
  ASSIGN_OR_RETURN(l.out, Pack("o", std::vector{attn + "o_proj.weight"}));

  const auto pack_mlp = [&](std::string_view kind, const std::string& prefix) -> Status {
    ASSIGN_OR_RETURN(l.gate_up, Pack(fmt::format("{} gate | up", kind),
                                     std::vector{prefix + "gate_proj.weight", prefix + "up_proj.weight"}));
    ASSIGN_OR_RETURN(l.down, Pack(fmt::format("{} down", kind), std::vector{prefix + "down_proj.weight"}));
    return OkStatus();
  };
  if (!moe) {
    RETURN_IF_ERROR(pack_mlp("dense", mlp));
    return layer;
  }
  ASSIGN_OR_RETURN(l.router, vector(mlp + "gate.weight"));
  if (config_.moe.has_bias) {
    ASSIGN_OR_RETURN(l.router_bias, vector(mlp + "gate.e_score_correction_bias"));
  }
  constexpr std::string_view kUp[] = {"gate_proj", "up_proj"}, kDown[] = {"down_proj"};
  ASSIGN_OR_RETURN(l.experts_gate_up, PackExperts("experts gate | up", mlp + "experts.", kUp));
  ASSIGN_OR_RETURN(l.experts_down, PackExperts("experts down", mlp + "experts.", kDown));
  if (config_.moe.num_shared > 0) RETURN_IF_ERROR(pack_mlp("shared", mlp + "shared_experts."));
  return layer;
}

StatusOr<std::unique_ptr<Model>> Model::Load(const ModelConfig& config,
                                             std::unique_ptr<Checkpoint> checkpoint, ops::Backend& backend,
                                             const LoadOptions& options) {
  std::unique_ptr<Model> m(new Model(config, backend));
  m->checkpoint_ = std::move(checkpoint);
  Checkpoint& ckpt = *m->checkpoint_;
  RETURN_IF_ERROR(ckpt.Validate(config, options.with_draft));
  m->notices_ = ckpt.notices();
  m->identity_ = ckpt.Identity(config);
  for (int64_t i = 0; i < config.num_layers; ++i) {
    ASSIGN_OR_RETURN(auto layer, m->LoadLayer(LogicalLayer(int32_t(i)), config.layer_is_moe[size_t(i)]));
    m->layers_.push_back(std::move(layer));
    if (options.progress) options.progress(i + 1, config.num_layers);
    ckpt.DropFilePages();  // stored and packed form are never both resident for more than a layer
  }
  const std::string embed = "model.embed_tokens.weight";
  const std::string head = config.tie_embeddings ? embed : "lm_head.weight";
  ASSIGN_OR_RETURN(const StoredMatrix table, ckpt.Matrix(embed));
  m->embedding_ = View(table);
  if (DeviceMemory* memory = backend.memory()) {
    if (table.scale != nullptr)
      return Unsupported("{}: an embedding table with scales is not supported", embed);
    const int64_t bytes = table.out * table.in * SizeOf(table.dtype);
    ASSIGN_OR_RETURN(m->embedding_memory_, memory->Allocate(bytes, "the embedding table"));
    memory->Copy(m->embedding_memory_.get(), table.data, bytes);
    m->embedding_.data = m->embedding_memory_.get();
  }
  const auto vector = [&](const std::string& name) -> StatusOr<ops::Constant> {
    ASSIGN_OR_RETURN(std::vector<float> values, ckpt.Vector(name));
    return backend.Keep(std::move(values));
  };
  ASSIGN_OR_RETURN(m->final_norm_, vector("model.norm.weight"));
  ASSIGN_OR_RETURN(m->head_, m->Pack("head", std::vector{head}));
  if (options.with_draft) {
    auto draft = std::make_unique<Draft>();
    const std::string at = LayerPrefix(config.draft_layer());
    // The draft layer works with the model's own embedding and head; a checkpoint's copies must be copies.
    for (const auto& [copy, own] :
         {std::pair{at + "embed_tokens.weight", embed}, {at + "shared_head.head.weight", head}}) {
      if (ckpt.Has(copy) && !ckpt.SameBytes(copy, own)) {
        return Unsupported(
            "{}: tensor \"{}\" differs from \"{}\"; a draft layer with its own table is not supported",
            ckpt.source(), copy, own);
      }
    }
    ASSIGN_OR_RETURN(draft->embedding_norm, vector(at + "enorm.weight"));
    ASSIGN_OR_RETURN(draft->hidden_norm, vector(at + "hnorm.weight"));
    ASSIGN_OR_RETURN(draft->head_norm, vector(at + "shared_head.norm.weight"));
    ASSIGN_OR_RETURN(draft->combine, m->Pack("draft eh", std::vector{at + "eh_proj.weight"}));
    ASSIGN_OR_RETURN(draft->layer, m->LoadLayer(config.draft_layer(), config.moe.num_experts > 0));
    m->draft_ = std::move(draft);
  }
  ckpt.ReleaseMemory(embed);  // a pack holds copies; the embedding table is read where it lies
  return m;
}

}  // namespace sluice
