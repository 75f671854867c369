// Constraints followed token by token: what comes out is whole, ends in time, and calls can be read back.
#include "grammar/constraint.h"

#include "base/check.h"
#include "base/random.h"
#include "gmock/gmock.h"
#include "grammar/test_vocabulary.h"
#include "gtest/gtest.h"
#include "text/response_parser.h"

namespace sluice {
namespace {

using Kind = ConstraintRequest::Kind;
using Reasoning = ConstraintRequest::Reasoning;
using ::testing::HasSubstr;

struct World {
  std::shared_ptr<const TestVocabulary> vocabulary = std::make_shared<TestVocabulary>();
  ConstraintCompiler compiler{vocabulary, {vocabulary->end()}, 2};

  std::shared_ptr<const TokenConstraint> Make(const ConstraintRequest& request) {
    auto made = compiler.Compile(request);
    SLUICE_CHECK(made.ok(), "{}", Message(made.status()));
    return *made;
  }
};

std::vector<int32_t> Allowed(std::span<const uint64_t> mask, int32_t vocab) {
  std::vector<int32_t> out;
  for (int32_t t = 0; t < vocab; ++t) {
    if ((mask[size_t(t) / 64] >> (t % 64)) & 1) out.push_back(t);
  }
  return out;
}

// Takes allowed tokens at random until the end; "" with a failure when it does not come within `tokens`.
std::string Follow(const World& w, const TokenConstraint& constraint, int32_t tokens, SeededStream& random,
                   std::vector<int32_t>* ids = nullptr) {
  auto state = constraint.Start({}, tokens);
  std::vector<int32_t> taken;
  for (int32_t left = tokens; left > 0; --left) {
    const auto mask = state->Mask(left);
    if (mask.empty()) break;
    const std::vector<int32_t> allowed = Allowed(mask, w.vocabulary->vocab_size());
    if (allowed.empty()) break;
    const int32_t token = allowed[size_t(random.Unit() * double(allowed.size()))];
    if (token == w.vocabulary->end()) {
      if (ids != nullptr) *ids = taken;
      return w.vocabulary->Decode(taken, false);
    }
    taken.push_back(token);
    state->Accept(token, left - 1);
  }
  ADD_FAILURE() << "no end within " << tokens << " tokens: " << w.vocabulary->Decode(taken, false);
  return "";
}

std::vector<int32_t> Forced(ConstraintState* state, int32_t max) {
  std::vector<int32_t> out;
  state->Forced(max, &out);
  return out;
}

TEST(Constraint, TextThatMustComeIsCutLikeTheTokenizerCutsIt) {
  World w;
  const auto& v = *w.vocabulary;
  const auto schema =
      w.Make({Kind::kJsonSchema,
              R"({"type":"object","properties":{"name":{"type":"string"},"key":{"const":"abc"}},
                                  "required":["name","key"]})"});
  auto state = schema->Start({}, 100);
  // `{"name":` must come; a space or a quote may follow, so the last token of it is open.
  const std::vector<int32_t> start = Forced(state.get(), 100);
  const std::vector<int32_t> whole = v.Encode("{\"name\":", false);
  ASSERT_GT(whole.size(), 1u);
  EXPECT_EQ(start, std::vector<int32_t>(whole.begin(), whole.end() - 1));
  int32_t left = 100;
  for (const int32_t token : start) {
    EXPECT_EQ(Allowed(state->Mask(left), v.vocab_size()), std::vector<int32_t>{token});
    state->Accept(token, --left);
  }
  EXPECT_TRUE(Forced(state.get(), left).empty());
  EXPECT_GT(Allowed(state->Mask(left), v.vocab_size()).size(), 1u);
  for (const int32_t token : v.Encode("\": \"x\", \"key\": \"", false)) state->Accept(token, --left);
  // Nothing can follow `abc"}`: its last token is forced as well.
  const std::vector<int32_t> last = Forced(state.get(), left);
  EXPECT_EQ(last, v.Encode("abc\"}", false));
  EXPECT_EQ(Forced(state.get(), 1), std::vector<int32_t>{last[0]});
  for (const int32_t token : last) state->Accept(token, --left);
  EXPECT_EQ(Allowed(state->Mask(left), v.vocab_size()), std::vector<int32_t>{v.end()});
  EXPECT_TRUE(Forced(state.get(), left).empty());
}

TEST(Constraint, ForcedTokensAreThoseThatTheMasksWouldLeaveAlone) {
  World w;
  SeededStream random(11);
  const std::vector<ConstraintRequest> requests = {
      {Kind::kJsonSchema, R"({"type":"object","properties":{"name":{"enum":["abc","ab","x"]},
        "list":{"type":"array","items":{"type":"object","properties":{"name":{"type":"boolean"}},"required":["name"]},
                "maxItems":4}},"required":["name","list"]})"},
      {Kind::kRegex, "(true, ){2}null(12)*|[a-c]{3}name: é🤗"},
      {Kind::kEbnf, R"(root ::= "SELECT " ("ab" | "abc") " FROM name")"}};
  int64_t forced = 0;
  for (const ConstraintRequest& request : requests) {
    const auto constraint = w.Make(request);
    for (int round = 0; round < 50; ++round) {
      const int32_t tokens = 40 + int32_t(random.Below(200));
      auto one_by_one = constraint->Start({}, tokens), jumping = constraint->Start({}, tokens);
      std::vector<int32_t> taken;
      for (int32_t left = tokens; left > 0;) {
        const std::vector<int32_t> ahead = Forced(jumping.get(), left);
        for (const int32_t token : ahead) {
          ASSERT_EQ(Allowed(one_by_one->Mask(left), w.vocabulary->vocab_size()), std::vector<int32_t>{token});
          one_by_one->Accept(token, --left);
          jumping->Accept(token, left);
          taken.push_back(token);
          ++forced;
        }
        if (left == 0) break;
        const auto a = Allowed(one_by_one->Mask(left), w.vocabulary->vocab_size());
        ASSERT_EQ(a, Allowed(jumping->Mask(left), w.vocabulary->vocab_size()));
        ASSERT_FALSE(a.empty());
        const int32_t token = a[size_t(random.Below(a.size()))];
        if (token == w.vocabulary->end()) break;
        one_by_one->Accept(token, --left);
        jumping->Accept(token, left);
        taken.push_back(token);
        // A state that starts behind what was taken is the same.
        auto late = constraint->Start(taken, left);
        ASSERT_EQ(Forced(late.get(), left), Forced(jumping.get(), left));
      }
    }
  }
  EXPECT_GT(forced, 500);
}

