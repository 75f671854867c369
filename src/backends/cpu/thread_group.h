// The compute threads of one rank: a fork-join group whose caller is thread 0.
//
// Owns threads - 1 workers and one scratch buffer a thread. Used by one caller at a time (the rank's executor
// thread). Between jobs a worker spins for some microseconds, then yields for some tens, then parks on a
// futex: a decode step forks hundreds of times in a millisecond, yet an idle engine must leave its cores
// alone. A worker that is not scheduled in time is never waited for: the caller closes the job when no task
// is left.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace sluice::cpu {

// A grow-only 64-byte aligned buffer. Contents are lost when it grows.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* Get(int64_t bytes);

 private:
  std::byte* data_ = nullptr;
  int64_t capacity_ = 0;
};

// Cuts a scratch buffer into aligned arrays; the same calls on a null base give the size.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    const int64_t at = used_;
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

class ThreadGroup {
 public:
  // first_core < 0: threads are not pinned. Else thread i of the group runs on core first_core + i; the
  // caller (thread 0) is left where it is.
  ThreadGroup(int threads, int first_core);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int threads() const { return threads_; }
  Scratch& scratch(int thread) { return *scratch_[size_t(thread)]; }

  // fn(thread, i) for every i in [0, n), each once, in any order on any thread; returns when all have run.
  // Not reentrant.
  template <typename Fn>
  void ParallelFor(int64_t n, Fn&& fn) {
    if (n <= 0) return;
    if (n == 1 || threads_ == 1) {
      for (int64_t i = 0; i < n; ++i) fn(0, i);
      return;
    }
    Run(
        n, [](void* f, int thread, int64_t i) { (*static_cast<std::remove_reference_t<Fn>*>(f))(thread, i); },
        &fn);
  }

 private:
  using TaskFn = void (*)(void*, int, int64_t);
  void Run(int64_t n, TaskFn fn, void* context);
  void WorkerLoop(int thread);
  void DrainTasks(int thread);

  const int threads_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::vector<std::thread> workers_;

  // gate_ = generation << 12 | open << 11 | workers inside. A worker enters an open job by adding one.
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int32_t> parked_{0};
  std::atomic<bool> stop_{false};
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0;
};

}  // namespace sluice::cpu
