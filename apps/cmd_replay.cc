// sluice replay TRACE: a request trace through the real scheduler and cache.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <map>

#include "base/log.h"
#include "commands.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "progress_line.h"
#include "replay.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const ReplayReport& r) {
  Json doc;
  doc["requests"] = r.requests;
  doc["rejected"] = r.rejected;
  doc["prompt_tokens"] = r.prompt_tokens;
  doc["output_tokens"] = r.output_tokens;
  doc["working_set_tokens"] = r.working_set_tokens;
  doc["device_tokens"] = r.device_tokens;
  doc["host_tokens"] = r.host_tokens;
  doc["hit_tokens"] = Json{{"l1", r.hit_l1}, {"l2", r.hit_l2}, {"l3", r.hit_l3}};
  doc["hit_rate"] =
      r.prompt_tokens > 0 ? double(r.hit_l1 + r.hit_l2 + r.hit_l3) / double(r.prompt_tokens) : 0.0;
  doc["prompt_tokens_per_s"] = r.prompt_tokens_per_s;
  doc["step_us"] = Json{{"p50", r.step_us_p50}, {"p99", r.step_us_p99}, {"max", r.step_us_max}};
  doc["full_step_us"] =
      Json{{"steps", r.full_steps}, {"p50", r.full_step_us_p50}, {"p99", r.full_step_us_p99}};
  doc["step_cpu_us"] =
      Json{{"p50", r.step_cpu_us_p50}, {"p99", r.step_cpu_us_p99}, {"full_p99", r.full_step_cpu_us_p99}};
  doc["steps"] = r.steps;
  doc["peak_running"] = r.peak_running;
  doc["retractions"] = r.retractions;
  doc["cpu_seconds"] = r.cpu_seconds;
  doc["wall_seconds"] = r.wall_seconds;
  doc["virtual_seconds"] = r.virtual_seconds;
  doc["cache"] = Json{{"nodes", r.cache.nodes},
                      {"evicted_pages_device", r.cache.evicted_pages_device},
                      {"evicted_pages_host", r.cache.evicted_pages_host},
                      {"backup_pages", r.cache.backup_pages},
                      {"load_pages", r.cache.load_pages},
                      {"deficit_evictions", r.cache.deficit_evictions},
                      {"free_room_misses", r.cache.free_room_misses},
                      {"loads_waited", r.cache.loads_waited},
                      {"lanes_passed_over", r.cache.lanes_passed_over},
                      {"slow_evictions", r.cache.slow_evictions},
                      {"short_evictions", r.cache.short_evictions},
                      {"lane_deficits", r.cache.lane_deficits},
                      {"planning_page_visits", r.cache.planning_page_visits},
                      {"backups_skipped", r.cache.backups_skipped},
                      {"dropped_unwritten", r.cache.dropped_unwritten}};
  doc["violations"] = r.violations;
  return doc;
}

