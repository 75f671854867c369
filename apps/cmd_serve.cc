// sluice serve: the composition root of a server. Configuration > model > engine > HTTP.
#include <sys/resource.h>

#include <iostream>

#include "api/generation_config.h"
#include "api/requests.h"
#include "base/clock.h"
#include "base/file_text.h"
#include "base/log.h"
#include "commands.h"
#include "config/flags.h"
#include "engine_setup.h"
#include "http/client.h"
#include "nlohmann/json.hpp"
#include "serve/app_server.h"
#include "serve/shutdown.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "storage_control.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "transfer/ucx_transport.h"
#include "version.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

const CommandSyntax kSyntax = {
    .usage = "sluice serve [options]",
    .summary = "Serves a model over the OpenAI-compatible HTTP API. Without --model-path: the bundled model.",
    .engine_flags = true,
};

// Log lines go to stderr, the ready line alone to stdout.
void SetUpLog(const std::string& level) {
  auto logger = spdlog::stderr_logger_mt("sluice");
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

// Descriptors for every connection, as far as the system lets us.
void RaiseDescriptorLimit(int64_t connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = rlim_t(connections) + 256;
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = std::min(wanted, limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  if (limit.rlim_cur < wanted) {
    spdlog::warn("{} descriptors are fewer than --max-connections {} needs; raise ulimit -n", limit.rlim_cur,
                 connections);
  }
}

StatusOr<SamplingDefaults> DefaultsFor(const ServerConfig& config, const std::string& folder) {
  if (config.sampling_defaults != "model") return SamplingDefaults{};
  const std::string path = folder + "/generation_config.json";
  const StatusOr<std::string> text = ReadFileText(path);
  if (absl::IsNotFound(text.status())) return SamplingDefaults{};
  RETURN_IF_ERROR(text.status());
  StatusOr<SamplingDefaults> defaults = ReadGenerationConfig(*text);
  if (!defaults.ok()) {
    return Status(defaults.status().code(),
                  fmt::format("{}: {} (correct it, or start with --sampling-defaults openai)", path,
                              Message(defaults.status())));
  }
  return defaults;
}

Json DescribeEngine(const ServerConfig& config, const EngineStack& stack) {
  Json info = Json::parse(config.ResolvedJson(), nullptr, /*allow_exceptions=*/false);
  if (!info.is_object()) info = Json::object();
  const KvLayout& layout = stack.layout;
  Json layers = Json::array(), index_layers = Json::array();
  for (const LogicalLayer layer : layout.latent_layers()) layers.push_back(layer.value);
  for (const LogicalLayer layer : layout.index_layers()) index_layers.push_back(layer.value);
  info["kv_layout"] = {{"fingerprint", Hex(layout.content_fingerprint())},
                       {"numerics_class", layout.options().numerics_class},
                       {"latent_dtype", std::string(Name(layout.latent_dtype()))},
                       {"index_dtype", std::string(Name(layout.index_dtype()))},
                       {"page_tokens", kPageTokens},
                       {"page_bytes", layout.page_bytes()},
                       {"bytes_per_token", layout.bytes_per_token()},
                       {"latent_layers", layers},
                       {"index_layers", index_layers}};
  info["memory"] = {{"device_tokens", stack.memory.device_tokens()},
                    {"device_bytes", stack.memory.device_bytes()},
                    {"host_tokens", stack.memory.host_tokens()},
                    {"host_bytes", stack.memory.host_bytes()},
                    {"weight_bytes", stack.memory.weight_bytes}};
  info["tokenizer_path"] = config.tokenizer_path.empty() ? stack.model->folder : config.tokenizer_path;
  info["commit"] = std::string(Commit());
  Json notices = Json::array();
  for (const std::string& line : config.notices) notices.push_back(line);
  for (const std::string& line : stack.model->notices) notices.push_back(line);
  for (const std::string& line : stack.notices) notices.push_back(line);
  info["notices"] = notices;
  const Json model = Json::parse(stack.model->config.merged_json, nullptr, /*allow_exceptions=*/false);
  if (model.is_object()) info["model_config"] = model;
  return info;
}

Status ChooseParsers(const ServerConfig& config, const std::string& architecture, AppServerOptions* options) {
  options->tool_calls = DefaultToolCallStyle(architecture);
  if (config.tool_call_parser != "auto") {
    ASSIGN_OR_RETURN(options->tool_calls, ParseToolCallStyle(config.tool_call_parser));
  }
  options->reasoning = DefaultReasoningStyle(architecture);
  if (config.reasoning_parser != "auto") {
    ASSIGN_OR_RETURN(options->reasoning, ParseReasoningStyle(config.reasoning_parser));
  }
  return OkStatus();
}

// What is wrong with flags, port or tokenizer is said before the weights are read, which may take minutes.
StatusOr<std::shared_ptr<const Tokenizer>> LoadTokenizer(const ServerConfig& config) {
  if (config.disaggregation_mode != "null" && config.disaggregation_transfer_backend == "ucx")
    RETURN_IF_ERROR(transfer::UcxSupport(config.disaggregation_ucx_library));
  RETURN_IF_ERROR(HttpServer::CanListen({.host = config.host, .port = uint16_t(config.port)}));
  ASSIGN_OR_RETURN(const std::string folder, ResolveModelFolder(config));
  RETURN_IF_ERROR(
      LoadModelConfig(folder, config.overrides).status());  // first: a wrong folder lacks everything
  return Tokenizer::Load(config.tokenizer_path.empty() ? folder : config.tokenizer_path);
}

Status Serve(const ServerConfig& config, std::unique_ptr<LeaveOnSignal> starting) {
  SteadyClock clock;
  SetUpLog(config.log_level);
  ASSIGN_OR_RETURN(Origins origins, Origins::Parse(config.cors_origins));
  for (const std::string& line : config.notices) spdlog::info("{}", line);
  ASSIGN_OR_RETURN(const std::string folder, ResolveModelFolder(config));
  ASSIGN_OR_RETURN(const SamplingDefaults defaults, DefaultsFor(config, folder));
  ASSIGN_OR_RETURN(std::shared_ptr<const Tokenizer> tokenizer, LoadTokenizer(config));
  ASSIGN_OR_RETURN(std::shared_ptr<LoadedModel> model, LoadModel(config));
  for (const std::string& line : model->notices) spdlog::info("{}", line);
  const std::string text_folder = config.tokenizer_path.empty() ? model->folder : config.tokenizer_path;
  std::shared_ptr<const ChatTemplate> chat_template;
  if (auto loaded = ChatTemplate::Load(text_folder); loaded.ok()) {
    chat_template = *std::move(loaded);
  } else if (absl::IsNotFound(loaded.status())) {
    spdlog::warn("{}; /v1/chat/completions is refused", Message(loaded.status()));
  } else {
    return loaded.status();
  }
  ASSIGN_OR_RETURN(std::unique_ptr<EngineStack> stack, MakeEngineStack(config, model, &clock));
  for (const std::string& line : stack->notices) spdlog::info("{}", line);

  RaiseDescriptorLimit(config.max_connections);
  AppServerOptions options;
  options.http.host = config.host;
  options.http.port = uint16_t(config.port);
  options.http.max_body_bytes = uint64_t(config.max_body_bytes);
  options.http.max_connections = config.max_connections;
  options.model_name = model->name;
  options.model_path = model->folder;
  options.version = std::string(Version());
  options.api_key = config.api_key;
  options.admin_api_key = config.admin_api_key;
  options.origins = std::move(origins);
  options.request_timeout_s = config.request_timeout_s;
  options.limits.vocab_size = int32_t(model->config.vocab_size);
  options.limits.context_length = model->context_length;
  options.defaults = defaults;
  RETURN_IF_ERROR(ChooseParsers(config, model->config.architecture_name, &options));
  for (const int32_t id : model->config.eos_token_ids) options.stop_tokens.push_back(id);
  options.page = !config.disable_page;
  options.sglang_metrics = config.enable_sglang_metrics;
  options.server_info = DescribeEngine(config, *stack);
  StorageControl storage(config, stack.get(), &clock);
  options.storage = {.describe = [&storage] { return storage.Describe(); },
                     .attach = [&storage](const Json& body) { return storage.Attach(body); },
                     .detach = [&storage] { return storage.Detach(); },
                     .clear = [&storage] { return storage.Clear(); }};
  options.model_info = {{"tokenizer_path", text_folder},
                        {"model_type", model->config.model_type},
                        {"architectures", {model->config.architecture_name}}};
  ASSIGN_OR_RETURN(
      std::unique_ptr<AppServer> server,
      AppServer::Start(std::move(options), stack->engine.get(), tokenizer, chat_template, &clock));
  starting.reset();  // before anybody is told: a signal now lets requests end
  std::cout << "sluice is ready: " << model->name << " at "
            << HttpUrl{.host = config.host, .port = server->port()}.ToString() << std::endl;
  ServeUntilSignal(server.get(), stack->engine.get(), &clock, config.shutdown_timeout_s);
  server.reset();
  stack.reset();
  spdlog::info("all requests have ended; bye");
  return OkStatus();
}

}  // namespace

int RunServe(const std::vector<std::string>& args) {
  BlockShutdownSignals();
  auto starting = std::make_unique<LeaveOnSignal>();
  auto line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("serve", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  const Status status = Serve(line->server, std::move(starting));
  if (!status.ok()) return FailWith("serve", status);
  return kExitOk;
}

}  // namespace sluice
