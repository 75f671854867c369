// Performs steps in the order of submission. Knows batches, not requests.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "batch/forward_batch.h"

namespace sluice {

// One step in flight. Owned by whoever submits; the executor writes `result` and touches neither after Poll
// returned it.
struct StepBuffers {
  ForwardBatch batch;
  StepResult result;

  void Clear() {
    batch.Clear();
    result.step = 0;
    result.work = StepWork();
    result.status = OkStatus();
    result.samples.clear();
    result.failed_slots.clear();
    result.copies_done.clear();
    result.copies_failed.clear();
  }
};

// What a step does: copies, forward, sampling. Called by one executor, one step at a time, in order.
class StepRunner {
 public:
  virtual ~StepRunner() = default;
  // What of a step does not follow from the results of earlier ones. Called in the order of submission by the
  // thread that submits, so beside Run of the step before; Run of the same batch, which stays where it is,
  // comes after. A step may run without.
  virtual void Prepare(const ForwardBatch& /*batch*/) {}
  // Fills *result (cleared, step set) but for the time of its work. Errors go into result->status; never
  // throws.
  virtual void Run(const ForwardBatch& batch, StepResult* result) = 0;
};

// Engine thread only, except where a class says more.
class Executor {
 public:
  virtual ~Executor() = default;
  // Steps run one after another: what a step reads or writes is ordered after all earlier steps.
  virtual void Submit(StepBuffers* step) = 0;
  // The oldest submitted step if it is done, else null. Never blocks for long on a threaded executor.
  virtual StepBuffers* Poll() = 0;
};

// Runs the oldest step inside Poll, on the caller's thread.
class InlineExecutor final : public Executor {
 public:
  explicit InlineExecutor(StepRunner* runner) : runner_(runner) {}
  void Submit(StepBuffers* step) override {
    runner_->Prepare(step->batch);
    queue_.push_back(step);
  }
  StepBuffers* Poll() override;

 private:
  StepRunner* const runner_;
  std::deque<StepBuffers*> queue_;
};

// Runs steps on a thread of its own and measures them. `on_done` is called on that thread after each step; it
// must not block. The destructor finishes what was submitted.
class ThreadExecutor final : public Executor {
 public:
  ThreadExecutor(std::unique_ptr<StepRunner> runner, std::function<void()> on_done);
  ~ThreadExecutor() override;
  void Submit(StepBuffers* step) override;
  StepBuffers* Poll() override;

 private:
  void Loop();

  const std::unique_ptr<StepRunner> runner_;
  const std::function<void()> on_done_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<StepBuffers*> todo_, done_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sluice
