// The page's event stream for the whole deployment: what the router knows, and the samples of every instance.
//
// Records are of two kinds: {"deployment": ...} at a fixed pace, and {"instance": i, "live": {a sample of
// it}}. Each viewer has streams of its own to the instances, opened with the viewer's key: the router judges
// no key, and a viewer sees what the instances would show it. Instances that break are asked again while
// somebody looks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "http/client.h"
#include "http/server.h"

namespace sluice::router {

class LiveRelay {
 public:
  struct Options {
    std::chrono::milliseconds interval{500};
    std::chrono::milliseconds ask_again{2000};
    size_t viewers_max = 16;
    size_t record_bytes_max = 4 << 20;  // of one sample
  };
  struct Instance {
    std::string name;
    HttpUrl url;
  };
  // describe: one JSON object, any thread. The client outlives the relay's Stop.
  LiveRelay(const Options& options, HttpClient* client, std::vector<Instance> instances,
            std::function<std::string()> describe);
  ~LiveRelay();
  // Answers when the instances have said whether they accept the key. False: there are too many viewers.
  bool Add(const HttpRequest& request, std::shared_ptr<HttpExchange> exchange);
  void Stop();  // ends all streams

 private:
  class View;
  void Run();

  const Options options_;
  HttpClient* const client_;
  const std::vector<Instance> instances_;
  const std::function<std::string()> describe_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<View>> views_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sluice::router
