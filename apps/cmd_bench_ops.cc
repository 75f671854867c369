// sluice bench ops: each kernel at real shapes against the machine's limit.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>

#include "bench_device_ops.h"
#include "bench_ops.h"
#include "commands.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const OpsBenchResult& r) {
  Json rows = Json::array();
  for (const OpsBenchRow& x : r.rows) {
    rows.push_back({{"op", x.op},
                    {"shape", x.shape},
                    {"us", x.us},
                    {"us_min", x.us_min},
                    {"us_max", x.us_max},
                    {"gb_s", x.gb_s},
                    {"tflop_s", x.tflop_s},
                    {"limit", x.limit},
                    {"limit_value", x.limit_value},
                    {"share_of_limit", x.share_of_limit},
                    {"error", x.error},
                    {"error_bound", x.error_bound}});
  }
  return {
      {"device", r.device}, {"isa", r.isa}, {"threads", r.threads}, {"correct", r.correct}, {"rows", rows}};
}

void PrintTable(const OpsBenchResult& r) {
  std::cout << fmt::format("{} {} with {} threads\n", r.device, r.isa, r.threads);
  std::cout << fmt::format("{:24} {:44} {:>10} {:>8} {:>8} {:>16} {:>6} {:>9} {:>9}\n", "op", "shape", "us",
                           "GB/s", "TFLOP/s", "limit", "share", "error", "bound");
  for (const OpsBenchRow& x : r.rows) {
    std::cout << fmt::format("{:24} {:44} {:>10.1f} {:>8.1f} {:>8.3f} {:>16} {:>6.2f} {:>9.1e} {:>9.1e}{}\n",
                             x.op, x.shape, x.us, x.gb_s, x.tflop_s,
                             x.limit == "memory" ? fmt::format("{:.1f} GB/s", x.limit_value)
                                                 : fmt::format("{:.3f} TFLOP/s", x.limit_value),
                             x.share_of_limit, x.error, x.error_bound,
                             x.error <= x.error_bound ? "" : "  WRONG");
  }
}

Json ToJson(const cuda::OpReport& r, bool correct) {
  Json rows = Json::array(), checks = Json::array();
  for (const cuda::OpTime& x : r.times) {
    rows.push_back({{"op", x.op},
                    {"shape", x.shape},
                    {"us", x.us},
                    {"rate", x.amount},
                    {"unit", x.unit},
                    {"limit", x.limit_name},
                    {"limit_value", x.limit},
                    {"share_of_limit", x.amount / x.limit}});
  }
  for (const cuda::OpCheck& x : r.checks) {
    checks.push_back({{"check", x.what}, {"error", x.error}, {"error_bound", x.bound}, {"ok", x.ok()}});
  }
  return {{"device", r.device},
          {"multiprocessors", r.multiprocessors},
          {"copy_gb_s", r.copy_gbs},
          {"read_pass_gb_s", r.read_gbs},
          {"host_to_device_gb_s", r.h2d_gbs},
          {"device_to_host_gb_s", r.d2h_gbs},
          {"correct", correct},
          {"rows", rows},
          {"checks", checks}};
}

// The document to stdout or a file; false when it cannot be written.
bool WriteJson(const Json& document, const std::string& file) {
  if (file == "-") {
    std::cout << document.dump(1) << "\n";
    return true;
  }
  std::ofstream out(file);
  out << document.dump(1) << "\n";
  return bool(out.flush());
}

int Ended(bool correct) {
  if (!correct) std::cerr << "sluice bench ops: a result is outside its error bound\n";
  return correct ? kExitOk : kExitCheckFailed;
}

int BenchDevice(const std::string& only, int runs, const std::string& json) {
  const StatusOr<cuda::OpReport> report = BenchDeviceOps({.only = only, .runs = runs, .print = json.empty()});
  if (!report.ok()) return FailWith("bench ops", report.status());
  const bool correct = std::ranges::all_of(report->checks, &cuda::OpCheck::ok);
  if (!json.empty() && !WriteJson(ToJson(*report, correct), json)) {
    return FailWith("bench ops", Unavailable("--json {}: cannot write", json));
  }
  return Ended(correct);
}

}  // namespace

int RunBenchOps(const std::vector<std::string>& args) {
  CLI::App app{
      "Times each op at real shapes against the machine's limit (multiply-adds in registers, or one read "
      "pass over memory), "
      "measured in the same rounds; checks results against double sums.",
      "sluice bench ops"};
  app.option_defaults()->always_capture_default();
  OpsBenchOptions o;
  std::string device = "cpu", json;
  app.add_option("--device", device, "cpu, or cuda for the device's op catalogue")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  CLI::Option* const threads =
      app.add_option("--threads", o.threads, "cpu: compute threads; 0: every core of this process");
  CLI::Option* const isa = app.add_option("--isa", o.isa, "cpu: auto, portable, avx2, avx512 or avx512_bf16");
  app.add_option("--only", o.only, "rows whose op or shape contains this text; cuda: parts whose name does");
  CLI::Option* const rounds =
      app.add_option("--rounds", o.rounds, "alternating rounds, of which medians are reported")
          ->check(CLI::Range(1, 1000));
  CLI::Option* const quick =
      app.add_flag("--quick", o.quick, "cpu: small shapes and contexts: does everything run?");
  app.add_option("--json", json, "write one JSON document there, - for stdout")->type_name("FILE");
  if (const auto code = ParseWords(&app, "bench ops", args)) return *code;
  if (device == "cuda") {
    for (const CLI::Option* option : {threads, isa, quick}) {
      if (option->count() > 0) {
        return FailWith("bench ops",
                        Invalid("{} has no meaning with --device cuda; leave it out", option->get_name()));
      }
    }
    return BenchDevice(o.only, rounds->count() > 0 ? o.rounds : 0, json);
  }
  const bool terminal = isatty(STDERR_FILENO) != 0;
  const StatusOr<OpsBenchResult> result =
      BenchCpuOps(o, terminal ? +[](const std::string& line) { std::cerr << line << "\n"; } : nullptr);
  if (!result.ok()) return FailWith("bench ops", result.status());
  if (json.empty()) {
    PrintTable(*result);
  } else if (!WriteJson(ToJson(*result), json)) {
    return FailWith("bench ops", Unavailable("--json {}: cannot write", json));
  }
  return Ended(result->correct);
}

}  // namespace sluice
