// Time as an input: the control plane reads a Clock and never the system, so that a simulation can own time.
#pragma once

#include <chrono>
#include <cstdint>

namespace sluice {

using Nanos = int64_t;  // monotonic nanoseconds since an arbitrary origin

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanos Now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  Nanos Now() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

class VirtualClock final : public Clock {
 public:
  Nanos Now() const override { return now_; }
  void Advance(Nanos d) { now_ += d; }
  void Set(Nanos t) { now_ = t; }

 private:
  Nanos now_ = 0;
};

}  // namespace sluice
