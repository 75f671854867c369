#include "config/flags.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "config/config_file.h"
#include "config/dsa_backends.h"
#include "config/flag_values.h"
#include "config/idle_flags.h"
#include "config/json_argument.h"
#include "config/legality.h"
#include "config/model_config_file.h"

namespace sluice {
namespace {

constexpr std::string_view kConfigFlag = "--config";

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

int ValueCount(std::string_view metavar) {  // -1: one or more
  if (metavar.empty()) return 0;
  if (metavar.ends_with("...")) return -1;
  return 1 + int(std::count(metavar.begin(), metavar.end(), ' '));
}

bool LooksLikeFlag(std::string_view word) { return word.size() > 2 && word.starts_with("--"); }

std::string_view OptionName(std::string_view word) { return word.substr(0, word.find('=')); }

std::string NearestName(std::string_view name, std::span<const std::string> names) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, name.size() / 4) + 1;
  for (const std::string& candidate : names) {
    if (name.size() > 4 && candidate.starts_with(name)) return candidate;  // an abbreviation
    if (const size_t d = EditDistance(name, candidate); d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  return best;
}

// "--model-path" and "model_path" for comparison with keys of a configuration file.
std::string FlagOfKey(std::string_view key) {
  std::string flag = "--";
  for (char c : key) flag += c == '_' ? '-' : c;
  return flag;
}

}  // namespace

const FlagSpec* FindFlag(std::string_view name) {
  for (const FlagSpec& flag : FlagTable()) {
    for (std::string_view n : SplitWords(flag.names, ' ')) {
      if (n == name) return &flag;
    }
  }
  return nullptr;
}

bool CommandLine::Has(std::string_view option) const {
  return std::any_of(given_.begin(), given_.end(), [&](const auto& g) { return g.first == option; });
}

std::string CommandLine::Text(std::string_view option, std::string_view fallback) const {
  for (auto it = given_.rbegin(); it != given_.rend(); ++it) {
    if (it->first == option) return it->second.empty() ? "" : it->second.front();
  }
  return std::string(fallback);
}

StatusOr<int64_t> CommandLine::Int(std::string_view option, int64_t fallback, int64_t min,
                                   int64_t max) const {
  if (!Has(option)) return fallback;
  const std::string text = Text(option);
  StatusOr<int64_t> value = ParseInt(text);
  if (!value.ok()) return Invalid("{}: {}", option, Message(value.status()));
  if (*value < min) return Invalid("{}: {} is too small; at least {}", option, *value, min);
  if (*value > max) return Invalid("{}: {} is too large; at most {}", option, *value, max);
  return *value;
}

StatusOr<double> CommandLine::Real(std::string_view option, double fallback) const {
  if (!Has(option)) return fallback;
  StatusOr<double> value = ParseReal(Text(option));
  if (!value.ok()) return Invalid("{}: {}", option, Message(value.status()));
  return *value;
}

std::vector<std::vector<std::string>> CommandLine::All(std::string_view option) const {
  std::vector<std::vector<std::string>> all;
  for (const auto& [name, values] : given_) {
    if (name == option) all.push_back(values);
  }
  return all;
}

// Collects what was given from all sources, then applies it in order of precedence; keeps every problem it
// meets.
class CommandLineParser {
 public:
  CommandLineParser(const CommandSyntax& syntax, const GetEnv& env) : syntax_(syntax), env_(env) {}

  StatusOr<CommandLine> Parse(const std::vector<std::string>& args) {
    for (const std::string& word : args) {
      if (word == "--help" || word == "-h") {
        line_.help = true;
        return line_;
      }
    }
    ReadWords(args);
    if (syntax_.engine_flags) {
      ReadConfigFile();
      ReadEnvironment();
      Apply();
    }
    if (problems_.empty()) CheckPositional();
    if (problems_.empty() && syntax_.engine_flags) {
      if (const Status s = CheckOverrides(line_.server.overrides); !s.ok()) Problem(std::string(Message(s)));
      for (std::string& problem : IllegalCombinations(line_.server, nullptr))
        problems_.push_back(std::move(problem));
      ChooseRows();
      // Also when no backend reads it.
      if (const auto json = ReadJsonArgument("--hicache-storage-backend-extra-config",
                                             line_.server.hicache_storage_extra_config);
          !json.ok())
        Problem(std::string(Message(json.status())));
      const auto given = [&](const FlagSpec* flag) {
        return OnCommandLine(flag) || from_env_.contains(flag) || from_file_.contains(flag);
      };
      for (std::string& line : IdleFlagNotices(line_.server, given))
        line_.server.notices.push_back(std::move(line));
    }
    if (problems_.empty()) return std::move(line_);
    std::string text;
    for (const std::string& p : problems_) text += (text.empty() ? "" : "\n") + p;
    return Invalid("{}", text);
  }

