#include "api/responses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "api/json_writer.h"
#include "nlohmann/json.hpp"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

const AnswerMeta kMeta{.id = "chatcmpl-1", .created = 7, .model = "m"};

Json ParseRecord(const std::string& record) {
  EXPECT_EQ(record.substr(0, 6), "data: ");
  EXPECT_EQ(record.substr(record.size() - 2), "\n\n");
  const std::string line = record.substr(6, record.size() - 8);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  return Json::parse(line);
}

TEST(JsonWriterTest, EscapesAndReplacesWhatIsNotUtf8) {
  std::string out;
  AppendJsonString(std::string_view("a\"\\\n\t\x01\0é\xff\xf0\x9f🤗", 16), &out);
  EXPECT_EQ(Json::parse(out).get<std::string>(), std::string("a\"\\\n\t\x01\0é\uFFFD\uFFFD🤗", 19));
}

TEST(JsonWriterTest, MatchesAnIndependentWriterOnRandomBytes) {
  uint32_t state = 1;
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 20; ++i) text += char((state = state * 1664525 + 1013904223) >> 24);
    std::string out;
    AppendJsonString(text, &out);
    EXPECT_EQ(
        Json::parse(out).get<std::string>(),
        Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>());
  }
}

TEST(JsonWriterTest, NumbersThatJsonCannotHold) {
  std::string out;
  JsonWriter w(&out);
  w.Array().Num(std::nan("")).Num(0.5).Logprob(-INFINITY).Logprob(NAN).Logprob(-0.25f).Int(-3).End();
  EXPECT_EQ(out, "[null,0.5,-9999.0,null,-0.25,-3]");
}

TEST(ErrorTest, AnyStatusBecomesOneWellFormedError) {
  for (int code : {-7, 0, 1, 3, 4, 8, 10, 13, 14, 16, 17, 77, 1 << 30}) {
    for (std::string message : {"", "why\nnot \xff"}) {
      const Status status(static_cast<absl::StatusCode>(code), message);
      const ApiError error = ErrorFromStatus(status);
      EXPECT_GE(error.http_status, 400) << code;
      EXPECT_LT(error.http_status, 600) << code;
      const Json body = Json::parse(ErrorBody(error))["error"];
      EXPECT_FALSE(body["message"].get<std::string>().empty()) << code;
      EXPECT_TRUE(body["type"].is_string());
      EXPECT_TRUE(body.contains("param") && body.contains("code"));
    }
  }
  EXPECT_EQ(ErrorFromStatus(Status(static_cast<absl::StatusCode>(77), "x")).code, "77");
}

TEST(ErrorTest, QuotedTextIsCutAtACharacterBorder) {
  EXPECT_EQ(Quoted("ab\xc3\xa9", 3), "\"ab\"...");
  EXPECT_EQ(Quoted("ab\xc3", 10), "\"ab\uFFFD\"");
  EXPECT_EQ(Quoted("a\nb"), "\"a?b\"");
}

TEST(ResponsesTest, ChatRecords) {
  std::string out;
  AppendChatRole(kMeta, 2, nullptr, &out);
  Json j = ParseRecord(out);
  EXPECT_EQ(j["choices"][0]["delta"], (Json{{"role", "assistant"}, {"content", ""}}));
  EXPECT_EQ(j["choices"][0]["index"], 2);
  EXPECT_FALSE(j.contains("usage"));

  out.clear();
  const Finish finish{.reason = FinishReason::kStop, .match = StopMatch::kText, .matched_text = "END"};
  const std::vector<TokenLogprob> tokens = {
      {.id = 5, .bytes = "\xc3", .logprob = -0.5f, .top = {{.id = 5, .bytes = "\xc3", .logprob = -0.5f}}}};
  AppendChatDelta(
      kMeta, {.index = 0, .text = "x\n", .with_logprobs = true, .logprobs = tokens, .finish = &finish}, &out);
  j = ParseRecord(out)["choices"][0];
  EXPECT_EQ(j["delta"]["content"], "x\n");
  EXPECT_EQ(j["finish_reason"], "stop");
  EXPECT_EQ(j["matched_stop"], "END");
  EXPECT_EQ(j["logprobs"]["content"][0]["bytes"], Json::array({195}));
  EXPECT_EQ(j["logprobs"]["content"][0]["token"], "\uFFFD");
  EXPECT_EQ(j["logprobs"]["content"][0]["top_logprobs"].size(), 1u);
}

