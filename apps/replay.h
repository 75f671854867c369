// Runs a request trace (Mooncake format) through the real scheduler and cache under a virtual clock.
//
// The executor computes nothing: a step takes as long as the cost model says and every copy succeeds. What is
// measured is the control plane: hits per tier, and the CPU time of scheduling, cache and batch building.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/kv_cache.h"
#include "schedule/scheduler.h"

namespace sluice {

constexpr int64_t kTraceBlockTokens = 512;

struct TraceRequest {
  int64_t timestamp_ms = 0;
  int64_t input_length = 0, output_length = 0;  // tokens
  std::vector<int64_t> hash_ids;                // one per block of the prompt, the last may be partial
};

inline constexpr int64_t kTraceTokensMax = int64_t(1) << 24, kTraceMillisMax = int64_t(1) << 40;

// One object a line: timestamp (ms), input_length, output_length, hash_ids. Errors name line, value and
// limit. Sorted by timestamp.
StatusOr<std::vector<TraceRequest>> ParseTrace(std::istream& in);
// A trace of conversations that grow turn by turn over shared system prompts. Same seed, same trace.
std::vector<TraceRequest> GenerateTrace(int64_t requests, uint64_t seed);
void WriteTrace(const std::vector<TraceRequest>& trace, std::ostream& out);

// The prompt of a request: a block's tokens are a function of its id alone.
std::vector<int32_t> ExpandPrompt(const TraceRequest& request);
// GLM-5.2's cache geometry: only its byte counts show.
KvLayout ReplayLayout();

struct ReplayOptions {
  int64_t device_tokens = 2'000'000, host_tokens = 8'000'000;  // of all lanes together
  double working_set_share = 0;  // > 0: device_tokens is this share of the trace's distinct prompt blocks
  int32_t lanes = 1;
  int64_t chunk_tokens = 8192;
  int64_t max_running = 256;
  int32_t depth = 1;
  double time_scale = 1;  // arrivals come this much faster
  SchedulePolicy policy = SchedulePolicy::kFcfs;
  EvictionPolicy eviction = EvictionPolicy::kLru;
  WritePolicy write_policy = WritePolicy::kWriteThrough;
  // Storage of this many tokens behind the host tier, 0: none. It holds names only; a batch takes its latency
  // and its bytes' time at the rate.
  int64_t storage_tokens = 0;
  double storage_latency_ms = 1, storage_gb_s = 2;
  PrefetchPolicy prefetch = PrefetchPolicy::kBestEffort;
  int64_t audit_every = 0;  // steps; 0: only at the end
  // Cost of a step in virtual time.
  double step_ms = 5, token_us = 20, context_token_us = 0.05;
};

struct ReplayReport {
  int64_t requests = 0, steps = 0, retractions = 0;
  int64_t rejected = 0;  // prompt and output together do not fit the device tier
  int64_t prompt_tokens = 0, output_tokens = 0;
  int64_t working_set_tokens = 0;  // of the distinct blocks of all prompts
  int64_t device_tokens = 0, host_tokens = 0;
  int64_t hit_l1 = 0, hit_l2 = 0, hit_l3 = 0;
  int64_t peak_running = 0;
  double cpu_seconds = 0, wall_seconds = 0, virtual_seconds = 0;
  double prompt_tokens_per_s = 0;  // prompt tokens / CPU seconds
  double step_us_p50 = 0, step_us_p99 = 0, step_us_max = 0;
  double full_step_us_p50 = 0, full_step_us_p99 = 0;  // of steps that began with max_running sequences
  int64_t full_steps = 0;
  // The same in CPU time of the thread: what a busy machine takes away is not in it.
  double step_cpu_us_p50 = 0, step_cpu_us_p99 = 0, full_step_cpu_us_p99 = 0;
  CacheStats cache;
  std::vector<std::string> violations;
};

// `progress` is called now and then with the number of finished requests; may be empty.
ReplayReport Replay(const std::vector<TraceRequest>& trace, const ReplayOptions& options,
                    const std::function<void(int64_t)>& progress);

}  // namespace sluice
