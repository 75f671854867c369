#include "config/flag_values.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace sluice {
namespace {

// A choice that has no text of its own: "none" on the command line is the empty string in ServerConfig.
constexpr std::string_view kNone = "none";

std::string Choices(const FlagSpec& flag) {
  std::string text;
  for (std::string_view c : SplitWords(flag.choices, '|'))
    text += (text.empty() ? "" : ", ") + std::string(c);
  return text;
}

StatusOr<std::string> CheckedText(const FlagSpec& flag, std::string_view value) {
  for (std::string_view pair : SplitWords(flag.synonyms, ' ')) {
    const size_t eq = pair.find('=');
    if (pair.substr(0, eq) == value) value = pair.substr(eq + 1);
  }
  if (flag.choices.empty()) return std::string(value);
  const auto choices = SplitWords(flag.choices, '|');
  if (value.empty()) value = kNone;
  if (std::ranges::count(choices, value) == 0) {
    return Invalid("'{}' is not supported; choose one of {}", value, Choices(flag));
  }
  return std::string(value == kNone ? "" : value);
}

template <typename T>
Status CheckRange(const FlagSpec& flag, T value) {
  if (double(value) < flag.min) return Invalid("{} is too small; at least {}", value, flag.min);
  if (double(value) > flag.max)
    return Invalid(
        "{} is too large; at most {}", value,
        int64_t(flag.max) == flag.max ? fmt::format("{}", int64_t(flag.max)) : fmt::format("{}", flag.max));
  return OkStatus();
}

void Store(const FlagTarget& target, ServerConfig* config, auto value) {
  using Value = decltype(value);
  if (auto* member = std::get_if<Value ServerConfig::*>(&target)) config->** member = std::move(value);
  if constexpr (std::is_same_v<Value, std::string> || std::is_same_v<Value, int64_t>) {
    if (auto* member = std::get_if<Value ModelOverrides::*>(&target))
      config->overrides.** member = std::move(value);
  }
}

Status SetSwitch(const FlagSpec& flag, const std::vector<std::string>& values, ServerConfig* config) {
  bool on = true;
  if (!values.empty()) {
    std::optional<bool> parsed = ParseSwitchWord(values.front());
    if (values.front() == "1") parsed = true;
    if (values.front() == "0") parsed = false;
    if (!parsed) return Invalid("'{}' is not a switch value; use true or false", values.front());
    on = *parsed;
  }
  if (!flag.switch_sets) {
    Store(flag.target, config, on);
  } else if (on) {
    Store(flag.target, config, *flag.switch_sets);
  }
  return OkStatus();
}

}  // namespace

std::vector<std::string_view> SplitWords(std::string_view text, char separator) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (end > 0) words.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

std::optional<bool> ParseSwitchWord(std::string_view word) {
  for (std::string_view w : {"true", "on", "yes", "True"}) {
    if (word == w) return true;
  }
  for (std::string_view w : {"false", "off", "no", "False"}) {
    if (word == w) return false;
  }
  return std::nullopt;
}

StatusOr<int64_t> ParseInt(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc::result_out_of_range) return Invalid("'{}' does not fit 64 bits", text);
  if (error != std::errc() || stop != end) return Invalid("'{}' is not a whole number", text);
  return value;
}

StatusOr<double> ParseReal(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !std::isfinite(value))
    return Invalid("'{}' is not a number", text);
  return value;
}

Status SetFlagValue(const FlagSpec& flag, const std::vector<std::string>& values, ServerConfig* config) {
  if (flag.type == FlagType::kSwitch) return SetSwitch(flag, values, config);
  if (flag.type != FlagType::kList && values.size() > 1)
    return Invalid("takes one value, got {}", values.size());
  if (values.empty()) return Invalid("needs a value");
  for (const std::string& value : values) {
    switch (flag.type) {
      case FlagType::kInt: {
        int64_t number = 0;
        ASSIGN_OR_RETURN(number, ParseInt(value));
        RETURN_IF_ERROR(CheckRange(flag, number));
        Store(flag.target, config, number);
        break;
      }
      case FlagType::kReal: {
        double number = 0;
        ASSIGN_OR_RETURN(number, ParseReal(value));
        RETURN_IF_ERROR(CheckRange(flag, number));
        Store(flag.target, config, number);
        break;
      }
      default: {
        std::string text;
        ASSIGN_OR_RETURN(text, CheckedText(flag, value));
        Store(flag.target, config, std::move(text));
        break;
      }
    }
  }
  return OkStatus();
}

std::string FlagValueText(const FlagSpec& flag, const ServerConfig& config) {
  struct Printer {
    const ServerConfig& config;
    const FlagSpec& flag;
    std::string Text(const std::string& v) const {
      return v.empty() && !flag.choices.empty() ? std::string(kNone) : v;
    }
    std::string operator()(std::monostate) const { return ""; }
    std::string operator()(std::string ServerConfig::*m) const { return Text(config.*m); }
    std::string operator()(int64_t ServerConfig::*m) const { return std::to_string(config.*m); }
    std::string operator()(double ServerConfig::*m) const { return fmt::format("{}", config.*m); }
    std::string operator()(bool ServerConfig::*m) const { return config.*m ? "true" : "false"; }
    std::string operator()(std::string ModelOverrides::*m) const { return Text(config.overrides.*m); }
    std::string operator()(int64_t ModelOverrides::*m) const { return std::to_string(config.overrides.*m); }
  };
  if (flag.switch_sets) return "";
  return std::visit(Printer{config, flag}, flag.target);
}

}  // namespace sluice
