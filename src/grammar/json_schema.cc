// JSON Schema (2020-12, the part that can be held while text grows) to expressions. What is generated is
// valid under the schema; not everything that is valid can be generated (properties come in the order of
// their declaration, and a schema that allows further properties by silence gets none).
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "grammar/json_text.h"
#include "grammar/schema_keywords.h"
#include "grammar/syntax.h"
#include "text/utf8.h"

namespace sluice {
namespace {

using Json = OrderedJson;

constexpr int kSchemaDeepMax = 64;
constexpr size_t kSchemasMax = 20000;

class SchemaCompiler {
 public:
  SchemaCompiler(const Json& root, bool whitespace, GrammarBuilder* builder)
      : root_(root), builder_(builder), text_(whitespace, builder) {}

  StatusOr<ExprPtr> Compile(const Json& schema, const std::string& at, int deep) {
    if (schema.is_boolean()) return schema.get<bool>() ? text_.Value() : Never();
    if (!schema.is_object()) return Invalid("{}: a schema is an object, true or false", at);
    if (deep > kSchemaDeepMax) return Invalid("{}: schemas are nested more than {} deep", at, kSchemaDeepMax);
    if (++schemas_ > kSchemasMax) return Invalid("{}: the schema has more than {} parts", at, kSchemasMax);
    RETURN_IF_ERROR(CheckSchemaKeywords(schema, at));
    if (const auto ref = schema.find("$ref"); ref != schema.end()) return Reference(schema, *ref, at);
    for (const char* combiner : {"allOf", "anyOf", "oneOf"}) {
      if (schema.contains(combiner)) return Combined(schema, combiner, at, deep);
    }
    if (schema.contains("const") || schema.contains("enum")) return Values(schema, at);
    return Types(schema, at, deep);
  }

 private:
  // ---- references and combinations ----

  StatusOr<const Json*> Resolve(const std::string& ref, const std::string& at) const {
    if (ref == "#") return &root_;
    if (!ref.starts_with("#/")) {
      return Invalid("{}.$ref: {} is not supported; only references within the schema (#/...) are", at, ref);
    }
    const Json* here = &root_;
    size_t begin = 2;
    while (begin <= ref.size()) {
      const size_t end = std::min(ref.find('/', begin), ref.size());
      std::string key;
      for (size_t i = begin; i < end; ++i) {
        if (ref[i] == '~' && i + 1 < end) {
          key += ref[++i] == '1' ? '/' : '~';
        } else {
          key += ref[i];
        }
      }
      const Json* next = nullptr;
      if (here->is_object()) {
        if (const auto it = here->find(key); it != here->end()) next = &*it;
      } else if (here->is_array() && !key.empty() && key.size() < 9 &&
                 key.find_first_not_of("0123456789") == std::string::npos &&
                 size_t(std::stol(key)) < here->size()) {
        next = &(*here)[size_t(std::stol(key))];
      }
      if (next == nullptr) return Invalid("{}.$ref: {} leads nowhere", at, ref);
      here = next;
      begin = end + 1;
    }
    return here;
  }

  StatusOr<ExprPtr> Reference(const Json& schema, const Json& ref, const std::string& at) {
    if (!ref.is_string()) return Invalid("{}.$ref: must be a string", at);
    for (const auto& [key, value] : schema.items()) {
      if (key != "$ref" && !IsAnnotation(key)) {
        return Invalid("{}: {} beside $ref is not supported; put both into allOf", at, key);
      }
    }
    const std::string& name = ref.get_ref<const std::string&>();
    if (const auto it = references_.find(name); it != references_.end()) return RuleExpr(it->second);
    ASSIGN_OR_RETURN(const Json* target, Resolve(name, at));
    const int32_t rule = builder_->NewRule("$ref " + name);
    references_[name] = rule;
    ASSIGN_OR_RETURN(ExprPtr body, Compile(*target, name, 0));
    builder_->Define(rule, std::move(body));
    return RuleExpr(rule);
  }