TEST(Constraint, EveryAnswerIsWholeAndEndsInTime) {
  World w;
  SeededStream random(7);
  const char* schema =
      R"({"type":"object","properties":{"name":{"type":"string"},"tags":{"type":"array","items":
    {"type":"string","enum":["ab","abc"]}},"n":{"type":"integer","minimum":-3,"maximum":250},"sub":{"anyOf":[{"$ref":"#"},
    {"type":"null"}]}},"required":["name","n","sub"]})";
  const auto bound = w.Make({.kind = Kind::kJsonSchema, .text = schema});
  const auto any = w.Make({.kind = Kind::kJsonObject});
  for (const int32_t tokens : {32, 40, 60, 100, 300}) {
    for (int i = 0; i < 20; ++i) {
      const nlohmann::json value = nlohmann::json::parse(Follow(w, *bound, tokens, random), nullptr, false);
      ASSERT_TRUE(value.is_object());
      EXPECT_TRUE(value["name"].is_string() && value["n"].is_number_integer());
      EXPECT_TRUE(value["n"] >= -3 && value["n"] <= 250);
      EXPECT_TRUE(nlohmann::json::accept(Follow(w, *any, tokens, random)));
    }
  }
}

TEST(Constraint, WhenTheRoomIsTooSmallTheShortestWayIsTaken) {
  World w;
  SeededStream random(3);
  const auto bound = w.Make({.kind = Kind::kJsonObject});
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Follow(w, *bound, 3, random), "{}");
}

