#include "exec/executor.h"

#include <pthread.h>

#include <chrono>
#include <utility>

namespace sluice {

StepBuffers* InlineExecutor::Poll() {
  if (queue_.empty()) return nullptr;
  StepBuffers* step = queue_.front();
  queue_.pop_front();
  step->result.step = step->batch.step;
  runner_->Run(step->batch, &step->result);
  return step;
}

ThreadExecutor::ThreadExecutor(std::unique_ptr<StepRunner> runner, std::function<void()> on_done)
    : runner_(std::move(runner)), on_done_(std::move(on_done)), thread_([this] { Loop(); }) {}

ThreadExecutor::~ThreadExecutor() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  thread_.join();
}

void ThreadExecutor::Submit(StepBuffers* step) {
  runner_->Prepare(step->batch);
  {
    std::lock_guard lock(mutex_);
    todo_.push_back(step);
  }
  work_.notify_one();
}

StepBuffers* ThreadExecutor::Poll() {
  std::lock_guard lock(mutex_);
  if (done_.empty()) return nullptr;
  StepBuffers* step = done_.front();
  done_.pop_front();
  return step;
}

void ThreadExecutor::Loop() {
  pthread_setname_np(pthread_self(), "sluice-exec");
  for (;;) {
    StepBuffers* step = nullptr;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return stop_ || !todo_.empty(); });
      if (todo_.empty()) return;
      step = todo_.front();
      todo_.pop_front();
    }
    step->result.step = step->batch.step;
    const auto begin = std::chrono::steady_clock::now();
    runner_->Run(step->batch, &step->result);
    if (step->result.work.rows > 0) {
      step->result.work.ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    }
    {
      std::lock_guard lock(mutex_);
      done_.push_back(step);
    }
    if (on_done_) on_done_();
  }
}

}  // namespace sluice
