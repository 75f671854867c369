#include "config/index_schedule.h"

#include <algorithm>
#include <optional>

namespace sluice {
namespace {

using Schedule = std::vector<bool>;

StatusOr<std::optional<Schedule>> FromTypes(const JsonFields& config, int64_t num_layers) {
  const Json* list = config.Find("indexer_types");
  if (list == nullptr) return std::optional<Schedule>();
  if (!list->is_array()) return config.WrongType("indexer_types", *list, "a list of \"full\" and \"shared\"");
  if (int64_t(list->size()) != num_layers) {
    return Invalid("indexer_types: {} entries for num_hidden_layers {}; give one entry a layer", list->size(),
                   num_layers);
  }
  Schedule s;
  for (const Json& v : *list) {
    if (v != "full" && v != "shared") {
      return Invalid("indexer_types[{}]: {} is neither \"full\" nor \"shared\"", s.size(), v.dump());
    }
    s.push_back(v == "full");
  }
  if (!s[0])
    return Invalid("indexer_types[0]: \"shared\", but layer 0 has no layer before it; it must be \"full\"");
  return std::optional(s);
}

StatusOr<std::optional<Schedule>> FromPattern(const JsonFields& config, int64_t num_layers) {
  if (!config.Has("index_topk_pattern")) return std::optional<Schedule>();
  ASSIGN_OR_RETURN(std::string pattern, config.String("index_topk_pattern", std::nullopt));
  if (int64_t(pattern.size()) != num_layers) {
    return Invalid(
        "index_topk_pattern: \"{}\" has {} characters for num_hidden_layers {}; give one F or S a layer",
        pattern, pattern.size(), num_layers);
  }
  Schedule s;
  for (char c : pattern) {
    if (c != 'F' && c != 'S') {
      return Invalid(
          "index_topk_pattern: \"{}\" has '{}' at layer {}; only F (computes) and S (reuses) are allowed",
          pattern, c, s.size());
    }
    s.push_back(c == 'F');
  }
  if (!s[0])
    return Invalid("index_topk_pattern: \"{}\" starts with S, but layer 0 has no layer before it", pattern);
  return std::optional(s);
}

StatusOr<std::optional<Schedule>> FromFrequency(const JsonFields& config, int64_t num_layers) {
  if (config.Has("index_skip_topk_offset")) {
    // Checked even without a frequency, so that a wrong value never passes in silence.
    RETURN_IF_ERROR(config.Int("index_skip_topk_offset", std::nullopt, 1).status());
  }
  if (!config.Has("index_topk_freq")) return std::optional<Schedule>();
  ASSIGN_OR_RETURN(const int64_t freq, config.Int("index_topk_freq", std::nullopt, 1));
  ASSIGN_OR_RETURN(const int64_t offset, config.Int("index_skip_topk_offset", 2, 1));
  Schedule s;
  for (int64_t i = 0; i < num_layers; ++i) s.push_back(std::max<int64_t>(i - offset + 1, 0) % freq == 0);
  return std::optional(s);
}

Status Disagree(std::string_view a, const Schedule& sa, std::string_view b, const Schedule& sb) {
  return Invalid("{} gives the index schedule {} but {} gives {}; make them agree or set one of them to null",
                 a, ScheduleString(sa), b, ScheduleString(sb));
}

}  // namespace

std::string ScheduleString(const std::vector<bool>& computes) {
  std::string s;
  for (bool full : computes) s.push_back(full ? 'F' : 'S');
  return s;
}

StatusOr<std::vector<bool>> ReadIndexSchedule(const JsonFields& config, int64_t num_layers) {
  ASSIGN_OR_RETURN(const std::optional<Schedule> types, FromTypes(config, num_layers));
  ASSIGN_OR_RETURN(const std::optional<Schedule> pattern, FromPattern(config, num_layers));
  ASSIGN_OR_RETURN(const std::optional<Schedule> freq, FromFrequency(config, num_layers));
  if (types && pattern && *types != *pattern)
    return Disagree("indexer_types", *types, "index_topk_pattern", *pattern);
  if (types && freq && *types != *freq) return Disagree("indexer_types", *types, "index_topk_freq", *freq);
  if (pattern && freq && *pattern != *freq)
    return Disagree("index_topk_pattern", *pattern, "index_topk_freq", *freq);
  if (types) return *types;
  if (pattern) return *pattern;
  if (freq) return *freq;
  return Schedule(size_t(num_layers), true);
}

}  // namespace sluice
