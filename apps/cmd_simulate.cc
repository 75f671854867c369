// sluice simulate: deterministic simulation of the control plane with injected faults; any failure replays
// from its seed.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <fstream>
#include <iostream>
#include <thread>

#include "base/log.h"
#include "base/plant.h"
#include "commands.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "sim/search.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

struct SimulateOptions {
  std::string scenario = "all";
  std::string seeds;
  std::string replay;
  bool trace = false;
  bool stop_at_first = false;
  int jobs = 0;
  std::string plant;
  std::string json;
};

StatusOr<uint64_t> ParseSeed(std::string_view flag, std::string_view text) {
  uint64_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size())
    return Invalid("{}: {} is not a whole number from 0 to 2^64 - 1", flag, text);
  return v;
}

StatusOr<std::vector<sim::Scenario>> ChooseScenarios(const std::string& name) {
  std::vector<sim::Scenario> chosen;
  std::string names;
  for (const sim::Scenario& s : sim::Scenarios()) {
    if (name == "all" || name == s.name) chosen.push_back(s);
    names += fmt::format("{}, ", s.name);
  }
  if (chosen.empty()) return Invalid("--scenario: {} is none of {}all", name, names);
  return chosen;
}

Status ChoosePlant(const std::string& name) {
  if (name.empty()) return OkStatus();
  std::string names;
  for (const PlantName& p : kPlants) {
#ifdef SLUICE_PLANTS
    if (p.name == name) {
      planted = p.plant;
      return OkStatus();
    }
#endif
    names += fmt::format(" {}", p.name);
  }
  if (!kPlantsBuilt)
    return Unsupported(
        "--plant: this program has no planted bugs; the test program sluice_planted (target of the same "
        "name) "
        "has them");
  return Invalid("--plant: {} is none of{}", name, names);
}

StatusOr<int> WriteJson(const std::string& path, const Json& doc, int code) {
  if (path == "-") {
    std::cout << doc.dump(2) << "\n";
  } else {
    std::ofstream out(path);
    if (!(out << doc.dump(2) << "\n")) return Unavailable("--json: cannot write {}", path);
  }
  return code;
}

StatusOr<int> Replay(const SimulateOptions& o, const std::vector<sim::Scenario>& scenarios) {
  ASSIGN_OR_RETURN(const uint64_t seed, ParseSeed("--replay", o.replay));
  if (o.trace) {  // in this process: the schedule comes out as it happens, up to a crash
    int failed = 0;
    for (const sim::Scenario& s : scenarios) {
      std::cout << fmt::format("scenario {}, seed {}\n", s.name, seed) << std::flush;
      const sim::SeedReport r = s.run(seed, true);
      std::cout << fmt::format("{} events, {} violations\n", r.events, r.violations.size());
      failed += !r.violations.empty();
    }
    return int(failed > 0 ? kExitCheckFailed : kExitOk);
  }
  sim::SearchOptions search;
  search.scenarios = scenarios;
  search.first = seed;
  search.end = seed + 1;
  ASSIGN_OR_RETURN(const sim::SearchResult r, sim::Search(search));
  for (const sim::Finding& f : r.findings)
    std::cout << fmt::format("{} seed {}: {}\n", f.scenario, f.seed, f.what);
  if (r.violations == 0) std::cout << fmt::format("seed {}: {} events, no violation\n", seed, r.events);
  return int(r.violations > 0 ? kExitCheckFailed : kExitOk);
}

