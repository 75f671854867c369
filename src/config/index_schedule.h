// Which layers run their own lightning indexer and which reuse the set of the layer before.
//
// indexer_types (list) over index_topk_pattern (string) over index_topk_freq with index_skip_topk_offset.
// What is present must agree; layer 0 always computes. With an offset o layer i reuses when max(i - o + 1, 0)
// mod freq != 0; without one when max(i - 1, 0) mod freq != 0 (the same as o = 2).
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "config/json_fields.h"

namespace sluice {

// [num_layers], true = computes. REQUIRES num_layers >= 1.
StatusOr<std::vector<bool>> ReadIndexSchedule(const JsonFields& config, int64_t num_layers);

// "FFSFS...": F computes, S reuses.
std::string ScheduleString(const std::vector<bool>& computes);

}  // namespace sluice
