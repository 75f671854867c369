// The model as one validated value, read from a Hugging Face config.json (raw keys, after overrides).
//
// All families (GlmMoeDsa, DeepseekV32, DeepseekV3, DeepseekV2, Glm4MoeLite) are the same layer loop with
// other numbers. Source of the rules: the checkpoints' config.json and the published reference code of
// DeepSeek-V3.2 and GLM-5.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "tensor/dtype.h"

namespace sluice {

enum class Architecture : uint8_t { kGlmMoeDsa, kDeepseekV32, kDeepseekV3, kDeepseekV2, kGlm4MoeLite };
enum class ScoringFunc : uint8_t { kSigmoid, kSoftmax };
enum class GroupScore : uint8_t { kNone, kMax, kSumTop2 };

struct RopeConfig {
  double theta = 10000.0;
  bool yarn = false;
  double factor = 1.0, beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
  int64_t original_max_position = 0;
  std::vector<float> inv_freq;  // [qk_rope_head_dim / 2], YaRN already applied
  float cos_sin_scale = 1.0f;   // multiplies cos and sin (mscale / mscale_all_dim), 1 when they are equal
};

struct MoeConfig {
  int64_t num_experts = 0;  // 0: the model has no MoE layer
  int64_t experts_per_token = 0;
  int64_t intermediate = 0;  // of one expert
  int64_t num_shared = 0;    // shared intermediate = num_shared * intermediate
  int64_t num_groups = 1, groups_kept = 1;
  ScoringFunc scoring = ScoringFunc::kSigmoid;
  GroupScore group_score = GroupScore::kNone;
  bool has_bias = false;  // e_score_correction_bias
  bool normalize = true;  // weights divided by their sum (+1e-20)
  float scaling = 1.0f;
};

struct IndexConfig {
  int64_t num_heads = 0;  // 0: the model attends densely
  int64_t head_dim = 0;
  int64_t topk = 0;
  bool rope_interleave = true;
  std::vector<bool> computes;  // [num_layers]: true = full layer, false = reuses the set of the layer before
  bool share_for_mtp_iteration = false;
};

struct ModelConfig {
  Architecture arch{};
  std::string architecture_name;  // as in config.json
  std::string model_type;
  int64_t vocab_size = 0, hidden = 0, num_layers = 0, num_heads = 0;
  int64_t dense_intermediate = 0;
  int64_t q_lora_rank = 0;  // 0: q_proj without a latent
  int64_t kv_lora_rank = 0, qk_nope = 0, qk_rope = 0, v_head = 0;
  float rms_eps = 1e-6f;          // layer norms and final norm
  float latent_norm_eps = 1e-6f;  // q_a_layernorm and kv_a_layernorm
  bool rope_interleave = true;    // main attention pairs (2i, 2i+1); false: (i, i + rope/2)
  float attn_scale = 0;           // (nope + rope)^-0.5 * yarn mscale^2
  int64_t max_positions = 0;
  bool tie_embeddings = false;
  std::vector<bool> layer_is_moe;  // [num_layers]
  int64_t num_draft_layers = 0;    // MTP layers of the checkpoint (num_nextn_predict_layers)
  RopeConfig rope;
  MoeConfig moe;
  IndexConfig index;
  std::vector<int32_t> eos_token_ids;
  std::string merged_json;   // the config after overrides, for inspect, /server_info and the model identity
  std::string quant_method;  // "" or "fp8"
  int64_t quant_block_n = 0, quant_block_k = 0;

  bool sparse() const { return index.num_heads > 0; }
  bool IsFullIndexLayer(LogicalLayer l) const;  // the draft layer is always full
  LogicalLayer draft_layer() const { return LogicalLayer(int32_t(num_layers)); }
  int64_t latent_dim() const { return kv_lora_rank + qk_rope; }
};

// Flags that add keys to the override JSON; 0 or empty = unset.
struct ModelOverrides {
  std::string json;             // --json-model-override-args
  int64_t index_topk_freq = 0;  // --nsa-index-topk-freq / --dsa-index-topk-freq
  std::string index_topk_pattern;
  int64_t index_skip_topk_offset = 0;
};

// Reads folder/config.json, merges the overrides and validates. Errors name the key, its value and what is
// right.
StatusOr<ModelConfig> LoadModelConfig(const std::string& folder, const ModelOverrides& overrides = {});
StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json, const ModelOverrides& overrides = {});

}  // namespace sluice
