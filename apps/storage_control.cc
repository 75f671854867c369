#include "storage_control.h"

#include <optional>
#include <utility>

#include "storage/storage.h"

namespace sluice {
namespace {
using Json = nlohmann::ordered_json;

Status Busy(std::string_view what) {
  return absl::FailedPreconditionError(fmt::format(
      "{}: requests run or wait, or the storage is at work; try again when the server is idle", what));
}
}  // namespace

StorageControl::StorageControl(const ServerConfig& config, EngineStack* stack, const Clock* clock)
    : stack_(stack),
      clock_(clock),
      host_tier_(config.enable_hierarchical_cache),
      backend_(stack->storage->storage == nullptr ? "none" : config.hicache_storage_backend),
      policy_(config.hicache_storage_prefetch_policy) {}

Json StorageControl::Describe() const {
  std::lock_guard lock(mutex_);
  Json out = {{"hicache_storage_backend", backend_},
              {"hicache_storage_prefetch_policy", policy_},
              {"attached", stack_->storage->storage != nullptr}};
  if (stack_->storage->storage != nullptr) out["description"] = stack_->storage->storage->Describe();
  return out;
}

Status StorageControl::Attach(const Json& body) {
  if (!body.is_object()) return Invalid("body: send a JSON object with hicache_storage_backend");
  std::string backend, extra, policy;
  for (const auto& [key, value] : body.items()) {
    if (key == "hicache_storage_backend" && value.is_string()) {
      backend = value.get<std::string>();
    } else if (key == "hicache_storage_backend_extra_config_json" &&
               (value.is_string() || value.is_object())) {
      extra = value.is_string() ? value.get<std::string>() : value.dump();
    } else if (key == "hicache_storage_prefetch_policy" && value.is_string()) {
      policy = value.get<std::string>();
    } else {
      return Invalid(
          "{}: use hicache_storage_backend, hicache_storage_backend_extra_config_json and "
          "hicache_storage_prefetch_policy, as texts",
          key);
    }
  }
  if (backend != "file" && backend != "redis")
    return Invalid("hicache_storage_backend: {} is none of file, redis",
                   backend.empty() ? "nothing" : backend);
  if (extra.starts_with("@"))
    return Invalid("hicache_storage_backend_extra_config_json: send the JSON itself, not the name of a file");
  if (!host_tier_)
    return Invalid(
        "hicache_storage_backend: pages reach storage through the host tier; start the server with "
        "--enable-hierarchical-cache");
  std::optional<PrefetchPolicy> chosen;
  if (!policy.empty()) {
    ASSIGN_OR_RETURN(chosen, ParsePrefetchPolicy(policy));
  }
  std::lock_guard lock(mutex_);
  if (stack_->storage->storage != nullptr)
    return absl::FailedPreconditionError(
        fmt::format("hicache_storage_backend: {} is attached; detach it first (DELETE)", backend_));
  ASSIGN_OR_RETURN(std::shared_ptr<StorageBackend> storage,
                   OpenStorageFor(backend, extra, stack_->layout, clock_));
  if (!stack_->engine->SetStorage(storage.get(), chosen)) return Busy("attach");
  stack_->storage->storage = std::move(storage);
  backend_ = backend;
  if (!policy.empty()) policy_ = policy;
  return OkStatus();
}

Status StorageControl::Detach() {
  std::lock_guard lock(mutex_);
  if (stack_->storage->storage == nullptr) return absl::NotFoundError("no storage backend is attached");
  if (!stack_->engine->SetStorage(nullptr, std::nullopt)) return Busy("detach");
  stack_->storage->storage.reset();
  backend_ = "none";
  return OkStatus();
}

Status StorageControl::Clear() {
  std::lock_guard lock(mutex_);
  if (stack_->storage->storage == nullptr) return absl::NotFoundError("no storage backend is attached");
  return stack_->engine->ClearStorage();
}

}  // namespace sluice
