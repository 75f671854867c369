#include "engine_setup.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/log.h"
#include "cache/kv_cache.h"
#include "cache/kv_record.h"
#include "config/json_argument.h"
#include "disagg/node.h"
#include "engine/pd_role.h"
#include "engine/threaded_engine.h"
#include "exec/model_runner.h"
#include "exec/warm_up.h"
#include "kv/device_pool.h"
#include "kv/host_pool.h"
#include "storage/open_storage.h"
#include "transfer/ucx_transport.h"

namespace sluice {
namespace {

constexpr double kDeviceStepSeconds = 300;  // --watchdog-timeout of a GPU, where none is given
constexpr int64_t kLogitsRows = 64;         // rows of one pass through the head: bounds the logits buffer

StatusOr<EvictionPolicy> ParseEviction(const std::string& name) {
  if (name == "lru") return EvictionPolicy::kLru;
  if (name == "lfu") return EvictionPolicy::kLfu;
  if (name == "fifo") return EvictionPolicy::kFifo;
  if (name == "mru") return EvictionPolicy::kMru;
  if (name == "priority") return EvictionPolicy::kPriority;
  return Invalid("--radix-eviction-policy {}: use lru, lfu, fifo, mru or priority", name);
}

StatusOr<WritePolicy> ParseWritePolicy(const std::string& name) {
  if (name == "write_through") return WritePolicy::kWriteThrough;
  if (name == "write_through_selective") return WritePolicy::kWriteThroughSelective;
  if (name == "write_back") return WritePolicy::kWriteBack;
  return Invalid("--hicache-write-policy {}: use write_through, write_through_selective or write_back", name);
}

std::string DefaultStorageFolder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache == '/') {
    return std::string(cache) + "/sluice/kv";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return std::string(home) + "/.cache/sluice/kv";
  }
  return "/var/tmp/sluice/kv";
}

bool HasStorage(const ServerConfig& config) {
  return !config.hicache_storage_backend.empty() && config.hicache_storage_backend != "none";
}

// What the cache and the runner point to; destroyed after them, in reverse order of the members.
struct Foundation {
  ~Foundation() { storage->storage.reset(); }  // it may be reading into the host pool: before that goes
  std::shared_ptr<LoadedModel> model;
  std::unique_ptr<DevicePool> device;
  std::unique_ptr<HostPool> host;
  std::shared_ptr<StorageSlot> storage = std::make_shared<StorageSlot>();
  std::unique_ptr<KvRecorder> recorder;
};

SchedulerOptions SchedulerOptionsFor(const ServerConfig& config, const LoadedModel& model) {
  SchedulerOptions o;
  o.max_running = config.max_running_requests;
  o.chunk_tokens = config.chunked_prefill_size;
  o.max_prefill_tokens = config.max_prefill_tokens;
  o.context_length = model.context_length;
  o.policy = config.schedule_policy == "lpm" ? SchedulePolicy::kLongestPrefix : SchedulePolicy::kFcfs;
  o.use_priority = config.enable_priority_scheduling;
  o.conservativeness = config.schedule_conservativeness;
  o.jump_ahead = !config.disable_jump_ahead;
  o.eos_token_ids = model.config.eos_token_ids;
  o.draft_tokens = config.DraftTokens();
  const bool moves_bytes = config.disaggregation_transfer_backend != "fake";
  o.draft_state_floats = o.draft_tokens > 0 && moves_bytes ? model.config.hidden : 0;
  o.adaptive_drafts = config.speculative_adaptive == "on";
  if (config.disaggregation_mode == "prefill") o.remote = RemoteRole::kPrefill;
  if (config.disaggregation_mode == "decode") o.remote = RemoteRole::kDecode;
  o.reserved_decode_tokens = config.num_reserved_decode_tokens;
  return o;
}

disagg::NodeOptions NodeOptionsFor(const ServerConfig& config, const LoadedModel& model) {
  const auto nanos = [](double seconds) { return Nanos(seconds * 1e9); };
  disagg::NodeOptions o;
  o.host = config.host;
  o.bootstrap_port = int(config.disaggregation_bootstrap_port);
  o.backend = config.disaggregation_transfer_backend;
  o.heartbeat_interval = nanos(config.disaggregation_heartbeat_interval_s);
  o.heartbeat_max_failure = int(config.disaggregation_heartbeat_max_failure);
  o.bytes_per_second_max = config.disaggregation_rate_limit_mb * 1e6;
  o.self_check = config.disaggregation_self_check;
  o.allow_mixed_numerics = config.allow_mixed_numerics;
  o.model_name = model.name;
  o.max_tokens = uint64_t(model.context_length);
  o.rooms.bootstrap_timeout = nanos(config.disaggregation_bootstrap_timeout_s);
  o.rooms.waiting_timeout = nanos(config.disaggregation_waiting_timeout_s);
  o.rooms.sending_timeout = 4 * o.rooms.waiting_timeout;
  o.rooms.tombstone = 4 * (o.rooms.bootstrap_timeout + o.rooms.waiting_timeout) + 2 * o.rooms.sending_timeout;
  o.rooms.layer_group = int32_t(config.disaggregation_layer_group);
  o.rooms.per_layer = config.disaggregation_per_layer_transfer;
  o.rooms.max_rooms = size_t(config.max_queued_requests + 2 * config.max_running_requests);
  return o;
}

}  // namespace

