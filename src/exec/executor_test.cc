#include "exec/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <vector>

namespace sluice {
namespace {

// Says what is called, and holds Run back while it is told to.
class Recording final : public StepRunner {
 public:
  void Prepare(const ForwardBatch& batch) override { Note({'p', batch.step}); }
  void Run(const ForwardBatch& batch, StepResult* result) override {
    Note({'r', batch.step});
    result->work.rows = 1;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !held_; });
  }
  void Hold(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void WaitFor(size_t calls) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return calls_.size() >= calls; });
  }
  std::vector<std::pair<char, int64_t>> calls() {
    std::lock_guard lock(mutex_);
    return calls_;
  }

 private:
  void Note(std::pair<char, int64_t> call) {
    std::lock_guard lock(mutex_);
    calls_.push_back(call);
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::vector<std::pair<char, int64_t>> calls_;
};

StepBuffers* AwaitStep(Executor& executor) {
  StepBuffers* done = nullptr;
  while (done == nullptr) done = executor.Poll();
  return done;
}

TEST(ThreadExecutor, PreparesTheNextStepWhileOneRuns) {
  auto owned = std::make_unique<Recording>();
  Recording& runner = *owned;
  ThreadExecutor executor(std::move(owned), nullptr);
  StepBuffers first, second;
  first.batch.step = 7;
  second.batch.step = 8;
  runner.Hold(true);
  executor.Submit(&first);
  runner.WaitFor(2);
  executor.Submit(&second);
  EXPECT_THAT(runner.calls(),
              ::testing::ElementsAre(std::pair('p', 7), std::pair('r', 7), std::pair('p', 8)));
  EXPECT_EQ(executor.Poll(), nullptr);
  runner.Hold(false);
  EXPECT_EQ(AwaitStep(executor), &first);
  EXPECT_EQ(AwaitStep(executor), &second);
  EXPECT_EQ(runner.calls().back(), std::pair('r', int64_t(8)));
  EXPECT_GT(second.result.work.ns, 0);
}

TEST(InlineExecutor, PreparesAtSubmissionAndRunsInOrder) {
  Recording runner;
  InlineExecutor executor(&runner);
  StepBuffers first, second;
  first.batch.step = 1;
  second.batch.step = 2;
  executor.Submit(&first);
  executor.Submit(&second);
  EXPECT_EQ(executor.Poll(), &first);
  EXPECT_EQ(executor.Poll(), &second);
  EXPECT_EQ(executor.Poll(), nullptr);
  EXPECT_THAT(runner.calls(), ::testing::ElementsAre(std::pair('p', 1), std::pair('p', 2), std::pair('r', 1),
                                                     std::pair('r', 2)));
}

}  // namespace
}  // namespace sluice
