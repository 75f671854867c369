#include "eval_golden.h"

#include <cstdio>
#include <fstream>

#include "commands.h"
#include "engine_setup.h"
#include "model/golden.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

constexpr double kFloat32Bound = 2e-4;
constexpr double kMarginShare = 0.99;

}  // namespace

StatusOr<int> RunGolden(const ServerConfig& config, const std::string& folder, const std::string& json) {
  ASSIGN_OR_RETURN(const std::shared_ptr<LoadedModel> loaded, LoadModel(config));
  ASSIGN_OR_RETURN(const KvLayoutOptions layout, KvOptionsFor(config, *loaded));
  RunnerOptions options;
  ASSIGN_OR_RETURN(options.max_context, GoldenContext(folder));
  if (config.chunked_prefill_size > 0) options.chunk = config.chunked_prefill_size;
  options.latent_dtype = layout.latent_dtype;
  options.index_dtype = layout.index_dtype;
  options.threads = loaded->threads;
  ASSIGN_OR_RETURN(const std::unique_ptr<SequenceRunner> runner,
                   SequenceRunner::Make(*loaded->model, *loaded->backend, options));
  ASSIGN_OR_RETURN(const GoldenReport report, CompareWithGolden(*loaded->model, *runner, folder));

  const bool exact = loaded->backend->info().act == DType::kF32 && layout.latent_dtype == DType::kF32 &&
                     layout.index_dtype == DType::kF32;
  const double margin =
      report.margin_positions == 0 ? 1.0 : double(report.margin_equal) / double(report.margin_positions);
  const bool good =
      exact ? report.max_rel_err <= kFloat32Bound && report.greedy_equal && report.topk_rows_differing == 0
            : margin >= kMarginShare;
  nlohmann::ordered_json out;
  out["golden"] = folder;
  out["model"] = loaded->name;
  out["prompts"] = report.prompts;
  out["max_rel_err"] = report.max_rel_err;
  out["greedy_equal"] = report.greedy_equal;
  out["greedy_tokens"] = report.greedy_tokens;
  // null, not 0, for what was not compared.
  const auto figure = [&](bool compared, auto value) {
    return compared ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
  };
  out["topk_sets"] = report.has_topk                    ? "compared"
                     : loaded->model->config().sparse() ? "not compared: the folder holds none"
                                                        : "not compared: the model selects no positions";
  out["topk_rows"] = figure(report.has_topk, report.topk_rows);
  out["topk_rows_differing"] = figure(report.has_topk, report.topk_rows_differing);
  out["topk_rows_near"] = figure(report.has_topk, report.topk_rows_near);
  out["topk_near_entries"] = figure(report.has_topk, report.topk_near_entries);
  out["margin_positions"] = report.margin_positions;
  out["margin_equal"] = report.margin_equal;
  out["margin_share"] = figure(report.margin_positions > 0, margin);
  out["draft_prompts"] = report.draft_prompts;
  out["draft_max_rel_err"] = figure(report.draft_prompts > 0, report.draft_max_rel_err);
  out["bound"] = exact ? "float32" : "margin";
  out["ok"] = good;
  if (!json.empty() && json != "-") {
    std::ofstream file(json, std::ios::trunc);
    file << out.dump(2) << "\n";
    file.close();
    if (!file) return Unavailable("{}: cannot write it", json);
  }
  if (json == "-") {
    std::fputs((out.dump(2) + "\n").c_str(), stdout);
  } else {
    for (const auto& [key, value] : out.items())
      std::fputs(fmt::format("{:<22}{}\n", key,
                             value.is_null()     ? "-"
                             : value.is_string() ? value.get<std::string>()
                                                 : value.dump())
                     .c_str(),
                 stdout);
  }
  return int(good ? kExitOk : kExitCheckFailed);
}

}  // namespace sluice
