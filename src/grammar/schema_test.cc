// Each keyword of JSON Schema that is held: texts that it lets through and texts that it does not; and the
// refusals.
#include "gmock/gmock.h"
#include "grammar/automaton.h"
#include "grammar/schema_keywords.h"
#include "grammar/syntax.h"
#include "grammar/test_vocabulary.h"
#include "gtest/gtest.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

StatusOr<std::shared_ptr<Automaton>> Build(const std::string& schema, bool whitespace) {
  static const auto* trie =
      new std::shared_ptr<const TokenTrie>(std::make_shared<TokenTrie>(TestVocabulary()));
  GrammarBuilder builder;
  const OrderedJson json = OrderedJson::parse(schema);
  ASSIGN_OR_RETURN(ExprPtr body, ParseJsonSchema(json, whitespace, &builder));
  ASSIGN_OR_RETURN(Program program, builder.Compile(builder.AddRule("root", body)));
  return std::make_shared<Automaton>(std::make_shared<const Program>(std::move(program)), *trie);
}

struct Case {
  const char* schema;
  std::vector<std::string> yes, no;
};

const Case kCases[] = {
    // any value, booleans as schemas
    {"true",
     {"1", "\"a\"", "null", "[1, {\"a\": [true]}]", "{}"},
     {"", "nul", "01", "+1", "1.", "\"", "[1,]", "{\"a\"}"}},
    {"{}", {"-0.5e+10", "false"}, {"tru", "'a'"}},
    // type
    {R"({"type":"null"})", {"null"}, {"0", "\"\""}},
    {R"({"type":"boolean"})", {"true", "false"}, {"0", "True"}},
    {R"({"type":"integer"})", {"0", "-5", "1234567890123456789012"}, {"1.5", "01", "-", "1e3", "-01"}},
    {R"({"type":"number"})", {"0", "-1.25", "1E9", "2e-7"}, {"1.", ".5", "NaN", "0x1", "--1"}},
    {R"({"type":"string"})",
     {"\"\"", "\"é🤗\"", "\"\\n\\\"\\\\\\/\"", "\"\\u00E9\"", "\"\\ud83e\\udd17\""},
     {"\"\n\"", "\"\\q\"", "\"\\u12\"", "\"\\ud83e\"", "\"\\udd17\"", "a", "\"a"}},
    {R"({"type":"array"})", {"[]", "[1,2]", "[1, [2]]"}, {"[1 ,2]", "[ 1]", "[1,  2]", "{}"}},
    {R"({"type":"object"})",
     {"{}", "{\"a\":1}", "{\"a\": {\"b\": []}, \"c\":null}"},
     {"{\"a\" :1}", "{ }", "[]", "{\"a\":\n1}"}},
    {R"({"type":["string","null"]})", {"null", "\"\""}, {"1"}},
    {R"({"type":"string","nullable":true})", {"null", "\"x\""}, {"0"}},
    {R"({"type":["integer","number"]})", {"1", "1.5"}, {"\"1\""}},
    // enum and const
    {R"({"enum":["a","b\n",1,null,{"k":[1]}]})",
     {"\"a\"", "\"b\\n\"", "1", "null", "{\"k\":[1]}"},
     {"\"c\"", "2", "\"\""}},
    {R"({"const":"x"})", {"\"x\""}, {"\"y\"", "x"}},
    {R"({"type":"string","enum":["a",1]})", {"\"a\""}, {"1"}},
    // minimum, maximum and their exclusive forms
    {R"({"type":"integer","minimum":3})", {"3", "9", "10", "999", "1000000"}, {"2", "0", "-3", "-10"}},
    {R"({"type":"integer","minimum":-12})", {"-12", "-11", "-1", "0", "5", "77777"}, {"-13", "-20", "-100"}},
    {R"({"type":"integer","maximum":120})",
     {"120", "99", "0", "-5", "-12345"},
     {"121", "130", "200", "1000"}},
    {R"({"type":"integer","maximum":-7})", {"-7", "-8", "-10", "-700"}, {"-6", "0", "7"}},
    {R"({"type":"integer","minimum":-2,"maximum":105})",
     {"-2", "-1", "0", "9", "99", "100", "105"},
     {"-3", "106", "110", "200"}},
    {R"({"type":"integer","exclusiveMinimum":0,"exclusiveMaximum":10})", {"1", "9"}, {"0", "10", "-1"}},
    {R"({"type":"integer","minimum":1.5,"maximum":3.5})", {"2", "3"}, {"1", "4"}},
    {R"({"type":"number","minimum":0,"maximum":1})",
     {"0", "0.25", "1", "1.0", "0.0"},
     {"1.1", "-0.1", "2", "10"}},
    {R"({"type":"number","minimum":-1.5,"maximum":2})",
     {"-1", "-1.0", "-0.75", "0", "1.999", "2"},
     {"-1.6", "-2", "2.1"}},
    {R"({"type":"number","minimum":10})", {"10", "10.5", "12345.678"}, {"9.99", "9", "-10"}},
    {R"({"type":"number","exclusiveMaximum":0})", {"-1", "-1.5", "-20"}, {"0", "1", "0.5"}},
    {R"({"type":"integer","multipleOf":1})", {"7"}, {"7.5"}},
    // minLength, maxLength: characters, not bytes
    {R"({"type":"string","minLength":2,"maxLength":3})",
     {"\"ab\"", "\"é🤗\"", "\"\\n\\u00e9x\""},
     {"\"a\"", "\"abcd\"", "\"\""}},
    {R"({"type":"string","maxLength":0})", {"\"\""}, {"\"a\""}},
    // pattern: a search unless anchored
    {R"({"type":"string","pattern":"^[a-z]+$"})", {"\"abc\""}, {"\"\"", "\"a1\"", "\"A\""}},
    {R"({"type":"string","pattern":"b+"})", {"\"abc\"", "\"b\""}, {"\"ac\""}},
    {R"({"type":"string","pattern":"^\"\\\\$"})", {"\"\\\"\\\\\""}, {"\"\"\\\""}},
    // format
    {R"({"type":"string","format":"date"})", {"\"2024-02-29\""}, {"\"2024-13-01\"", "\"24-1-1\""}},
    {R"({"type":"string","format":"time"})",
     {"\"23:59:59Z\"", "\"00:00:00.5+01:30\""},
     {"\"24:00:00Z\"", "\"10:00\""}},
    {R"({"type":"string","format":"date-time"})", {"\"2024-01-31T10:00:00Z\""}, {"\"2024-01-31\""}},
    {R"({"type":"string","format":"duration"})",
     {"\"P3D\"", "\"PT1H30M\"", "\"P1Y2M3DT4H\""},
     {"\"P\"", "\"PT\"", "\"3D\""}},
    {R"({"type":"string","format":"uuid"})", {"\"123e4567-e89b-12d3-a456-426614174000\""}, {"\"123e4567\""}},
    {R"({"type":"string","format":"ipv4"})", {"\"255.0.10.99\""}, {"\"256.0.0.1\"", "\"1.2.3\""}},
    {R"({"type":"string","format":"email"})", {"\"a.b@c.org\""}, {"\"a@b\"", "\"@c.org\""}},
    {R"({"type":"string","format":"uri"})", {"\"https://a.b/c?d=1\""}, {"\"no uri\""}},
    // items, prefixItems, minItems, maxItems
    {R"({"type":"array","items":{"type":"integer"}})", {"[]", "[1,2, 3]"}, {"[\"a\"]", "[1,]"}},
    {R"({"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3})",
     {"[1,2]", "[1,2,3]"},
     {"[]", "[1]", "[1,2,3,4]"}},
    {R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"}},
    {R"({"type":"array","maxItems":1})", {"[]", "[5]"}, {"[1,2]"}},
    {R"({"type":"array","minItems":1})", {"[1]", "[1,2]"}, {"[]"}},
    {R"({"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}],"items":{"type":"null"}})",
     {"[]", "[1]", "[1,\"a\"]", "[1,\"a\",null,null]"},
     {"[\"a\"]", "[1,2]", "[1,\"a\",1]"}},
    {R"({"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}],"items":false,"minItems":2})",
     {"[1,\"a\"]"},
     {"[]", "[1]", "[1,\"a\",1]"}},
    {R"({"type":"array","prefixItems":[{"const":1},{"const":2},{"const":3}],"minItems":1,"maxItems":2})",
     {"[1]", "[1,2]"},
     {"[]", "[1,2,3]"}},
    // properties, required, additionalProperties
    {R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},"required":["a","b"]})",
     {"{\"a\":1,\"b\":\"\"}", "{\"a\": 1, \"b\": \"x\"}"},
     {"{}", "{\"a\":1}", "{\"b\":\"\",\"a\":1}", "{\"a\":1,\"b\":\"\",\"c\":1}"}},
    {R"({"type":"object","properties":{"a":{"const":1},"b":{"const":2},"c":{"const":3}}})",
     {"{}", "{\"a\":1}", "{\"b\":2}", "{\"c\":3}", "{\"a\":1,\"c\":3}", "{\"a\":1,\"b\":2,\"c\":3}"},
     {"{,\"b\":2}", "{\"a\":1,}", "{\"c\":3,\"a\":1}"}},
    {R"({"type":"object","properties":{"a":{"const":1},"b":{"const":2}},"required":["b"]})",
     {"{\"b\":2}", "{\"a\":1,\"b\":2}"},
     {"{}", "{\"a\":1}"}},
    {R"({"type":"object","additionalProperties":{"type":"integer"}})",
     {"{}", "{\"x\":1,\"y\":2}"},
     {"{\"x\":\"a\"}"}},
    {R"({"type":"object","additionalProperties":false})", {"{}"}, {"{\"a\":1}"}},
    {R"({"type":"object","properties":{"ab":{"const":1}},"additionalProperties":{"type":"null"}})",
     {"{}", "{\"ab\":1}", "{\"ab\":1,\"abc\":null}", "{\"a\":null}", "{\"\":null}", "{\"é\":null}"},
     {"{\"ab\":null}", "{\"x\":1}", "{\"ab\":1,\"ab\":null}"}},
    {R"({"type":"object","required":["k"]})", {"{\"k\":1}", "{\"k\":1,\"z\":2}"}, {"{}"}},
    {R"({"type":"object","additionalProperties":{"const":1},"minProperties":1,"maxProperties":2})",
     {"{\"a\":1}", "{\"a\":1,\"b\":1}"},
     {"{}", "{\"a\":1,\"b\":1,\"c\":1}"}},
    {R"({"properties":{"a":true},"required":["a"]})", {"{\"a\":[1]}"}, {"{}", "1"}},
    // anyOf, oneOf, allOf
    {R"({"anyOf":[{"type":"integer"},{"type":"string","maxLength":1}]})", {"5", "\"a\""}, {"null", "\"ab\""}},
    {R"({"type":"object","properties":{"t":{"type":"string"}},"anyOf":[{"required":["t"]},{"properties":{"t":{"type":"string"},"u":{"const":1}},"required":["u"]}]})",
     {"{\"t\":\"\"}", "{\"u\":1}"},
     {"{}"}},
    {R"({"oneOf":[{"type":"object","properties":{"k":{"const":"a"},"x":{"type":"integer"}},"required":["k","x"]},
                  {"type":"object","properties":{"k":{"const":"b"},"y":{"type":"string"}},"required":["k","y"]}]})",
     {"{\"k\":\"a\",\"x\":1}", "{\"k\":\"b\",\"y\":\"\"}"},
     {"{\"k\":\"a\",\"y\":\"\"}"}},
    {R"({"oneOf":[{"type":"null"},{"enum":[1]}, {"type":"array"}]})", {"null", "[]"}, {"2"}},
    {R"({"allOf":[{"type":"object","properties":{"a":{"const":1}},"required":["a"]},{"properties":{"b":{"const":2}},"required":["b"]}]})",
     {"{\"a\":1,\"b\":2}"},
     {"{\"a\":1}", "{\"b\":2}"}},
    {R"({"allOf":[{"type":"integer","minimum":2},{"minimum":5,"maximum":9}]})", {"5", "9"}, {"2", "10"}},
    // $ref, recursion
    {R"({"$defs":{"n":{"type":"integer"}},"type":"array","items":{"$ref":"#/$defs/n"}})",
     {"[1,2]"},
     {"[\"a\"]"}},
    {R"({"type":"object","properties":{"v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#"},{"type":"null"}]}},"required":["v","next"]})",
     {"{\"v\":1,\"next\":null}", "{\"v\":1,\"next\":{\"v\":2,\"next\":{\"v\":3,\"next\":null}}}"},
     {"{\"v\":1}", "{\"v\":1,\"next\":{}}"}},
    {R"({"definitions":{"a/b":{"const":1}},"allOf":[{"$ref":"#/definitions/a~1b"}]})", {"1"}, {"2"}},
    // annotations say nothing
    {R"({"title":"t","description":"d","default":1,"examples":[1],"type":"null","x-more":1})",
     {"null"},
     {"1"}},
};

