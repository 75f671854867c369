// The parsers against malformed bodies, edge values and values that must not cost memory (cases of public
// failure reports).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api/generation_config.h"
#include "api/json_reader.h"
#include "api/requests.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const ApiLimits kLimits{.vocab_size = 1000, .context_length = 100};
const SamplingDefaults kDefaults;

// The error's message, or "" when the body is accepted.
std::string Chat(const std::string& fields, ChatRequest* out = nullptr) {
  ChatRequest local;
  const std::string body =
      R"({"messages":[{"role":"user","content":"hi"}])" + (fields.empty() ? "" : "," + fields) + "}";
  const auto error = ParseChat(body, kLimits, kDefaults, out ? out : &local);
  if (error) {
    EXPECT_EQ(error->http_status, 400) << body;
  }
  return error ? error->message : "";
}
std::string RawChat(const std::string& body) {
  ChatRequest out;
  const auto error = ParseChat(body, kLimits, kDefaults, &out);
  if (error) {
    EXPECT_FALSE(ErrorBody(*error).empty());
  }
  return error ? error->message : "";
}
std::string Completion(const std::string& fields, CompletionRequest* out = nullptr) {
  CompletionRequest local;
  const auto error = ParseCompletion("{" + fields + "}", kLimits, kDefaults, out ? out : &local);
  return error ? error->message : "";
}
std::string Native(const std::string& fields, NativeRequest* out = nullptr) {
  NativeRequest local;
  const auto error = ParseNative("{" + fields + "}", kLimits, kDefaults, out ? out : &local);
  return error ? error->message : "";
}

TEST(BodyTest, MalformedBodiesAreRefusedWithAReason) {
  EXPECT_THAT(RawChat("{:"), HasSubstr("not valid JSON"));
  EXPECT_THAT(RawChat(""), HasSubstr("empty"));
  for (const char* body : {"null", "[]", "\"x\"", "5"})
    EXPECT_THAT(RawChat(body), HasSubstr("send a JSON object"));
  EXPECT_THAT(RawChat("{\"messages\":\"\xff\xfe\"}"), HasSubstr("UTF-8"));
  EXPECT_THAT(RawChat("{\"messages\":\"\xc4\xe3\"}"), HasSubstr("UTF-8"));  // GBK
  EXPECT_THAT(RawChat(R"({"messages":[{"role":"user","content":"\ud800"}]})"), HasSubstr("surrogate"));
  EXPECT_THAT(RawChat(R"({"messages":[],})"), HasSubstr("not valid JSON"));
  EXPECT_THAT(RawChat(R"({"a":1,"a":2})"), HasSubstr("\"a\": the key is there twice"));
  EXPECT_THAT(RawChat(R"({"messages":[{"role":"user","role":"user","content":"x"}]})"),
              HasSubstr("messages[0].role"));
}

TEST(BodyTest, DepthIsLimitedAlsoInIgnoredFields) {
  for (const char* key : {"x", "tools"}) {
    for (size_t depth : {3000u, 100000u}) {
      const std::string value = std::string(depth, '[') + std::string(depth, ']');
      EXPECT_THAT(RawChat("{\"" + std::string(key) + "\":" + value + "}"),
                  HasSubstr("nested deeper than 128"));
    }
  }
  const std::string value = std::string(64, '[') + std::string(64, ']');
  EXPECT_EQ(Chat("\"x\":" + value), "");
  // A body that is larger than the parser's first guess keeps the limit.
  const std::string deep = std::string(200, '[') + std::string(200, ']');
  EXPECT_THAT(RawChat("{\"pad\":\"" + std::string(100000, 'p') + "\",\"x\":" + deep + "}"),
              HasSubstr("nested deeper"));
}

TEST(BodyTest, AKeyCutInsideACharacterGivesAValidError) {
  for (size_t pad = 40; pad < 52; ++pad) {
    const std::string key = std::string(pad, 'k') + std::string(100, '\xc3');
    std::string fixed;
    for (size_t i = 0; i < 75; ++i) fixed += "é";
    const std::string text =
        "{\"" + std::string(pad, 'k') + fixed + "\":1,\"" + std::string(pad, 'k') + fixed + "\":2}";
    ChatRequest out;
    const auto error = ParseChat(text, kLimits, kDefaults, &out);
    ASSERT_TRUE(error);
    EXPECT_TRUE(nlohmann::json::accept(ErrorBody(*error)));
    ChatRequest out2;
    const auto raw = ParseChat("{\"" + key + "\":1}", kLimits, kDefaults, &out2);
    ASSERT_TRUE(raw);
    EXPECT_TRUE(nlohmann::json::accept(ErrorBody(*raw)));
  }
}

