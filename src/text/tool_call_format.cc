#include "text/tool_call_format.h"

#include <algorithm>
#include <map>
#include <utility>

#include "text/json_depth.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxNameBytes = 256;

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == '.' || c == ':' || c == '/';
}

std::string_view Trimmed(std::string_view s) {
  while (!s.empty() && IsSpace(s.front())) s.remove_prefix(1);
  while (!s.empty() && IsSpace(s.back())) s.remove_suffix(1);
  return s;
}

std::string Quoted(std::string_view s) {
  return Json(s).dump(-1, ' ', false, Json::error_handler_t::replace);
}
bool IsJson(std::string_view s) { return !JsonTooDeep(s) && Json::accept(s); }
bool IsJsonObject(std::string_view s) { return s.starts_with('{') && IsJson(s); }

// An object's text from its members' texts; a repeated key keeps its last value.
class ObjectBuilder {
 public:
  void Clear() { members_.clear(); }
  void Set(std::string key, std::string json) {
    for (auto& [k, v] : members_) {
      if (k == key) {
        v = std::move(json);
        return;
      }
    }
    members_.emplace_back(std::move(key), std::move(json));
  }
  std::string Text() const {
    std::string out = "{";
    for (const auto& [k, v] : members_) {
      if (out.size() > 1) out += ", ";
      out += Quoted(k) + ": " + v;
    }
    return out + "}";
  }

 private:
  std::vector<std::pair<std::string, std::string>> members_;
};

// Parameter types as the tools declare them.
class ParameterTypes {
 public:
  explicit ParameterTypes(const Json& tools) {
    if (!tools.is_array()) return;
    for (const Json& tool : tools) {
      const Json* f = At(tool, "function");
      const Json* name = f == nullptr ? nullptr : At(*f, "name");
      const Json* parameters = f == nullptr ? nullptr : At(*f, "parameters");
      const Json* properties = parameters == nullptr ? nullptr : At(*parameters, "properties");
      if (name == nullptr || !name->is_string() || properties == nullptr || !properties->is_object())
        continue;
      for (const auto& [key, schema] : properties->items())
        types_[{name->get<std::string>(), key}] = TypesOf(schema);
    }
  }

  // The JSON text of a raw argument.
  std::string Encode(const std::string& function, const std::string& key, const std::string& raw) const {
    const auto it = types_.find({function, key});
    const std::string_view trimmed = Trimmed(raw);
    if (it != types_.end() && !it->second.empty()) {
      const std::vector<std::string>& types = it->second;
      const auto may_be = [&](const char* type) {
        return std::find(types.begin(), types.end(), type) != types.end();
      };
      if (may_be("string")) return trimmed == "null" && may_be("null") ? "null" : Quoted(raw);
    }
    return IsJson(trimmed) ? std::string(trimmed) : Quoted(raw);
  }

 private:
  static const Json* At(const Json& object, const char* key) {
    if (!object.is_object()) return nullptr;
    const auto it = object.find(key);
    return it == object.end() ? nullptr : &*it;
  }
  static std::vector<std::string> TypesOf(const Json& schema) {
    std::vector<std::string> types;
    if (const Json* type = At(schema, "type")) {
      if (type->is_string()) types.push_back(type->get<std::string>());
      if (type->is_array()) {
        for (const Json& t : *type) {
          if (t.is_string()) types.push_back(t.get<std::string>());
        }
      }
    } else if (const Json* values = At(schema, "enum")) {
      if (values->is_array() && !values->empty() &&
          std::all_of(values->begin(), values->end(), [](const Json& v) { return v.is_string(); })) {
        types.push_back("string");
      }
    }
    return types;
  }
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> types_;
};

