#include "exec/watchdog.h"

#include <pthread.h>

#include "base/end_process.h"
#include "fmt/format.h"

namespace sluice {
namespace {

using std::chrono::duration_cast;
using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kAnswerErrors{1000};

}  // namespace

Watchdog::Watchdog(double seconds, std::function<std::string()> where,
                   std::function<void(const std::string&)> end)
    : limit_(seconds),
      where_(std::move(where)),
      end_(end ? std::move(end) : [](const std::string& report) { EndProcess(report); }),
      thread_([this] { Loop(); }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

// The thread looks up by itself when a step is due: to begin and to end one costs no wake-up.
void Watchdog::StepBegins(int64_t step, int64_t rows) {
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    wake = due_ == Time();  // it sleeps without an end
    running_ = true;
    step_ = step;
    rows_ = rows;
    due_ = steady_clock::now() + duration_cast<steady_clock::duration>(limit_);
  }
  if (wake && limit_.count() > 0) changed_.notify_one();
}

void Watchdog::StepEnds() {
  std::lock_guard lock(mutex_);
  running_ = false;
}

void Watchdog::Fault(const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (!fault_.empty()) return;
    fault_ = text;
    fault_due_ = steady_clock::now() + kAnswerErrors;
  }
  changed_.notify_one();
}

void Watchdog::Loop() {
  pthread_setname_np(pthread_self(), "sluice-watchdog");
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const Time now = steady_clock::now();
    if (!fault_.empty()) {
      if (now >= fault_due_) {
        const std::string report = fmt::format("the device has failed and the process ends: {}", fault_);
        lock.unlock();
        end_(report);
        return;
      }
      changed_.wait_until(lock, fault_due_);
      continue;
    }
    if (limit_.count() <= 0 || due_ == Time()) {
      changed_.wait(lock);
      continue;
    }
    if (!running_) {
      // A step that begins from now on is not due before a whole limit has passed.
      due_ = Time();
      changed_.wait(lock);
      continue;
    }
    if (now >= due_) {
      const int64_t step = step_, rows = rows_;
      lock.unlock();
      end_(fmt::format(
          "step {} of {} rows has not ended after {:g} s (--watchdog-timeout) and the process ends{}", step,
          rows, limit_.count(), where_ ? ": " + where_() : std::string()));
      return;
    }
    changed_.wait_until(lock, due_);
  }
}

}  // namespace sluice
