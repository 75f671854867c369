// sluice plan CONFIG: tokens that each cache tier holds for a cluster shape, before buying it. All KV bytes
// come from KvLayout.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "base/file_text.h"
#include "commands.h"
#include "config/legality.h"
#include "config/model_config_file.h"
#include "config/parameter_count.h"
#include "fmt/format.h"
#include "kv/kv_layout.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

struct PlanOptions {
  std::string config;
  std::string overrides;
  int64_t index_topk_freq = 0, index_skip_topk_offset = 0;
  std::string index_topk_pattern;
  int64_t ranks = 8;  // of one instance, = attention CP size
  int64_t ep = 0;     // 0 = ranks
  double gpu_gb = 141, host_gb = 0, storage_gb = 0, activation_gb = 8;
  double mem_fraction = 0.9;
  std::string weights = "fp8";
  bool speculative = false;
  std::string json;
};

struct Variant {
  std::string kv_dtype;
  bool compacted;
};

struct Capacity {
  double bytes_per_token = 0;
  int64_t tokens_l1 = 0, tokens_l2 = 0, tokens_l3 = 0;
};

// An FP8 checkpoint keeps embedding and head in 16 bits; the rest has one float32 scale a 128 x 128 block.
double WeightBytes(const ParameterCount& count, int64_t ep, const PlanOptions& o) {
  const int64_t all = ParametersPerRank(count, ep, o.speculative);
  if (o.weights != "fp8") return double(all) * (o.weights == "bf16" ? 2 : 4);
  return double(count.embedding) * 2 + double(all - count.embedding) * (1 + 4.0 / (128 * 128));
}

// Whole pages, lane by lane: a lane that is short of one page does not borrow from another.
int64_t Tokens(double bytes_per_lane, int64_t lanes, int64_t page_bytes) {
  if (bytes_per_lane < double(page_bytes)) return 0;
  return int64_t(bytes_per_lane / double(page_bytes)) * lanes * kPageTokens;
}

StatusOr<Capacity> Plan(ModelConfig model, const Variant& variant, const PlanOptions& o,
                        double kv_bytes_per_rank) {
  if (!variant.compacted) model.index.computes.assign(size_t(model.num_layers), true);
  KvLayoutOptions options;
  options.latent_dtype = variant.kv_dtype == "fp8_e4m3" ? DType::kF8E4M3 : DType::kBF16;
  options.index_dtype = options.latent_dtype;
  options.with_draft = o.speculative;
  ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Make(model, options));
  Capacity c;
  c.bytes_per_token = layout.bytes_per_token();
  // One page of a lane is the scratch page that dummy rows go to.
  c.tokens_l1 = Tokens(kv_bytes_per_rank - double(layout.page_bytes()), o.ranks, layout.page_bytes());
  c.tokens_l2 = Tokens(o.host_gb * 1e9 / double(o.ranks), o.ranks, layout.page_bytes());
  c.tokens_l3 = Tokens(o.storage_gb * 1e9, 1, layout.page_bytes());
  return c;
}

// A shape that no server of this program can have is refused in the server's words.
Status CheckShape(const PlanOptions& o) {
  ServerConfig config;
  config.tp_size = config.attn_cp_size = o.ranks;
  config.ep_size = o.ep > 0 ? o.ep : o.ranks;
  std::string text;
  for (const std::string& line : IllegalCombinations(config, nullptr))
    text += (text.empty() ? "" : "\n") + line;
  return text.empty() ? OkStatus() : Invalid("{}", text);
}