TEST(BodyTest, AMillionKeysAreRefused) {
  std::string bias = "\"logit_bias\":{";
  for (int i = 0; i < 1000000; ++i) bias += (i ? ",\"" : "\"") + std::to_string(i) + "\":1";
  EXPECT_THAT(Chat(bias + "}"), HasSubstr("logit_bias: 1000000 entries are too many"));
}

TEST(SamplingTest, RangesHoldAndNameTheField) {
  const std::vector<std::pair<std::string, std::string>> refused = {
      {R"("temperature":-0.1)", "temperature: -0.1"},
      {R"("temperature":999999)", "temperature: 999999"},
      {R"("temperature":"1")", "temperature: \"1\" is not a number"},
      {R"("temperature":1e999)", "\"temperature\": a number is malformed or out of range"},
      {R"("temperature":NaN)", "not valid JSON"},
      {R"("top_p":-1)", "top_p"},
      {R"("top_p":0)", "top_p: 0 is out of range; send a number above 0"},
      {R"("top_p":1.01)", "top_p"},
      {R"("min_p":1.5)", "min_p"},
      {R"("top_k":-2)", "top_k"},
      {R"("repetition_penalty":0)", "repetition_penalty"},
      {R"("repetition_penalty":1e-300)", "repetition_penalty"},
      {R"("presence_penalty":2.1)", "presence_penalty"},
      {R"("n":0)", "n: 0 is out of range; send an integer from 1 to 128"},
      {R"("n":5000000)", "n: 5000000"},
      {R"("n":1.5)", "n: 1.5 is not a whole number"},
      {R"("logprobs":true,"top_logprobs":21)", "top_logprobs: 21"},
      {R"("logprobs":true,"top_logprobs":-1)", "top_logprobs: -1"},
      {R"("logprobs":true,"top_logprobs":1e9)", "top_logprobs"},
      {R"("logprobs":false,"top_logprobs":2)", "needs \"logprobs\": true"},
      {R"("logprobs":5)", "logprobs: 5 is not a boolean"},
      {R"("seed":18446744073709551616)", "\"seed\": a number is malformed or out of range"},
      {R"("seed":1.5)", "seed"},
      {R"("logit_bias":{"1000":1})", "logit_bias: \"1000\" is not a token id from 0 to 999"},
      {R"("logit_bias":{"1":1e30})", "logit_bias.1"},
      {R"("logit_bias":{"x":1})", "logit_bias"},
      {R"("logit_bias":[1])", "logit_bias"},
      {R"("stop_token_ids":[1000])", "stop_token_ids[0]"},
      {R"("stream_options":{"include_usage":true})", "only allowed together with \"stream\": true"},
      {R"("stream":true,"stream_options":5)", "stream_options"},
      {R"("stream":"yes")", "stream: \"yes\" is not a boolean"},
      {R"("cache_salt":"")", "cache_salt"},
      {R"("cache_salt":5)", "cache_salt: 5 is not a string"},
      {R"("timeout":0)", "timeout"},
      {R"("response_format":{"type":"grammar"})", "response_format.type: \"grammar\" is not supported"},
      {R"("tools":[{"type":"function"}])", "tools[0].function: missing"},
      {R"("min_tokens":5,"max_tokens":4)", "min_tokens"},
      {R"("max_tokens":5,"max_completion_tokens":4)", "contradicts"},
      {R"("model":5)", "model: 5 is not a string"},
  };
  for (const auto& [field, message] : refused) EXPECT_THAT(Chat(field), HasSubstr(message)) << field;
  EXPECT_THAT(Chat("\"cache_salt\":\"" + std::string(10000, 's') + "\""),
              HasSubstr("cache_salt: 10000 bytes"));
  for (const char* accepted :
       {R"("temperature":-0.0)", R"("temperature":2)", R"("top_p":1e-9)", R"("top_k":0)", R"("top_k":-1)",
        R"("min_p":1)", R"("seed":18446744073709551615)", R"("seed":-5)", R"("tools":[])", R"("tools":null)",
        R"("tool_choice":"auto")", R"("response_format":{"type":"text"})", R"("top_logprobs":0)",
        R"("logprobs":true)", R"("n":null)", R"("unknown_field":{"a":[1,2]})",
        R"("stream":true,"stream_options":{"include_usage":true})"}) {
    EXPECT_EQ(Chat(accepted), "") << accepted;
  }
}

TEST(SamplingTest, StopStrings) {
  EXPECT_THAT(Chat(R"("stop":"")"), HasSubstr("stop: an empty stop string"));
  EXPECT_THAT(Chat(R"("stop":[""])"), HasSubstr("stop[0]: an empty stop string"));
  EXPECT_THAT(Chat(R"("stop":["a","b","c","d","e"])"),
              HasSubstr("5 stop strings are too many; send at most 4"));
  EXPECT_THAT(Chat(R"("stop":5)"), HasSubstr("stop: 5 is not a string"));
  ChatRequest out;
  EXPECT_EQ(Chat(R"("stop":[])", &out), "");
  EXPECT_TRUE(out.options.stop.empty());
  EXPECT_EQ(Chat(R"("stop":"x")", &out), "");
  EXPECT_THAT(out.options.stop, ElementsAre("x"));
  EXPECT_EQ(Native(R"("text":"t","sampling_params":{"stop":["a","b","c","d","e"]})"), "");
}

