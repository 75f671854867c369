#include "serve/shutdown.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <thread>

#include "base/log.h"

namespace sluice {
namespace {

constexpr double kFlushGraceS = 5;    // for the last bytes to slow clients
constexpr double kHurriedGraceS = 1;  // the same after a second signal

sigset_t ShutdownSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

void BlockShutdownSignals() {
  const sigset_t set = ShutdownSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

LeaveOnSignal::LeaveOnSignal()
    : thread_([this] {
        const sigset_t set = ShutdownSignals();
        while (!done_) {
          const timespec wait{0, 20'000'000};
          const int signal = sigtimedwait(&set, nullptr, &wait);
          if (signal > 0 && done_) {
            kill(getpid(), signal);  // came when the start was over: ServeUntilSignal's
          } else if (signal > 0) {
            spdlog::warn("signal {} during the start: leaving", signal);
            spdlog::default_logger()->flush();
            _exit(128 + signal);
          }
        }
      }) {}

LeaveOnSignal::~LeaveOnSignal() {
  done_ = true;
  thread_.join();
}

void ServeUntilSignal(AppServer* server, Engine* engine, const Clock* clock, double timeout_s) {
  const sigset_t set = ShutdownSignals();
  int signal = 0;
  while (sigwait(&set, &signal) != 0) {
  }
  spdlog::info("signal {}: no new requests; running ones may go on for {} s", signal, timeout_s);
  server->BeginDrain();
  std::atomic<bool> drained{false}, hurried{false};
  std::thread drain([&] {
    engine->Drain(clock->Now() + Nanos(timeout_s * 1e9));
    server->Stop(hurried ? kHurriedGraceS : kFlushGraceS);
    drained = true;
  });
  std::thread hurry;  // a second Drain, whose time is over, ends the first
  while (!drained) {
    const timespec wait{0, 20'000'000};
    const int again = sigtimedwait(&set, nullptr, &wait);
    if (again <= 0) continue;
    if (hurried.exchange(true)) {
      spdlog::warn("signal {} a third time: leaving at once", again);
      spdlog::default_logger()->flush();
      _exit(128 + again);
    }
    spdlog::warn("signal {} again: running requests end with an error now; a third one leaves at once",
                 again);
    hurry = std::thread([&] { engine->Drain(clock->Now()); });
  }
  drain.join();
  if (hurry.joinable()) hurry.join();
}

}  // namespace sluice
