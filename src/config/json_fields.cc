#include "config/json_fields.h"

#include <cmath>

#include "base/file_text.h"

namespace sluice {

StatusOr<Json> ParseJsonObject(std::string_view text, std::string_view what) {
  const std::string at = what.empty() ? "" : fmt::format("{}: ", what);
  // These files are small and flat; refuse deep nesting before a recursive parser sees it.
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > 64) return Invalid("{}nested deeper than 64 levels at byte {}", at, i);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  Json json;
  try {
    json = Json::parse(text);
  } catch (const nlohmann::json::exception& e) {
    return Invalid("{}not valid JSON: {}", at, JsonComplaint(e.what()));
  }
  if (!json.is_object()) return Invalid("{}holds a JSON {}, expected an object", at, json.type_name());
  return json;
}

const Json* JsonFields::Find(std::string_view key) const {
  const auto it = object_.find(std::string(key));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

Status JsonFields::Missing(std::string_view key) const {
  return Invalid("{}{}: missing; this architecture needs it", prefix_, key);
}

Status JsonFields::WrongType(std::string_view key, const Json& value, std::string_view wanted) const {
  std::string shown = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (shown.size() > 80) shown = shown.substr(0, 77) + "...";
  return Invalid("{}{}: {} is not {}", prefix_, key, shown, wanted);
}

StatusOr<int64_t> JsonFields::Int(std::string_view key, std::optional<int64_t> fallback, int64_t min,
                                  int64_t max) const {
  const Json* v = Find(key);
  if (v == nullptr) {
    if (fallback) return *fallback;
    return Missing(key);
  }
  std::string wanted = max == kNoMax ? fmt::format("a whole number >= {}", min)
                                     : fmt::format("a whole number from {} to {}", min, max);
  if (!v->is_number_integer()) return WrongType(key, *v, wanted);
  if (v->is_number_unsigned() && v->get<uint64_t>() > uint64_t(max)) return WrongType(key, *v, wanted);
  const int64_t n = v->get<int64_t>();
  if (n < min || n > max) return WrongType(key, *v, wanted);
  return n;
}

StatusOr<double> JsonFields::Real(std::string_view key, std::optional<double> fallback) const {
  const Json* v = Find(key);
  if (v == nullptr) {
    if (fallback) return *fallback;
    return Missing(key);
  }
  if (!v->is_number() || !std::isfinite(v->get<double>())) return WrongType(key, *v, "a number");
  return v->get<double>();
}

StatusOr<bool> JsonFields::Bool(std::string_view key, std::optional<bool> fallback) const {
  const Json* v = Find(key);
  if (v == nullptr) {
    if (fallback) return *fallback;
    return Missing(key);
  }
  if (!v->is_boolean()) return WrongType(key, *v, "true or false");
  return v->get<bool>();
}

StatusOr<std::string> JsonFields::String(std::string_view key, std::optional<std::string> fallback) const {
  const Json* v = Find(key);
  if (v == nullptr) {
    if (fallback) return *fallback;
    return Missing(key);
  }
  if (!v->is_string()) return WrongType(key, *v, "a string");
  return v->get<std::string>();
}

}  // namespace sluice
