// Rotary embedding settings in all spellings of config.json.
//
// Newer files hold everything under rope_parameters, older ones use rope_theta + rope_scaling; the type key
// is "rope_type" or "type". Where two spellings are present they must say the same. Types: default and yarn.
#pragma once

#include "base/status.h"
#include "config/json_fields.h"
#include "config/model_config.h"

namespace sluice {

// dim = qk_rope_head_dim. YaRN is applied at every position, as the published implementations do (they do not
// switch it off for contexts that fit the original length).
StatusOr<RopeConfig> ReadRopeConfig(const JsonFields& config, int64_t dim);

// (head_dim)^-0.5, times the YaRN temperature squared when mscale_all_dim is set.
float AttentionScale(const RopeConfig& rope, int64_t head_dim);

}  // namespace sluice
