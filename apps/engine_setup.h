// Wires an engine from a ServerConfig: the one place that names concrete backends, storages and the cache
// together.
//
// Everything that runs a model uses it (serve, run, eval, bench model). Weights are loaded once and shared by
// engines that are torn down and made again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "cache/kv_cache.h"
#include "config/model_config.h"
#include "config/server_config.h"
#include "engine/engine.h"
#include "exec/memory_plan.h"
#include "exec/model_runner.h"
#include "kv/kv_layout.h"
#include "model/model.h"
#include "ops/backend.h"

namespace sluice {

// The folder that a ServerConfig means: model_path, or the bundled model. NotFound names what was looked for.
StatusOr<std::string> ResolveModelFolder(const ServerConfig& config);

struct LoadedModel {
  std::string folder;
  std::string name;  // served model name
  ModelConfig config;
  std::unique_ptr<ops::Backend> backend;
  std::unique_ptr<Model> model;      // points into backend
  int threads = 1;                   // compute threads
  int64_t context_length = 0;        // --context-length, at most the model's
  int64_t free_bytes_before = 0;     // memory that was free before the weights came
  std::vector<std::string> notices;  // for the log at start
};

StatusOr<std::shared_ptr<LoadedModel>> LoadModel(const ServerConfig& config);

// The storage tier that the engine uses now; exchanged while the engine runs (storage_control.h).
struct StorageSlot {
  std::shared_ptr<StorageBackend> storage;  // may be null
};

// A running engine with all it stands on. Destroying it stops the engine first.
struct EngineStack {
  std::shared_ptr<LoadedModel> model;
  KvLayout layout;
  MemoryPlan memory;
  std::vector<std::string> notices;    // one line each: pool sizes, tiers, fallbacks
  const RunnerTimes* times = nullptr;  // of the executor; valid as long as the engine
  const RankGroup* ranks = nullptr;    // for its bytes_moved()
  std::shared_ptr<StorageSlot> storage;
  std::unique_ptr<Engine> engine;  // owns pools, cache and executor
};

// `clock` outlives the stack. time_device: RunnerTimes::device is measured.
StatusOr<std::unique_ptr<EngineStack>> MakeEngineStack(const ServerConfig& config,
                                                       std::shared_ptr<LoadedModel> model, const Clock* clock,
                                                       bool time_device = false);

// How the flags say that ranks exchange cache rows.
void SetKvExchange(const ServerConfig& config, RankGroupOptions* group);

// DTypes of the KV cache that the flags mean for this model ("auto" = the compute type; index K follows the
// latent).
// Opens what the two flags name, for pages of this layout.
StatusOr<std::shared_ptr<StorageBackend>> OpenStorageFor(const std::string& backend,
                                                         const std::string& extra_config,
                                                         const KvLayout& layout, const Clock* clock);
StatusOr<PrefetchPolicy> ParsePrefetchPolicy(const std::string& name);

StatusOr<KvLayoutOptions> KvOptionsFor(const ServerConfig& config, const LoadedModel& model);

}  // namespace sluice