 private:
  void Problem(std::string text) { problems_.push_back(std::move(text)); }

  // An unset side of the sparse kernels follows the set one.
  void ChooseRows() {
    ServerConfig& c = line_.server;
    StatusOr<DsaBackends> chosen =
        ChooseDsaBackends(c.dsa_prefill_backend, c.dsa_decode_backend, c.kv_cache_dtype, c.dtype);
    if (!chosen.ok()) return Problem(std::string(Message(chosen.status())));
    c.dsa_prefill_backend = std::move(chosen->prefill);
    c.dsa_decode_backend = std::move(chosen->decode);
  }

  // What a word is called when it is an option here, and how many values it takes.
  struct Known {
    std::string name;
    int values = 0;
    bool is_flag = false, optional_value = false;
  };
  std::optional<Known> Find(std::string_view name) const {
    for (const CommandOption& o : syntax_.options) {
      if (o.name == name) return Known{.name = o.name, .values = ValueCount(o.metavar)};
    }
    if (!syntax_.engine_flags) return std::nullopt;
    std::string_view base = name;
    if (const FlagSpec* flag = FindFlag(base)) {
      const int values = flag->type == FlagType::kSwitch ? 0 : flag->type == FlagType::kList ? -1 : 1;
      return Known{.name = std::string(flag->name()),
                   .values = values,
                   .is_flag = true,
                   .optional_value = flag->type == FlagType::kSwitch};
    }
    return std::nullopt;
  }

  // "--no-x" switches off the switch --x.
  const FlagSpec* Negated(std::string_view name) const {
    if (!syntax_.engine_flags || !name.starts_with("--no-")) return nullptr;
    const FlagSpec* flag = FindFlag("--" + std::string(name.substr(5)));
    return flag != nullptr && flag->type == FlagType::kSwitch && !flag->switch_sets ? flag : nullptr;
  }

  void ReadWords(const std::vector<std::string>& args) {
    bool only_positional = false;
    for (size_t i = 0; i < args.size(); ++i) {
      const std::string& word = args[i];
      if (word == "--" && !only_positional) {
        only_positional = true;
        continue;
      }
      if (only_positional || !word.starts_with("-") || word == "-" || ParseReal(word).ok()) {
        line_.positional.push_back(word);
        continue;
      }
      const std::string name(OptionName(word));
      const std::optional<Known> known = Find(name);
      if (!known) {
        if (const FlagSpec* flag = Negated(word)) {
          flags_.emplace_back(flag, std::vector<std::string>{"false"});
          continue;
        }
        UnknownOption(name);
        while (i + 1 < args.size() && !args[i + 1].starts_with("-")) ++i;  // its values say nothing to us
        continue;
      }
      std::vector<std::string> values;
      if (const size_t eq = word.find('='); eq != std::string::npos) {
        values.push_back(word.substr(eq + 1));
        if (known->values == 0 && !known->optional_value) {
          Problem(fmt::format("{} takes no value, got '{}'", name, values[0]));
          continue;
        }
        if (known->values > 1) {
          Problem(fmt::format("{} takes {} values, separated by spaces", name, known->values));
          continue;
        }
      } else if (known->values == 0) {
        if (known->optional_value && i + 1 < args.size() && ParseSwitchWord(args[i + 1]))
          values.push_back(args[++i]);
      } else {
        const size_t wanted = known->values < 0 ? args.size() : size_t(known->values);
        while (values.size() < wanted && i + 1 < args.size() && !LooksLikeFlag(args[i + 1]))
          values.push_back(args[++i]);
        if (values.empty() || (known->values > 1 && values.size() < wanted)) {
          Problem(fmt::format("{} needs {}", name,
                              known->values > 1 ? fmt::format("{} values", wanted) : "a value"));
          continue;
        }
      }
      if (known->is_flag) {
        flags_.emplace_back(FindFlag(name), std::move(values));
      } else {
        line_.given_.emplace_back(known->name, std::move(values));
      }
    }
  }

  void UnknownOption(const std::string& name) {
    std::vector<std::string> names;
    for (const CommandOption& o : syntax_.options) names.push_back(o.name);
    if (syntax_.engine_flags) {
      for (const FlagSpec& flag : FlagTable()) {
        for (std::string_view n : SplitWords(flag.names, ' ')) names.emplace_back(n);
      }
    }
    const std::string nearest = NearestName(name, names);
    Problem(nearest.empty() ? fmt::format("unknown flag {}", name)
                            : fmt::format("unknown flag {}; did you mean {}?", name, nearest));
  }

  bool OnCommandLine(const FlagSpec* flag) const {
    return std::any_of(flags_.begin(), flags_.end(), [&](const auto& f) { return f.first == flag; });
  }