TEST(Constraint, AnEndIsOfferedExactlyWhenTheTextIsWhole) {
  World w;
  const auto bound = w.Make({.kind = Kind::kRegex, .text = "ab|abc"});
  auto state = bound->Start({}, 100);
  const auto end = [&](int32_t left) {
    const auto mask = state->Mask(left);
    return (mask[size_t(w.vocabulary->end()) / 64] >> (w.vocabulary->end() % 64)) & 1;
  };
  EXPECT_FALSE(end(100));
  state->Accept('a', 99);
  EXPECT_FALSE(end(99));
  state->Accept('b', 98);
  EXPECT_TRUE(end(98));
  state->Accept('c', 97);
  EXPECT_EQ(Allowed(state->Mask(97), w.vocabulary->vocab_size()), std::vector<int32_t>{w.vocabulary->end()});
  state->Accept(w.vocabulary->end(), 96);  // a step that was planned ahead
  EXPECT_EQ(Allowed(state->Mask(96), w.vocabulary->vocab_size()), std::vector<int32_t>{w.vocabulary->end()});
}

TEST(Constraint, ATokenThatCannotComeFailsTheStateAlone) {
  World w;
  const auto bound = w.Make({.kind = Kind::kRegex, .text = "ab"});
  auto state = bound->Start({}, 10);
  state->Accept('x', 9);
  EXPECT_TRUE(state->Mask(9).empty());
  EXPECT_FALSE(bound->Start({}, 10)->Mask(10).empty());
}

TEST(Constraint, ContinuesBehindTokensThatAreThere) {
  World w;
  const auto bound = w.Make({.kind = Kind::kJsonObject});
  SeededStream random(11);
  std::vector<int32_t> ids;
  Follow(w, *bound, 200, random, &ids);
  auto state = bound->Start({}, 500);
  for (size_t i = 0; i < ids.size(); ++i) {
    auto again = bound->Start(std::span(ids).first(i), int32_t(500 - i));
    const auto want = state->Mask(int32_t(500 - i));
    const auto got = again->Mask(int32_t(500 - i));
    ASSERT_TRUE(std::equal(want.begin(), want.end(), got.begin(), got.end())) << i;
    state->Accept(ids[i], int32_t(499 - i));
  }
}

TEST(Constraint, ReasoningIsFreeAndLeavesRoom) {
  World w;
  const int32_t think = w.vocabulary->IdOf("<think>"), end_think = w.vocabulary->IdOf("</think>");
  const auto open = w.Make({.kind = Kind::kRegex, .text = "ab", .reasoning = Reasoning::kOpen});
  auto state = open->Start({}, 50);
  auto allowed = Allowed(state->Mask(50), w.vocabulary->vocab_size());
  EXPECT_EQ(int32_t(allowed.size()), w.vocabulary->vocab_size() - 1);  // all but the end
  state->Accept('x', 5);
  state->Accept('y', 4);
  EXPECT_EQ(Allowed(state->Mask(4), w.vocabulary->vocab_size()), std::vector<int32_t>{end_think});
  state->Accept(end_think, 3);
  state->Accept('\n', 20);
  EXPECT_THAT(Allowed(state->Mask(20), w.vocabulary->vocab_size()), ::testing::Contains('a'));
  const auto may = w.Make({.kind = Kind::kRegex, .text = "ab", .reasoning = Reasoning::kMayOpen});
  auto begin = may->Start({}, 100);
  EXPECT_THAT(Allowed(begin->Mask(100), w.vocabulary->vocab_size()),
              ::testing::IsSupersetOf({think, int32_t('a')}));
  begin->Accept(think, 99);
  EXPECT_THAT(Allowed(begin->Mask(99), w.vocabulary->vocab_size()), ::testing::Contains('z'));
}

