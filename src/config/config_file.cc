#include "config/config_file.h"

#include <algorithm>
#include <fstream>
#include <iterator>

namespace sluice {
namespace {

std::string_view Trim(std::string_view s) {
  while (!s.empty() && (s.front() == ' ' || s.front() == '\t' || s.front() == '\r')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == ' ' || s.back() == '\t' || s.back() == '\r')) s.remove_suffix(1);
  return s;
}

// Reads one scalar from the front of `rest`: quoted text, or what comes before `stops` or a comment.
StatusOr<std::string> TakeScalar(std::string_view* rest, std::string_view stops) {
  *rest = Trim(*rest);
  if (!rest->empty() && (rest->front() == '"' || rest->front() == '\'')) {
    const char quote = rest->front();
    std::string value;
    size_t i = 1;
    for (; i < rest->size() && (*rest)[i] != quote; ++i) {
      if (quote == '"' && (*rest)[i] == '\\' && i + 1 < rest->size()) ++i;
      value += (*rest)[i];
    }
    if (i >= rest->size()) return Invalid("a {} is not closed", quote);
    rest->remove_prefix(i + 1);
    return value;
  }
  size_t end = 0;
  while (end < rest->size() && stops.find((*rest)[end]) == std::string_view::npos &&
         !((*rest)[end] == '#' && (end == 0 || (*rest)[end - 1] == ' ' || (*rest)[end - 1] == '\t'))) {
    ++end;
  }
  std::string value(Trim(rest->substr(0, end)));
  rest->remove_prefix(end);
  return value;
}

Status OnlyCommentLeft(std::string_view rest) {
  rest = Trim(rest);
  if (!rest.empty() && rest.front() != '#') return Invalid("'{}' follows the value", rest);
  return OkStatus();
}

StatusOr<std::vector<std::string>> ParseValues(std::string_view rest) {
  std::vector<std::string> values;
  rest = Trim(rest);
  if (rest.empty() || rest.front() == '#') return values;  // a list of "- item" lines may follow
  if (rest.front() == '{') return Invalid("a nested table is not a flag's value; put JSON in quotes");
  if (rest.front() != '[') {
    std::string value;
    ASSIGN_OR_RETURN(value, TakeScalar(&rest, ""));
    RETURN_IF_ERROR(OnlyCommentLeft(rest));
    values.push_back(std::move(value));
    return values;
  }
  rest.remove_prefix(1);
  while (true) {
    rest = Trim(rest);
    if (!rest.empty() && rest.front() == ']') break;
    std::string value;
    ASSIGN_OR_RETURN(value, TakeScalar(&rest, ",]"));
    values.push_back(std::move(value));
    rest = Trim(rest);
    if (rest.empty()) return Invalid("a [ is not closed on its line");
    if (rest.front() == ',') rest.remove_prefix(1);
  }
  rest.remove_prefix(1);
  RETURN_IF_ERROR(OnlyCommentLeft(rest));
  return values;
}

}  // namespace

StatusOr<std::vector<ConfigEntry>> ParseFlagFile(std::string_view text, std::string_view name) {
  std::vector<ConfigEntry> entries;
  int number = 0;
  bool open_list = false;  // the last entry had no value yet and takes "- item" lines
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = Trim(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (line.empty() || line.front() == '#' || line == "---") continue;
    if (line.front() == '[') {
      return Invalid("{}:{}: '{}' is a table; keys are flag names at the top level", name, number, line);
    }
    if (line.starts_with("- ") || line == "-") {
      if (!open_list) return Invalid("{}:{}: '{}' belongs to no key", name, number, line);
      std::string_view rest = line.substr(1);
      StatusOr<std::string> item = TakeScalar(&rest, "");
      if (!item.ok()) return Invalid("{}:{}: {}", name, number, Message(item.status()));
      entries.back().values.push_back(*item);
      continue;
    }
    const size_t separator = line.find_first_of(":=");
    if (separator == std::string_view::npos || separator == 0) {
      return Invalid("{}:{}: '{}' is not `key: value` or `key = value`", name, number, line);
    }
    std::string key(Trim(line.substr(0, separator)));
    if (key.size() >= 2 && key.front() == '"' && key.back() == '"') key = key.substr(1, key.size() - 2);
    if (std::ranges::count(entries, key, &ConfigEntry::key) > 0) {
      return Invalid("{}:{}: '{}' is given twice", name, number, key);
    }
    StatusOr<std::vector<std::string>> values = ParseValues(line.substr(separator + 1));
    if (!values.ok()) return Invalid("{}:{}: {}: {}", name, number, key, Message(values.status()));
    open_list = values->empty();
    entries.push_back({.key = std::move(key), .values = std::move(*values), .line = number});
  }
  for (const ConfigEntry& entry : entries) {
    if (entry.values.empty()) return Invalid("{}:{}: '{}' has no value", name, entry.line, entry.key);
  }
  return entries;
}

StatusOr<std::vector<ConfigEntry>> ReadFlagFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file.is_open() || file.bad()) return NotFound("--config {}: cannot read the file", path);
  return ParseFlagFile(text, path);
}

}  // namespace sluice
