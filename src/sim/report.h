// What one run of a simulation says about itself: violations found, work done, states covered; and the trace
// of a replay.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "fmt/format.h"

namespace sluice::sim {

struct SeedReport {
  int64_t events = 0;
  std::vector<std::string> violations;      // at most kMaxViolations are kept
  std::map<std::string, int64_t> coverage;  // named situations, how often each came up
};

// Shared by all parts of one simulated world. One thread.
class Journal {
 public:
  explicit Journal(bool trace) : trace_(trace) {}

  template <typename... A>
  void Violation(fmt::format_string<A...> f, A&&... a) {
    if (report_.violations.size() < 8) report_.violations.push_back(fmt::format(f, std::forward<A>(a)...));
    if (trace_) Line("VIOLATION " + fmt::format(f, std::forward<A>(a)...));
  }
  // One line of the schedule; arguments are formatted only when somebody reads them.
  template <typename... A>
  void Trace(Nanos now, fmt::format_string<A...> f, A&&... a) {
    if (trace_)
      Line(fmt::format("{:>12.3f} ms  ", double(now) / 1e6) + fmt::format(f, std::forward<A>(a)...));
  }
  void Cover(std::string_view name, int64_t n = 1) {
    if (n > 0) report_.coverage[std::string(name)] += n;
  }
  void CountEvent() { ++report_.events; }
  bool failed() const { return !report_.violations.empty(); }
  bool tracing() const { return trace_; }
  const SeedReport& report() const { return report_; }
  SeedReport& report() { return report_; }

 private:
  void Line(const std::string& s) { std::fputs((s + "\n").c_str(), stdout); }
  const bool trace_;
  SeedReport report_;
};

// A scenario runs one seed from nothing to its end. The same seed gives the same events in any process.
struct Scenario {
  std::string_view name;
  std::string_view what;
  SeedReport (*run)(uint64_t seed, bool trace);
};
const std::vector<Scenario>& Scenarios();

SeedReport RunRadixSeed(uint64_t seed, bool trace);
SeedReport RunTiersSeed(uint64_t seed, bool trace);
SeedReport RunEngineSeed(uint64_t seed, bool trace);
SeedReport RunDraftSeed(uint64_t seed, bool trace);
SeedReport RunCpSeed(uint64_t seed, bool trace);
SeedReport RunPdSeed(uint64_t seed, bool trace);
SeedReport RunPdCpSeed(uint64_t seed, bool trace);

}  // namespace sluice::sim
