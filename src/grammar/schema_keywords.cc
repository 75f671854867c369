#include "grammar/schema_keywords.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace sluice {
namespace {

constexpr std::array<std::string_view, 15> kAnnotations = {
    "title", "description", "default",  "examples",  "example",    "$schema", "$id",   "$comment",
    "$defs", "definitions", "readOnly", "writeOnly", "deprecated", "$anchor", "strict"};
constexpr std::array<std::string_view, 29> kHeld = {"$ref",
                                                    "type",
                                                    "nullable",
                                                    "enum",
                                                    "const",
                                                    "allOf",
                                                    "anyOf",
                                                    "oneOf",
                                                    "minimum",
                                                    "maximum",
                                                    "exclusiveMinimum",
                                                    "exclusiveMaximum",
                                                    "multipleOf",
                                                    "minLength",
                                                    "maxLength",
                                                    "pattern",
                                                    "format",
                                                    "items",
                                                    "prefixItems",
                                                    "minItems",
                                                    "maxItems",
                                                    "uniqueItems",
                                                    "properties",
                                                    "required",
                                                    "additionalProperties",
                                                    "minProperties",
                                                    "maxProperties",
                                                    "propertyOrdering",
                                                    "x-order"};

struct Format {
  std::string_view name, pattern;
};
constexpr std::string_view kDate = "\\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\\d|3[01])";
constexpr std::string_view kTime =
    "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)";
constexpr std::array<Format, 8> kFormats = {{
    {"date", kDate},
    {"time", kTime},
    {"date-time", ""},  // both, joined below
    {"duration",
     "P(\\d+W|(\\d+Y(\\d+M(\\d+D)?)?|\\d+M(\\d+D)?|\\d+D)(T(\\d+H(\\d+M(\\d+S)?)?|\\d+M(\\d+S)?|\\d+S))?|"
     "T(\\d+H(\\d+M(\\d+S)?)?|\\d+M(\\d+S)?|\\d+S))"},
    {"uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"},
    {"ipv4", "((25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"},
    {"email",
     "[A-Za-z0-9_%+-]+(\\.[A-Za-z0-9_%+-]+)*@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\\.)+[A-Za-z]{2,"
     "24}"},
    {"uri", "[a-z][a-z0-9+.-]{0,20}:(//)?[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+"},
}};

}  // namespace

bool IsAnnotation(std::string_view keyword) {
  return std::find(kAnnotations.begin(), kAnnotations.end(), keyword) != kAnnotations.end() ||
         keyword.starts_with("x-");
}

Status CheckSchemaKeywords(const OrderedJson& schema, const std::string& at) {
  for (const auto& [key, unused] : schema.items()) {
    if (IsAnnotation(key) || std::find(kHeld.begin(), kHeld.end(), key) != kHeld.end()) continue;
    return Invalid("{}: the keyword {} is not supported; supported are {}", at, key,
                   SupportedSchemaKeywords());
  }
  return OkStatus();
}

std::string SupportedSchemaKeywords() {
  std::string out;
  for (const std::string_view name : kHeld) {
    if (name == "propertyOrdering" || name.starts_with("x-")) continue;
    out += (out.empty() ? "" : ", ") + std::string(name);
  }
  return out;
}

std::set<std::string> SchemaTypes(const OrderedJson& schema) {
  std::set<std::string> types;
  if (!schema.is_object()) return types;
  const auto it = schema.find("type");
  if (it != schema.end() && it->is_string()) types.insert(it->get<std::string>());
  if (it != schema.end() && it->is_array()) {
    for (const auto& type : *it) {
      if (type.is_string()) types.insert(type.get<std::string>());
    }
  }
  const auto has = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return schema.contains(name); });
  };
  if (types.empty()) {
    if (has({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}))
      types.insert("object");
    if (has({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"})) types.insert("array");
    if (has({"minLength", "maxLength", "pattern", "format"})) types.insert("string");
    if (has({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}))
      types.insert("number");
  }
  if (!types.empty() && schema.contains("nullable") && schema["nullable"] == true) types.insert("null");
  return types;
}

bool IsOfType(const OrderedJson& value, const std::set<std::string>& types) {
  if (value.is_string()) return types.contains("string");
  if (value.is_boolean()) return types.contains("boolean");
  if (value.is_null()) return types.contains("null");
  if (value.is_array()) return types.contains("array");
  if (value.is_object()) return types.contains("object");
  if (types.contains("number")) return true;
  return types.contains("integer") &&
         (value.is_number_integer() || value.get<double>() == std::floor(value.get<double>()));
}

StatusOr<std::string> FormatPattern(const std::string& format, const std::string& at) {
  std::string names;
  for (const Format& known : kFormats) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
    if (known.name != format) continue;
    if (format == "date-time") return fmt::format("^{}T{}$", kDate, kTime);
    // One group, so that both anchors belong to all of it.
    return fmt::format("^(?:{})$", known.pattern);
  }
  return Invalid("{}.format: {} is not supported; supported are {}", at, format, names);
}

}  // namespace sluice
