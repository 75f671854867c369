#include "serve/work_pool.h"

#include <pthread.h>
#include <time.h>

#include <string>

namespace sluice {

WorkPool::WorkPool(const Options& options) {
  const std::array<int, 3> counts = {options.short_threads, options.long_threads, options.control_threads};
  static constexpr std::array<const char*, 3> kNames = {"sluice-short", "sluice-long", "sluice-control"};
  for (size_t lane = 0; lane < queues_.size(); ++lane) {
    queues_[lane] = std::make_unique<BoundedQueue<std::function<void()>>>(options.queue_max);
    for (int i = 0; i < counts[lane]; ++i) {
      threads_.emplace_back([queue = queues_[lane].get(), lane] {
        pthread_setname_np(pthread_self(), kNames[lane]);
        while (auto work = queue->Pop()) (*work)();
      });
    }
  }
}

WorkPool::~WorkPool() { Stop(); }

void WorkPool::Stop() {
  for (auto& queue : queues_) queue->Close();
  for (auto& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

double WorkPool::cpu_seconds() const {
  double seconds = 0;
  for (const std::thread& thread : threads_) {
    clockid_t clock;
    timespec t{};
    if (pthread_getcpuclockid(const_cast<std::thread&>(thread).native_handle(), &clock) != 0) continue;
    if (clock_gettime(clock, &t) == 0) seconds += double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
  }
  return seconds;
}

bool WorkPool::Post(WorkLane lane, std::function<void()> work) {
  return queues_[size_t(lane)]->TryPush(std::move(work));
}

}  // namespace sluice