  void ReadConfigFile() {
    const FlagSpec* config = FindFlag(kConfigFlag);
    std::string path;
    for (const auto& [flag, values] : flags_) {
      if (flag == config) path = values.front();
    }
    if (path.empty()) return;
    StatusOr<std::vector<ConfigEntry>> entries = ReadFlagFile(path);
    if (!entries.ok()) {
      Problem(std::string(Message(entries.status())));
      return;
    }
    for (ConfigEntry& entry : *entries) {
      const std::string name = FlagOfKey(entry.key);
      const FlagSpec* flag = FindFlag(name);
      const std::string place = fmt::format("{}:{}", path, entry.line);
      if (flag == nullptr || flag == config) {
        std::vector<std::string> keys;
        for (const FlagSpec& f : FlagTable()) keys.emplace_back(f.name());
        const std::string nearest = NearestName(name, keys);
        Problem(fmt::format("{}: unknown key '{}'{}", place, entry.key,
                            nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest.substr(2))));
        continue;
      }
      from_file_[flag] = {place, std::move(entry.values)};
    }
  }

  void ReadEnvironment() {
    for (const FlagSpec& flag : FlagTable()) {
      if (flag.env.empty()) continue;
      const char* value = env_(std::string(flag.env).c_str());
      if (value == nullptr || *value == '\0') continue;
      if (OnCommandLine(&flag)) {
        line_.server.notices.push_back(
            fmt::format("{}={} is ignored: {} is given", flag.env, value, flag.name()));
      } else {
        from_env_[&flag] = value;
        if (flag.status == FlagStatus::kNoEffect) continue;  // what becomes of it is said when it is applied
        line_.server.notices.push_back(fmt::format("{}={} is in force as {}", flag.env, value, flag.name()));
      }
    }
  }

  void Apply() {
    for (const auto& [flag, source] : from_file_) {
      if (OnCommandLine(flag) || from_env_.contains(flag)) continue;
      ApplyOne(*flag, source.second, fmt::format("{}: {}", source.first, flag->name().substr(2)));
    }
    for (const auto& [flag, value] : from_env_) ApplyOne(*flag, {value}, std::string(flag->env));
    for (const auto& [flag, values] : flags_) ApplyOne(*flag, values, std::string(flag->name()));
  }

  void ApplyOne(const FlagSpec& flag, const std::vector<std::string>& values, const std::string& source) {
    if (flag.name() == kConfigFlag) return;
    if (flag.status == FlagStatus::kRefused) {
      const bool idle =
          !values.empty() && std::ranges::count(SplitWords(flag.idle_values, '|'), values.front()) > 0;
      if (!idle) {
        Problem(fmt::format("{}{}{} is refused: {}", source, values.empty() ? "" : " ",
                            values.empty() ? "" : values.front(), flag.note));
      }
      return;
    }
    if (Status s = SetFlagValue(flag, values, &line_.server); !s.ok()) {
      Problem(fmt::format("{}: {}", source, Message(s)));
      return;
    }
    if (flag.status == FlagStatus::kNoEffect && noted_.insert(&flag).second) {
      const std::string value =
          flag.env == source ? fmt::format("={} ({})", values.front(), flag.name()) : "";
      line_.server.notices.push_back(fmt::format("{}{} has no effect here: {}", source, value, flag.note));
    }
  }

  void CheckPositional() {
    if (line_.positional.size() > syntax_.max_positional) {
      Problem(fmt::format("unexpected word '{}'; usage: {}", line_.positional[syntax_.max_positional],
                          syntax_.usage));
    } else if (line_.positional.size() < syntax_.min_positional) {
      Problem(fmt::format("something is missing; usage: {}", syntax_.usage));
    }
  }

  const CommandSyntax& syntax_;
  const GetEnv& env_;
  CommandLine line_;
  std::vector<std::pair<const FlagSpec*, std::vector<std::string>>> flags_;  // of the command line, in order
  std::map<const FlagSpec*, std::pair<std::string, std::vector<std::string>>> from_file_;
  std::map<const FlagSpec*, std::string> from_env_;
  std::set<const FlagSpec*> noted_;
  std::vector<std::string> problems_;
};

StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args, const CommandSyntax& syntax,
                                       const GetEnv& env) {
  return CommandLineParser(syntax, env).Parse(args);
}

StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args, const CommandSyntax& syntax) {
  return ParseCommandLine(args, syntax, [](const char* name) { return std::getenv(name); });
}

StatusOr<ServerConfig> ParseServerFlags(const std::vector<std::string>& args) {
  StatusOr<CommandLine> line =
      ParseCommandLine(args, CommandSyntax{.usage = "sluice serve [options]", .engine_flags = true});
  if (!line.ok()) return line.status();
  return std::move(line->server);
}

}  // namespace sluice
