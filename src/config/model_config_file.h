// A config.json at a path of its own, and what the flags that change it can get wrong by themselves.
#pragma once

#include <string>
#include <string_view>

#include "config/model_config.h"

namespace sluice {

// As ParseModelConfig; its complaints begin with the path and end with what to do.
StatusOr<ModelConfig> ParseModelConfigFile(const std::string& path, std::string_view config_json,
                                           const ModelOverrides& overrides = {});

// Needs no model: JSON that is none, flags that contradict it.
Status CheckOverrides(const ModelOverrides& overrides);

}  // namespace sluice
