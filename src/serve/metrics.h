// The server's Prometheus metrics: request counters and histograms kept here, engine gauges read when
// scraped.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "request/request.h"

namespace sluice {

enum class RequestResult : uint8_t { kOk, kAborted, kError, kRejected };

// Durations in seconds from a monotonic clock; never negative.
struct RequestRecord {
  std::string_view endpoint;  // "chat", "completions", "generate"
  RequestResult result = RequestResult::kOk;
  std::string_view reason;  // of an abort, error or rejection: "client_gone", "queue_full", ...
  int64_t prompt_tokens = 0, completion_tokens = 0;
  CachedTokens cached;
  double first_token_s = -1, total_s = 0, per_token_s = -1;  // < 0: there was none
};

// Thread-safe.
class ServeMetrics {
 public:
  // sglang_aliases: the same series once more under the names that SGLang's dashboards read.
  ServeMetrics(std::string model_name, bool sglang_aliases);
  ~ServeMetrics();
  void Finished(const RequestRecord& record);
  void InterToken(double seconds, int64_t tokens);
  struct FrontEnd {
    int64_t connections = 0;
    double http_cpu_s = 0, text_cpu_s = 0;
  };
  // The text of /metrics.
  std::string Render(const EngineSnapshot& snapshot, const FrontEnd& front_end);
  // Output tokens per second over the last second or more of calls.
  // Mean time to the first token of the last few whole answers; -1: there were none.
  double RecentFirstToken() const;
  double GenerationRate(const EngineSnapshot& snapshot);

 private:
  struct Series;
  std::unique_ptr<Series> series_;
  const std::string model_name_;
  const bool aliases_;
  mutable std::mutex rate_mutex_;
  std::array<double, 8> first_tokens_{};  // a ring
  size_t first_token_count_ = 0;
  int64_t rate_tokens_ = 0;
  double rate_time_s_ = -1, rate_ = 0;
};

}  // namespace sluice
