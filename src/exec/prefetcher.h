// Work that a thread does ahead while its caller does something else; whoever is free takes the next chunk.
//
// Post hands out chunks 0 .. n-1 of one job, Finish does what nobody has begun and waits for the rest: a
// helper that wakes late costs nothing. One job at a time; Post and Finish come from one thread. Neither
// allocates.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "comm/communicator.h"

namespace sluice {

class Prefetcher {
 public:
  // `work` runs on the helper (ahead) or inside Finish.
  Prefetcher(std::function<void(int32_t chunk, bool ahead)> work, WaitMode wait);
  ~Prefetcher();

  void Post(int32_t chunks);  // REQUIRES the job before to be finished
  void Finish();              // returns at once without a job
  int64_t chunks_ahead() const { return ahead_.load(std::memory_order_relaxed); }  // done by the helper

 private:
  // What is left of the job, as one word: 24 bits that tell jobs apart, 20 of the next chunk, 20 of their
  // number.
  static constexpr int kBits = 20;
  static constexpr uint64_t kMask = (uint64_t(1) << kBits) - 1;
  bool Take(int32_t* chunk);
  void Work(bool ahead);
  void Loop();

  const std::function<void(int32_t, bool)> work_;
  const WaitMode wait_;
  std::atomic<uint64_t> state_{0};
  std::atomic<int32_t> done_{0};
  std::atomic<int64_t> ahead_{0};
  int32_t chunks_ = 0;  // of the caller's current job
  uint64_t jobs_ = 0;
  std::mutex mutex_;
  std::condition_variable posted_, progress_;
  uint64_t newest_ = 0;  // job, under mutex_
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sluice
