// Calls that must come: the declared tools in a model's own form.
#include <algorithm>
#include <set>
#include <utility>

#include "grammar/json_text.h"
#include "grammar/schema_keywords.h"
#include "grammar/syntax.h"

namespace sluice {
namespace {

using Json = OrderedJson;

class CallGrammar {
 public:
  CallGrammar(const Tokenizer& tokenizer, std::vector<std::string_view> markers, GrammarBuilder* builder)
      : tokenizer_(tokenizer), markers_(std::move(markers)), builder_(builder) {}

  // Text whose markers are tokens of their own, where the tokenizer has them.
  ExprPtr Marked(std::string_view text) const {
    std::vector<ExprPtr> parts;
    while (!text.empty()) {
      size_t at = std::string_view::npos;
      std::string_view first;
      for (const std::string_view marker : markers_) {
        const size_t found = text.find(marker);
        if (found < at && tokenizer_.IdOf(marker) >= 0) {
          at = found;
          first = marker;
        }
      }
      if (at == std::string_view::npos) {
        parts.push_back(Literal(std::string(text)));
        break;
      }
      if (at > 0) parts.push_back(Literal(std::string(text.substr(0, at))));
      parts.push_back(TokenExpr(tokenizer_.IdOf(first)));
      text.remove_prefix(at + first.size());
    }
    return Seq(std::move(parts));
  }

  // Members one after another, in the order of declaration, the required ones always. member(name, schema).
  template <typename Member>
  StatusOr<ExprPtr> Members(const Json& parameters, const std::string& at, Member member) {
    ExprPtr rest = Empty();
    const Json properties =
        parameters.is_object() ? parameters.value("properties", Json::object()) : Json::object();
    const Json required =
        parameters.is_object() ? parameters.value("required", Json::array()) : Json::array();
    if (!properties.is_object() || !required.is_array())
      return Invalid("{}: no JSON schema of an object", at);
    std::vector<std::pair<std::string, Json>> list;
    for (const auto& [name, schema] : properties.items()) list.emplace_back(name, schema);
    for (size_t i = list.size(); i-- > 0;) {
      ASSIGN_OR_RETURN(ExprPtr one, member(list[i].first, list[i].second));
      const bool must = std::find(required.begin(), required.end(), list[i].first) != required.end();
      const ExprPtr behind = RuleExpr(builder_->AddRule("parameters", rest));
      rest = must ? Seq({one, behind}) : Alt({Seq({one, behind}), behind});
    }
    return rest;
  }

  // The raw text of a string parameter, or the JSON text of another one.
  StatusOr<std::pair<ExprPtr, bool>> Value(const Json& schema, const Json& root, std::string_view end) {
    const std::set<std::string> types = SchemaTypes(schema);
    if (types == std::set<std::string>{"string"} && !schema.contains("pattern") &&
        !schema.contains("format")) {
      if (schema.contains("enum") && schema["enum"].is_array()) {
        std::vector<ExprPtr> values;
        for (const Json& value : schema["enum"]) {
          if (value.is_string()) values.push_back(Literal(value.get<std::string>()));
        }
        if (!values.empty()) return std::pair(Alt(std::move(values)), true);
      }
      return std::pair(TextWithout(builder_, end), true);
    }
    ASSIGN_OR_RETURN(ExprPtr value, ParseJsonSchema(schema, false, builder_, &root));
    // JSON of something that may be a string would be read back as raw text.
    const bool text = types.contains("string");
    if (text) return std::pair(TextWithout(builder_, end), true);
    return std::pair(std::move(value), false);
  }

  StatusOr<ExprPtr> JsonArguments(const Json& parameters, const std::string& at) {
    Json schema = parameters.is_object() ? parameters : Json::object();
    if (!schema.contains("type")) schema["type"] = "object";
    auto arguments = ParseJsonSchema(schema, false, builder_);
    if (!arguments.ok()) return Invalid("{}: {}", at, Message(arguments.status()));
    return arguments;
  }

