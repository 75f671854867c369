// --help and docs/flags.md, both from the flag table and the legality table.
#include <algorithm>

#include "config/flag_values.h"
#include "config/flags.h"
#include "config/idle_flags.h"
#include "config/legality.h"

namespace sluice {
namespace {

constexpr size_t kHelpColumn = 30, kHelpWidth = 110;

// `text` in lines that end before kHelpWidth, the first one continuing at `column`.
std::string Wrapped(std::string_view text, size_t column) {
  std::string out;
  size_t at = column;
  for (std::string_view word : SplitWords(text, ' ')) {
    if (at + word.size() + 1 > kHelpWidth) {
      out += "\n" + std::string(kHelpColumn, ' ');
      at = kHelpColumn;
    } else if (!out.empty()) {
      out += ' ';
      ++at;
    }
    out += word;
    at += word.size();
  }
  return out;
}

std::string HelpLine(std::string_view left, std::string_view right) {
  std::string line = "  " + std::string(left);
  if (line.size() + 2 > kHelpColumn) {
    line += "\n" + std::string(kHelpColumn, ' ');
  } else {
    line += std::string(kHelpColumn - line.size(), ' ');
  }
  return line + Wrapped(right, kHelpColumn) + "\n";
}

std::string ValueForm(const FlagSpec& flag) {
  if (flag.type == FlagType::kSwitch) return "";
  if (!flag.choices.empty()) return std::string(flag.choices);
  return std::string(flag.metavar) + (flag.type == FlagType::kList ? "..." : "");
}

std::string Aliases(const FlagSpec& flag) {
  std::string text;
  for (std::string_view name : SplitWords(flag.names, ' ')) {
    if (name != flag.name()) text += (text.empty() ? "" : ", ") + std::string(name);
  }
  return text;
}

std::string DefaultText(const FlagSpec& flag) {
  const std::string value = FlagValueText(flag, ServerConfig{});
  if (flag.type == FlagType::kSwitch) return value == "true" ? "on" : "";
  return value;
}

std::string GroupHelp(FlagGroup group) {
  std::string text;
  for (const FlagSpec& flag : FlagTable()) {
    if (flag.group != group || flag.status != FlagStatus::kWorks) continue;
    std::string right(flag.help);
    if (const std::string value = DefaultText(flag); !value.empty()) right += " [" + value + "]";
    if (const std::string aliases = Aliases(flag); !aliases.empty()) right += " Also: " + aliases + ".";
    if (!flag.env.empty()) right += " Environment: " + std::string(flag.env) + ".";
    text +=
        HelpLine(std::string(flag.name()) + (ValueForm(flag).empty() ? "" : " " + ValueForm(flag)), right);
  }
  return text.empty() ? "" : "\n" + std::string(GroupTitle(group)) + ":\n" + text;
}

std::string StatusHelp(FlagStatus status, std::string_view title) {
  std::string text;
  for (const FlagSpec& flag : FlagTable()) {
    if (flag.status != status) continue;
    const std::string line = std::string(flag.name()) + ": " + std::string(flag.note);
    text += "  " + Wrapped(line, 2) + "\n";
  }
  return "\n" + std::string(title) + ":\n" + text;
}

// "|" ends a cell of a markdown table.
std::string Cell(std::string_view text) {
  std::string out;
  for (char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

constexpr FlagGroup kGroups[] = {
    FlagGroup::kModel, FlagGroup::kHttp,     FlagGroup::kMemory,         FlagGroup::kSparse,
    FlagGroup::kTiers, FlagGroup::kParallel, FlagGroup::kDisaggregation, FlagGroup::kSpeculation,
    FlagGroup::kMoe,   FlagGroup::kKernels,  FlagGroup::kDebug,          FlagGroup::kParsers,
};

}  // namespace

std::string_view GroupTitle(FlagGroup group) {
  switch (group) {
    case FlagGroup::kModel:
      return "Model and numbers";
    case FlagGroup::kHttp:
      return "HTTP";
    case FlagGroup::kMemory:
      return "Memory and scheduling";
    case FlagGroup::kSparse:
      return "Sparse attention";
    case FlagGroup::kTiers:
      return "Host and storage tiers";
    case FlagGroup::kParallel:
      return "Ranks";
    case FlagGroup::kDisaggregation:
      return "Disaggregation";
    case FlagGroup::kSpeculation:
      return "Speculation";
    case FlagGroup::kMoe:
      return "Mixture of experts";
    case FlagGroup::kKernels:
      return "Kernels and GPUs";
    case FlagGroup::kDebug:
      return "Metrics and debugging";
    case FlagGroup::kParsers:
      return "Parsers";
  }
  return "";
}

std::string HelpText(const CommandSyntax& syntax) {
  std::string text = "usage: " + syntax.usage + "\n";
  if (!syntax.summary.empty()) text += "\n" + syntax.summary + "\n";
  if (!syntax.options.empty()) {
    text += "\nOptions:\n";
    for (const CommandOption& o : syntax.options)
      text += HelpLine(o.name + (o.metavar.empty() ? "" : " " + o.metavar), o.help);
  }
  if (!syntax.engine_flags) return text;
  for (FlagGroup group : kGroups) text += GroupHelp(group);
  text += StatusHelp(FlagStatus::kNoEffect, "Accepted without effect here");
  text += StatusHelp(FlagStatus::kRefused, "Refused");
  text +=
      "\nValues follow as `--flag value` or `--flag=value`; a switch may be turned off with --no-flag or "
      "--flag=false.\n"
      "Command line > environment > --config file > default.\n";
  return text;
}

std::string FlagsMarkdown() {
  std::string text =
      "# Flags\n\n"
      "Generated from the flag table (`src/config/flag_table.cc`), the legality table "
      "(`src/config/legality.cc`) "
      "and the table\nof flags that need another (`src/config/idle_flags.cc`);\n"
      "`SLUICE_UPDATE_DOCS=1 build/release/src/config/config_test` writes it anew and a test keeps it "
      "current.\n\n"
      "Names are SGLang's where it has one. Values follow as `--flag value` or `--flag=value`, lists are "
      "separated by spaces,\n"
      "a switch is turned off with `--no-flag` or `--flag=false`. Precedence: command line, environment, "
      "`--config` file,\n"
      "default. An unknown flag ends the program with exit code 2.\n";
  for (FlagGroup group : kGroups) {
    text += "\n## " + std::string(GroupTitle(group)) +
            "\n\n| flag | values | default | status | meaning |\n| --- | --- | --- | --- | --- |\n";
    for (const FlagSpec& flag : FlagTable()) {
      if (flag.group != group) continue;
      std::string names = "`" + std::string(flag.name()) + "`";
      for (std::string_view name : SplitWords(flag.names, ' ')) {
        if (name != flag.name()) names += " `" + std::string(name) + "`";
      }
      std::string meaning(flag.help);
      std::string status = "works";
      if (flag.status == FlagStatus::kNoEffect) {
        status = "no effect";
        meaning += " Here: " + std::string(flag.note) + ".";
      } else if (flag.status == FlagStatus::kRefused) {
        status = "refused";
        meaning += " Refused: " + std::string(flag.note) + ".";
        if (!flag.idle_values.empty())
          meaning += " The value " + std::string(flag.idle_values) + " is taken.";
      }
      if (!flag.env.empty()) meaning += " Environment: `" + std::string(flag.env) + "`.";
      text += fmt::format("| {} | {} | {} | {} | {} |\n", names, Cell(ValueForm(flag)),
                          Cell(DefaultText(flag)), status, Cell(meaning));
    }
  }
  text += "\n## Combinations that are refused\n\n| combination | why | what works |\n| --- | --- | --- |\n";
  for (const LegalityRow& row : LegalityTable()) {
    text += fmt::format("| {} | {} | {} |\n", Cell(row.combination), Cell(row.reason), Cell(row.remedy));
  }
  text +=
      "\n## Flags that need another\n\nGiven all the same, each gets a notice line at start.\n\n"
      "| flag | has no effect | why |\n| --- | --- | --- |\n";
  for (const IdleFlagRow& row : IdleFlagTable()) {
    text += fmt::format("| `{}` | {} | {} |\n", row.flag, Cell(std::string(row.when)),
                        Cell(std::string(row.why)));
  }
  return text;
}

}  // namespace sluice