class GlmMatcher final : public ToolCallMatcher {
 public:
  explicit GlmMatcher(const Json& tools) : types_(tools) {}
  std::string_view begin_marker() const override { return "<tool_call>"; }
  std::vector<std::string_view> marker_tokens() const override {
    return {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"};
  }
  bool one_call_a_section() const override { return true; }

 private:
  enum class State { kName, kBetween, kKey, kBehindKey, kValue };
  void Restart() override {
    state_ = State::kName;
    arguments_.Clear();
  }
  Result Advance(std::string_view text) override {
    while (true) {
      Found found = Found::kYes;
      switch (state_) {
        case State::kName:
          SkipSpace(text);
          found = Name(text, &call_.name);
          state_ = found == Found::kYes ? State::kBetween : state_;
          break;
        case State::kBetween:
          SkipSpace(text);
          found = Literal(text, "<arg_key>");
          if (found == Found::kYes) {
            state_ = State::kKey;
          } else if (const Found end = Literal(text, "</tool_call>"); end == Found::kYes) {
            call_.arguments = arguments_.Text();
            return Result::kCall;
          } else if (end == Found::kMore) {
            return Result::kMore;
          }
          break;
        case State::kKey:
          found = Until(text, "</arg_key>", &key_);
          state_ = found == Found::kYes ? State::kBehindKey : state_;
          break;
        case State::kBehindKey:
          SkipSpace(text);
          found = Literal(text, "<arg_value>");
          state_ = found == Found::kYes ? State::kValue : state_;
          break;
        case State::kValue: {
          std::string value;
          found = Until(text, "</arg_value>", &value);
          if (found != Found::kYes) break;
          const std::string key(Trimmed(key_));
          arguments_.Set(key, types_.Encode(call_.name, key, value));
          state_ = State::kBetween;
          break;
        }
      }
      if (found != Found::kYes) return found == Found::kMore ? Result::kMore : Result::kFail;
    }
  }

  ParameterTypes types_;
  ObjectBuilder arguments_;
  State state_ = State::kName;
  std::string key_;
};

class DeepseekJsonMatcher final : public ToolCallMatcher {
 public:
  explicit DeepseekJsonMatcher(bool fenced) : fenced_(fenced) {}
  std::string_view begin_marker() const override { return "<｜tool▁calls▁begin｜>"; }
  std::vector<std::string_view> marker_tokens() const override {
    return {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>"};
  }
  bool one_call_a_section() const override { return false; }

 private:
  enum class State { kBetween, kType, kTypeEnd, kName, kNameEnd, kArguments };
  void Restart() override { state_ = State::kBetween; }
  Result Advance(std::string_view text) override {
    while (true) {
      Found found = Found::kYes;
      const auto next = [&](State state) { state_ = found == Found::kYes ? state : state_; };
      switch (state_) {
        case State::kBetween:
          SkipSpace(text);
          found = Literal(text, "<｜tool▁call▁begin｜>");
          if (found == Found::kYes) {
            state_ = fenced_ ? State::kType : State::kName;
          } else if (const Found end = Literal(text, "<｜tool▁calls▁end｜>"); end == Found::kYes) {
            return Result::kEnd;
          } else if (end == Found::kMore) {
            return Result::kMore;
          }
          break;
        case State::kType:
          found = Literal(text, "function");
          next(State::kTypeEnd);
          break;
        case State::kTypeEnd:
          found = Literal(text, "<｜tool▁sep｜>");
          next(State::kName);
          break;
        case State::kName:
          found = Name(text, &call_.name);
          next(State::kNameEnd);
          break;
        case State::kNameEnd:
          found = Literal(text, fenced_ ? "\n```json\n" : "<｜tool▁sep｜>");
          next(State::kArguments);
          break;
        case State::kArguments: {
          std::string raw;
          found = Until(text, fenced_ ? "```<｜tool▁call▁end｜>" : "<｜tool▁call▁end｜>", &raw);
          if (found != Found::kYes) break;
          const std::string_view trimmed = Trimmed(raw);
          if (!trimmed.empty() && !IsJsonObject(trimmed)) return Result::kFail;
          call_.arguments = trimmed.empty() ? "{}" : std::string(trimmed);
          state_ = State::kBetween;
          return Result::kCall;
        }
      }
      if (found != Found::kYes) return found == Found::kMore ? Result::kMore : Result::kFail;
    }
  }

  bool fenced_;
  State state_ = State::kBetween;
};

class DsmlMatcher final : public ToolCallMatcher {
 public:
  std::string_view begin_marker() const override { return "<｜DSML｜function_calls>"; }
  std::vector<std::string_view> marker_tokens() const override { return {"｜DSML｜"}; }
  bool one_call_a_section() const override { return false; }

 private:
  enum class State { kBetween, kName, kNameEnd, kParameters, kKey, kKind, kValue };
  void Restart() override { state_ = State::kBetween; }
  Result Advance(std::string_view text) override {
    while (true) {
      Found found = Found::kYes;
      const auto next = [&](State state) { state_ = found == Found::kYes ? state : state_; };
      switch (state_) {
        case State::kBetween:
          SkipSpace(text);
          found = Literal(text, "<｜DSML｜invoke name=\"");
          if (found == Found::kYes) {
            arguments_.Clear();
            state_ = State::kName;
          } else if (const Found end = Literal(text, "</｜DSML｜function_calls>"); end == Found::kYes) {
            return Result::kEnd;
          } else if (end == Found::kMore) {
            return Result::kMore;
          }
          break;
        case State::kName:
          found = Name(text, &call_.name);
          next(State::kNameEnd);
          break;
        case State::kNameEnd:
          found = Literal(text, "\">");
          next(State::kParameters);
          break;
        case State::kParameters:
          SkipSpace(text);
          found = Literal(text, "<｜DSML｜parameter name=\"");
          if (found == Found::kYes) {
            state_ = State::kKey;
          } else if (const Found end = Literal(text, "</｜DSML｜invoke>"); end == Found::kYes) {
            call_.arguments = arguments_.Text();
            state_ = State::kBetween;
            return Result::kCall;
          } else if (end == Found::kMore) {
            return Result::kMore;
          }
          break;
        case State::kKey:
          found = Until(text, "\" string=\"", &key_);
          next(State::kKind);
          break;
        case State::kKind:
          found = Literal(text, "true\">");
          is_string_ = found == Found::kYes;
          if (found == Found::kNo) found = Literal(text, "false\">");
          next(State::kValue);
          break;
        case State::kValue: {
          std::string value;
          found = Until(text, "</｜DSML｜parameter>", &value);
          if (found != Found::kYes) break;
          const std::string_view trimmed = Trimmed(value);
          arguments_.Set(key_, !is_string_ && IsJson(trimmed) ? std::string(trimmed) : Quoted(value));
          state_ = State::kParameters;
          break;
        }
      }
      if (found != Found::kYes) return found == Found::kMore ? Result::kMore : Result::kFail;
    }
  }

