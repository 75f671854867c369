// sluice inspect MODEL: what a model folder and the flags come to, without serving: geometry, index schedule,
// KV layout, memory plan, packed matrices with the kernel chosen for each.
#include <fstream>
#include <iostream>

#include "commands.h"
#include "config/flags.h"
#include "config/index_schedule.h"
#include "config/parameter_count.h"
#include "engine_setup.h"
#include "model/model_buffers.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

const CommandSyntax kSyntax = {
    .usage = "sluice inspect [MODEL] [options]",
    .summary =
        "Shows geometry, cache layout, schedule, memory plan and kernels of a model under the given flags.",
    .options = {{"--json", "FILE", "write one JSON document; - is stdout"}},
    .engine_flags = true,
    .max_positional = 1,
};

Json Geometry(const ModelConfig& c) {
  Json g = {{"architecture", c.architecture_name},
            {"layers", c.num_layers},
            {"draft_layers", c.num_draft_layers},
            {"hidden", c.hidden},
            {"heads", c.num_heads},
            {"vocab", c.vocab_size},
            {"q_lora_rank", c.q_lora_rank},
            {"kv_lora_rank", c.kv_lora_rank},
            {"qk_nope_head_dim", c.qk_nope},
            {"qk_rope_head_dim", c.qk_rope},
            {"v_head_dim", c.v_head},
            {"max_positions", c.max_positions},
            {"attention_scale", c.attn_scale},
            {"rope_theta", c.rope.theta},
            {"rope_scaling", c.rope.yarn ? fmt::format("yarn x{}", c.rope.factor) : "none"},
            {"rope_interleave", c.rope_interleave},
            {"dense_intermediate", c.dense_intermediate},
            {"weights", c.quant_method.empty() ? "unquantised"
                                               : fmt::format("{} blocks of {}x{}", c.quant_method,
                                                             c.quant_block_n, c.quant_block_k)},
            {"stop_tokens", c.eos_token_ids}};
  if (c.moe.num_experts > 0) {
    int64_t layers = 0;
    for (bool moe : c.layer_is_moe) layers += moe;
    g["moe"] = {{"layers", layers},
                {"experts", c.moe.num_experts},
                {"per_token", c.moe.experts_per_token},
                {"shared", c.moe.num_shared},
                {"intermediate", c.moe.intermediate},
                {"groups", c.moe.num_groups},
                {"groups_kept", c.moe.groups_kept},
                {"scoring", c.moe.scoring == ScoringFunc::kSigmoid ? "sigmoid" : "softmax"},
                {"bias", c.moe.has_bias},
                {"normalized", c.moe.normalize},
                {"scaling", c.moe.scaling}};
  }
  if (c.sparse()) {
    g["index"] = {{"heads", c.index.num_heads},
                  {"head_dim", c.index.head_dim},
                  {"topk", c.index.topk},
                  {"rope_interleave", c.index.rope_interleave},
                  {"schedule", ScheduleString(c.index.computes)}};
  }
  return g;
}

Json LayoutJson(const KvLayout& l) {
  const auto ids = [](const std::vector<LogicalLayer>& layers) {
    Json list = Json::array();
    for (LogicalLayer x : layers) list.push_back(x.value);
    return list;
  };
  return {{"page_tokens", kPageTokens},
          {"latent_dtype", Name(l.latent_dtype())},
          {"latent_row_bytes", l.latent_row_bytes()},
          {"index_dtype", l.index_layers().empty() ? "none" : std::string(Name(l.index_dtype()))},
          {"index_page_bytes", l.index_page_bytes()},
          {"page_bytes", l.page_bytes()},
          {"latent_layers", ids(l.latent_layers())},
          {"index_layers", ids(l.index_layers())},
          {"hadamard", l.options().hadamard},
          {"numerics_class", l.options().numerics_class}};
}

std::string Table(const Json& doc) {
  std::string out;
  const auto section = [&](const char* title, const Json& object) {
    out += fmt::format("{}\n", title);
    for (const auto& [key, value] : object.items()) {
      std::string shown = value.is_string() ? value.get<std::string>() : value.dump();
      if (shown.size() > 100) shown = shown.substr(0, 97) + "...";
      out += fmt::format("  {:<22} {}\n", key, shown);
    }
  };
  section("geometry", doc["geometry"]);
  section("cache layout", doc["layout"]);
  section("bytes per token", doc["bytes_per_token"]);
  section("memory plan", doc["memory"]);
  section("device", doc["device"]);
  out +=
      fmt::format("kernels\n  {:<24} {:>22} {:>6} {:>10}  {}\n", "matrix", "shape", "count", "MiB", "kernel");
  for (const Json& k : doc["kernels"]) {
    out += fmt::format("  {:<24} {:>22} {:>6} {:>10.1f}  {}\n", k["matrix"].get<std::string>(),
                       k["shape"].get<std::string>(), k["count"].get<int64_t>(),
                       k["bytes"].get<double>() / (1 << 20), k["kernel"].get<std::string>());
  }
  out += fmt::format("model identity         {}\ncontent fingerprint    {}\n",
                     doc["model_identity"].get<std::string>(), doc["fingerprint"].get<std::string>());
  for (const Json& n : doc["notices"]) out += fmt::format("note: {}\n", n.get<std::string>());
  return out;
}

