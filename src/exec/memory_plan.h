// How much memory the pools of an engine take. Pure arithmetic over bytes that KvLayout and the model report.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "kv/kv_layout.h"

namespace sluice {

struct MemoryInputs {
  int64_t free_bytes = 0;           // free at start, before the weights were loaded
  int64_t separate_host_bytes = 0;  // free host memory, where the device has memory of its own; else 0
  double fraction = 0.8;  // --mem-fraction-static: share for weights, staging, device and host pages together
  int64_t weight_bytes = 0;     // resident
  int64_t staging_bytes = 0;    // working memory of the forward pass
  int64_t score_row_bytes = 0;  // of one row's index scores, where they take memory of their own; else 0
  int64_t score_rows = 0;       // rows of a step that have scores, of one rank
  int64_t page_bytes = 0;       // KvLayout::page_bytes()
  int32_t lanes = 1;
  int64_t max_total_tokens = 0;  // --max-total-tokens; 0: from memory
  int64_t max_running = 0, context_length = 0;
  bool host_tier = false;
  double host_ratio = 2.0;      // --hicache-ratio: host pages per device page
  double host_gb_per_rank = 0;  // --hicache-size; > 0 wins over the ratio
};

struct MemoryPlan {
  int64_t budget_bytes = 0, weight_bytes = 0, staging_bytes = 0;
  int64_t page_bytes = 0;
  int32_t lanes = 1;
  int64_t device_pages_per_lane = 0;  // usable pages, without the scratch page
  int64_t host_pages_per_lane = 0;
  int64_t score_bytes = 0;  // of one rank, beside the budget: scores of a step are made in pieces that fit
  int64_t device_bytes() const { return (device_pages_per_lane + 1) * lanes * page_bytes; }
  int64_t host_bytes() const { return host_pages_per_lane * lanes * page_bytes; }
  int64_t device_tokens() const { return device_pages_per_lane * lanes * kPageTokens; }
  int64_t host_tokens() const { return host_pages_per_lane * lanes * kPageTokens; }
  std::string ToString() const;
};

// Without explicit sizes: device = min(half of the rest (all of it where host memory is another), max_running
// x context), host = ratio x device,
// clipped to the rest; at least one page a lane, so that such a combination always starts. Exhausted when an
// explicit size is more than is free. Index scores get a part of what the budget leaves free: whole rows, at
// least one, no more than a step has.
StatusOr<MemoryPlan> PlanMemory(const MemoryInputs& in);

// Bytes that can be used now: free memory of the machine or the rest of the cgroup's limit, whichever is
// less.
// `root` holds the /proc and /sys to be read; tests have their own.
int64_t FreeMemoryBytes(const std::string& root = "");
// Cores this process may use: affinity mask and the cgroup's quota, at least 1.
int AvailableCores(const std::string& root = "");

}  // namespace sluice