TEST(SamplingTest, DefaultsThatCannotBeAreRefusedWithTheirRange) {
  const auto error = [](std::string_view text) {
    const auto d = ReadGenerationConfig(text);
    return d.ok() ? std::string("accepted") : std::string(d.status().message());
  };
  EXPECT_EQ(error(R"({"temperature":"hot"})"), "temperature: \"hot\" is not a number; write one from 0 to 2");
  EXPECT_EQ(error(R"({"temperature":-5,"top_p":9})"),
            "temperature: -5 is out of range; write a number of at least 0 and at most 2");
  EXPECT_THAT(error(R"({"top_p":9})"), HasSubstr("top_p: 9 is out of range"));
  EXPECT_THAT(error(R"({"repetition_penalty":0})"), HasSubstr("repetition_penalty: 0 is out of range"));
  EXPECT_THAT(error(R"({"min_p":1.5})"), HasSubstr("min_p: 1.5 is out of range"));
  EXPECT_THAT(error(R"({"top_k":"all"})"), HasSubstr("top_k: \"all\" is not a whole number"));
  EXPECT_THAT(error(R"({"top_k":-2})"), HasSubstr("top_k: -2 is out of range"));
  EXPECT_THAT(error(R"({"do_sample":"no"})"), HasSubstr("do_sample: \"no\" is not a boolean"));
  EXPECT_THAT(error(R"({"top_k":1,"top_k":2})"), HasSubstr("top_k"));
  EXPECT_THAT(error("nonsense"), HasSubstr("JSON object"));
  EXPECT_EQ(error(R"({"temperature":null,"top_k":0,"transformers_version":"4.57.0"})"), "accepted");
}

TEST(SamplingTest, DefaultsComeFromTheModelUnlessSent) {
  const SamplingDefaults greedy =
      ReadGenerationConfig(R"({"do_sample":false,"temperature":1.0,"top_k":50})").value();
  EXPECT_EQ(greedy.temperature, 0);
  EXPECT_EQ(greedy.top_k, 50);
  EXPECT_EQ(ReadGenerationConfig(R"({"temperature":0.6,"top_p":0.95})")->top_p, 0.95f);
  ChatRequest out;
  EXPECT_FALSE(ParseChat(R"({"messages":[{"role":"user","content":"x"}],"top_k":3})", kLimits, greedy, &out));
  EXPECT_EQ(out.options.sampling.temperature, 0);
  EXPECT_EQ(out.options.sampling.top_k, 3);
}

TEST(MaxTokensTest, EdgeValues) {
  for (const char* bad : {"-1", "1.5", "\"5\"", "2147483648", "9223372036854775808", "[]", "true"}) {
    EXPECT_THAT(Completion("\"prompt\":\"x\",\"max_tokens\":" + std::string(bad)), HasSubstr("max_tokens:"))
        << bad;
  }
  CompletionRequest out;
  EXPECT_EQ(Completion(R"("prompt":"x","max_tokens":0,"echo":true)", &out), "");
  EXPECT_EQ(out.options.sampling.max_tokens, 0);
  CompletionRequest absent;
  EXPECT_EQ(Completion(R"("prompt":"x","max_tokens":null)", &absent), "");
  EXPECT_EQ(absent.options.sampling.max_tokens, 16);
  ChatRequest chat;
  EXPECT_EQ(Chat("", &chat), "");
  EXPECT_FALSE(chat.options.has_max_tokens);
}

TEST(PromptTest, AllShapesAndTheirErrors) {
  CompletionRequest out;
  EXPECT_EQ(Completion(R"("prompt":"a")", &out), "");
  EXPECT_EQ(out.prompts[0].text, "a");
  CompletionRequest ids;
  EXPECT_EQ(Completion(R"("prompt":[1,2,3])", &ids), "");
  EXPECT_THAT(ids.prompts[0].ids, ElementsAre(1, 2, 3));
  CompletionRequest lists;
  EXPECT_EQ(Completion(R"("prompt":[[1],[2]])", &lists), "");
  EXPECT_EQ(lists.prompts.size(), 2u);
  for (const char* bad : {R"("")", R"([""])", "[]", "[[]]", R"(["a",""])", "[-1]", "[4294967296]", "[1000]",
                          "[1.5]", "5", "{}", "null", "[null]", "[[1,\"a\"]]"}) {
    EXPECT_THAT(Completion("\"prompt\":" + std::string(bad)), HasSubstr("prompt")) << bad;
  }
  std::string many = "[0";
  for (int i = 0; i < 101; ++i) many += ",0";
  EXPECT_THAT(Completion("\"prompt\":" + many + "]"), HasSubstr("more than the context of 100 tokens"));
  EXPECT_THAT(Completion(R"("prompt":["a","b","c","d","e","f","g","h","i"],"n":128)"),
              HasSubstr("at most 1024 together"));
  EXPECT_THAT(Completion(R"("prompt":"a","best_of":3)"), HasSubstr("best_of"));
  EXPECT_THAT(Completion(R"("prompt":"a","logprobs":21)"), HasSubstr("logprobs: 21"));
}

