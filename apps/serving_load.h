// A load on a server: which requests come when, and what was seen of their answers. Open loop (a rate) or
// closed (concurrency).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "http/client.h"
#include "nlohmann/json.hpp"
#include "progress_line.h"

namespace sluice {

struct LoadRequest {
  std::vector<int32_t> prompt;
  int32_t output_tokens = 0;
  double arrival_s = 0;  // after the start; 0 for all: as fast as the concurrency allows
};

struct WorkloadOptions {
  std::string dataset = "random";  // random, generated-shared-prefix
  int64_t num_prompts = 100;
  int64_t input_len = 256, output_len = 64;
  double range_ratio = 1.0;  // lengths are uniform in [ratio * len, len]
  int64_t groups = 8, prompts_per_group = 16, system_len = 512, question_len = 64;  // generated-shared-prefix
  double request_rate = 0;  // requests a second, Poisson; 0: all at once
  uint64_t seed = 1;
  int32_t vocab_size = 0;
};

// The same options give the same requests, on every machine.
StatusOr<std::vector<LoadRequest>> MakeWorkload(const WorkloadOptions& options);
// Poisson arrivals at `rate` requests a second; 0: all at once.
void SetArrivals(std::vector<LoadRequest>* requests, double rate, uint64_t seed);

enum class LoadBackend : uint8_t { kNative, kCompletions, kChat };

struct LoadTarget {
  HttpUrl url;
  LoadBackend backend = LoadBackend::kNative;
  bool incremental = false;  // the native stream carries deltas when asked
  std::string model, api_key;
  bool ignore_eos = true;
  double temperature = 0;
  int64_t max_concurrency = 0;        // 0: no limit
  nlohmann::ordered_json extra_body;  // merged into each request
};

struct LoadResult {
  bool ok = false;
  std::string error;
  double start_s = 0, ttft_s = 0, latency_s = 0;
  std::vector<float> itl_s;  // per token after the first
  int64_t output_tokens = 0, cached_tokens = -1;
  std::vector<int32_t> output_ids;  // native only
  std::string text;
  double spec_accept_length = 0;
  int64_t spec_verify_steps = 0;
};

struct LoadRun {
  double duration_s = 0;
  std::vector<LoadResult> results;  // as the requests
};

// progress_line: may be null.
LoadRun RunLoad(HttpClient* client, const LoadTarget& target, const std::vector<LoadRequest>& requests,
                ProgressLine* progress_line);

// The figures of a run under the names of SGLang's bench_serving.
nlohmann::ordered_json SummariseLoad(const std::vector<LoadRequest>& requests, const LoadRun& run);

}  // namespace sluice