StatusOr<int> Run(CommandLine& line) {
  ServerConfig& server = line.server;
  if (!line.positional.empty()) server.model_path = line.positional[0];
  ASSIGN_OR_RETURN(const std::shared_ptr<LoadedModel> loaded, LoadModel(server));
  const ModelConfig& config = loaded->config;
  ASSIGN_OR_RETURN(const KvLayoutOptions kv, KvOptionsFor(server, *loaded));
  ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Make(config, kv));
  const ParameterCount count = CountParameters(config);

  ModelLimits limits;
  limits.max_rows =
      (server.chunked_prefill_size > 0 ? server.chunked_prefill_size : server.max_prefill_tokens) +
      server.max_running_requests;
  limits.max_seqs = server.max_running_requests;
  limits.max_logits_rows = server.max_running_requests;
  limits.max_context = loaded->context_length;
  ASSIGN_OR_RETURN(const auto buffers, ModelBuffers::Make(config, *loaded->backend, limits));
  MemoryInputs in;
  in.free_bytes = loaded->free_bytes_before;
  in.fraction = server.mem_fraction_static;
  in.weight_bytes = loaded->model->packed_bytes();
  in.staging_bytes = buffers->bytes();
  in.page_bytes = layout.page_bytes();
  in.max_total_tokens = server.max_total_tokens;
  in.max_running = server.max_running_requests;
  in.context_length = loaded->context_length;
  in.host_tier = server.enable_hierarchical_cache;
  in.host_ratio = server.hicache_ratio;
  in.host_gb_per_rank = server.hicache_size_gb;
  ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(in));

  double latent = 0, index = 0;
  for (const KvPiece& p : layout.pieces())
    (p.component == KvComponent::kLatent ? latent : index) += double(p.bytes) / kPageTokens;
  Json doc;
  doc["model"] = loaded->name;
  doc["folder"] = loaded->folder;
  doc["parameters"] = count.total();
  doc["geometry"] = Geometry(config);
  doc["layout"] = LayoutJson(layout);
  doc["bytes_per_token"] = {{"latent", latent}, {"index", index}, {"total", layout.bytes_per_token()}};
  doc["memory"] = {{"free_bytes", in.free_bytes},         {"budget_bytes", plan.budget_bytes},
                   {"weight_bytes", plan.weight_bytes},   {"staging_bytes", plan.staging_bytes},
                   {"device_bytes", plan.device_bytes()}, {"device_tokens", plan.device_tokens()},
                   {"host_bytes", plan.host_bytes()},     {"host_tokens", plan.host_tokens()}};
  const ops::BackendInfo& info = loaded->backend->info();
  doc["device"] = {{"device", info.device},
                   {"isa", info.isa},
                   {"compute_dtype", Name(info.act)},
                   {"threads", loaded->threads}};
  doc["kernels"] = Json::array();
  for (const Model::KernelLine& k : loaded->model->kernels()) {
    doc["kernels"].push_back({{"matrix", k.matrix},
                              {"shape", k.shape},
                              {"count", k.count},
                              {"bytes", k.bytes},
                              {"kernel", k.kernel}});
  }
  doc["model_identity"] = Hex(loaded->model->identity());
  doc["fingerprint"] = Hex(layout.content_fingerprint());
  doc["config"] = Json::parse(config.merged_json);
  doc["notices"] = Json::array();
  for (const auto* list : {&server.notices, &loaded->notices}) {
    for (const std::string& n : *list) doc["notices"].push_back(n);
  }

  const std::string path = line.Text("--json");
  if (path.empty()) {
    std::cout << Table(doc);
  } else if (path == "-") {
    std::cout << doc.dump(2) << "\n";
  } else {
    std::ofstream out(path);
    if (!(out << doc.dump(2) << "\n")) return Unavailable("--json {}: cannot be written", path);
  }
  return int(kExitOk);
}

}  // namespace

int RunInspect(const std::vector<std::string>& args) {
  StatusOr<CommandLine> line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("inspect", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  const StatusOr<int> code = Run(*line);
  return code.ok() ? *code : FailWith("inspect", code.status());
}

}  // namespace sluice
