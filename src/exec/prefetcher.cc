#include "exec/prefetcher.h"

#include <pthread.h>

#include <utility>

#include "base/check.h"

namespace sluice {

Prefetcher::Prefetcher(std::function<void(int32_t, bool)> work, WaitMode wait)
    : work_(std::move(work)), wait_(wait), thread_([this] { Loop(); }) {}

Prefetcher::~Prefetcher() {
  Finish();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

void Prefetcher::Post(int32_t chunks) {
  SLUICE_CHECK(chunks_ == 0, "a job of {} chunks is not finished", chunks_);
  SLUICE_CHECK(chunks >= 0 && uint64_t(chunks) <= kMask, "{} chunks", chunks);
  if (chunks == 0) return;
  chunks_ = chunks;
  done_.store(0, std::memory_order_relaxed);
  ++jobs_;
  state_.store(jobs_ << 2 * kBits | uint64_t(chunks), std::memory_order_release);
  {
    std::lock_guard lock(mutex_);
    newest_ = jobs_;
  }
  posted_.notify_one();
}

bool Prefetcher::Take(int32_t* chunk) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (true) {
    const uint64_t next = state >> kBits & kMask;
    if (next == (state & kMask)) return false;
    if (state_.compare_exchange_weak(state, state + (uint64_t(1) << kBits), std::memory_order_acq_rel)) {
      *chunk = int32_t(next);
      return true;
    }
  }
}

void Prefetcher::Work(bool ahead) {
  int32_t chunk = 0;
  while (Take(&chunk)) {
    work_(chunk, ahead);
    if (ahead) ahead_.fetch_add(1, std::memory_order_relaxed);
    {
      // Only the helper's last chunk can be waited for; the lock keeps a waiter from missing it.
      std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
      if (ahead) lock.lock();
      done_.fetch_add(1, std::memory_order_acq_rel);
    }
    if (ahead) progress_.notify_one();
  }
}

void Prefetcher::Finish() {
  if (chunks_ == 0) return;
  Work(false);
  const auto done = [this] { return done_.load(std::memory_order_acquire) == chunks_; };
  if (!WaitAwake(wait_, done)) {
    std::unique_lock lock(mutex_);
    progress_.wait(lock, done);
  }
  chunks_ = 0;
}

void Prefetcher::Loop() {
  pthread_setname_np(pthread_self(), "sluice-gather");
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [&] { return stop_ || newest_ != seen; });
      if (stop_) return;
      seen = newest_;
    }
    Work(true);
  }
}

}  // namespace sluice