TEST(Schema, EachKeywordLetsThroughAndHoldsBack) {
  for (const Case& c : kCases) {
    auto built = Build(c.schema, false);
    ASSERT_TRUE(built.ok()) << c.schema << ": " << built.status();
    Automaton& a = **built;
    const auto matches = [&](std::string_view text) {
      const int32_t state = a.AfterBytes(a.start(), text);
      return state != Automaton::kDead && a.Accepts(state);
    };
    for (const std::string& text : c.yes) EXPECT_TRUE(matches(text)) << c.schema << " and " << text;
    for (const std::string& text : c.no) EXPECT_FALSE(matches(text)) << c.schema << " and " << text;
  }
}

TEST(Schema, AllKeywordsHaveACase) {
  std::string all;
  for (const Case& c : kCases) all += c.schema;
  std::string names = SupportedSchemaKeywords();
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(", ", at), names.size());
    const std::string name = names.substr(at, end - at);
    if (name != "uniqueItems") {
      EXPECT_THAT(all, HasSubstr("\"" + name + "\"")) << name;
    }
    at = end + 2;
  }
}

TEST(Schema, WhiteSpaceOnlyWhenAskedFor) {
  const char* schema = R"({"type":"object","properties":{"a":{"type":"array"}},"required":["a"]})";
  const std::string spaced = "{\n  \"a\" : [\n 1 ,\t2 ]\n}";
  const auto matches = [&](bool whitespace, std::string_view text) {
    auto a = *Build(schema, whitespace);
    const int32_t state = a->AfterBytes(a->start(), text);
    return state != Automaton::kDead && a->Accepts(state);
  };
  EXPECT_TRUE(matches(true, spaced));
  EXPECT_FALSE(matches(false, spaced));
  EXPECT_TRUE(matches(true, "{\"a\":[]}"));
  EXPECT_TRUE(matches(false, "{\"a\": [1, 2]}"));
}

