// What the page at "/" shows: samples of the engine as an event stream, at a fixed pace, while somebody
// looks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "http/server.h"
#include "serve/metrics.h"

namespace sluice {

// The page itself; needs nothing from anywhere else.
std::string_view PageHtml();
// The same as an answer, with headers that let it load nothing from elsewhere.
HttpResponse PageResponse();

struct LiveFeedOptions {
  std::chrono::milliseconds interval{500};
  size_t viewers_max = 16;
  size_t nodes_max = 200, sequences_max = 20;  // of a sample
};

// One thread, asleep without viewers. A sample costs the engine one bounded walk between two steps, whatever
// the number of viewers.
class LiveFeed {
 public:
  LiveFeed(const LiveFeedOptions& options, const Engine* engine, ServeMetrics* metrics,
           std::string model_name);
  ~LiveFeed();
  // Starts the stream; false: there are too many viewers.
  bool Add(std::shared_ptr<HttpExchange> exchange);
  void Stop();  // ends all streams

 private:
  struct Point {
    double time_s = 0;
    int64_t generated = 0, prompt = 0, cached = 0;
  };
  void Run();
  std::string Sample();

  const LiveFeedOptions options_;
  const Engine* const engine_;
  ServeMetrics* const metrics_;
  const std::string model_name_;
  std::deque<Point> points_;  // the feed's thread only
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<HttpExchange>> viewers_;
  bool stop_ = false, fresh_ = false;
  std::thread thread_;
};

}  // namespace sluice
