// Ends the process when a step does not end, and after a fault of the device.
//
// StepBegins, StepEnds and Fault are called by the executor's thread; a thread of its own watches the time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace sluice {

class Watchdog {
 public:
  // `where` says what the device was doing; called on the watchdog's thread while the step hangs. `end` gets
  // the report; the default prints it and ends the process.
  // seconds <= 0: steps may take any time.
  Watchdog(double seconds, std::function<std::string()> where,
           std::function<void(const std::string& report)> end = nullptr);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void StepBegins(int64_t step, int64_t rows);
  void StepEnds();
  // The device is lost. The process ends after a moment in which requests get their errors.
  void Fault(const std::string& text);

 private:
  using Time = std::chrono::steady_clock::time_point;
  void Loop();

  const std::chrono::duration<double> limit_;
  const std::function<std::string()> where_;
  const std::function<void(const std::string&)> end_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false, stop_ = false;
  int64_t step_ = 0, rows_ = 0;
  Time due_;
  std::string fault_;
  Time fault_due_;
  std::thread thread_;
};

}  // namespace sluice