TEST(MessagesTest, ShapesAndTheirErrors) {
  const auto with = [](const std::string& messages) { return RawChat("{\"messages\":" + messages + "}"); };
  EXPECT_THAT(with("[]"), HasSubstr("messages: the list is empty"));
  EXPECT_THAT(with("5"), HasSubstr("messages: 5 is not an array"));
  EXPECT_THAT(RawChat("{}"), HasSubstr("messages: missing"));
  EXPECT_THAT(with(R"([{"content":"x"}])"), HasSubstr("messages[0].role: missing"));
  EXPECT_THAT(with(R"([{"role":"robot","content":"x"}])"),
              HasSubstr("messages[0].role: \"robot\" is unknown"));
  EXPECT_THAT(with(R"([{"role":"user","content":5}])"), HasSubstr("messages[0].content: 5 is not text"));
  EXPECT_THAT(with(R"([{"role":"user","content":"a"},{"role":"user","content":[{"type":"image_url"}]}])"),
              HasSubstr("messages[1].content[0]: parts of type \"image_url\""));
  EXPECT_EQ(with(R"([{"role":"user","content":[{"type":"text","text":"A"},{"type":"text","text":"B"}]}])"),
            "");
  EXPECT_EQ(with(R"([{"role":"assistant","content":null,"tool_calls":[]}])"), "");
  EXPECT_EQ(with(R"([{"role":"user","content":"","name":"n"}])"), "");
}

TEST(NativeTest, InputsParametersAndLists) {
  NativeRequest one;
  EXPECT_EQ(Native(R"("text":"a","sampling_params":{"max_new_tokens":3,"temperature":0},"rid":"r")", &one),
            "");
  EXPECT_FALSE(one.batch);
  EXPECT_EQ(one.options[0].sampling.max_tokens, 3);
  EXPECT_EQ(one.options[0].rid, "r");
  NativeRequest two;
  EXPECT_EQ(
      Native(R"("input_ids":[[1],[2]],"sampling_params":[{"max_new_tokens":3},{}],"rid":["a","b"])", &two),
      "");
  EXPECT_EQ(two.options[1].rid, "b");
  EXPECT_EQ(two.options[1].sampling.max_tokens, 128);
  EXPECT_THAT(Native(R"("sampling_params":{})"), HasSubstr("exactly one of text and input_ids"));
  EXPECT_THAT(Native(R"("text":"a","input_ids":[1])"), HasSubstr("exactly one"));
  EXPECT_THAT(Native(R"("text":[1])"), HasSubstr("input_ids"));
  EXPECT_THAT(Native(R"("input_ids":[[1],[2]],"sampling_params":[{}])"), HasSubstr("1 objects for 2 inputs"));
  EXPECT_THAT(Native(R"("text":"a","sampling_params":{"temperature":9})"),
              HasSubstr("sampling_params.temperature"));
  EXPECT_THAT(Native(R"("text":"a","sampling_params":{"regex":5})"), HasSubstr("sampling_params.regex"));
  EXPECT_THAT(Native(R"("text":"a","return_logprob":true,"top_logprobs_num":1000000000)"),
              HasSubstr("top_logprobs_num"));
}

TEST(SmallRequestsTest, TokenizeDetokenizeAbort) {
  TokenizeRequest t;
  EXPECT_FALSE(ParseTokenize(R"({"prompt":["a","b"]})", kLimits, &t));
  EXPECT_TRUE(t.batch);
  DetokenizeRequest d;
  EXPECT_FALSE(ParseDetokenize(R"({"tokens":[[1,2],[3]]})", kLimits, &d));
  EXPECT_EQ(d.tokens.size(), 2u);
  EXPECT_TRUE(ParseDetokenize(R"({"tokens":[1000]})", kLimits, &d));
  AbortRequest a;
  EXPECT_TRUE(ParseAbort("{}", kLimits, &a));
  EXPECT_FALSE(ParseAbort(R"({"abort_all":true})", kLimits, &a));
}

}  // namespace
}  // namespace sluice