TEST(Schema, UnsupportedIsNamed) {
  const struct {
    const char *schema, *says;
  } kRefused[] = {
      {R"({"type":"object","patternProperties":{}})", "patternProperties"},
      {R"({"not":{"type":"null"}})", "not"},
      {R"({"if":{},"then":{}})", "if"},
      {R"({"type":"array","contains":{}})", "contains"},
      {R"({"type":"array","uniqueItems":true})", "uniqueItems"},
      {R"({"type":"object","propertyNames":{}})", "propertyNames"},
      {R"({"type":"object","dependentRequired":{}})", "dependentRequired"},
      {R"({"type":"object","unevaluatedProperties":false})", "unevaluatedProperties"},
      {R"({"type":"number","multipleOf":0.5})", "multipleOf"},
      {R"({"type":"string","format":"hostname"})", "hostname"},
      {R"({"type":"string","pattern":"a","maxLength":5})", "pattern"},
      {R"x({"type":"string","pattern":"(?=a)"})x", "look-around"},
      {R"({"type":"string","minLength":5,"maxLength":2})", "minLength"},
      {R"({"type":"string","maxLength":1000000})", "maxLength"},
      {R"({"type":"string","minLength":-1})", "minLength"},
      {R"({"type":"array","minItems":3,"maxItems":2})", "minItems"},
      {R"({"type":"integer","minimum":5,"maximum":4})", "bounds"},
      {R"({"type":"nothing"})", "nothing"},
      {R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "oneOf"},
      {R"({"oneOf":[{"type":"object"},{"type":"object"}]})", "anyOf"},
      {R"({"allOf":[{"type":"integer"},{"type":"string"}]})", "type"},
      {R"({"$ref":"#/nowhere"})", "leads nowhere"},
      {R"({"$ref":"http://example.org/s"})", "only references within"},
      {R"({"$ref":"#"})", "left recursion"},
      {R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})", "never ends"},
      {R"({"type":"object","properties":{"a":1}})", "a schema is an object"},
      {R"({"type":"object","properties":{"a":{}},"required":["b"],"additionalProperties":false})", "b"},
      {R"({"type":"object","properties":{"a":{},"b":{}},"maxProperties":1})", "maxProperties"},
      {R"({"enum":[]})", "enum"},
      {R"({"type":"string","enum":[1]})", "enum"},
      {"false", "nothing can match"},
      {"[]", "a schema is an object"},
  };
  for (const auto& r : kRefused) {
    const auto built = Build(r.schema, false);
    ASSERT_FALSE(built.ok()) << r.schema;
    EXPECT_THAT(std::string(Message(built.status())), HasSubstr(r.says)) << r.schema;
  }
  std::string deep = "true";
  for (int i = 0; i < 100; ++i) deep = R"({"type":"array","items":)" + deep + "}";
  EXPECT_THAT(std::string(Message(Build(deep, false).status())), HasSubstr("deep"));
}

}  // namespace
}  // namespace sluice