StatusOr<PrefetchPolicy> ParsePrefetchPolicy(const std::string& name) {
  if (name == "best_effort") return PrefetchPolicy::kBestEffort;
  if (name == "wait_complete") return PrefetchPolicy::kWaitComplete;
  if (name == "timeout") return PrefetchPolicy::kTimeout;
  return Invalid("--hicache-storage-prefetch-policy {}: use best_effort, wait_complete or timeout", name);
}

StatusOr<std::shared_ptr<StorageBackend>> OpenStorageFor(const std::string& backend,
                                                         const std::string& extra_config,
                                                         const KvLayout& layout, const Clock* clock) {
  StorageFormat format;
  format.content_fingerprint = layout.content_fingerprint();
  for (const KvPiece& piece : layout.pieces()) format.piece_bytes.push_back(uint32_t(piece.bytes));
  ASSIGN_OR_RETURN(const std::string extra,
                   ReadJsonArgument("--hicache-storage-backend-extra-config", extra_config));
  ASSIGN_OR_RETURN(std::unique_ptr<StorageBackend> storage,
                   OpenStorage(backend, extra, DefaultStorageFolder(), format, clock));
  return std::shared_ptr<StorageBackend>(std::move(storage));
}

void SetKvExchange(const ServerConfig& config, RankGroupOptions* group) {
  group->kv_exchange = config.cp_kv_exchange == "gather" ? KvExchangeMode::kGather : KvExchangeMode::kDirect;
  group->gather_buffer_bytes = config.cp_gather_buffer_mib << 20;
}

