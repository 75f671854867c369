#include "text/response_parser.h"

#include <fstream>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;
using Kind = ResponseEvent::Kind;

const Json kTools = Json::parse(R"([
  {"type":"function","function":{"name":"get","parameters":{"type":"object","properties":{"p":{"type":"string"}}}}},
  {"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{
     "p":{"type":"string"},"n":{"type":"integer"},"o":{"type":"object"},"s":{"type":["string","null"]},"e":{"enum":["1","2"]}}}}},
  {"type":"function","function":{"name":"ping","parameters":{"type":"object","properties":{}}}}])");

struct Message {
  std::string content, reasoning;
  std::vector<std::string> calls;  // index id name arguments
  bool operator==(const Message&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Message& m) {
  out << "content=" << Json(m.content).dump() << " reasoning=" << Json(m.reasoning).dump();
  for (const std::string& c : m.calls) out << " call=" << c;
  return out;
}

Message Parse(const ResponseParser::Options& options, const std::vector<std::string>& pieces) {
  ResponseParser parser(options);
  Message m;
  int open = -1;
  const auto take = [&](const std::vector<ResponseEvent>& events) {
    for (const ResponseEvent& e : events) {
      switch (e.kind) {
        case Kind::kContent:
          EXPECT_EQ(open, -1);
          EXPECT_FALSE(e.text.empty());
          m.content += e.text;
          break;
        case Kind::kReasoning:
          EXPECT_EQ(open, -1);
          EXPECT_FALSE(e.text.empty());
          m.reasoning += e.text;
          break;
        case Kind::kToolBegin:
          EXPECT_EQ(open, -1);
          open = static_cast<int>(m.calls.size());
          EXPECT_EQ(e.tool_index, open);
          m.calls.push_back(std::to_string(e.tool_index) + " " + e.id + " " + e.text + " ");
          break;
        case Kind::kToolArguments:
          EXPECT_EQ(e.tool_index, open);
          m.calls.back() += e.text;
          break;
        case Kind::kToolEnd:
          EXPECT_EQ(e.tool_index, open);
          open = -1;
          break;
      }
    }
  };
  for (const std::string& piece : pieces) take(parser.Feed(piece));
  take(parser.Finish());
  EXPECT_EQ(open, -1);
  EXPECT_EQ(parser.tool_calls_sent(), static_cast<int>(m.calls.size()));
  for (const std::string& call : m.calls) {
    const std::string arguments = call.substr(call.find('{'));
    EXPECT_TRUE(Json::accept(arguments)) << call;
  }
  return m;
}

ResponseParser::Options Glm(bool inside = false) {
  return {ReasoningStyle::kThinkTags, inside, ToolCallStyle::kGlm, kTools, "call_"};
}
ResponseParser::Options Deepseek(ToolCallStyle style, bool inside = false) {
  return {ReasoningStyle::kThinkTags, inside, style, kTools, "call_"};
}

// The message, checked to be the same for every single cut, for single bytes, and for random cuts.
Message AnyCut(const ResponseParser::Options& options, const std::string& text) {
  const Message whole = Parse(options, {text});
  for (size_t i = 0; i <= text.size() && i < 3000; ++i) {
    EXPECT_EQ(Parse(options, {text.substr(0, i), text.substr(i)}), whole)
        << "cut at " << i << " of " << text.substr(0, 500);
  }
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  EXPECT_EQ(Parse(options, bytes), whole) << text.substr(0, 500);
  uint64_t state = 99;
  for (int round = 0; round < 30; ++round) {
    std::vector<std::string> pieces;
    for (size_t pos = 0; pos < text.size();) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      const size_t n = 1 + (state >> 33) % (round % 2 == 0 ? 7 : 40);
      pieces.push_back(text.substr(pos, n));
      pos += n;
    }
    EXPECT_EQ(Parse(options, pieces), whole) << text.substr(0, 500);
  }
  return whole;
}

const std::string kCallText =
    "<tool_call>get_weather\n<arg_key>p</arg_key>\n<arg_value>C:\\\\a\\\\worker.js</arg_value>\n</"
    "tool_call><tool_call>ping\n</tool_call>";
const std::vector<std::string> kCalls = {R"(0 call_0 get_weather {"p": "C:\\\\a\\\\worker.js"})",
                                         "1 call_1 ping {}"};

