// From flags to a model in memory: folder, config, backend, packed weights.
#include <algorithm>
#include <filesystem>

#include "backends/cpu/cpu_backend.h"
#ifdef SLUICE_HAS_CUDA
#include "backends/cuda/cuda_backend.h"
#endif
#include "bundled_model.h"
#include "config/legality.h"
#include "engine_setup.h"
#include "progress_line.h"

namespace sluice {
namespace {

StatusOr<DType> CacheDType(std::string_view flag, std::string_view value, DType follow) {
  if (value == "auto") return follow;
  if (value == "bf16") return DType::kBF16;
  if (value == "fp8_e4m3") return DType::kF8E4M3;
  if (value == "float32") return DType::kF32;
  return Invalid("{} {}: not one of auto, bf16, fp8_e4m3, float32", flag, value);
}

#ifdef SLUICE_HAS_CUDA
StatusOr<std::unique_ptr<ops::Backend>> CudaBackend(const ServerConfig& config, DType act) {
  return cuda::MakeCudaBackend({.act = act,
                                .deterministic = config.deterministic_inference,
                                .fp8_gemm = config.fp8_gemm_backend,
                                .graph_rows = config.disable_cuda_graph ? 0 : config.cuda_graph_max_bs,
                                .check_steps = config.debug_device});
}
#else
StatusOr<std::unique_ptr<ops::Backend>> CudaBackend(const ServerConfig&, DType) {
  return Unsupported(
      "--device cuda: this build has no CUDA backend; build with -DSLUICE_CUDA=ON, or use --device cpu");
}
#endif

}  // namespace

StatusOr<std::string> ResolveModelFolder(const ServerConfig& config) {
  if (config.model_path.empty()) return BundledModelPath();
  std::error_code ec;
  if (!std::filesystem::is_directory(config.model_path, ec)) {
    return NotFound(
        "model folder {}: {}; give a Hugging Face folder with config.json, tokenizer.json and *.safetensors",
        config.model_path,
        std::filesystem::exists(config.model_path, ec) ? "not a folder" : "does not exist");
  }
  return config.model_path;
}

StatusOr<std::shared_ptr<LoadedModel>> LoadModel(const ServerConfig& config) {
  auto loaded = std::make_shared<LoadedModel>();
  loaded->free_bytes_before = FreeMemoryBytes();
  ASSIGN_OR_RETURN(loaded->folder, ResolveModelFolder(config));
  ASSIGN_OR_RETURN(loaded->config, LoadModelConfig(loaded->folder, config.overrides));
  RETURN_IF_ERROR(CheckWithModel(config, loaded->config));
  const std::filesystem::path folder = std::filesystem::absolute(loaded->folder).lexically_normal();
  loaded->name = !config.served_model_name.empty() ? config.served_model_name
                 : folder.has_filename()           ? folder.filename().string()
                                                   : folder.parent_path().filename().string();
  loaded->context_length = config.context_length > 0 ? config.context_length : loaded->config.max_positions;
  if (loaded->context_length > loaded->config.max_positions) {
    return Invalid(
        "--context-length {} exceeds the model's max_position_embeddings {}; lower it or override that key",
        config.context_length, loaded->config.max_positions);
  }
  if (loaded->context_length < 2) {
    return Invalid(
        "--context-length {}: leaves no room for a prompt and an answer; give at least 2, or 0 for the "
        "model's own",
        loaded->context_length);
  }
  loaded->threads = config.threads > 0 ? int(config.threads) : AvailableCores();
  const DType act = config.dtype == "float32" ? DType::kF32 : DType::kBF16;
  if (config.device == "cuda") {
    ASSIGN_OR_RETURN(loaded->backend, CudaBackend(config, act));
    loaded->free_bytes_before = loaded->backend->memory()->free_bytes();
    if (loaded->config.index.topk > 2048)
      return Unsupported("--device cuda: index_topk {} exceeds the kernels' 2048; use --device cpu",
                         loaded->config.index.topk);
  } else {
    ASSIGN_OR_RETURN(loaded->backend, cpu::MakeCpuBackend({act, config.cpu_isa}));
  }
  const bool with_draft = !config.speculative_algorithm.empty();
  StatusOr<std::unique_ptr<Checkpoint>> checkpoint =
      config.load_format == "dummy"
          ? Checkpoint::Dummy(loaded->config, with_draft, uint64_t(config.random_seed))
          : Checkpoint::Open(loaded->folder);
  RETURN_IF_ERROR(checkpoint.status());
  ProgressLine line;
  const auto progress = [&](int64_t done, int64_t all) { line.Show("loading layers", done, all); };
  ASSIGN_OR_RETURN(loaded->model, Model::Load(loaded->config, std::move(*checkpoint), *loaded->backend,
                                              {with_draft, progress}));
  loaded->notices = loaded->model->notices();
  if (loaded->threads > AvailableCores()) {
    loaded->notices.push_back(fmt::format(
        "--threads {} exceeds the {} cores of this process: threads wait for one another; leave it out "
        "to use all cores",
        loaded->threads, AvailableCores()));
  }
  if (loaded->config.eos_token_ids.empty()) {
    loaded->notices.push_back(
        "neither config.json nor generation_config.json has an eos_token_id: answers end by their length or "
        "a stop "
        "string only");
  }
  return loaded;
}

StatusOr<KvLayoutOptions> KvOptionsFor(const ServerConfig& config, const LoadedModel& model) {
  KvLayoutOptions o;
  const DType act = model.backend->info().act;
  ASSIGN_OR_RETURN(o.latent_dtype, CacheDType("--kv-cache-dtype", config.kv_cache_dtype, act));
  ASSIGN_OR_RETURN(o.index_dtype,
                   CacheDType("--index-cache-dtype", config.index_cache_dtype, o.latent_dtype));
  if (act != DType::kF32 && (o.latent_dtype == DType::kF32 || o.index_dtype == DType::kF32)) {
    return Invalid("float32 rows in the cache need --dtype float32; use bf16 or fp8_e4m3");
  }
  o.with_draft = model.model->has_draft();
  o.numerics_class = model.backend->info().numerics_class;
  o.model_identity = model.model->identity();
  return o;
}

}  // namespace sluice
