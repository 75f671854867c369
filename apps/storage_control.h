// Attaches and detaches the storage tier of a running engine: what /hicache/storage-backend does.
#pragma once

#include <mutex>
#include <string>

#include "base/clock.h"
#include "config/server_config.h"
#include "engine_setup.h"
#include "nlohmann/json.hpp"

namespace sluice {

// Thread-safe. `stack` and `clock` outlive it.
class StorageControl {
 public:
  StorageControl(const ServerConfig& config, EngineStack* stack, const Clock* clock);

  nlohmann::ordered_json Describe() const;
  // Body: hicache_storage_backend (file, redis), optional hicache_storage_backend_extra_config_json (an
  // object or its text), optional hicache_storage_prefetch_policy. FailedPrecondition while requests run or
  // wait.
  Status Attach(const nlohmann::ordered_json& body);
  Status Detach();
  Status Clear();

 private:
  EngineStack* const stack_;
  const Clock* const clock_;
  const bool host_tier_;
  mutable std::mutex mutex_;
  std::string backend_, policy_;  // as in force
};

}  // namespace sluice
