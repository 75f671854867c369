// The fields that bind an answer to a form, under all the names that clients use for them.
#include <string>

#include "api/parse_options.h"

namespace sluice::api_internal {

namespace dom = simdjson::dom;
using Kind = ConstraintSpec::Kind;

namespace {

void Set(FieldReader& f, Kind kind, std::string field, std::string text, GenerationOptions* out) {
  if (out->constraint.kind != Kind::kNone) {
    return f.Fail(field, fmt::format("{} binds the answer already; send one of them", out->constraint.field));
  }
  out->constraint.kind = kind;
  out->constraint.text = std::move(text);
  out->constraint.field = f.path() + field;
}

// A schema as an object, or as JSON text.
void SetSchema(FieldReader& f, const std::string& field, JsonElement value, GenerationOptions* out) {
  if (std::string_view text; value.get(text) == simdjson::SUCCESS) {
    Set(f, Kind::kJsonSchema, field, std::string(text), out);
  } else if (value.is_object() || value.is_bool()) {
    Set(f, Kind::kJsonSchema, field, simdjson::minify(value), out);
  } else {
    f.Fail(field, fmt::format("{} is not a JSON schema", Shown(value)));
  }
}

void SetText(FieldReader& f, Kind kind, const std::string& field, JsonElement value, GenerationOptions* out) {
  std::string_view text;
  if (value.get(text) != simdjson::SUCCESS || text.empty()) {
    return f.Fail(field, fmt::format("{} is not a text", Shown(value)));
  }
  Set(f, kind, field, std::string(text), out);
}

// One of several texts, as a regular expression.
void SetChoice(FieldReader& f, const std::string& field, JsonElement value, GenerationOptions* out) {
  dom::array list;
  if (value.get(list) != simdjson::SUCCESS || list.size() == 0) {
    return f.Fail(field, fmt::format("{} is not a list of texts", Shown(value)));
  }
  std::string pattern;
  for (const JsonElement entry : list) {
    std::string_view text;
    if (entry.get(text) != simdjson::SUCCESS)
      return f.Fail(field, fmt::format("{} is not a text", Shown(entry)));
    if (!pattern.empty()) pattern += '|';
    for (const char c : text) {
      if (std::string_view("\\^$.|?*+()[]{}").find(c) != std::string_view::npos) pattern += '\\';
      pattern += c;
    }
  }
  Set(f, Kind::kRegex, field, std::move(pattern), out);
}

void ReadResponseFormat(FieldReader& f, JsonElement format, GenerationOptions* out) {
  std::string_view type;
  if (!format.is_object()) {
    return f.Fail(
        "response_format",
        fmt::format("{} is not an object; send {{\"type\": \"json_object\"}} or the like", Shown(format)));
  }
  if (JsonElement value; format.at_key("type").get(value) != simdjson::SUCCESS) {
    return f.Fail("response_format.type", "missing; send text, json_object or json_schema");
  } else if (value.get(type) != simdjson::SUCCESS) {
    return f.Fail("response_format.type",
                  fmt::format("{} is not supported; send text, json_object or json_schema", Shown(value)),
                  "unsupported");
  }
  if (type == "text") return;
  if (type == "json_object") return Set(f, Kind::kJsonObject, "response_format", "", out);
  if (type != "json_schema") {
    return f.Fail("response_format.type",
                  fmt::format("{} is not supported; send text, json_object or json_schema", Quoted(type)),
                  "unsupported");
  }
  auto schema = format.at_key("json_schema").at_key("schema");
  if (schema.error() != simdjson::SUCCESS) {
    return f.Fail("response_format.json_schema.schema", "missing; send the JSON schema there");
  }
  SetSchema(f, "response_format.json_schema.schema", schema.value(), out);
}

}  // namespace

void ReadConstraint(FieldReader& f, GenerationOptions* out) {
  if (const auto value = f.Find("response_format")) ReadResponseFormat(f, *value, out);
  for (const char* name : {"json_schema", "guided_json"}) {
    if (const auto value = f.Find(name)) SetSchema(f, name, *value, out);
  }
  for (const char* name : {"regex", "guided_regex"}) {
    if (const auto value = f.Find(name)) SetText(f, Kind::kRegex, name, *value, out);
  }
  for (const char* name : {"ebnf", "guided_grammar"}) {
    if (const auto value = f.Find(name)) SetText(f, Kind::kEbnf, name, *value, out);
  }
  if (const auto value = f.Find("guided_choice")) SetChoice(f, "guided_choice", *value, out);
  if (const auto value = f.Find("structured_outputs")) {
    dom::object object;
    if (value->get(object) != simdjson::SUCCESS) {
      return f.Fail("structured_outputs", fmt::format("{} is not an object", Shown(*value)));
    }
    for (const auto [key, inner] : object) {
      const std::string field = "structured_outputs." + std::string(key.substr(0, 32));
      if (inner.is_null()) continue;
      if (key == "json") {
        SetSchema(f, field, inner, out);
      } else if (key == "regex") {
        SetText(f, Kind::kRegex, field, inner, out);
      } else if (key == "grammar") {
        SetText(f, Kind::kEbnf, field, inner, out);
      } else if (key == "choice") {
        SetChoice(f, field, inner, out);
      } else if (key == "json_object" && inner.is_bool()) {
        if (bool(inner)) Set(f, Kind::kJsonObject, field, "", out);
      } else {
        f.Fail(field, "not supported; send json, json_object, regex, choice or grammar", "unsupported");
      }
    }
  }
  f.Bool("whitespace", &out->constraint.whitespace);
}

}  // namespace sluice::api_internal