  StatusOr<ExprPtr> Combined(const Json& schema, const std::string& combiner, const std::string& at,
                             int deep) {
    const Json& list = schema[combiner];
    if (!list.is_array() || list.empty()) return Invalid("{}.{}: must be a list of schemas", at, combiner);
    Json rest = Json::object();
    bool more = false;
    for (const auto& [key, value] : schema.items()) {
      if (key == combiner) continue;
      rest[key] = value;
      more |= !IsAnnotation(key);
    }
    if (combiner == "allOf") {
      Json all = rest;
      for (size_t i = 0; i < list.size(); ++i) {
        ASSIGN_OR_RETURN(all, Merged(all, list[i], fmt::format("{}.allOf[{}]", at, i)));
      }
      return Compile(all, at, deep + 1);
    }
    std::vector<Json> branches;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string here = fmt::format("{}.{}[{}]", at, combiner, i);
      if (!more) {
        branches.push_back(list[i]);
        continue;
      }
      ASSIGN_OR_RETURN(Json merged, Merged(rest, list[i], here));
      branches.push_back(std::move(merged));
    }
    if (combiner == "oneOf") RETURN_IF_ERROR(CheckDisjoint(branches, at));
    std::vector<ExprPtr> parts;
    for (size_t i = 0; i < branches.size(); ++i) {
      ASSIGN_OR_RETURN(ExprPtr part,
                       Compile(branches[i], fmt::format("{}.{}[{}]", at, combiner, i), deep + 1));
      parts.push_back(std::move(part));
    }
    return Alt(std::move(parts));
  }

  StatusOr<Json> Resolved(Json schema, const std::string& at) const {
    for (int i = 0; i < 32 && schema.is_object() && schema.contains("$ref") && schema["$ref"].is_string();
         ++i) {
      ASSIGN_OR_RETURN(const Json* target, Resolve(schema["$ref"].get<std::string>(), at));
      Json next = *target;
      if (!next.is_object()) return next;
      for (const auto& [key, value] : schema.items()) {
        if (key != "$ref" && !IsAnnotation(key))
          return Invalid("{}: {} beside $ref is not supported", at, key);
      }
      schema = std::move(next);
    }
    return schema;
  }

  // What both say. Keywords that both have must be equal, but for those that can be joined.
  StatusOr<Json> Merged(const Json& a, const Json& raw, const std::string& at) const {
    ASSIGN_OR_RETURN(const Json b, Resolved(raw, at));
    if (b.is_boolean()) return b.get<bool>() ? a : Json(false);
    if (a.is_boolean()) return a.get<bool>() ? b : Json(false);
    if (!b.is_object()) return Invalid("{}: a schema is an object, true or false", at);
    const auto closed = [](const Json& s) {
      return s.contains("additionalProperties") && s["additionalProperties"] != true;
    };
    Json out = a;
    for (const auto& [key, value] : b.items()) {
      if (!out.contains(key)) {
        out[key] = value;
      } else if (IsAnnotation(key) || out[key] == value) {
        continue;
      } else if (key == "properties" && value.is_object() && out[key].is_object()) {
        for (const auto& [name, property] : value.items()) {
          if (!out[key].contains(name)) {
            out[key][name] = property;
          } else if (out[key][name] != property) {
            out[key][name] = Json{{"allOf", Json::array({out[key][name], property})}};
          }
        }
      } else if (key == "required" && value.is_array() && out[key].is_array()) {
        for (const Json& name : value) {
          if (std::find(out[key].begin(), out[key].end(), name) == out[key].end()) out[key].push_back(name);
        }
      } else if (key == "minimum" || key == "minLength" || key == "minItems" || key == "exclusiveMinimum") {
        if (out[key] < value) out[key] = value;
      } else if (key == "maximum" || key == "maxLength" || key == "maxItems" || key == "exclusiveMaximum") {
        if (value < out[key]) out[key] = value;
      } else if (key == "enum" && value.is_array() && out[key].is_array()) {
        Json both = Json::array();
        for (const Json& v : value) {
          if (std::find(out[key].begin(), out[key].end(), v) != out[key].end()) both.push_back(v);
        }
        out[key] = both;
      } else {
        return Invalid(
            "{}: {} stands in two schemas that must both hold, with different values; join them by hand", at,
            key);
      }
    }
    if (closed(a) != closed(b) && (a.contains("properties") && b.contains("properties"))) {
      return Invalid("{}: additionalProperties closes only one of two joined objects; close the joined one",
                     at);
    }
    return out;
  }