StatusOr<int> Run(const PlanOptions& o) {
  RETURN_IF_ERROR(CheckShape(o));
  const ModelOverrides overrides{o.overrides, o.index_topk_freq, o.index_topk_pattern,
                                 o.index_skip_topk_offset};
  StatusOr<ModelConfig> loaded = Internal("unread");
  if (std::filesystem::is_directory(o.config)) {
    loaded = LoadModelConfig(o.config, overrides);
  } else {
    ASSIGN_OR_RETURN(const std::string text, ReadFileText(o.config));
    loaded = ParseModelConfigFile(o.config, text, overrides);
  }
  ASSIGN_OR_RETURN(const ModelConfig model, std::move(loaded));
  if (o.speculative && model.num_draft_layers == 0)
    return Invalid("--speculative: {} has no draft layer (num_nextn_predict_layers is 0)", o.config);
  const ParameterCount count = CountParameters(model);
  const int64_t ep = o.ep > 0 ? o.ep : o.ranks;
  const double weights = WeightBytes(count, ep, o);
  const double kv = o.gpu_gb * 1e9 * o.mem_fraction - weights - o.activation_gb * 1e9;
  if (kv <= 0)
    return Invalid(
        "--gpu-memory-gb: {} GB x {} leaves nothing for the cache after {:.1f} GB of weights and {} GB of "
        "activations a "
        "rank; take more ranks, a larger --ep-size or fp8 weights",
        o.gpu_gb, o.mem_fraction, weights / 1e9, o.activation_gb);
  Json doc;
  doc["config"] = o.config;
  doc["architecture"] = model.architecture_name;
  doc["parameters"] = count.total();
  doc["ranks"] = o.ranks;
  doc["ep_size"] = ep;
  doc["weight_bytes_per_rank"] = int64_t(weights);
  doc["kv_bytes_per_rank"] = int64_t(kv);
  Json rows = Json::array();
  std::string table = fmt::format("{:<10} {:<10} {:>14} {:>14} {:>14} {:>14}\n", "kv dtype", "index K",
                                  "bytes/token", "tokens L1", "tokens L2", "tokens L3");
  bool any_shared = false;
  for (const bool full : model.index.computes) any_shared |= !full;
  for (const std::string kv_dtype : {"fp8_e4m3", "bf16"}) {
    for (const bool compacted : {true, false}) {
      if (!compacted && !(model.sparse() && any_shared)) continue;
      ASSIGN_OR_RETURN(const Capacity c, Plan(model, {kv_dtype, compacted}, o, kv));
      const std::string index = !model.sparse() ? "none"
                                : compacted     ? (any_shared ? "compacted" : "all layers")
                                                : "all layers";
      rows.push_back(Json{{"kv_cache_dtype", kv_dtype},
                          {"index_layers", index},
                          {"bytes_per_token", c.bytes_per_token},
                          {"tokens_l1", c.tokens_l1},
                          {"tokens_l2", c.tokens_l2},
                          {"tokens_l3", c.tokens_l3}});
      table += fmt::format("{:<10} {:<10} {:>14.0f} {:>14} {:>14} {:>14}\n", kv_dtype, index,
                           c.bytes_per_token, c.tokens_l1, c.tokens_l2, c.tokens_l3);
    }
  }
  for (const char* key : {"tokens_l1", "tokens_l2", "tokens_l3", "bytes_per_token"}) doc[key] = rows[0][key];
  doc["rows"] = rows;
  if (o.json.empty()) {
    std::cout << fmt::format(
        "{}: {:.1f}G parameters; a rank holds {:.1f} GB of weights and {:.1f} GB of KV\n\n{}",
        model.architecture_name, double(count.total()) / 1e9, weights / 1e9, kv / 1e9, table);
  } else if (o.json == "-") {
    std::cout << doc.dump(2) << "\n";
  } else {
    std::ofstream out(o.json);
    if (!(out << doc.dump(2) << "\n")) return Unavailable("--json: cannot write {}", o.json);
  }
  return int(kExitOk);
}

}  // namespace

int RunPlan(const std::vector<std::string>& args) {
  PlanOptions o;
  CLI::App app("Tokens that each cache tier holds for a cluster shape", "sluice plan");
  app.option_defaults()->always_capture_default();
  app.add_option("config", o.config, "a model folder or a config.json")->required();
  app.add_option("--json-model-override-args", o.overrides, "JSON object merged into the config")
      ->type_name("JSON");
  app.add_option("--nsa-index-topk-freq,--dsa-index-topk-freq", o.index_topk_freq, "0: as in the config");
  app.add_option("--nsa-index-topk-pattern,--dsa-index-topk-pattern", o.index_topk_pattern);
  app.add_option("--nsa-index-skip-topk-offset,--dsa-index-skip-topk-offset", o.index_skip_topk_offset);
  app.add_option("--attn-cp-size,--gpus", o.ranks, "ranks of one instance; each owns a lane of the cache")
      ->check(CLI::Range(1, 1024));
  app.add_option("--ep-size,--ep", o.ep, "ranks that share the experts; 0 = all")->check(CLI::Range(0, 1024));
  app.add_option("--gpu-memory-gb", o.gpu_gb, "of one device, 10^9 bytes")->check(Above0(kMostGigabytes));
  app.add_option("--mem-fraction-static", o.mem_fraction)->check(CLI::Range(0.01, 1.0));
  app.add_option("--activation-gb", o.activation_gb, "kept free on each device for activations and graphs")
      ->check(AtLeast0(kMostGigabytes));
  app.add_option("--host-gb", o.host_gb, "host tier of the whole instance")->check(AtLeast0(kMostGigabytes));
  app.add_option("--storage-gb", o.storage_gb, "storage tier")->check(AtLeast0(kMostGigabytes));
  app.add_option("--weights-dtype", o.weights)->check(CLI::IsMember({"fp8", "bf16", "float32"}));
  app.add_flag("--speculative", o.speculative, "keep the draft layer's rows in the cache");
  app.add_option("--json", o.json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "plan", args)) return *code;
  const StatusOr<int> code = Run(o);
  return code.ok() ? *code : FailWith("plan", code.status());
}

}  // namespace sluice