  ObjectBuilder arguments_;
  State state_ = State::kBetween;
  std::string key_;
  bool is_string_ = false;
};

}  // namespace

std::unique_ptr<ToolCallMatcher> ToolCallMatcher::Create(ToolCallStyle style, const Json& tools) {
  switch (style) {
    case ToolCallStyle::kNone:
      return nullptr;
    case ToolCallStyle::kGlm:
      return std::make_unique<GlmMatcher>(tools);
    case ToolCallStyle::kDeepseekV3:
      return std::make_unique<DeepseekJsonMatcher>(true);
    case ToolCallStyle::kDeepseekV31:
      return std::make_unique<DeepseekJsonMatcher>(false);
    case ToolCallStyle::kDeepseekV32:
      return std::make_unique<DsmlMatcher>();
  }
  return nullptr;
}

void ToolCallMatcher::Reset() {
  position_ = searched_ = 0;
  call_dropped_ = false;
  call_ = {};
  Restart();
}

ToolCallMatcher::Result ToolCallMatcher::Step(std::string_view text) {
  if (call_dropped_) {
    position_ = searched_ = 0;
    call_dropped_ = false;
  }
  const Result result = Advance(text);
  call_dropped_ = result == Result::kCall;
  return result;
}

void ToolCallMatcher::SkipSpace(std::string_view text) {
  while (position_ < text.size() && IsSpace(text[position_])) ++position_;
}

ToolCallMatcher::Found ToolCallMatcher::Literal(std::string_view text, std::string_view literal) {
  const std::string_view here = text.substr(position_, literal.size());
  if (here == literal) {
    position_ += literal.size();
    return Found::kYes;
  }
  return literal.starts_with(here) ? Found::kMore : Found::kNo;
}

ToolCallMatcher::Found ToolCallMatcher::Name(std::string_view text, std::string* name) {
  size_t end = position_;
  while (end < text.size() && IsNameByte(text[end])) ++end;
  if (end - position_ > kMaxNameBytes) return Found::kNo;
  if (end == text.size()) return Found::kMore;
  if (end == position_) return Found::kNo;
  *name = text.substr(position_, end - position_);
  position_ = end;
  return Found::kYes;
}

ToolCallMatcher::Found ToolCallMatcher::Until(std::string_view text, std::string_view end, std::string* out) {
  const size_t at = text.find(end, std::max(position_, searched_));
  if (at == std::string_view::npos) {
    searched_ = text.size() < end.size() ? 0 : text.size() - end.size() + 1;
    return Found::kMore;
  }
  *out = text.substr(position_, at - position_);
  position_ = at + end.size();
  searched_ = position_;
  return Found::kYes;
}

StatusOr<ToolCallStyle> ParseToolCallStyle(std::string_view name) {
  if (name == "none") return ToolCallStyle::kNone;
  if (name == "glm" || name == "glm45" || name == "glm47") return ToolCallStyle::kGlm;
  if (name == "deepseekv3") return ToolCallStyle::kDeepseekV3;
  if (name == "deepseekv31") return ToolCallStyle::kDeepseekV31;
  if (name == "deepseekv32") return ToolCallStyle::kDeepseekV32;
  return Invalid(
      "tool-call-parser: {} is unknown; use none, glm45, glm47, deepseekv3, deepseekv31 or deepseekv32",
      name);
}

ToolCallStyle DefaultToolCallStyle(std::string_view architecture) {
  if (architecture.starts_with("Glm")) return ToolCallStyle::kGlm;
  if (architecture == "DeepseekV32ForCausalLM") return ToolCallStyle::kDeepseekV32;
  if (architecture == "DeepseekV3ForCausalLM") return ToolCallStyle::kDeepseekV31;
  return ToolCallStyle::kNone;
}

}  // namespace sluice