StatusOr<std::unique_ptr<EngineStack>> MakeEngineStack(const ServerConfig& config,
                                                       std::shared_ptr<LoadedModel> model, const Clock* clock,
                                                       bool time_device) {
  auto stack = std::make_unique<EngineStack>();
  stack->model = model;
  if (config.disaggregation_mode != "null" && config.disaggregation_transfer_backend == "ucx")
    RETURN_IF_ERROR(transfer::UcxSupport(config.disaggregation_ucx_library));
  ASSIGN_OR_RETURN(const KvLayoutOptions layout_options, KvOptionsFor(config, *model));
  ASSIGN_OR_RETURN(stack->layout, KvLayout::Make(model->config, layout_options));

  ThreadedEngineOptions options;
  options.loop.scheduler = SchedulerOptionsFor(config, *model);
  options.loop.depth = int32_t(config.step_depth);
  options.max_queued = config.max_queued_requests;
  options.status_interval_steps = config.decode_log_interval;

  const int32_t ranks = int32_t(std::max(config.tp_size, config.attn_cp_size));
  const int64_t max_rows = MaxStepRows(options.loop.scheduler);
  RankGroupOptions group;
  group.ranks = ranks;
  group.spread_experts = config.ep_size > 1;
  SetKvExchange(config, &group);
  group.cores = AvailableCores();
  group.threads_per_rank = std::max(1, model->threads / ranks);
  // A rank computes its share of the prefill rows, padded, and at worst every decode row.
  const int64_t running = config.max_running_requests, drafts = options.loop.scheduler.draft_tokens;
  group.limits.max_rows =
      ranks == 1 ? max_rows
                 : CeilDiv(max_rows - running * (drafts + 1), ranks) + running * (drafts + 3) + ranks;
  group.limits.max_seqs = running;
  // A device is waited for after every pass, so one has room for all rows that are sampled.
  const int64_t logits_rows =
      model->backend->memory() != nullptr ? std::max(kLogitsRows, running * (drafts + 1)) : kLogitsRows;
  group.limits.max_logits_rows = std::min(group.limits.max_rows, logits_rows);
  group.limits.max_context = model->context_length;
  ops::Limits backend_limits = OpLimits(model->config, group.limits);
  int64_t working_bytes = 0;  // the pools are planned before the ranks exist: measure one rank's buffers
  {
    ASSIGN_OR_RETURN(const auto probe, ModelBuffers::Make(model->config, *model->backend, group.limits));
    working_bytes = probe->bytes() * ranks;
    working_bytes += RankGroup::GatherBytes(stack->layout, group);
    if (group.spread_experts) working_bytes += ExpertExchangeOptions().buffer_bytes * ranks;
    working_bytes += model->backend->ScratchBytes(backend_limits) * ranks;
  }
  if (drafts > 0) {
    // States that the draft layer waits for, per slot, and those of a step's rows.
    working_bytes +=
        Drafter::SlotBytes(model->config.hidden, NumSlots(options.loop.scheduler), int32_t(drafts)) +
        group.limits.max_rows * ranks * model->config.hidden * int64_t(sizeof(float));
  }

  MemoryInputs memory;
  memory.free_bytes = model->free_bytes_before;
  if (model->backend->memory() != nullptr) memory.separate_host_bytes = FreeMemoryBytes();
  memory.fraction = config.mem_fraction_static;
  memory.weight_bytes = model->model->packed_bytes();
  memory.staging_bytes = working_bytes;
  if (model->backend->memory() != nullptr) {
    memory.score_row_bytes = backend_limits.ScoreRowBytes();
    memory.score_rows = group.limits.max_rows;
  }
  memory.lanes = ranks;
  memory.page_bytes = stack->layout.page_bytes();
  memory.max_total_tokens = config.max_total_tokens;
  memory.max_running = config.max_running_requests;
  memory.context_length = model->context_length;
  memory.host_tier = config.enable_hierarchical_cache;
  memory.host_ratio = config.hicache_ratio;
  memory.host_gb_per_rank = config.hicache_size_gb;
  ASSIGN_OR_RETURN(stack->memory, PlanMemory(memory));
  stack->notices.push_back(stack->memory.ToString());
  backend_limits.score_bytes = stack->memory.score_bytes;
  RETURN_IF_ERROR(model->backend->Plan(backend_limits));
  if (stack->memory.device_tokens() < model->context_length) {
    stack->notices.push_back(
        fmt::format("the cache holds {} tokens, fewer than the context of {}: a longer request is refused or "
                    "ends early; raise --max-total-tokens or --mem-fraction-static",
                    stack->memory.device_tokens(), model->context_length));
  }

  const int64_t longest = std::min<int64_t>(model->context_length, stack->memory.device_tokens());
  if (config.enable_hierarchical_cache && stack->memory.host_tokens() < longest) {
    stack->notices.push_back(
        fmt::format("the host tier holds {} tokens, fewer than a request of {}: little of it is found there "
                    "again; raise --hicache-ratio or --hicache-size",
                    stack->memory.host_tokens(), longest));
  }

  ModelRunnerOptions runner;
  auto foundation = std::make_shared<Foundation>();
  foundation->model = model;
  const bool shared =
      config.disaggregation_mode == "decode" && model->backend->memory() == nullptr &&
      (config.disaggregation_transfer_backend == "auto" || config.disaggregation_transfer_backend == "shm");
  const int64_t device_pages = stack->memory.device_pages_per_lane + 1;
  ASSIGN_OR_RETURN(
      foundation->device,
      shared ? DevicePool::MakeShared(stack->layout, stack->memory.lanes, device_pages)
             : DevicePool::Make(stack->layout, stack->memory.lanes, device_pages, model->backend->memory()));
  CacheOptions cache;
  cache.lanes = stack->memory.lanes;
  cache.pages_per_lane = stack->memory.device_pages_per_lane;
  cache.host_pages_per_lane = stack->memory.host_pages_per_lane;
  cache.enable_radix = !config.disable_radix_cache;
  ASSIGN_OR_RETURN(cache.eviction, ParseEviction(config.radix_eviction_policy));
  ASSIGN_OR_RETURN(cache.write_policy, ParseWritePolicy(config.hicache_write_policy));
  ASSIGN_OR_RETURN(cache.prefetch, ParsePrefetchPolicy(config.hicache_storage_prefetch_policy));
#ifndef NDEBUG
  cache.poison_on_free = true;
  cache.poison_pool = foundation->device.get();
#endif
  if (config.debug_kv) {
    foundation->recorder =
        std::make_unique<KvRecorder>(clock, [](const std::string& line) { spdlog::info("{}", line); });
    cache.recorder = foundation->recorder.get();
    options.loop.scheduler.label_kv = true;
  }
  if (config.verify_cache > 0) {
    cache.verify_share = config.verify_cache;
    cache.verify_seed = uint64_t(clock->Now());
    cache.verify_pool = foundation->device.get();
    cache.bad_page = [](const std::string& evidence) { spdlog::error("verify-cache: {}", evidence); };
    options.loop.verify = true;
  }
  if (config.enable_hierarchical_cache) {
    ASSIGN_OR_RETURN(const HostLayout order, ParseHostLayout(config.hicache_mem_layout));
    RETURN_IF_ERROR(CheckHostLayout(order, config.hicache_io_backend));
    ASSIGN_OR_RETURN(foundation->host,
                     HostPool::Make(stack->layout, order, stack->memory.lanes,
                                    stack->memory.host_pages_per_lane, model->backend->memory()));
    ASSIGN_OR_RETURN(runner.io_backend, ParseIoBackend(config.hicache_io_backend));
    RETURN_IF_ERROR(PlanCopier::Make(runner.io_backend, *foundation->device, *foundation->host).status());
  }
  if (HasStorage(config)) {
    ASSIGN_OR_RETURN(foundation->storage->storage,
                     OpenStorageFor(config.hicache_storage_backend, config.hicache_storage_extra_config,
                                    stack->layout, clock));
    stack->notices.push_back("storage: " + foundation->storage->storage->Describe());
  }

  runner.num_slots = NumSlots(options.loop.scheduler);
  runner.max_rows = max_rows;
  runner.max_logits_rows = group.limits.max_logits_rows;
  runner.dequant_only_topk = config.nsa_dequant_only_topk;
  runner.dequant_verify = config.nsa_dequant_verify;
  runner.draft_tokens = int32_t(drafts);
  runner.rank_rows = group.limits.max_rows;
  runner.time_device = time_device && ranks == 1 && drafts == 0 && model->backend->memory() != nullptr;
  runner.step_seconds = config.watchdog_timeout_s > 0 ? config.watchdog_timeout_s
                        : config.device == "cuda"     ? kDeviceStepSeconds
                                                      : 0;
  if (config.dsa_prefill_backend != "auto") {
    stack->notices.push_back(
        fmt::format("--dsa-prefill-backend {} and --dsa-decode-backend {}: the {} backend's own kernels read "
                    "the cache's {}",
                    config.dsa_prefill_backend, config.dsa_decode_backend, config.device,
                    stack->layout.latent_dtype() == DType::kF8E4M3 ? "packed fp8 rows" : "bf16 rows"));
  }
  EngineParts parts;
  if (config.disaggregation_mode != "null") {
    disagg::NodeOptions node = NodeOptionsFor(config, *model);
    if (config.debug_kv) {  // a recorder of its own: transfers run on a thread of their own
      auto recorder =
          std::make_shared<KvRecorder>(clock, [](const std::string& line) { spdlog::info("{}", line); });
      node.record = [recorder](const disagg::NodeOptions::Record& r) {
        const std::string label = fmt::format("room-{}", r.room);
        if (r.chunk == nullptr) {
          recorder->Reserve(label, r.registered.begin, r.destination);
        } else {
          recorder->SendChunk(label, r.chunk->start, r.chunk->end, r.registered.begin, r.registered.end,
                              r.lane, r.kept, r.destination);
        }
      };
    }
    const auto make = config.disaggregation_mode == "prefill" ? MakePrefillRole : MakeDecodeRole;
    ASSIGN_OR_RETURN(parts.role, make(node, stack->layout, *foundation->device));
    runner.observer = parts.role->observer();
    stack->notices.push_back(
        fmt::format("disaggregation: {} over {}{}", config.disaggregation_mode, node.backend,
                    config.disaggregation_mode == "prefill"
                        ? fmt::format(", decode instances connect to {}:{}", node.host, node.bootstrap_port)
                        : ""));
  }
  parts.cache = MakeKvCache(cache, stack->layout, foundation->host.get(), foundation->storage->storage.get());
  stack->storage = foundation->storage;
  ASSIGN_OR_RETURN(std::unique_ptr<RankGroup> rank_group,
                   RankGroup::Make(*model->model, *model->backend, *foundation->device, group));
  auto model_runner = std::make_unique<ModelRunner>(*model->model, std::move(rank_group), *foundation->device,
                                                    foundation->host.get(), runner);
  if (model->backend->memory() != nullptr) {
    const WarmUpLimits limits{max_rows, running, model->context_length, int32_t(drafts)};
    ASSIGN_OR_RETURN(const WarmUpReport warm, WarmUp(*model_runner, *foundation->device, limits, clock));
    stack->notices.push_back(warm.ToString());
  }
  stack->times = &model_runner->times();
  stack->ranks = &model_runner->ranks();
  parts.runner = std::move(model_runner);
  parts.keep_alive = foundation;
  stack->engine = MakeThreadedEngine(options, std::move(parts), clock);
  return stack;
}

}  // namespace sluice