void PrintTable(const ReplayReport& r) {
  auto share = [&](int64_t n) {
    return r.prompt_tokens > 0 ? 100.0 * double(n) / double(r.prompt_tokens) : 0.0;
  };
  std::cout << fmt::format(
      "{} requests, {} prompt tokens, {} output tokens, {:.0f} s of trace\n"
      "hits      L1 {:.1f}%  L2 {:.1f}%  L3 {:.1f}%\n"
      "control   {:.2f} M prompt tokens per CPU second ({:.2f} s)\n"
      "step      p50 {:.0f} us  p99 {:.0f} us; with all slots running ({} steps) p50 {:.0f} us  p99 {:.0f} "
      "us\n"
      "cache     {} nodes, {} pages backed up, {} loaded, {} + {} evicted (device, host), {} retractions\n",
      r.requests, r.prompt_tokens, r.output_tokens, r.virtual_seconds, share(r.hit_l1), share(r.hit_l2),
      share(r.hit_l3), r.prompt_tokens_per_s / 1e6, r.cpu_seconds, r.step_us_p50, r.step_us_p99, r.full_steps,
      r.full_step_us_p50, r.full_step_us_p99, r.cache.nodes, r.cache.backup_pages, r.cache.load_pages,
      r.cache.evicted_pages_device, r.cache.evicted_pages_host, r.retractions);
  const int64_t moved = r.cache.evicted_pages_device + r.cache.evicted_pages_host + r.cache.load_pages;
  std::cout << fmt::format(
      "pools     {} device tokens ({:.1f}% of the working set of {}), {} host tokens\n"
      "planning  {} page entries looked at for {} pages evicted and loaded (owners counted anew: {}); {} "
      "slow and {} "
      "short evictions, {} lane deficits, {} pages from another lane than their turn's\n",
      r.device_tokens,
      r.working_set_tokens > 0 ? 100.0 * double(r.device_tokens) / double(r.working_set_tokens) : 0.0,
      r.working_set_tokens, r.host_tokens, r.cache.planning_page_visits, moved,
      std::max<int64_t>(0, r.cache.planning_page_visits - moved), r.cache.slow_evictions,
      r.cache.short_evictions, r.cache.lane_deficits, r.cache.lanes_passed_over);
  std::cout << fmt::format("step CPU  p50 {:.0f} us  p99 {:.0f} us; with all slots running p99 {:.0f} us\n",
                           r.step_cpu_us_p50, r.step_cpu_us_p99, r.full_step_cpu_us_p99);
  if (r.rejected > 0)
    std::cout << r.rejected
              << " requests (prompt and output) are longer than the device tier and were refused\n";
  for (const std::string& v : r.violations) std::cout << "VIOLATION " << v << "\n";
}

// An option whose values have names. (CLI11's own transformers show the numbers behind them in help and
// errors.)
template <typename T>
void AddNamed(CLI::App& app, const std::string& flag, T* target, const std::map<std::string, T>& names) {
  std::vector<std::string> keys;
  std::string now;
  for (const auto& [name, value] : names) {
    keys.push_back(name);
    if (value == *target) now = name;
  }
  app.add_option_function<std::string>(flag, [target, names](const std::string& v) { *target = names.at(v); })
      ->check(CLI::IsMember(keys))
      ->default_str(now);
}

}  // namespace

