// From ready to exit: waits for SIGTERM or SIGINT, drains, stops.
#pragma once

#include <atomic>
#include <thread>

#include "base/clock.h"
#include "engine/engine.h"
#include "serve/app_server.h"

namespace sluice {

// Blocks the two signals in this thread and all that it starts, so that only ServeUntilSignal sees them.
// First thing in main.
void BlockShutdownSignals();

// Until it is gone: either signal ends the process at once, with status 128 + its number. For the time before
// ServeUntilSignal, while weights are read and nobody is served.
class LeaveOnSignal {
 public:
  LeaveOnSignal();
  ~LeaveOnSignal();

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// Returns after the first signal, when running requests have ended, or ended with an error event once
// `timeout_s` was over, and their answers are out: /health says 503 meanwhile and new work is refused. A
// second signal is the end of that time: what runs ends with its error event now. A third one ends the
// process at once, with status 128 + its number.
void ServeUntilSignal(AppServer* server, Engine* engine, const Clock* clock, double timeout_s);

}  // namespace sluice