 private:
  const Tokenizer& tokenizer_;
  const std::vector<std::string_view> markers_;
  GrammarBuilder* const builder_;
};

}  // namespace

StatusOr<ExprPtr> ToolCallGrammar(ToolCallStyle style, const OrderedJson& tools, bool one,
                                  const Tokenizer& tokenizer, GrammarBuilder* builder) {
  const auto matcher = ToolCallMatcher::Create(style, tools);
  if (matcher == nullptr) return Unsupported("tool_choice: how this model writes calls is not known");
  CallGrammar g(tokenizer, matcher->marker_tokens(), builder);
  std::vector<ExprPtr> calls;
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& function = tools[i]["function"];
    const std::string name = function["name"].get<std::string>();
    const std::string at = fmt::format("tools[{}].function.parameters", i);
    const Json parameters = function.value("parameters", Json::object());
    ExprPtr call;
    switch (style) {
      case ToolCallStyle::kGlm: {
        const ExprPtr line = Optional(Literal("\n"));
        ASSIGN_OR_RETURN(
            ExprPtr members,
            g.Members(parameters, at, [&](const std::string& key, const Json& schema) -> StatusOr<ExprPtr> {
              ASSIGN_OR_RETURN(auto value, g.Value(schema, parameters, "</arg_value>"));
              return Seq({g.Marked("<arg_key>"), Literal(key), g.Marked("</arg_key>"), line,
                          g.Marked("<arg_value>"), value.first, g.Marked("</arg_value>"), line});
            }));
        call = Seq({g.Marked("<tool_call>"), Literal(name), line, members, g.Marked("</tool_call>")});
        break;
      }
      case ToolCallStyle::kDeepseekV3:
      case ToolCallStyle::kDeepseekV31: {
        const bool fenced = style == ToolCallStyle::kDeepseekV3;
        ASSIGN_OR_RETURN(ExprPtr arguments, g.JsonArguments(parameters, at));
        call =
            Seq({g.Marked(fenced ? "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" : "<｜tool▁call▁begin｜>"),
                 Literal(name), g.Marked(fenced ? "\n```json\n" : "<｜tool▁sep｜>"), arguments,
                 g.Marked(fenced ? "\n```<｜tool▁call▁end｜>" : "<｜tool▁call▁end｜>")});
        break;
      }
      case ToolCallStyle::kDeepseekV32: {
        ASSIGN_OR_RETURN(
            ExprPtr members,
            g.Members(parameters, at, [&](const std::string& key, const Json& schema) -> StatusOr<ExprPtr> {
              ASSIGN_OR_RETURN(auto value, g.Value(schema, parameters, "</｜DSML｜parameter>"));
              return Seq({g.Marked("<｜DSML｜parameter name=\""), Literal(key),
                          g.Marked(value.second ? "\" string=\"true\">" : "\" string=\"false\">"),
                          value.first, g.Marked("</｜DSML｜parameter>"), Literal("\n")});
            }));
        call = Seq({g.Marked("<｜DSML｜invoke name=\""), Literal(name), Literal("\">\n"), members,
                    g.Marked("</｜DSML｜invoke>\n")});
        break;
      }
      case ToolCallStyle::kNone:
        break;
    }
    calls.push_back(RuleExpr(builder->AddRule("call of " + name, std::move(call))));
  }
  const ExprPtr any = Alt(std::move(calls));
  switch (style) {
    case ToolCallStyle::kGlm: {
      const ExprPtr line = Optional(Literal("\n"));
      return Seq({line, any, one ? Empty() : Star(Seq({line, any}))});
    }
    case ToolCallStyle::kDeepseekV3:
    case ToolCallStyle::kDeepseekV31: {
      const ExprPtr between = style == ToolCallStyle::kDeepseekV3 ? Literal("\n") : Empty();
      return Seq({g.Marked("<｜tool▁calls▁begin｜>"), any, one ? Empty() : Star(Seq({between, any})),
                  g.Marked("<｜tool▁calls▁end｜>")});
    }
    default:
      return Seq({Optional(Literal("\n\n")), g.Marked("<｜DSML｜function_calls>\n"), any,
                  one ? Empty() : Star(any), g.Marked("</｜DSML｜function_calls>")});
  }
}

}  // namespace sluice