int RunReplay(const std::vector<std::string>& args) {
  ReplayOptions o;
  std::string file, json, executor = "null";
  int64_t limit = 0, generate = 0;
  uint64_t seed = 1;
  CLI::App app(
      "Run a Mooncake-format request trace through the scheduler and the cache under a virtual clock",
      "sluice replay");
  app.option_defaults()->always_capture_default();
  app.add_option(
      "trace", file,
      "JSONL: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks; - for stdin");
  app.add_option("--executor", executor, "null: steps take what the cost model says")
      ->check(CLI::IsMember({"null"}));
  app.add_option("--limit", limit, "only the first N requests; 0 = all")->check(AtLeast0(1e12));
  app.add_option("--time-scale", o.time_scale, "arrivals come this much faster")->check(Above0(1e6));
  app.add_option("--max-total-tokens", o.device_tokens, "device tier")
      ->check(CLI::Range(int64_t(128), int64_t(1) << 36));
  app.add_option(
         "--working-set-share", o.working_set_share,
         "device tier as a share of the trace's distinct prompt blocks, in place of --max-total-tokens")
      ->check(CLI::Range(0.0, 100.0));
  app.add_option("--host-tokens", o.host_tokens, "host tier; 0 = off")->check(AtLeast0(kMostTokens));
  app.add_option("--storage-tokens", o.storage_tokens, "storage tier behind the host tier; 0 = off")
      ->check(AtLeast0(kMostTokens));
  app.add_option("--storage-latency-ms", o.storage_latency_ms, "of a batch")->check(AtLeast0(1e6));
  app.add_option("--storage-gb-s", o.storage_gb_s, "rate of the storage")->check(Above0(1e6));
  AddNamed<PrefetchPolicy>(app, "--hicache-storage-prefetch-policy", &o.prefetch,
                           {{"best_effort", PrefetchPolicy::kBestEffort},
                            {"wait_complete", PrefetchPolicy::kWaitComplete},
                            {"timeout", PrefetchPolicy::kTimeout}});
  app.add_option("--attn-cp-size", o.lanes, "lanes of the pools")->check(CLI::Range(1, 8));
  app.add_option("--chunked-prefill-size", o.chunk_tokens)->check(Above0(1 << 20));
  app.add_option("--max-running-requests", o.max_running)->check(CLI::Range(1, 65536));
  app.add_option("--step-depth", o.depth, "steps planned ahead")->check(CLI::Range(0, 1));
  AddNamed<SchedulePolicy>(app, "--schedule-policy", &o.policy,
                           {{"fcfs", SchedulePolicy::kFcfs}, {"lpm", SchedulePolicy::kLongestPrefix}});
  AddNamed<EvictionPolicy>(app, "--radix-eviction-policy", &o.eviction,
                           {{"lru", EvictionPolicy::kLru},
                            {"lfu", EvictionPolicy::kLfu},
                            {"fifo", EvictionPolicy::kFifo},
                            {"mru", EvictionPolicy::kMru},
                            {"priority", EvictionPolicy::kPriority}});
  AddNamed<WritePolicy>(app, "--hicache-write-policy", &o.write_policy,
                        {{"write_through", WritePolicy::kWriteThrough},
                         {"write_through_selective", WritePolicy::kWriteThroughSelective},
                         {"write_back", WritePolicy::kWriteBack}});
  app.add_option("--audit-every", o.audit_every, "walk all invariants every N steps; 0 = at the end only")
      ->check(AtLeast0(1e12));
  app.add_option("--generate", generate, "write a trace of N requests to stdout and stop")
      ->check(Above0(1e9));
  app.add_option("--seed", seed, "of --generate");
  app.add_option("--json", json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "replay", args)) return *code;
  if (generate > 0) {
    WriteTrace(GenerateTrace(generate, seed), std::cout);
    return kExitOk;
  }
  if (file.empty())
    return FailWith("replay", Invalid("TRACE is missing; give a file, - for stdin, or --generate N"));
  std::ifstream opened;
  if (file != "-") {
    opened.open(file);
    if (!opened) return FailWith("replay", NotFound("{}: cannot be read", file));
  }
  StatusOr<std::vector<TraceRequest>> trace = ParseTrace(file == "-" ? std::cin : opened);
  if (!trace.ok()) return FailWith("replay", trace.status());
  if (limit > 0 && limit < int64_t(trace->size())) trace->resize(size_t(limit));
  const auto all = int64_t(trace->size());
  if (all == 0)
    return FailWith("replay", Internal("{}: the trace holds no request, so nothing is shown", file));
  spdlog::set_level(spdlog::level::off);  // the report counts what the cache would warn of
  ReplayReport report;
  {
    ProgressLine line;
    std::function<void(int64_t)> progress;
    if (line.shown()) progress = [&](int64_t done) { line.Show("requests", done, all); };
    report = Replay(*trace, o, progress);
  }
  if (json.empty()) {
    PrintTable(report);
  } else if (json == "-") {
    std::cout << ToJson(report).dump(2) << "\n";
  } else {
    std::ofstream out(json);
    if (!(out << ToJson(report).dump(2) << "\n"))
      return FailWith("replay", Unavailable("--json: cannot write {}", json));
  }
  if (report.requests == 0 && report.violations.empty())
    return FailWith("replay",
                    Internal("all {} requests (prompt and output) are longer than the device tier of {} "
                             "tokens and were refused; raise --max-total-tokens",
                             report.rejected, report.device_tokens));
  return report.violations.empty() ? kExitOk : kExitCheckFailed;
}

}  // namespace sluice
