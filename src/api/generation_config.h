// What a model's generation_config.json says of sampling.
#pragma once

#include <string_view>

#include "api/requests.h"
#include "base/status.h"

namespace sluice {

// {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"} in the ranges of a request;
// do_sample false means temperature 0. Errors name the field, its value and the range.
StatusOr<SamplingDefaults> ReadGenerationConfig(std::string_view json);

}  // namespace sluice
