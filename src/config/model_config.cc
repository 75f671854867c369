#include "config/model_config.h"

#include <algorithm>
#include <utility>

#include "base/file_text.h"
#include "config/index_schedule.h"
#include "config/json_fields.h"
#include "config/model_config_file.h"
#include "config/rope_config.h"

namespace sluice {
namespace {

constexpr struct {
  std::string_view architecture, model_type;
  Architecture arch;
} kArchitectures[] = {
    {"GlmMoeDsaForCausalLM", "glm_moe_dsa", Architecture::kGlmMoeDsa},
    {"DeepseekV32ForCausalLM", "deepseek_v32", Architecture::kDeepseekV32},
    {"DeepseekV3ForCausalLM", "deepseek_v3", Architecture::kDeepseekV3},
    {"DeepseekV2ForCausalLM", "deepseek_v2", Architecture::kDeepseekV2},
    {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", Architecture::kGlm4MoeLite},
};

std::string SupportedArchitectures() {
  std::string s;
  for (const auto& a : kArchitectures) s += (s.empty() ? "" : ", ") + std::string(a.architecture);
  return s;
}

// Objects merge key by key; anything else (null too) replaces.
void DeepMerge(Json& target, const Json& patch) {
  for (const auto& [key, value] : patch.items()) {
    if (value.is_object() && target.contains(key) && target[key].is_object()) {
      DeepMerge(target[key], value);
    } else {
      target[key] = value;
    }
  }
}

// Adds one flag to the override object. A value that is there already must be the same.
Status AddFlag(Json& overrides, std::string_view key, std::string_view flag, const Json& value) {
  const auto it = overrides.find(std::string(key));
  if (it != overrides.end() && *it != value) {
    return Invalid("{} {} conflicts with --json-model-override-args \"{}\": {}; remove one of them", flag,
                   value.is_string() ? value.get<std::string>() : value.dump(), key, it->dump());
  }
  overrides[std::string(key)] = value;
  return OkStatus();
}

StatusOr<Json> MergedOverrides(const ModelOverrides& o) {
  Json merged = Json::object();
  if (!o.json.empty()) {
    ASSIGN_OR_RETURN(merged, ParseJsonObject(o.json, "--json-model-override-args"));
  }
  if (o.index_topk_freq < 0) {
    return Invalid(
        "--nsa-index-topk-freq: {} is negative; give a whole number >= 1, or 0 for the model's own",
        o.index_topk_freq);
  }
  if (o.index_skip_topk_offset < 0) {
    return Invalid(
        "--nsa-index-skip-topk-offset: {} is negative; give a whole number >= 1, or 0 for the model's own",
        o.index_skip_topk_offset);
  }
  if (o.index_topk_freq != 0) {
    RETURN_IF_ERROR(AddFlag(merged, "index_topk_freq", "--nsa-index-topk-freq", o.index_topk_freq));
  }
  if (!o.index_topk_pattern.empty()) {
    RETURN_IF_ERROR(AddFlag(merged, "index_topk_pattern", "--nsa-index-topk-pattern", o.index_topk_pattern));
  }
  if (o.index_skip_topk_offset != 0) {
    RETURN_IF_ERROR(
        AddFlag(merged, "index_skip_topk_offset", "--nsa-index-skip-topk-offset", o.index_skip_topk_offset));
  }
  return merged;
}

Status ReadArchitecture(const JsonFields& f, ModelConfig& c) {
  ASSIGN_OR_RETURN(c.model_type, f.String("model_type", ""));
  if (const Json* list = f.Find("architectures")) {
    if (!list->is_array() || list->size() != 1 || !(*list)[0].is_string()) {
      return f.WrongType("architectures", *list, "a list of one name");
    }
    c.architecture_name = (*list)[0].get<std::string>();
    for (const auto& a : kArchitectures) {
      if (a.architecture == c.architecture_name) {
        c.arch = a.arch;
        if (c.model_type.empty()) c.model_type = a.model_type;
        return OkStatus();
      }
    }
    return Unsupported("architectures: \"{}\" is not supported; supported are {}", c.architecture_name,
                       SupportedArchitectures());
  }
  for (const auto& a : kArchitectures) {
    if (a.model_type == c.model_type) {
      c.arch = a.arch;
      c.architecture_name = a.architecture;
      return OkStatus();
    }
  }
  if (c.model_type.empty()) return f.Missing("architectures");
  return Unsupported("model_type: \"{}\" is not supported; supported are {}", c.model_type,
                     SupportedArchitectures());
}

Status ReadAttention(const JsonFields& f, ModelConfig& c) {
  ASSIGN_OR_RETURN(c.q_lora_rank, f.Int("q_lora_rank", 0, 1));
  ASSIGN_OR_RETURN(c.kv_lora_rank, f.Int("kv_lora_rank", std::nullopt, 1, 4096));
  ASSIGN_OR_RETURN(c.qk_nope, f.Int("qk_nope_head_dim", std::nullopt, 1, 4096));
  ASSIGN_OR_RETURN(c.qk_rope, f.Int("qk_rope_head_dim", std::nullopt, 2, 1024));
  ASSIGN_OR_RETURN(c.v_head, f.Int("v_head_dim", std::nullopt, 1, 4096));
  if (c.qk_rope % 2 != 0)
    return Invalid("qk_rope_head_dim: {} is odd; rotary pairs need an even number", c.qk_rope);
  ASSIGN_OR_RETURN(const int64_t qk_head, f.Int("qk_head_dim", c.qk_nope + c.qk_rope, 1));
  if (qk_head != c.qk_nope + c.qk_rope) {
    return Invalid("qk_head_dim: {} differs from qk_nope_head_dim {} + qk_rope_head_dim {}", qk_head,
                   c.qk_nope, c.qk_rope);
  }
  for (std::string_view key : {"attention_bias", "mlp_bias"}) {
    ASSIGN_OR_RETURN(const bool bias, f.Bool(key, false));
    if (bias) return Unsupported("{}: true is not supported; projections have no bias in this family", key);
  }
  ASSIGN_OR_RETURN(c.rope, ReadRopeConfig(f, c.qk_rope));
  ASSIGN_OR_RETURN(c.rope_interleave, f.Bool("rope_interleave", true));
  c.attn_scale = AttentionScale(c.rope, c.qk_nope + c.qk_rope);
  return OkStatus();
}

Status ReadLayerKinds(const JsonFields& f, ModelConfig& c) {
  ASSIGN_OR_RETURN(const int64_t first_dense, f.Int("first_k_dense_replace", 0, 0));
  ASSIGN_OR_RETURN(const int64_t freq, f.Int("moe_layer_freq", 1, 1));
  for (int64_t i = 0; i < c.num_layers; ++i) {
    c.layer_is_moe.push_back(c.moe.num_experts > 0 && i >= first_dense && i % freq == 0);
  }
  if (const Json* list = f.Find("mlp_layer_types")) {
    if (!list->is_array() || int64_t(list->size()) != c.num_layers) {
      return Invalid(
          "mlp_layer_types: give a list of num_hidden_layers = {} entries, \"dense\" or \"sparse\"",
          c.num_layers);
    }
    for (int64_t i = 0; i < c.num_layers; ++i) {
      const Json& v = (*list)[size_t(i)];
      if (v != "dense" && v != "sparse") {
        return Invalid("mlp_layer_types[{}]: {} is neither \"dense\" nor \"sparse\"", i, v.dump());
      }
      const bool sparse = v == "sparse";
      if (f.Has("first_k_dense_replace") && sparse != c.layer_is_moe[size_t(i)]) {
        return Invalid("mlp_layer_types[{}]: {} disagrees with first_k_dense_replace {}, moe_layer_freq {}",
                       i, v.dump(), first_dense, freq);
      }
      if (sparse && c.moe.num_experts == 0)
        return Invalid("mlp_layer_types[{}]: \"sparse\" without n_routed_experts", i);
      c.layer_is_moe[size_t(i)] = sparse;
    }
  }
  if (const Json* list = f.Find("layer_types")) {
    const std::string_view wanted = c.sparse() ? "deepseek_sparse_attention" : "full_attention";
    if (!list->is_array()) return f.WrongType("layer_types", *list, "a list of layer kinds");
    for (const Json& v : *list) {
      if (v != wanted)
        return Unsupported("layer_types: {} is not supported here; {} layers are", v.dump(), wanted);
    }
  }
  return OkStatus();
}

Status ReadMoe(const JsonFields& f, ModelConfig& c) {
  MoeConfig& m = c.moe;
  ASSIGN_OR_RETURN(m.num_experts, f.Int("n_routed_experts", 0, 1, 65536));
  if (m.num_experts == 0) return OkStatus();
  const bool v2 = c.arch == Architecture::kDeepseekV2;
  ASSIGN_OR_RETURN(m.experts_per_token, f.Int("num_experts_per_tok", std::nullopt, 1));
  ASSIGN_OR_RETURN(m.intermediate, f.Int("moe_intermediate_size", std::nullopt, 1));
  ASSIGN_OR_RETURN(m.num_shared, f.Int("n_shared_experts", 0, 0));
  ASSIGN_OR_RETURN(const double scaling,
                   f.Real("routed_scaling_factor", v2 ? std::optional<double>(1.0) : std::nullopt));
  if (scaling <= 0) return Invalid("routed_scaling_factor: {} is not positive", scaling);
  m.scaling = float(scaling);
  ASSIGN_OR_RETURN(const std::string scoring, f.String("scoring_func", v2 ? "softmax" : "sigmoid"));
  if (scoring != "sigmoid" && scoring != "softmax") {
    return Invalid("scoring_func: \"{}\" is neither \"sigmoid\" nor \"softmax\"", scoring);
  }
  m.scoring = scoring == "softmax" ? ScoringFunc::kSoftmax : ScoringFunc::kSigmoid;
  ASSIGN_OR_RETURN(m.normalize, f.Bool("norm_topk_prob", !v2));
  ASSIGN_OR_RETURN(const std::string method, f.String("topk_method", v2 ? "greedy" : "noaux_tc"));
  if (method != "noaux_tc" && method != "greedy" && method != "group_limited_greedy") {
    return Invalid("topk_method: \"{}\" is not one of \"noaux_tc\", \"greedy\", \"group_limited_greedy\"",
                   method);
  }
  m.has_bias = method == "noaux_tc";
  if (v2 && m.normalize && m.scaling != 1.0f) {
    return Unsupported(
        "norm_topk_prob: true with routed_scaling_factor {} is ambiguous for {}: published implementations "
        "apply the factor or not; set one of them to its neutral value",
        scaling, c.architecture_name);
  }
  ASSIGN_OR_RETURN(m.num_groups, f.Int("n_group", 1, 1));
  ASSIGN_OR_RETURN(m.groups_kept, f.Int("topk_group", 1, 1));
  if (method == "greedy") m.num_groups = m.groups_kept = 1;
  if (m.num_experts % m.num_groups != 0) {
    return Invalid("n_group: {} does not divide n_routed_experts {}", m.num_groups, m.num_experts);
  }
  if (m.groups_kept > m.num_groups) {
    return Invalid("topk_group: {} is more than n_group {}", m.groups_kept, m.num_groups);
  }
  const int64_t selectable = m.num_experts / m.num_groups * m.groups_kept;
  if (m.experts_per_token > selectable) {
    return Invalid("num_experts_per_tok: {} is more than the {} experts of {} kept groups",
                   m.experts_per_token, selectable, m.groups_kept);
  }
  if (m.num_groups > 1) {
    m.group_score = m.has_bias ? GroupScore::kSumTop2 : GroupScore::kMax;
    if (m.has_bias && m.num_experts / m.num_groups < 2) {
      return Invalid(
          "n_group: {} leaves fewer than 2 experts a group, but a group's score is the sum of its two best",
          m.num_groups);
    }
  }
  return OkStatus();
}

Status ReadIndex(const JsonFields& f, ModelConfig& c) {
  if (c.arch != Architecture::kGlmMoeDsa && c.arch != Architecture::kDeepseekV32) {
    for (std::string_view key :
         {"index_topk", "index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"}) {
      if (f.Has(key)) {
        return Invalid("{}: set, but {} has no indexer and attends to every position; remove the key or flag",
                       key, c.architecture_name);
      }
    }
    return OkStatus();
  }
  IndexConfig& x = c.index;
  ASSIGN_OR_RETURN(x.num_heads, f.Int("index_n_heads", std::nullopt, 1, 1024));
  ASSIGN_OR_RETURN(x.head_dim, f.Int("index_head_dim", std::nullopt, 2, 1024));
  ASSIGN_OR_RETURN(x.topk, f.Int("index_topk", std::nullopt, 1, 1 << 20));
  if (x.head_dim < c.qk_rope) {
    return Invalid("index_head_dim: {} is smaller than qk_rope_head_dim {}, which is its rotary part",
                   x.head_dim, c.qk_rope);
  }
  if (c.q_lora_rank == 0)
    return Invalid("q_lora_rank: missing; the indexer's query is projected from that latent");
  ASSIGN_OR_RETURN(const std::string norm, f.String("index_k_norm_type", "layer"));
  if (norm != "layer") return Unsupported("index_k_norm_type: \"{}\" is not supported; \"layer\" is", norm);
  ASSIGN_OR_RETURN(x.rope_interleave, f.Bool("indexer_rope_interleave", c.arch == Architecture::kGlmMoeDsa));
  ASSIGN_OR_RETURN(x.share_for_mtp_iteration, f.Bool("index_share_for_mtp_iteration", false));
  ASSIGN_OR_RETURN(x.computes, ReadIndexSchedule(f, c.num_layers));
  return OkStatus();
}

Status ReadQuantization(const JsonFields& f, ModelConfig& c) {
  const Json* q = f.Find("quantization_config");
  if (q == nullptr) return OkStatus();
  if (!q->is_object()) return f.WrongType("quantization_config", *q, "an object or null");
  const JsonFields fields(*q, "quantization_config.");
  ASSIGN_OR_RETURN(c.quant_method, fields.String("quant_method", std::nullopt));
  if (c.quant_method != "fp8") {
    return Unsupported(
        "quantization_config.quant_method: \"{}\" is not supported; \"fp8\" with block scales and "
        "unquantised bf16, f16 or f32 checkpoints are",
        c.quant_method);
  }
  ASSIGN_OR_RETURN(const std::string fmt, fields.String("fmt", "e4m3"));
  if (fmt != "e4m3") return Unsupported("quantization_config.fmt: \"{}\" is not supported; \"e4m3\" is", fmt);
  const Json* block = fields.Find("weight_block_size");
  if (block == nullptr) {
    return Unsupported(
        "quantization_config.weight_block_size: missing; fp8 weights with one scale a tensor are not "
        "supported, block scales such as [128, 128] are");
  }
  if (!block->is_array() || block->size() != 2 || !(*block)[0].is_number_unsigned() ||
      !(*block)[1].is_number_unsigned() || (*block)[0] == 0 || (*block)[1] == 0) {
    return fields.WrongType("weight_block_size", *block, "a list of two whole numbers >= 1");
  }
  c.quant_block_n = (*block)[0].get<int64_t>();
  c.quant_block_k = (*block)[1].get<int64_t>();
  return OkStatus();
}

// What the model computes in is --dtype; this key says what the weights are meant to be stored in.
Status ReadDtype(const JsonFields& f) {
  ASSIGN_OR_RETURN(std::string dtype, f.String("dtype", ""));
  ASSIGN_OR_RETURN(const std::string torch_dtype, f.String("torch_dtype", ""));
  if (!dtype.empty() && !torch_dtype.empty() && dtype != torch_dtype) {
    return Invalid("dtype: \"{}\" differs from torch_dtype \"{}\"; keep one of them", dtype, torch_dtype);
  }
  const std::string_view key = dtype.empty() ? "torch_dtype" : "dtype";
  if (dtype.empty()) dtype = torch_dtype;
  constexpr std::string_view kTorch = "torch.";
  std::string_view name = dtype;
  if (name.starts_with(kTorch)) name.remove_prefix(kTorch.size());
  for (std::string_view known : {"", "bfloat16", "float16", "float32", "float8_e4m3fn"}) {
    if (name == known) return OkStatus();
  }
  return Unsupported("{}: \"{}\" is not supported; bfloat16, float16, float32 and float8_e4m3fn are", key,
                     dtype);
}

Status AddStopTokens(const JsonFields& f, int64_t vocab_size, std::vector<int32_t>& ids) {
  const Json* v = f.Find("eos_token_id");
  if (v == nullptr) return OkStatus();
  const Json list = v->is_array() ? *v : Json::array({*v});
  for (const Json& id : list) {
    if (!id.is_number_integer() || id < 0 || id > 0x7fffffff) {
      return f.WrongType("eos_token_id", *v, "a token id or a list of token ids");
    }
    if (id.get<int64_t>() >= vocab_size) {
      return Invalid(
          "eos_token_id: {} is not below vocab_size {}: no answer would ever end with it; give the id that "
          "ends an "
          "answer, or null",
          id.get<int64_t>(), vocab_size);
    }
    const int32_t n = id.get<int32_t>();
    if (std::find(ids.begin(), ids.end(), n) == ids.end()) ids.push_back(n);
  }
  return OkStatus();
}

// A complaint about a file of the model folder, with what can be done about any of them.
Status InFile(const std::string& path, const Status& s, bool can_override) {
  if (s.code() == absl::StatusCode::kUnimplemented)
    return Status(s.code(), fmt::format("{}: {} (take a model of a supported kind)", path, Message(s)));
  return Status(s.code(), fmt::format("{}: {} ({})", path, Message(s),
                                      can_override ? "correct it there or with --json-model-override-args"
                                                   : "correct it there"));
}

}  // namespace

bool ModelConfig::IsFullIndexLayer(LogicalLayer l) const {
  if (!sparse()) return false;
  return l.value >= num_layers || index.computes[size_t(l.value)];
}

StatusOr<ModelConfig> ParseModelConfig(std::string_view config_json, const ModelOverrides& overrides) {
  ASSIGN_OR_RETURN(const Json patch, MergedOverrides(overrides));
  ASSIGN_OR_RETURN(Json json, ParseJsonObject(config_json, ""));
  DeepMerge(json, patch);
  const JsonFields f(json);
  ModelConfig c;
  RETURN_IF_ERROR(ReadArchitecture(f, c));
  ASSIGN_OR_RETURN(c.vocab_size, f.Int("vocab_size", std::nullopt, 1, 1 << 24));
  ASSIGN_OR_RETURN(c.hidden, f.Int("hidden_size", std::nullopt, 1, 1 << 20));
  ASSIGN_OR_RETURN(c.num_layers, f.Int("num_hidden_layers", std::nullopt, 1, 4096));
  ASSIGN_OR_RETURN(c.num_heads, f.Int("num_attention_heads", std::nullopt, 1, 4096));
  ASSIGN_OR_RETURN(c.dense_intermediate, f.Int("intermediate_size", std::nullopt, 1, 1 << 24));
  ASSIGN_OR_RETURN(c.max_positions, f.Int("max_position_embeddings", std::nullopt, 1, 1 << 30));
  ASSIGN_OR_RETURN(const double eps, f.Real("rms_norm_eps", std::nullopt));
  if (eps <= 0 || eps >= 1) return Invalid("rms_norm_eps: {} is not between 0 and 1", eps);
  c.rms_eps = float(eps);
  c.latent_norm_eps =
      1e-6f;  // all families build these two norms with their class's default, not with rms_norm_eps
  ASSIGN_OR_RETURN(const std::string act, f.String("hidden_act", "silu"));
  if (act != "silu") return Unsupported("hidden_act: \"{}\" is not supported; \"silu\" is", act);
  ASSIGN_OR_RETURN(c.tie_embeddings, f.Bool("tie_word_embeddings", false));
  ASSIGN_OR_RETURN(c.num_draft_layers, f.Int("num_nextn_predict_layers", 0, 0, 16));
  RETURN_IF_ERROR(ReadAttention(f, c));
  RETURN_IF_ERROR(ReadMoe(f, c));
  RETURN_IF_ERROR(ReadIndex(f, c));
  RETURN_IF_ERROR(ReadLayerKinds(f, c));
  RETURN_IF_ERROR(ReadQuantization(f, c));
  RETURN_IF_ERROR(ReadDtype(f));
  RETURN_IF_ERROR(AddStopTokens(f, c.vocab_size, c.eos_token_ids));
  c.merged_json = json.dump();
  return c;
}

Status CheckOverrides(const ModelOverrides& overrides) { return MergedOverrides(overrides).status(); }

StatusOr<ModelConfig> ParseModelConfigFile(const std::string& path, std::string_view config_json,
                                           const ModelOverrides& overrides) {
  RETURN_IF_ERROR(CheckOverrides(overrides));  // of the command line, not of the file
  StatusOr<ModelConfig> config = ParseModelConfig(config_json, overrides);
  if (!config.ok()) return InFile(path, config.status(), true);
  return config;
}

StatusOr<ModelConfig> LoadModelConfig(const std::string& folder, const ModelOverrides& overrides) {
  const std::string path = folder + "/config.json", generation_path = folder + "/generation_config.json";
  const StatusOr<std::string> text = ReadFileText(path);
  if (absl::IsNotFound(text.status())) {
    return NotFound("{}: is not there; give a folder with config.json, tokenizer.json and *.safetensors",
                    path);
  }
  RETURN_IF_ERROR(text.status());
  ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfigFile(path, *text, overrides));
  const StatusOr<std::string> generation = ReadFileText(generation_path);
  if (absl::IsNotFound(generation.status())) return config;
  RETURN_IF_ERROR(generation.status());
  const StatusOr<Json> json = ParseJsonObject(*generation, "");
  if (!json.ok()) return InFile(generation_path, json.status(), false);
  const Status added = AddStopTokens(JsonFields(*json), config.vocab_size, config.eos_token_ids);
  if (!added.ok()) return InFile(generation_path, added, false);
  return config;
}

}  // namespace sluice
