// The threads that parse, tokenise and wait for the engine, so that the I/O threads never do. Three lanes
// with threads of their own, so that a megabyte prompt never stands before a short one, and a wait for the
// engine never before either.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"

namespace sluice {

enum class WorkLane : uint8_t {
  kShort,    // requests with little text
  kLong,     // requests whose text takes long to read
  kControl,  // blocking calls of the engine: metrics, flush, server info
};

class WorkPool {
 public:
  struct Options {
    int short_threads = 2, long_threads = 1, control_threads = 1;
    size_t queue_max = 4096;  // per lane
  };
  explicit WorkPool(const Options& options);
  ~WorkPool();  // runs what is queued, then joins
  // False: the lane's queue is full.
  [[nodiscard]] bool Post(WorkLane lane, std::function<void()> work);
  double cpu_seconds() const;  // of all threads. REQUIRES not stopped
  // No more work is taken; waits for what is queued.
  void Stop();

 private:
  std::array<std::unique_ptr<BoundedQueue<std::function<void()>>>, 3> queues_;
  std::vector<std::thread> threads_;
};

}  // namespace sluice
