#include "backends/cpu/thread_group.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdlib>

#include "base/check.h"

namespace sluice::cpu {
namespace {

constexpr uint32_t kOpen = 1u << 11;
constexpr uint32_t kInside = kOpen - 1;
constexpr int kGenerationShift = 12;
// A pause is about 40 cycles on Zen 4: some 4 us. Then yields, which cost nothing to a neighbour that wants
// the core, for about the gap between two forks of a decode step. A futex wake costs 30 to 50 us on a virtual
// machine.
constexpr int kPauses = 300;
constexpr auto kYieldFor = std::chrono::microseconds(80);

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void FutexWait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

Scratch::~Scratch() { std::free(data_); }

std::byte* Scratch::Get(int64_t bytes) {
  if (bytes > capacity_) {
    std::free(data_);
    capacity_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    data_ = static_cast<std::byte*>(std::aligned_alloc(4096, size_t(capacity_)));
    SLUICE_CHECK(data_ != nullptr, "scratch of {} bytes", capacity_);
  }
  return data_;
}

ThreadGroup::ThreadGroup(int threads, int first_core) : threads_(threads) {
  SLUICE_CHECK(threads >= 1 && threads < int(kInside), "threads {}", threads);
  for (int t = 0; t < threads; ++t) scratch_.push_back(std::make_unique<Scratch>());
  for (int t = 1; t < threads; ++t) {
    workers_.emplace_back([this, t] { WorkerLoop(t); });
    if (first_core >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(size_t(first_core + t), &set);
      pthread_setaffinity_np(workers_.back().native_handle(), sizeof(set), &set);  // best effort: a hint
    }
  }
}

ThreadGroup::~ThreadGroup() {
  stop_.store(true);
  gate_.fetch_add(1u << kGenerationShift);
  FutexWakeAll(gate_);
  for (std::thread& w : workers_) w.join();
}

void ThreadGroup::DrainTasks(int thread) {
  for (;;) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    if (i >= n_) return;
    fn_(context_, thread, i);
  }
}

void ThreadGroup::Run(int64_t n, TaskFn fn, void* context) {
  fn_ = fn;
  context_ = context;
  n_ = n;
  next_.store(0, std::memory_order_relaxed);
  const uint32_t generation = (gate_.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
  gate_.store(generation << kGenerationShift | kOpen);
  if (parked_.load() > 0) FutexWakeAll(gate_);
  DrainTasks(0);
  gate_.fetch_and(~kOpen);
  for (int spins = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
    if (spins < kPauses) {
      Pause();
    } else {
      sched_yield();
    }
  }
}

void ThreadGroup::WorkerLoop(int thread) {
  uint32_t done = gate_.load() >> kGenerationShift;
  for (;;) {
    uint32_t gate = 0;
    int spins = 0;
    auto yield_until = std::chrono::steady_clock::time_point::max();
    for (;;) {
      gate = gate_.load(std::memory_order_acquire);
      if ((gate & kOpen) != 0 && gate >> kGenerationShift != done) {
        if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) break;
        continue;
      }
      if (stop_.load(std::memory_order_acquire)) return;
      if (++spins < kPauses) {
        Pause();
        continue;
      }
      const auto now = std::chrono::steady_clock::now();
      if (spins == kPauses) yield_until = now + kYieldFor;
      if (now < yield_until) {
        sched_yield();
        continue;
      }
      parked_.fetch_add(1);
      if (gate_.load() == gate && !stop_.load()) FutexWait(gate_, gate);
      parked_.fetch_sub(1);
      spins = 0;
    }
    DrainTasks(thread);
    done = gate >> kGenerationShift;
    gate_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace sluice::cpu
