#include "kv/kv_layout.h"

#include <utility>

#include "base/check.h"

namespace sluice {
namespace {

Status CheckDType(std::string_view field, DType t) {
  if (t == DType::kF32 || t == DType::kBF16 || t == DType::kF8E4M3) return OkStatus();
  return Unsupported("{}: {} cannot hold KV rows; use float32, bf16 or fp8_e4m3", field, Name(t));
}

int64_t LatentRowBytes(DType t, int64_t kv_lora, int64_t rope) {
  if (t == DType::kF8E4M3) {
    return kv_lora + CeilDiv(kv_lora, kScaleTile) * SizeOf(DType::kF32) + rope * SizeOf(DType::kBF16);
  }
  return (kv_lora + rope) * SizeOf(t);
}

int64_t IndexPageBytes(DType t, int64_t dim) {
  const int64_t scales = t == DType::kF8E4M3 ? kPageTokens * SizeOf(DType::kF32) : 0;
  return kPageTokens * dim * SizeOf(t) + scales;
}

}  // namespace

StatusOr<KvLayout> KvLayout::Make(const ModelConfig& model, const KvLayoutOptions& options) {
  RETURN_IF_ERROR(CheckDType("kv-cache-dtype", options.latent_dtype));
  if (model.num_layers <= 0 || model.kv_lora_rank <= 0 || model.qk_rope <= 0) {
    return Invalid(
        "config: num_hidden_layers {}, kv_lora_rank {} and qk_rope_head_dim {} must all be positive for an "
        "MLA cache",
        model.num_layers, model.kv_lora_rank, model.qk_rope);
  }
  if (options.with_draft && model.num_draft_layers <= 0) {
    return Invalid(
        "config: num_nextn_predict_layers is {}; speculation needs a checkpoint with a draft layer",
        model.num_draft_layers);
  }
  // The f32 scales follow the kv_lora bytes, the bf16 rope part follows the scales: both must lie aligned in
  // every row.
  if (options.latent_dtype == DType::kF8E4M3 && (model.kv_lora_rank % 4 != 0 || model.qk_rope % 2 != 0)) {
    return Unsupported(
        "kv-cache-dtype: fp8_e4m3 needs kv_lora_rank ({}) in fours and qk_rope_head_dim ({}) even; use bf16",
        model.kv_lora_rank, model.qk_rope);
  }
  KvLayout l;
  l.options_ = options;
  l.kv_lora_ = model.kv_lora_rank;
  l.rope_ = model.qk_rope;
  l.latent_row_bytes_ = LatentRowBytes(options.latent_dtype, l.kv_lora_, l.rope_);
  if (model.sparse()) {
    RETURN_IF_ERROR(CheckDType("index-cache-dtype", options.index_dtype));
    if (model.index.head_dim <= 0)
      return Invalid("config: index_head_dim {} must be positive", model.index.head_dim);
    if (int64_t(model.index.computes.size()) != model.num_layers) {
      return Invalid("config: the index schedule names {} layers, the model has {}",
                     model.index.computes.size(), model.num_layers);
    }
    l.index_dim_ = model.index.head_dim;
    l.index_page_bytes_ = IndexPageBytes(options.index_dtype, l.index_dim_);
  }
  l.latent_parts_ = {{0, l.latent_row_bytes_}};
  if (model.sparse()) {
    const int64_t values = l.index_dim_ * SizeOf(options.index_dtype);
    l.index_parts_ = {{0, values}};
    if (options.index_dtype == DType::kF8E4M3) l.index_parts_.push_back({kPageTokens * values, 4});
  }
  const int64_t layers = model.num_layers + (options.with_draft ? 1 : 0);
  l.latent_slot_.resize(size_t(layers));
  l.index_slot_.resize(size_t(layers));
  for (int64_t i = 0; i < layers; ++i) {
    const LogicalLayer layer{int32_t(i)};
    const CompactLayer latent{int32_t(l.latent_layers_.size())};
    l.latent_slot_[size_t(i)] = latent;
    l.latent_layers_.push_back(layer);
    l.AddPiece(KvComponent::kLatent, layer, latent, l.latent_page_bytes());
    const bool draft = i == model.num_layers;  // the draft layer always computes its own top-k
    if (model.sparse() && (draft || model.index.computes[size_t(i)])) {
      const CompactLayer index{int32_t(l.index_layers_.size())};
      l.index_slot_[size_t(i)] = index;
      l.index_layers_.push_back(layer);
      l.AddPiece(KvComponent::kIndex, layer, index, l.index_page_bytes_);
    }
  }
  l.ComputeFingerprint(model);
  return l;
}

void KvLayout::AddPiece(KvComponent component, LogicalLayer layer, CompactLayer slot, int64_t bytes) {
  pieces_.push_back({component, layer, slot, bytes, page_bytes_});
  page_bytes_ += bytes;
}

void KvLayout::ComputeFingerprint(const ModelConfig& model) {
  Hasher h;
  h.AddFramed("sluice.kv.content.v1");
  h.AddFramed("model").Add(std::as_bytes(std::span(options_.model_identity)));
  h.AddFramed("numerics").AddFramed(options_.numerics_class);
  h.AddFramed("page_tokens").AddU64(kPageTokens);
  h.AddFramed("latent")
      .AddFramed(Name(options_.latent_dtype))
      .AddU64(uint64_t(kv_lora_))
      .AddU64(uint64_t(rope_));
  h.AddU64(uint64_t(latent_row_bytes_)).AddFramed(model.rope_interleave ? "rope:interleaved" : "rope:half");
  h.AddFramed("scale").AddFramed(kScaleRule).AddU64(kScaleTile);
  h.AddFramed("latent_layers").AddU64(latent_layers_.size());
  for (LogicalLayer l : latent_layers_) h.AddU32(uint32_t(l.value));
  h.AddFramed("index_layers").AddU64(index_layers_.size());
  for (LogicalLayer l : index_layers_) h.AddU32(uint32_t(l.value));
  if (!index_layers_.empty()) {
    h.AddFramed("index").AddFramed(Name(options_.index_dtype)).AddU64(uint64_t(index_dim_));
    h.AddU64(uint64_t(index_page_bytes_))
        .AddFramed(model.index.rope_interleave ? "rope:interleaved" : "rope:half");
    h.AddFramed(options_.hadamard ? "hadamard" : "plain");
    h.AddU64(uint64_t(model.index.topk));  // which rows a later layer saw, hence its latent bytes
  }
  h.AddFramed(options_.with_draft ? "draft" : "no draft");
  fingerprint_ = h.Finish();
}

}  // namespace sluice