TEST(ResponsesTest, UsageAlwaysNamesCachedTokens) {
  std::string out;
  AppendUsageRecord(kMeta, true, {.prompt = 10, .completion = 3, .details = true}, &out);
  const Json j = ParseRecord(out);
  EXPECT_EQ(j["choices"], Json::array());
  EXPECT_EQ(j["usage"]["total_tokens"], 13);
  EXPECT_EQ(j["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  EXPECT_EQ(j["sglext"]["cached_tokens_details"]["storage"], 0);
}

TEST(ResponsesTest, UsageNamesDraftedTokensWhenAsked) {
  for (const bool details : {false, true}) {
    std::string out;
    AppendUsageRecord(
        kMeta, true, {.prompt = 1, .completion = 9, .details = details, .drafted = 8, .draft_kept = 6}, &out);
    const Json usage = ParseRecord(out)["usage"];
    EXPECT_EQ(usage.contains("completion_tokens_details"), details);
    if (!details) continue;
    EXPECT_EQ(usage["completion_tokens_details"]["accepted_prediction_tokens"], 6);
    EXPECT_EQ(usage["completion_tokens_details"]["rejected_prediction_tokens"], 2);
  }
}

TEST(ResponsesTest, CompletionLogprobsKeepTheFourLists) {
  ChoiceAnswer answer{
      .text = "ab", .with_logprobs = true, .with_top = true, .finish = {.reason = FinishReason::kLength}};
  answer.logprobs = {{.id = 1, .bytes = "a", .has_logprob = false},
                     {.id = 2,
                      .bytes = "b",
                      .logprob = -3,
                      .top = {{.id = 9, .bytes = "z", .logprob = -1}, {.id = 8, .bytes = "z", .logprob = -2}},
                      .text_offset = 1}};
  const Json j = Json::parse(CompletionBody(kMeta, std::span(&answer, 1), {}))["choices"][0];
  EXPECT_EQ(j["logprobs"]["tokens"], (Json{"a", "b"}));
  EXPECT_EQ(j["logprobs"]["token_logprobs"], (Json{nullptr, -3.0}));
  EXPECT_EQ(j["logprobs"]["text_offset"], (Json{0, 1}));
  EXPECT_EQ(j["logprobs"]["top_logprobs"][0], nullptr);
  EXPECT_EQ(j["logprobs"]["top_logprobs"][1], (Json{{"z", -1.0}, {"b", -3.0}}));
  EXPECT_EQ(j["finish_reason"], "length");
  EXPECT_EQ(j["matched_stop"], nullptr);
}

TEST(ResponsesTest, NativeAnswerHasMetaInfo) {
  const std::vector<int32_t> ids = {4, 5};
  const std::vector<TokenLogprob> in = {{.id = 1, .has_logprob = false}, {.id = 2, .logprob = -1}};
  const std::vector<TokenLogprob> outs = {{.id = 4, .bytes = "x", .logprob = -2, .top = {{4, "x", -2}}}};
  const Finish finish{.reason = FinishReason::kStop, .match = StopMatch::kToken, .matched_token = 5};
  std::string out;
  AppendNativeAnswer(
      {.id = "r",
       .text = "x",
       .output_ids = ids,
       .usage = {.prompt = 2, .completion = 2, .cached = {.device = 64, .host = 1}, .details = true},
       .finish = &finish,
       .e2e_latency_s = 0.5,
       .with_logprobs = true,
       .with_top = true,
       .with_input_logprobs = true,
       .input_logprobs = in,
       .output_logprobs = outs},
      &out);
  const Json j = Json::parse(out);
  EXPECT_EQ(j["output_ids"], (Json{4, 5}));
  const Json& meta = j["meta_info"];
  EXPECT_EQ(meta["finish_reason"], (Json{{"type", "stop"}, {"matched", 5}}));
  EXPECT_EQ(meta["cached_tokens"], 65);
  EXPECT_EQ(meta["cached_tokens_details"]["host"], 1);
  EXPECT_EQ(meta["input_token_logprobs"], (Json{Json{nullptr, 1, nullptr}, Json{-1.0, 2, nullptr}}));
  EXPECT_EQ(meta["output_top_logprobs"], (Json{Json{Json{-2.0, 4, nullptr}}}));
}

}  // namespace
}  // namespace sluice