StatusOr<int> Run(const SimulateOptions& o) {
  spdlog::set_level(spdlog::level::off);  // pressure is what it is about; the report counts it
  if (Status s = ChoosePlant(o.plant); !s.ok()) return s;
  ASSIGN_OR_RETURN(const std::vector<sim::Scenario> scenarios, ChooseScenarios(o.scenario));
  if (!o.replay.empty()) return Replay(o, scenarios);
  if (o.trace) return Invalid("--trace: goes with --replay SEED");
  const size_t dots = o.seeds.find("..");
  if (dots == std::string::npos) return Invalid("--seeds: {} is not of the form A..B", o.seeds);
  sim::SearchOptions search;
  search.scenarios = scenarios;
  ASSIGN_OR_RETURN(search.first, ParseSeed("--seeds", std::string_view(o.seeds).substr(0, dots)));
  ASSIGN_OR_RETURN(search.end, ParseSeed("--seeds", std::string_view(o.seeds).substr(dots + 2)));
  if (search.first >= search.end)
    return Invalid("--seeds: {} holds no seed; B of A..B is not included and must be above A", o.seeds);
  search.jobs = o.jobs > 0 ? o.jobs : int(std::max(1u, std::thread::hardware_concurrency()));
  search.stop_at_first = o.stop_at_first;
  const bool terminal = ::isatty(2) != 0;
  if (terminal)
    search.progress = [&](int64_t runs, int64_t violations) {
      std::cerr << fmt::format("\r{} of {} runs, {} violations ", runs,
                               int64_t(search.end - search.first) * int64_t(scenarios.size()), violations);
    };
  ASSIGN_OR_RETURN(const sim::SearchResult r, sim::Search(search));
  if (terminal) std::cerr << "\r\033[K";
  const int code = r.violations > 0 ? kExitCheckFailed : kExitOk;
  if (!o.json.empty()) {
    Json doc;
    doc["runs"] = r.runs;
    doc["events"] = r.events;
    doc["violations"] = r.violations;
    doc["first_failing_seed"] = r.findings.empty() ? Json() : Json(r.findings.front().seed);
    doc["findings"] = Json::array();
    for (const sim::Finding& f : r.findings)
      doc["findings"].push_back(Json{{"scenario", f.scenario}, {"seed", f.seed}, {"violation", f.what}});
    doc["coverage"] = Json::object();
    for (const auto& [name, n] : r.coverage) doc["coverage"][name] = n;
    return WriteJson(o.json, doc, code);
  }
  std::cout << fmt::format("{} runs, {} events, {} violations\n", r.runs, r.events, r.violations);
  for (const sim::Finding& f : r.findings)
    std::cout << fmt::format("  {} seed {}: {}\n", f.scenario, f.seed, f.what);
  if (!r.findings.empty())
    std::cout << fmt::format("replay: sluice simulate --scenario {} --replay {} --trace\n",
                             r.findings.front().scenario, r.findings.front().seed);
  std::cout << "\nsituations that came up:\n";
  for (const auto& [name, n] : r.coverage) std::cout << fmt::format("  {:<32} {:>12}\n", name, n);
  return code;
}

}  // namespace

int RunSimulate(const std::vector<std::string>& args) {
  SimulateOptions o;
  CLI::App app("Deterministic simulation of scheduler, cache and tiers with injected faults",
               "sluice simulate");
  app.option_defaults()->always_capture_default();
  std::string names;
  for (const sim::Scenario& s : sim::Scenarios()) names += fmt::format("  {:<8} {}\n", s.name, s.what);
  app.footer("scenarios:\n" + names);
  app.add_option("--scenario", o.scenario, "one of the scenarios, or all")->type_name("NAME");
  auto* seeds = app.add_option("--seeds", o.seeds,
                               "A..B: seeds from A up to but not including B, each in each scenario")
                    ->type_name("A..B");
  auto* replay = app.add_option("--replay", o.replay, "one seed again")->type_name("SEED");
  seeds->excludes(replay);
  app.add_flag("--trace", o.trace, "with --replay: print the schedule");
  app.add_flag("--stop-at-first", o.stop_at_first, "stop at the first violation");
  app.add_option("--jobs", o.jobs, "processes at once; 0: one per core")->check(CLI::Range(0, 1024));
  app.add_option("--plant", o.plant, "plant a known bug (only in the test program sluice_planted)")
      ->type_name("NAME");
  app.add_option("--json", o.json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "simulate", args)) return *code;
  if (o.seeds.empty() && o.replay.empty())
    return FailWith("simulate", Invalid("nothing to run; give --seeds A..B or --replay SEED"));
  const StatusOr<int> code = Run(o);
  return code.ok() ? *code : FailWith("simulate", code.status());
}

}  // namespace sluice