TEST(Constraint, ForcedCallsCanBeReadBack) {
  World w;
  SeededStream random(5);
  const auto tools = nlohmann::ordered_json::parse(R"([
    {"type":"function","function":{"name":"get","parameters":{"type":"object","properties":{"s":{"type":"string"},
      "n":{"type":"integer"},"o":{"type":"object","properties":{"k":{"type":"boolean"}},"required":["k"]},
      "e":{"type":"string","enum":["x","y z"]},"r":{"$ref":"#/$defs/r"}},"$defs":{"r":{"type":"integer"}},"required":["s","o"]}}},
    {"type":"function","function":{"name":"get_all"}}])");
  for (const ToolCallStyle style : {ToolCallStyle::kGlm, ToolCallStyle::kDeepseekV3,
                                    ToolCallStyle::kDeepseekV31, ToolCallStyle::kDeepseekV32}) {
    for (const bool one : {true, false}) {
      const auto bound = w.Make({.kind = Kind::kToolCalls, .tools = tools, .style = style, .one_call = one});
      for (int i = 0; i < 15; ++i) {
        const std::string text = Follow(w, *bound, 600, random);
        ResponseParser parser({.tools = style, .declared_tools = tools});
        std::string plain;
        int calls = 0;
        auto events = parser.Feed(text);
        for (auto& e : parser.Finish()) events.push_back(e);
        std::string name;
        for (const ResponseEvent& e : events) {
          if (e.kind == ResponseEvent::Kind::kContent) plain += e.text;
          if (e.kind == ResponseEvent::Kind::kToolBegin) name = e.text;
          if (e.kind != ResponseEvent::Kind::kToolArguments) continue;
          ++calls;
          const auto arguments = nlohmann::json::parse(e.text, nullptr, false);
          ASSERT_TRUE(arguments.is_object()) << text;
          if (name != "get") continue;
          EXPECT_TRUE(arguments.contains("s") && arguments["s"].is_string()) << text;
          EXPECT_TRUE(arguments.contains("o") && arguments["o"]["k"].is_boolean()) << text;
        }
        EXPECT_GE(calls, 1) << text;
        if (one) {
          EXPECT_EQ(calls, 1) << text;
        }
        EXPECT_EQ(plain, "") << text;
      }
    }
  }
}

TEST(Constraint, EqualOnesAreCompiledOnce) {
  World w;
  for (int i = 0; i < 5; ++i) w.Make({.kind = Kind::kRegex, .text = "a+"});
  EXPECT_EQ(w.compiler.compiled(), 1);
  for (int i = 0; i < 100; ++i) w.Make({.kind = Kind::kRegex, .text = fmt::format("a{{{}}}", i + 1)});
  EXPECT_EQ(w.compiler.compiled(), 101);
  w.Make({.kind = Kind::kRegex, .text = "a+"});  // it had to go
  EXPECT_EQ(w.compiler.compiled(), 102);
}

TEST(Constraint, RefusesWhatIsTooLargeOrNotJson) {
  World w;
  const auto error = [&](ConstraintRequest request) {
    auto made = w.compiler.Compile(request);
    return made.ok() ? std::string() : std::string(Message(made.status()));
  };
  EXPECT_THAT(error({.kind = Kind::kRegex, .text = std::string(300000, 'a')}), HasSubstr("bytes"));
  EXPECT_THAT(error({.kind = Kind::kJsonSchema, .text = "{"}), HasSubstr("not valid JSON"));
  EXPECT_THAT(error({.kind = Kind::kJsonSchema, .text = std::string(2000, '[')}), HasSubstr("deep"));
}

// Any text is a constraint or an error, never a crash; and a constraint always has a way on.
TEST(Constraint, AnyTextCompilesOrIsRefused) {
  World w;
  SeededStream random(13);
  const std::string alphabet = "ab01\\[](){}*+?|^$.,:\"'-#\n =>_/";
  const char* words[] = {"root ::= ",      "\"type\":", "\"object\"", "{",   "}",         "\"properties\":",
                         "\"$ref\":\"#\"", "[a-z]",     "::=",        "\\d", "\"enum\":["};
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (int n = int(random.Unit() * 20); n >= 0; --n) {
      if (random.Unit() < 0.3) {
        text += words[size_t(random.Unit() * double(std::size(words)))];
      } else {
        text += alphabet[size_t(random.Unit() * double(alphabet.size()))];
      }
    }
    for (const Kind kind : {Kind::kRegex, Kind::kEbnf, Kind::kJsonSchema}) {
      auto made = w.compiler.Compile({.kind = kind, .text = text});
      if (!made.ok()) continue;
      auto state = (*made)->Start({}, 100);
      EXPECT_FALSE(Allowed(state->Mask(100), w.vocabulary->vocab_size()).empty()) << text;
    }
  }
}

}  // namespace
}  // namespace sluice
