// Model shapes for tests of everything that counts KV bytes.
#pragma once

#include "config/model_config.h"
#include "kv/kv_layout.h"

namespace sluice::testing {

// GLM-5.x cache geometry: 78 layers, latent 512 + 64, index dim 128; freq/offset = the index schedule (1: all
// compute).
inline ModelConfig Glm5(int64_t freq = 1, int64_t offset = 2) {
  ModelConfig m;
  m.num_layers = 78;
  m.kv_lora_rank = 512;
  m.qk_rope = 64;
  m.num_draft_layers = 1;
  m.index.num_heads = 32;
  m.index.head_dim = 128;
  m.index.topk = 2048;
  for (int64_t i = 0; i < m.num_layers; ++i) {
    const int64_t d = i - offset + 1;
    m.index.computes.push_back(freq <= 1 || (d > 0 ? d : 0) % freq == 0);
  }
  return m;
}

// A few small layers, so that page bytes can be checked one by one. Layers 0 and 2 own index K.
inline ModelConfig Small() {
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

inline KvLayout MakeLayout(const ModelConfig& m, DType latent = DType::kBF16, DType index = DType::kBF16,
                           bool draft = false) {
  KvLayoutOptions o;
  o.latent_dtype = latent;
  o.index_dtype = index;
  o.with_draft = draft;
  o.numerics_class = "test";
  return KvLayout::Make(m, o).value();
}

}  // namespace sluice::testing