  // oneOf is offered where no value can match two branches.
  Status CheckDisjoint(const std::vector<Json>& raw, const std::string& at) const {
    std::vector<Json> all;
    for (const Json& r : raw) {
      ASSIGN_OR_RETURN(Json b, Resolved(r, at));
      all.push_back(std::move(b));
    }
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (!Disjoint(all[i], all[j], at)) {
          return Invalid(
              "{}.oneOf: a value could match branch {} and branch {}; tell them apart by type or by a "
              "required property with const, or use anyOf",
              at, j, i);
        }
      }
    }
    return OkStatus();
  }
  bool Disjoint(const Json& a, const Json& b, const std::string& at) const {
    if (!a.is_object() || !b.is_object()) return false;
    const auto values = [](const Json& s) {
      std::optional<Json> out;
      if (s.contains("const")) out = Json::array({s["const"]});
      if (s.contains("enum") && s["enum"].is_array()) out = s["enum"];
      return out;
    };
    if (const auto x = values(a), y = values(b); x && y) {
      return std::none_of(x->begin(), x->end(),
                          [&](const Json& v) { return std::find(y->begin(), y->end(), v) != y->end(); });
    }
    const auto types_of = [&](const Json& schema) {
      std::set<std::string> types = SchemaTypes(schema);
      const auto all = values(schema);
      if (!types.empty() || !all) return types;
      for (const Json& value : *all) {
        for (const char* type : {"string", "boolean", "null", "array", "object", "number"}) {
          if (IsOfType(value, {type})) types.insert(type);
        }
      }
      return types;
    };
    const std::set<std::string> s = types_of(a), t = types_of(b);
    const auto number = [](const std::set<std::string>& types) {
      return types.contains("number") || types.contains("integer");
    };
    if (!s.empty() && !t.empty() && !(number(s) && number(t)) &&
        std::none_of(s.begin(), s.end(), [&](const std::string& type) { return t.contains(type); })) {
      return true;
    }
    if (!a.contains("properties") || !b.contains("properties") || !a.contains("required") ||
        !b.contains("required")) {
      return false;
    }
    const auto needed = [](const Json& schema, const std::string& name) {
      const Json& list = schema["required"];
      return list.is_array() && std::find(list.begin(), list.end(), name) != list.end();
    };
    for (const auto& [name, property] : a["properties"].items()) {
      if (!b["properties"].contains(name) || !needed(a, name) || !needed(b, name)) continue;
      const auto x = Resolved(property, at), y = Resolved(b["properties"][name], at);
      if (x.ok() && y.ok() && values(*x) && values(*y) && Disjoint(*x, *y, at)) return true;
    }
    return false;
  }

  // ---- values and types ----

  StatusOr<ExprPtr> Values(const Json& schema, const std::string& at) {
    Json list = schema.contains("enum") ? schema["enum"] : Json::array({schema["const"]});
    if (!list.is_array() || list.empty())
      return Invalid("{}.enum: must be a list with at least one value", at);
    if (schema.contains("enum") && schema.contains("const")) {
      const bool in = std::find(list.begin(), list.end(), schema["const"]) != list.end();
      list = in ? Json::array({schema["const"]}) : Json::array();
    }
    const std::set<std::string> types = SchemaTypes(schema);
    std::vector<ExprPtr> parts;
    for (const Json& value : list) {
      if (!types.empty() && !IsOfType(value, types)) continue;
      parts.push_back(Literal(value.dump(-1, ' ', false, Json::error_handler_t::replace)));
    }
    if (parts.empty()) return Invalid("{}: no value of enum or const has the schema's type", at);
    for (const auto& [key, unused] : schema.items()) {
      if (key != "enum" && key != "const" && key != "type" && !IsAnnotation(key)) {
        return Invalid("{}: {} beside enum or const is not supported; drop it", at, key);
      }
    }
    return Alt(std::move(parts));
  }

  StatusOr<ExprPtr> Types(const Json& schema, const std::string& at, int deep) {
    std::set<std::string> types = SchemaTypes(schema);
    if (types.empty()) {
      const bool says_nothing = std::all_of(schema.items().begin(), schema.items().end(),
                                            [](const auto& item) { return IsAnnotation(item.key()); });
      if (says_nothing) return text_.Value();
      return Invalid("{}: \"type\" is missing, and the keywords do not tell it", at);
    }
    std::vector<ExprPtr> parts;
    for (const std::string& type : types) {
      if (type == "integer" && types.contains("number")) continue;
      ASSIGN_OR_RETURN(ExprPtr part, OfType(type, schema, at, deep));
      parts.push_back(std::move(part));
    }
    return Alt(std::move(parts));
  }

  StatusOr<ExprPtr> OfType(const std::string& type, const Json& schema, const std::string& at, int deep) {
    if (type == "null") return Literal("null");
    if (type == "boolean") return Alt({Literal("true"), Literal("false")});
    if (type == "integer" || type == "number") return NumberOf(schema, type == "integer", at);
    if (type == "string") return StringOf(schema, at);
    if (type == "array") return ArrayOf(schema, at, deep);
    if (type == "object") return ObjectOf(schema, at, deep);
    return Invalid("{}.type: {} is no JSON type", at, type);
  }

  StatusOr<ExprPtr> NumberOf(const Json& schema, bool integer, const std::string& at) {
    if (schema.contains("multipleOf") && !(integer && schema["multipleOf"] == 1)) {
      return Invalid("{}.multipleOf: not supported", at);
    }
    std::optional<int64_t> low, high;
    for (const auto& [name, is_low, exclusive] : {std::tuple{"minimum", true, false},
                                                  {"exclusiveMinimum", true, true},
                                                  {"maximum", false, false},
                                                  {"exclusiveMaximum", false, true}}) {
      const auto it = schema.find(name);
      if (it == schema.end()) continue;
      if (!it->is_number()) return Invalid("{}.{}: must be a number", at, name);
      const double value = it->get<double>();
      if (!(std::abs(value) < 9e15)) return Invalid("{}.{}: {} is out of range", at, name, it->dump());
      // Fractions are rounded inwards, and so is an exclusive bound: to the next whole number.
      int64_t bound = int64_t(is_low ? std::ceil(value) : std::floor(value));
      if (exclusive && double(bound) == value) bound += is_low ? 1 : -1;
      if (is_low) low = std::max(low.value_or(bound), bound);
      if (!is_low) high = std::min(high.value_or(bound), bound);
    }
    if (!low && !high) return integer ? text_.Integer() : text_.Number();
    if (low && high && *low > *high) return Invalid("{}: no whole number lies between its bounds", at);
    if (integer) {
      return low && high ? IntegersBetween(*low, *high) : low ? IntegersFrom(*low) : IntegersTo(*high);
    }
    return DecimalsBetween(low, high);
  }

  // Decimals without exponent. A fraction moves a value away from 0, so the whole part next to a bound has
  // none.
  static ExprPtr DecimalsBetween(std::optional<int64_t> low, std::optional<int64_t> high) {
    const ExprPtr digits = Repeat(Chars({{'0', '9'}}), 1, 60);
    const ExprPtr fraction = Optional(Seq({Literal("."), digits}));
    const ExprPtr zeros = Optional(Seq({Literal("."), Repeat(Literal("0"), 1, 60)}));
    std::vector<ExprPtr> parts;
    // Texts without '-': whole part m, value in [m, m + 1).
    const int64_t from = std::max<int64_t>(low.value_or(0), 0);
    if (!high) {
      parts.push_back(Seq({IntegersFrom(from), fraction}));
    } else if (*high >= from) {
      parts.push_back(Seq({IntegersBetween(*high, *high), zeros}));
      if (*high - 1 >= from) parts.push_back(Seq({IntegersBetween(from, *high - 1), fraction}));
    }
    // Texts with '-': value in (-m - 1, -m].
    const int64_t nearest = std::max<int64_t>(high ? -*high : 0, 0);
    if (!low) {
      parts.push_back(Seq({Literal("-"), IntegersFrom(nearest), fraction}));
    } else if (-*low >= nearest && *low < 0) {
      parts.push_back(Seq({Literal("-"), IntegersBetween(-*low, -*low), zeros}));
      if (-*low - 1 >= nearest)
        parts.push_back(Seq({Literal("-"), IntegersBetween(nearest, -*low - 1), fraction}));
    }
    return Alt(std::move(parts));
  }

  StatusOr<int32_t> Count(const Json& schema, const char* name, int32_t fallback,
                          const std::string& at) const {
    const auto it = schema.find(name);
    if (it == schema.end()) return fallback;
    if (!it->is_number() || it->get<double>() < 0 || it->get<double>() != std::floor(it->get<double>())) {
      return Invalid("{}.{}: {} is not a whole number from 0", at, name, it->dump());
    }
    if (it->get<double>() > kGrammarRepeatMax) {
      return Invalid("{}.{}: {} is above the limit of {}", at, name, it->dump(), kGrammarRepeatMax);
    }
    return int32_t(it->get<double>());
  }

  StatusOr<ExprPtr> StringOf(const Json& schema, const std::string& at) {
    ASSIGN_OR_RETURN(const int32_t min, Count(schema, "minLength", 0, at));
    ASSIGN_OR_RETURN(const int32_t max, Count(schema, "maxLength", -1, at));
    const bool counted = schema.contains("minLength") || schema.contains("maxLength");
    std::string pattern;
    if (schema.contains("pattern")) {
      if (!schema["pattern"].is_string()) return Invalid("{}.pattern: must be a string", at);
      pattern = schema["pattern"].get<std::string>();
    }
    if (schema.contains("format")) {
      if (!pattern.empty()) return Invalid("{}.format: not supported together with pattern", at);
      if (!schema["format"].is_string()) return Invalid("{}.format: must be a string", at);
      ASSIGN_OR_RETURN(pattern, FormatPattern(schema["format"].get<std::string>(), at));
    }
    if (schema.contains("pattern") || schema.contains("format")) {
      if (counted) {
        return Invalid(
            "{}: minLength and maxLength are not supported together with pattern or format; put the count "
            "into the pattern",
            at);
      }
      auto body = ParseRegex(pattern, {.json_string = true, .search = true});
      if (!body.ok()) return Invalid("{}.pattern: {}", at, Message(body.status()));
      return Seq({Literal("\""), *body, Literal("\"")});
    }
    if (max >= 0 && min > max) return Invalid("{}: minLength is above maxLength", at);
    return Seq({Literal("\""), Repeat(text_.StringChar(), min, max), Literal("\"")});
  }

  StatusOr<ExprPtr> ArrayOf(const Json& schema, const std::string& at, int deep) {
    if (schema.contains("uniqueItems") && schema["uniqueItems"] != false) {
      return Invalid("{}.uniqueItems: not supported", at);
    }
    ASSIGN_OR_RETURN(const int32_t min, Count(schema, "minItems", 0, at));
    ASSIGN_OR_RETURN(int32_t max, Count(schema, "maxItems", -1, at));
    std::vector<ExprPtr> first;
    if (const auto prefix = schema.find("prefixItems"); prefix != schema.end()) {
      if (!prefix->is_array()) return Invalid("{}.prefixItems: must be a list of schemas", at);
      for (size_t i = 0; i < prefix->size(); ++i) {
        ASSIGN_OR_RETURN(ExprPtr item,
                         Compile((*prefix)[i], fmt::format("{}.prefixItems[{}]", at, i), deep + 1));
        first.push_back(std::move(item));
      }
    }
    ExprPtr item = text_.Value();
    if (schema.contains("items")) {
      if (schema["items"].is_array())
        return Invalid("{}.items: a list is not supported; use prefixItems", at);
      if (schema["items"] == false) {
        max = max < 0 ? int32_t(first.size()) : std::min(max, int32_t(first.size()));
      } else {
        ASSIGN_OR_RETURN(item, Compile(schema["items"], at + ".items", deep + 1));
      }
    }
    if (max >= 0 && min > max) return Invalid("{}: minItems is above the most items that are possible", at);
    // From the back: what may follow when i items are there.
    const int32_t fixed = int32_t(first.size());
    const int32_t counted = std::max(fixed, 1);
    ExprPtr more = Repeat(Seq({text_.Comma(), item}), std::max(0, min - counted),
                          max < 0 ? -1 : std::max(0, max - counted));
    if (max >= 0 && max <= counted) more = Empty();
    ExprPtr tail = more;
    for (int32_t i = counted - 1; i >= 1; --i) {
      const ExprPtr next = max >= 0 && i >= max ? Never() : Seq({text_.Comma(), first[size_t(i)], tail});
      tail = i >= min ? Alt({Empty(), next}) : next;
    }
    const ExprPtr one = fixed > 0 ? first[0] : item;
    ExprPtr body = max == 0 ? Empty() : Seq({one, tail});
    if (min == 0 && max != 0) body = Optional(body);
    return Seq({text_.Open('['), body, text_.Close(']')});
  }

  // ---- objects ----

  // A key that is none of the declared ones, without escapes.
  ExprPtr OtherKey(const Json& declared) {
    std::vector<std::string> names;
    for (const auto& [name, unused] : declared.items()) names.push_back(name);
    return Seq({Literal("\""), OtherText(names), Literal("\"")});
  }
  // Text that is none of the names: leaves the tree of names somewhere, or ends inside it.
  ExprPtr OtherText(const std::vector<std::string>& names) {
    const CharSet plain = CharSet{{0x20, kCodepointMax}}.Without({{'"', '"'}, {'\\', '\\'}});
    std::map<char32_t, std::vector<std::string>> next;
    bool ends = false;
    for (const std::string& name : names) {
      if (name.empty()) {
        ends = true;
        continue;
      }
      const Utf8Step step = DecodeUtf8(name, 0);
      next[step.codepoint].push_back(name.substr(step.bytes));
    }
    CharSet others = plain;
    std::vector<ExprPtr> parts;
    for (const auto& [c, rest] : next) {
      others = others.Without({{c, c}});
      if (plain.Has(c)) parts.push_back(Seq({Chars({{c, c}}), OtherText(rest)}));
    }
    parts.push_back(Seq({Chars(others), Star(Chars(plain))}));
    if (!ends) parts.push_back(Empty());
    return Alt(std::move(parts));
  }

  StatusOr<ExprPtr> ObjectOf(const Json& schema, const std::string& at, int deep) {
    const Json properties = schema.value("properties", Json::object());
    if (!properties.is_object()) return Invalid("{}.properties: must be an object", at);
    const Json required = schema.value("required", Json::array());
    if (!required.is_array()) return Invalid("{}.required: must be a list of names", at);
    std::set<std::string> needed;
    for (const Json& name : required) {
      if (!name.is_string()) return Invalid("{}.required: must be a list of names", at);
      needed.insert(name.get<std::string>());
    }
    ASSIGN_OR_RETURN(const int32_t min, Count(schema, "minProperties", 0, at));
    ASSIGN_OR_RETURN(const int32_t max, Count(schema, "maxProperties", -1, at));
    // Silence closes an object with declared properties, and leaves one without open.
    std::optional<ExprPtr> additional;
    const auto extra = schema.find("additionalProperties");
    if (extra != schema.end() ? *extra != false : properties.empty()) {
      additional = text_.Value();
      if (extra != schema.end()) {
        ASSIGN_OR_RETURN(additional, Compile(*extra, at + ".additionalProperties", deep + 1));
      }
    }
    std::vector<std::pair<std::string, Json>> list;
    for (const auto& [name, property] : properties.items()) list.emplace_back(name, property);
    for (const std::string& name : needed) {
      if (properties.contains(name)) continue;
      if (!additional) {
        return Invalid("{}.required: {} is not among the properties, and others are not allowed", at, name);
      }
      list.emplace_back(name, extra == schema.end() ? Json(true) : *extra);
    }
    if (list.empty()) {
      if (!additional)
        return min > 0 ? Invalid("{}.minProperties: no property is possible", at)
                       : StatusOr<ExprPtr>(Seq({text_.Open('{'), text_.Close('}')}));
      if (max >= 0 && min > max) return Invalid("{}: minProperties is above maxProperties", at);
      const ExprPtr member = Seq({text_.String(), text_.Colon(), *additional});
      ExprPtr body = max == 0 ? Empty()
                              : Seq({member, Repeat(Seq({text_.Comma(), member}), std::max(0, min - 1),
                                                    max < 0 ? -1 : max - 1)});
      if (min == 0 && max != 0) body = Optional(body);
      return Seq({text_.Open('{'), body, text_.Close('}')});
    }
    if (min > int32_t(needed.size()) || (max >= 0 && (additional || max < int32_t(list.size())))) {
      return Invalid(
          "{}: minProperties and maxProperties are supported for objects without declared properties only",
          at);
    }
    // From the back. `bare`: nothing stands before; `rest`: a member does.
    Json declared = Json::object();
    for (const auto& [name, unused] : list) declared[name] = true;
    ExprPtr bare = Empty(), rest = Empty();
    if (additional) {
      const ExprPtr member = Seq({OtherKey(declared), text_.Colon(), *additional});
      rest = Star(Seq({text_.Comma(), member}));
      bare = Optional(Seq({member, rest}));
    }
    for (size_t i = list.size(); i-- > 0;) {
      const auto& [name, property] = list[i];
      ASSIGN_OR_RETURN(ExprPtr value, Compile(property, fmt::format("{}.properties.{}", at, name), deep + 1));
      const std::string key = Json(name).dump(-1, ' ', false, Json::error_handler_t::replace);
      const int32_t member = builder_->AddRule("property " + name, Seq({Literal(key), text_.Colon(), value}));
      const ExprPtr rest_rule = RuleExpr(builder_->AddRule("members", rest));
      const bool must = needed.contains(name);
      const ExprPtr first = Seq({RuleExpr(member), rest_rule}),
                    later = Seq({text_.Comma(), RuleExpr(member), rest_rule});
      if (must) {
        bare = first;
        rest = later;
      } else {
        bare = Alt({first, RuleExpr(builder_->AddRule("members", bare))});
        rest = Alt({later, rest_rule});
      }
    }
    return Seq({text_.Open('{'), bare, text_.Close('}')});
  }

  const Json& root_;
  GrammarBuilder* const builder_;
  const JsonText text_;
  std::map<std::string, int32_t> references_;
  size_t schemas_ = 0;
};

}  // namespace

StatusOr<ExprPtr> ParseJsonSchema(const OrderedJson& schema, bool whitespace, GrammarBuilder* builder,
                                  const OrderedJson* root) {
  return SchemaCompiler(root != nullptr ? *root : schema, whitespace, builder).Compile(schema, "schema", 0);
}

ExprPtr AnyJsonObject(bool whitespace, GrammarBuilder* builder) {
  return JsonText(whitespace, builder).Object();
}

}  // namespace sluice
