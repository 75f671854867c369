// The commands of the `sluice` executable: one row here, one file cmd_<name>.cc with its Run function.
//
// A Run function gets the words after its command, answers --help itself, writes results to stdout and
// complaints to stderr, and returns an ExitCode. CMake globs cmd_*.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace sluice {

struct ServerConfig;

enum ExitCode : int {
  kExitOk = 0,
  kExitCheckFailed = 1,  // the command ran and what it checks does not hold
  kExitUsage = 2,        // unknown flag, bad value, illegal combination
  kExitEnvironment = 3,  // a file, port, peer or resource is missing or fails
};

struct Command {
  std::string_view name;  // "serve", "bench ops"
  std::string_view summary;
  int (*run)(const std::vector<std::string>& args);
};

// The commands of this build.
const std::vector<Command>& Commands();

// The exit code that a status stands for (base/status.h says which error is which).
ExitCode ExitCodeOf(const Status& status);

// Prints "sluice <command>: <message>" to stderr and returns the exit code; for usage errors a pointer to
// --help follows.
int FailWith(std::string_view command, const Status& status);

// Prints what serve logs at its start of its flags (those without effect, aliases of the environment) to
// stderr, for the commands that run an engine until their output is complete.
void SayNotices(std::string_view command, const ServerConfig& config);

// For a command that describes its words with CLI11 (app: named "sluice <command>", positionals in small
// letters): parses them into the app's targets. nullopt: the command goes on. Else its exit code, help or a
// complaint in the form of all commands having been printed.
std::optional<int> ParseWords(CLI::App* app, std::string_view command, const std::vector<std::string>& args);

// What a number of such an option may be: anything that is not in these ranges is refused with the limit.
inline constexpr double kMostGigabytes = 1e9;  // 10^18 bytes: fits 64 bits, times 8 ranks too
inline constexpr double kMostTokens = double(int64_t(1) << 36);
CLI::Validator AtLeast0(double most);
CLI::Validator Above0(double most);

// Weak: a command whose file a build leaves out is null and gets no row.
#define SLUICE_COMMAND(function) [[gnu::weak]] int function(const std::vector<std::string>& args)
SLUICE_COMMAND(RunServe);
SLUICE_COMMAND(RunRouter);
SLUICE_COMMAND(RunRun);
SLUICE_COMMAND(RunChat);
SLUICE_COMMAND(RunEval);
SLUICE_COMMAND(RunBenchServing);
SLUICE_COMMAND(RunBenchModel);
SLUICE_COMMAND(RunBenchOps);
SLUICE_COMMAND(RunBenchRadix);
SLUICE_COMMAND(RunBenchSpeculation);
SLUICE_COMMAND(RunBenchTransfer);
SLUICE_COMMAND(RunBenchRanks);
SLUICE_COMMAND(RunBenchStep);
SLUICE_COMMAND(RunBenchStart);
SLUICE_COMMAND(RunReplay);
SLUICE_COMMAND(RunSimulate);
SLUICE_COMMAND(RunInspect);
SLUICE_COMMAND(RunPlan);
#undef SLUICE_COMMAND

inline constexpr Command kCommandTable[] = {
    {"serve", "serve a model over the OpenAI-compatible HTTP API", RunServe},
    {"router", "front door of several servers (prefill/decode, cache-aware)", RunRouter},
    {"run", "answer one prompt, without HTTP", RunRun},
    {"chat", "chat with a server in the terminal", RunChat},
    {"eval", "accuracy, and equality of outputs between cache passes", RunEval},
    {"bench serving", "load generator against a server", RunBenchServing},
    {"bench model", "prefill and decode speed by length and batch", RunBenchModel},
    {"bench ops", "each kernel at real shapes against its limit", RunBenchOps},
    {"bench radix", "prefix match and insert against memcmp", RunBenchRadix},
    {"bench speculation", "decode speed with and without drafts", RunBenchSpeculation},
    {"bench step", "the control plane's own time of a decode step", RunBenchStep},
    {"bench start", "from the start of a server to its first token, and its memory", RunBenchStart},
    {"bench transfer", "copies between tiers and instances against a plain copy", RunBenchTransfer},
    {"bench ranks", "several ranks on one request against one rank", RunBenchRanks},
    {"replay", "run a request trace through the scheduler and the cache", RunReplay},
    {"simulate", "deterministic simulation with injected faults", RunSimulate},
    {"inspect", "geometry, layout, memory plan and kernels of a model", RunInspect},
    {"plan", "tokens per cache tier for a cluster shape", RunPlan},
};

}  // namespace sluice