TEST(GlmResponse, IsTheSameHoweverTheTextIsCut) {
  EXPECT_EQ(AnyCut(Glm(), "<think>a</think>ok" + kCallText), (Message{"ok", "a", kCalls}));
  EXPECT_EQ(AnyCut(Glm(), "\n<think>a\n</think>\n\nok\n" + kCallText + "\n"), (Message{"ok", "a", kCalls}));
  EXPECT_EQ(AnyCut(Glm(true), "a</think>ok" + kCallText), (Message{"ok", "a", kCalls}));
}

TEST(GlmResponse, FindsACallThatBeginsWithinReasoning) {
  EXPECT_EQ(AnyCut(Glm(), "<think>aok" + kCallText), (Message{"", "aok", kCalls}));
  EXPECT_EQ(AnyCut(Glm(), "<think>a<tool_call>ping</tool_call> b</think>c"),
            (Message{"c", "a b", {"0 call_0 ping {}"}}));
}

TEST(GlmResponse, TakesAnyTextAsAValue) {
  const std::vector<std::string> values = {
      "</arg", "a\nb\n", "say \"hi\" \\ 'x'", "🤗",    "<tool_call>", "</tool_call>",
      "",      " 5 ",    "<think>",           "{\"a\":", "\x01\t"};
  for (const std::string& v : values) {
    const std::string text =
        "<tool_call>get\n<arg_key>p</arg_key>\n<arg_value>" + v + "</arg_value>\n</tool_call>";
    EXPECT_EQ(AnyCut(Glm(), text), (Message{"", "", {"0 call_0 get {\"p\": " + Json(v).dump() + "}"}}));
  }
  const std::string big(100'000, 'x');
  const std::string text = "<tool_call>get<arg_key>p</arg_key><arg_value>" + big + "</arg_value></tool_call>";
  EXPECT_EQ(AnyCut(Glm(), text), (Message{"", "", {"0 call_0 get {\"p\": \"" + big + "\"}"}}));
}

TEST(GlmResponse, TypesValuesAsTheToolDeclaresThem) {
  const auto arguments = [](const std::string& key, const std::string& value) {
    const Message m = Parse(Glm(), {"<tool_call>get_weather<arg_key>" + key + "</arg_key><arg_value>" +
                                    value + "</arg_value></tool_call>"});
    return m.calls.size() == 1 ? m.calls[0].substr(m.calls[0].find('{')) : "";
  };
  EXPECT_EQ(arguments("p", "5"), R"({"p": "5"})");
  EXPECT_EQ(arguments("n", "5"), R"({"n": 5})");
  EXPECT_EQ(arguments("n", " 5\n"), R"({"n": 5})");
  EXPECT_EQ(arguments("n", "five"), R"({"n": "five"})");
  EXPECT_EQ(arguments("o", R"({"k": [1, "é"]})"), R"({"o": {"k": [1, "é"]}})");
  EXPECT_EQ(arguments("s", "null"), R"({"s": null})");
  EXPECT_EQ(arguments("s", "5"), R"({"s": "5"})");
  EXPECT_EQ(arguments("e", "1"), R"({"e": "1"})");
  EXPECT_EQ(arguments("other", "true"), R"({"other": true})");
  EXPECT_EQ(arguments("other", "text"), R"({"other": "text"})");
  EXPECT_EQ(arguments("other", std::string(1000, '[')), "{\"other\": \"" + std::string(1000, '[') + "\"}");
}

TEST(GlmResponse, GivesBrokenMarkupBackAsText) {
  const std::vector<std::string> texts = {
      "<tool_call>",
      "<tool_call>get",
      "<tool_call>get\n<arg_key>p",
      "<tool_call>get\n<arg_key>p</arg_key>\n<arg_value>x",
      "see <tool_call> there",
      "<tool_call>two words</tool_call>",
      "<tool_call></tool_call>",
      "a < b <tool <tool_cal",
      "<tool_call>get\njunk</tool_call>",
      "</tool_call> <arg_key>",
      "<tool_call>{\"name\": \"get\"}</tool_call>",
      "x <tool_call>get\n<arg_key>p</arg_key> = <arg_value>y</arg_value></tool_call> z",
      "<tool_call>" + std::string(400, 'n') + "</tool_call>"};
  for (const std::string& text : texts) EXPECT_EQ(AnyCut(Glm(), text), (Message{text, "", {}})) << text;
  EXPECT_EQ(AnyCut(Glm(), "<tool_call>no call <tool_call>ping</tool_call>"),
            (Message{"<tool_call>no call", "", {"0 call_0 ping {}"}}));
  EXPECT_EQ(AnyCut(Glm(), "<tool_call>ping</tool_call>\n<tool_call>ge"),
            (Message{"\n<tool_call>ge", "", {"0 call_0 ping {}"}}));
  EXPECT_EQ(AnyCut(Glm(), "<tool_call>ping</tool_call>\nmore\n"),
            (Message{"\nmore\n", "", {"0 call_0 ping {}"}}));
}

TEST(GlmResponse, LeavesTextAloneWhereNothingIsDeclared) {
  ResponseParser::Options no_tools = Glm();
  no_tools.tools = ToolCallStyle::kNone;
  EXPECT_EQ(AnyCut(no_tools, "<think>a</think>ok" + kCallText + "\n"),
            (Message{"ok" + kCallText + "\n", "a", {}}));
  ResponseParser::Options no_reasoning = Glm();
  no_reasoning.reasoning = ReasoningStyle::kNone;
  EXPECT_EQ(AnyCut(no_reasoning, " <think>a</think>\nok" + kCallText),
            (Message{" <think>a</think>\nok", "", kCalls}));
  for (const std::string text : {"", " ", "\n\n", "plain text\n", "  indented\n  text ", "<thin",
                                 "a <think>b</think>", "</think>x", "<"}) {
    EXPECT_EQ(AnyCut(Glm(), text), (Message{text, "", {}})) << text;
  }
}

TEST(GlmResponse, KeepsReasoningThatNeverEnds) {
  EXPECT_EQ(AnyCut(Glm(), "<think>so far\n"), (Message{"", "so far", {}}));
  EXPECT_EQ(AnyCut(Glm(true), "so far </thin"), (Message{"", "so far </thin", {}}));
  EXPECT_EQ(AnyCut(Glm(), "<think></think>ok"), (Message{"ok", "", {}}));
  EXPECT_EQ(AnyCut(Glm(), "<think>\n\n</think>\n  ok"), (Message{"  ok", "", {}}));
}

TEST(GlmResponse, StreamsTextAsSoonAsItIsCertain) {
  ResponseParser parser(Glm());
  EXPECT_EQ(parser.Feed("Hel").size(), 1u);
  EXPECT_EQ(parser.Feed("lo <").at(0).text, "lo");
  EXPECT_EQ(parser.Feed("b> x").at(0).text, " <b> x");
  EXPECT_TRUE(parser.Finish().empty());
}

TEST(DeepseekResponse, ReadsEachFormHoweverItIsCut) {
  const std::string v3 =
      "ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"p\": "
      "\"```\\n\", \"n\": 1}\n```<｜tool▁call▁end｜>\n"
      "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜><"
      "｜tool▁calls▁end｜>";
  EXPECT_EQ(AnyCut(Deepseek(ToolCallStyle::kDeepseekV3), v3),
            (Message{"ok", "", {R"(0 call_0 get_weather {"p": "```\n", "n": 1})", "1 call_1 ping {}"}}));
  const std::string v31 =
      "why</think>ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"p\": "
      "\"ü\"}<｜tool▁call▁end｜>"
      "<｜tool▁call▁begin｜>ping<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>";
  EXPECT_EQ(AnyCut(Deepseek(ToolCallStyle::kDeepseekV31, true), v31),
            (Message{"ok", "why", {R"(0 call_0 get_weather {"p": "ü"})", "1 call_1 ping {}"}}));
  const std::string v32 =
      "need</think>ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get\">\n<｜DSML｜parameter "
      "name=\"city\" string=\"true\">5 Köln "
      "\"</｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" "
      "string=\"false\">2</｜DSML｜parameter>\n<｜DSML｜parameter name=\"o\" "
      "string=\"false\">{\"a\": [1, \"<b>\"]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke "
      "name=\"ping\">\n\n</｜DSML｜invoke>\n"
      "</｜DSML｜function_calls>";
  EXPECT_EQ(AnyCut(Deepseek(ToolCallStyle::kDeepseekV32, true), v32),
            (Message{"ok",
                     "need",
                     {R"(0 call_0 get {"city": "5 Köln \"", "n": 2, "o": {"a": [1, "<b>"]}})",
                      "1 call_1 ping {}"}}));
}

TEST(DeepseekResponse, GivesBrokenMarkupBackAsText) {
  const auto v31 = Deepseek(ToolCallStyle::kDeepseekV31), v32 = Deepseek(ToolCallStyle::kDeepseekV32);
  for (const std::string text :
       {"<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"p\":", "<｜tool▁calls▁begin｜>x",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>[1]<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"}) {
    EXPECT_EQ(AnyCut(v31, text), (Message{text, "", {}})) << text;
  }
  for (const std::string text :
       {"<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get\">\n<｜DSML｜parameter name=\"p\" "
        "string=\"maybe\">x",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=get>",
        "<｜DSML｜function_calls>\n</｜DSML｜function_calls>", "<｜DSML｜invoke name=\"get\">"}) {
    EXPECT_EQ(AnyCut(v32, text), (Message{text, "", {}})) << text;
  }
  // A section that breaks off behind a whole call: the call stands, the rest is text.
  EXPECT_EQ(AnyCut(v31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
            (Message{"", "", {"0 call_0 ping {}"}}));
  EXPECT_EQ(
      AnyCut(v31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>junk"),
      (Message{"junk", "", {"0 call_0 ping {}"}}));
}

TEST(ResponseParser, AnyMixOfMarkersIsCutInvariantAndLosesNoLetter) {
  const std::vector<std::string> parts = {
      "<think>",    "</think>",    "<tool_call>", "</tool_call>", "get", "\n", "<arg_key>", "p",
      "</arg_key>", "<arg_value>", "v",           "</arg_value>", " ",   "Z",  "ping",      "<",
      "</"};
  uint64_t state = 4;
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (int i = 0; i < 14; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      text += parts[(state >> 33) % parts.size()];
    }
    const Message m = AnyCut(Glm(round % 2 == 0), text);
    std::string all = m.content + m.reasoning;
    for (const std::string& c : m.calls) all += c;
    EXPECT_EQ(std::count(all.begin(), all.end(), 'Z'), std::count(text.begin(), text.end(), 'Z')) << text;
  }
}

TEST(PromptOpensReasoning, LooksAtTheEndOnly) {
  EXPECT_TRUE(PromptOpensReasoning("<｜Assistant｜><think>"));
  EXPECT_TRUE(PromptOpensReasoning("x<think>\n"));
  EXPECT_FALSE(PromptOpensReasoning("<think></think>"));
  EXPECT_FALSE(PromptOpensReasoning(""));
}

TEST(Styles, AreKnownByNameAndArchitecture) {
  EXPECT_EQ(*ParseToolCallStyle("glm45"), ToolCallStyle::kGlm);
  EXPECT_THAT(std::string(sluice::Message(ParseToolCallStyle("hermes").status())), HasSubstr("deepseekv32"));
  EXPECT_EQ(DefaultToolCallStyle("GlmMoeDsaForCausalLM"), ToolCallStyle::kGlm);
  EXPECT_EQ(DefaultToolCallStyle("DeepseekV32ForCausalLM"), ToolCallStyle::kDeepseekV32);
  EXPECT_EQ(DefaultReasoningStyle("Qwen3ForCausalLM"), ReasoningStyle::kNone);
  EXPECT_FALSE(ParseReasoningStyle("x").ok());
}

TEST(KeptTokens, SurviveSkippingInTheDetokenizer) {
  const std::shared_ptr<const Tokenizer> t =
      Tokenizer::Load(std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8").value();
  const ResponseParser parser(Glm());
  IncrementalDetokenizer plain(t, true), keeping(t, true, parser.KeptTokens(*t));
  const int32_t call = t->IdOf("<tool_call>"), user = t->IdOf("<|user|>");
  EXPECT_EQ(plain.Add(call), "");
  EXPECT_EQ(keeping.Add(call), "<tool_call>");
  EXPECT_EQ(keeping.Add(user), "");
}

}  // namespace
}  // namespace sluice
