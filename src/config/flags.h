// The one flag table. Parsing, --help, docs/flags.md, environment aliases and configuration files all come
// from it.
//
// A flag works, is accepted without effect here (one notice line at start names it), or is refused by name
// with the reason and what to use instead. Precedence of values: command line > environment alias > --config
// file > default.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"
#include "config/server_config.h"

namespace sluice {

enum class FlagStatus : uint8_t { kWorks, kNoEffect, kRefused };
enum class FlagType : uint8_t { kSwitch, kInt, kReal, kText, kList };
enum class FlagGroup : uint8_t {
  kModel,
  kHttp,
  kMemory,
  kSparse,
  kTiers,
  kParallel,
  kDisaggregation,
  kSpeculation,
  kMoe,
  kKernels,
  kDebug,
  kParsers,
};

using FlagTarget =
    std::variant<std::monostate, std::string ServerConfig::*, int64_t ServerConfig::*, double ServerConfig::*,
                 bool ServerConfig::*, std::string ModelOverrides::*, int64_t ModelOverrides::*>;

struct FlagSpec {
  std::string_view names;  // "--model-path --model": the first is the flag's name, the others are aliases
  FlagGroup group{};
  FlagType type{};
  std::string_view metavar;  // "N", "DIR"; empty for a switch or when `choices` says it
  std::string_view help;
  FlagStatus status = FlagStatus::kWorks;
  std::string_view note;      // kNoEffect: what holds here instead. kRefused: the reason and what to use
  FlagTarget target;          // where the value goes; none for most flags that do not work here
  std::string_view choices;   // "auto|bf16|float32": the only legal values
  std::string_view synonyms;  // "bfloat16=bf16 none=": other spellings of a choice
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  std::string_view
      idle_values;  // kRefused: values that ask for nothing ("1", "none|1") and are taken in silence
  std::optional<int64_t> switch_sets;  // a switch whose target is a number: the number it sets
  std::string_view env;                // environment variable that is an alias of this flag

  std::string_view name() const { return names.substr(0, names.find(' ')); }
};

std::span<const FlagSpec> FlagTable();
// By name or alias, with the leading dashes; null if there is none.
const FlagSpec* FindFlag(std::string_view name);
std::string_view GroupTitle(FlagGroup group);
// The value a flag has in `config`, as the command line would spell it; "" for a flag without a target.
std::string FlagValueText(const FlagSpec& flag, const ServerConfig& config);

using GetEnv = std::function<const char*(const char*)>;  // as std::getenv; tests pass their own

// An option of one command, beside the engine's flags.
struct CommandOption {
  std::string name;     // "--limit"
  std::string metavar;  // "N"; "" = switch; "URL PORT" = two values; "NAME..." = one or more values
  std::string help;     // says the default
};

struct CommandSyntax {
  std::string usage;  // "sluice eval MODEL|URL --dataset FILE [options]"
  std::string summary;
  std::vector<CommandOption> options;
  bool engine_flags = false;  // the command starts an engine and takes all flags of the table too
  size_t min_positional = 0, max_positional = 0;
};

// A parsed command line. Positional words are whatever is neither an option nor the value of one.
class CommandLine {
 public:
  bool help = false;    // --help was there; nothing else was looked at
  ServerConfig server;  // with engine_flags
  std::vector<std::string> positional;

  bool Has(std::string_view option) const;
  // Value of the last occurrence, or the fallback.
  std::string Text(std::string_view option, std::string_view fallback = "") const;
  StatusOr<int64_t> Int(std::string_view option, int64_t fallback,
                        int64_t min = std::numeric_limits<int64_t>::min(),
                        int64_t max = std::numeric_limits<int64_t>::max()) const;
  StatusOr<double> Real(std::string_view option, double fallback) const;
  // The values of each occurrence, in order.
  std::vector<std::vector<std::string>> All(std::string_view option) const;

 private:
  friend class CommandLineParser;
  std::vector<std::pair<std::string, std::vector<std::string>>> given_;
};

// Invalid or Unsupported: every problem found, one line each, naming flag, value, what is legal and what to
// do.
StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args, const CommandSyntax& syntax);
StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args, const CommandSyntax& syntax,
                                       const GetEnv& env);

// The text that --help prints.
std::string HelpText(const CommandSyntax& syntax);
// docs/flags.md.
std::string FlagsMarkdown();

// "30,000" is no number, "1e3" is no integer, "0x10" neither. Errors name what is wrong, not which flag.
StatusOr<int64_t> ParseInt(std::string_view text);
StatusOr<double> ParseReal(std::string_view text);

}  // namespace sluice
