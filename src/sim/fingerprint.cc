#include "sim/fingerprint.h"

#include "base/check.h"

namespace sluice::sim {

ModelConfig SimModel() {
  ModelConfig m;
  m.num_layers = 3;
  m.kv_lora_rank = 32;
  m.qk_rope = 8;
  m.num_draft_layers = 1;
  m.index.num_heads = 2;
  m.index.head_dim = 16;
  m.index.topk = 64;
  m.index.computes = {true, false, true};
  return m;
}

KvLayout SimLayout(DType latent, DType index, bool draft, uint64_t identity) {
  KvLayoutOptions o;
  o.latent_dtype = latent;
  o.index_dtype = index;
  o.with_draft = draft;
  o.numerics_class = "simulation";
  for (size_t i = 0; i < 8; ++i) o.model_identity[i] = uint8_t(identity >> (8 * i));
  auto layout = KvLayout::Make(SimModel(), o);
  SLUICE_CHECK(layout.ok(), "{}", Message(layout.status()));
  return *layout;
}

FingerprintRows::FingerprintRows(const DevicePool* pool) : pool_(pool) {
  const KvLayout& layout = pool->layout();
  for (const KvPiece& piece : layout.pieces()) {
    Piece p{&piece, Mix(uint64_t(piece.layer.value) + 1, uint64_t(piece.component) + 7), 0, 0, 0};
    if (piece.component == KvComponent::kIndex && layout.index_dtype() == DType::kF8E4M3) {
      p.stride = layout.index_dim();
      p.tail_at = kPageTokens * layout.index_dim();
      p.tail_stride = 4;
    } else {
      p.stride = p.tail_stride = piece.bytes / kPageTokens;
      p.tail_at = p.stride - 4;
    }
    SLUICE_CHECK(p.stride >= 16 && (p.tail_at >= 16), "rows of {} bytes cannot hold a fingerprint", p.stride);
    pieces_.push_back(p);
  }
}

}  // namespace sluice::sim
