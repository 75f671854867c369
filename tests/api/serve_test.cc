// The server in process, over real sockets, with an engine that does what the prompt says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "byte_tokenizer.h"
#include "http/client.h"
#include "nlohmann/json.hpp"
#include "scripted_engine.h"
#include "serve/app_server.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using J = nlohmann::ordered_json;
using namespace std::chrono_literals;

class ServeTest : public ::testing::Test {
 protected:
  void Begin(ScriptedOptions engine_options = {.step_us = 500}, AppServerOptions options = {}) {
    engine_ = std::make_unique<ScriptedEngine>(engine_options);
    options.model_name = "scripted";
    options.limits.vocab_size = 259;
    options.limits.context_length = engine_options.context;
    auto server = AppServer::Start(std::move(options), engine_.get(), MakeByteTokenizer(),
                                   std::make_shared<JoiningTemplate>(), &clock_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
  }
  void TearDown() override {
    if (server_) server_->Stop(1);
    engine_.reset();
    server_.reset();
  }

  HttpResponse Call(const std::string& method, const std::string& path, const std::string& body = "",
                    HttpHeaders headers = {}) {
    HttpCall call{.url = *HttpUrl::Parse("127.0.0.1:" + std::to_string(server_->port()))};
    headers.emplace_back("Content-Type", "application/json");
    call.request = {.method = method, .path = path, .headers = std::move(headers), .body = body};
    auto answer = client_->Fetch(std::move(call));
    EXPECT_TRUE(answer.ok()) << answer.status() << " " << path << " " << body;
    return answer.ok() ? *answer : HttpResponse{.status = 0};
  }
  HttpResponse Post(const std::string& path, const J& body) { return Call("POST", path, body.dump()); }

  // The request of each endpoint that runs a script.
  static J Request(const std::string& path, const J& script, J more = J::object()) {
    J body = path == "/v1/chat/completions"
                 ? J{{"messages", {{{"role", "user"}, {"content", script.dump()}}}}}
             : path == "/v1/completions" ? J{{"prompt", script.dump()}, {"max_tokens", 100}}
                                         : J{{"text", script.dump()}};
    body.update(more);
    return body;
  }
  // The records of a stream; checks the framing on the way.
  static std::vector<std::string> Records(const HttpResponse& response) {
    EXPECT_EQ(response.content_type, "text/event-stream");
    std::vector<std::string> records;
    std::string_view rest = response.body;
    while (!rest.empty()) {
      const size_t end = rest.find("\n\n");
      EXPECT_NE(end, rest.npos);
      const std::string_view record = rest.substr(0, end);
      rest.remove_prefix(end + 2);
      if (record.starts_with(":")) continue;
      EXPECT_TRUE(record.starts_with("data: ")) << record;
      EXPECT_EQ(record.find('\n'), record.npos);
      records.emplace_back(record.substr(6));
    }
    return records;
  }
  void WaitIdle() {
    for (int i = 0; i < 2000; ++i) {
      const EngineSnapshot s = engine_->Snapshot();
      if (s.running + s.queued == 0) return;
      std::this_thread::sleep_for(1ms);
    }
    FAIL() << "the engine does not get idle";
  }

  const SteadyClock clock_;
  std::unique_ptr<HttpClient> client_ = HttpClient::Make();
  std::unique_ptr<ScriptedEngine> engine_;
  std::unique_ptr<AppServer> server_;
};

constexpr const char* kEndpoints[] = {"/v1/chat/completions", "/v1/completions", "/generate"};

// An end with any status, known or not, is exactly one well-formed error or finish.
TEST_F(ServeTest, AnyEndStatusBecomesExactlyOneErrorOrFinish) {
  Begin();
  for (const char* path : kEndpoints) {
    for (const char* end : {"error", "abort"}) {
      for (int code : {0, 1, 2, 3, 4, 8, 10, 13, 14, 16, 42, 77, 9999, -5}) {
        for (const char* message : {"", "why"}) {
          const J script = {{"say", "AB"}, {"end", end}, {"code", code}, {"message", message}};
          const std::string name = std::string(path) + " " + end + " " + std::to_string(code);
          const HttpResponse whole = Post(path, Request(path, script));
          const J answer = J::parse(whole.body);
          const bool asked_for = std::string(end) == "abort" && (code == 0 || code == 1 || code == 10);
          if (asked_for) {
            EXPECT_EQ(whole.status, 200) << name;
            EXPECT_THAT(whole.body, HasSubstr("\"abort\"")) << name;
          } else {
            EXPECT_GE(whole.status, 400) << name;
            EXPECT_TRUE(answer["error"]["message"].is_string() && !answer["error"]["message"].empty())
                << name;
          }
          const HttpResponse stream = Post(path, Request(path, script, {{"stream", true}}));
          EXPECT_EQ(stream.status, 200) << name;
          int errors = 0, finishes = 0, done = 0;
          for (const std::string& record : Records(stream)) {
            EXPECT_EQ(errors, 0) << name << ": a record after the error";
            if (record == "[DONE]") {
              ++done;
              continue;
            }
            const J j = J::parse(record);
            errors += j.contains("error");
            if (j.contains("choices")) finishes += !j["choices"][0]["finish_reason"].is_null();
            if (j.contains("meta_info")) finishes += !j["meta_info"]["finish_reason"].is_null();
          }
          EXPECT_EQ(errors, asked_for ? 0 : 1) << name;
          EXPECT_EQ(finishes, asked_for ? 1 : 0) << name;
          EXPECT_EQ(done, asked_for ? 1 : 0) << name;
        }
      }
    }
  }
}

TEST_F(ServeTest, StopStringsGiveTheSameTextInBothModes) {
  Begin();
  struct Case {
    J stop;
    int max_tokens;
    std::string text, reason;
    int tokens;
  };
  const std::vector<Case> cases = {{J{"DEFGHIJ"}, 100, "ABC", "stop", 10},
                                   {J{"DEFX"}, 100, "ABCDEFGHIJKLM", "stop", 14},
                                   {J{"BCD", "CDEF"}, 100, "A", "stop", 4},
                                   {J{"HIJKLMZ"}, 10, "ABCDEFGHIJ", "length", 10},
                                   {J::array(), 100, "ABCDEFGHIJKLM", "stop", 14},
                                   {"say", 100, "ABCDEFGHIJKLM", "stop", 14}};  // only in the prompt
  for (int per_step : {1, 3, 13}) {
    for (const Case& c : cases) {
      const J script = {{"say", "ABCDEFGHIJKLM"}, {"per_step", per_step}};
      const J more = {{"stop", c.stop}, {"max_tokens", c.max_tokens}};
      const std::string path = "/v1/chat/completions";
      const J whole = J::parse(Post(path, Request(path, script, more)).body);
      EXPECT_EQ(whole["choices"][0]["message"]["content"], c.text) << c.stop;
      EXPECT_EQ(whole["choices"][0]["finish_reason"], c.reason);
      EXPECT_EQ(whole["usage"]["completion_tokens"], c.tokens) << c.stop << " " << per_step;
      J streamed = more;
      streamed["stream"] = true;
      std::string text, reason;
      for (const std::string& record : Records(Post(path, Request(path, script, streamed)))) {
        if (record == "[DONE]") continue;
        const J choice = J::parse(record)["choices"][0];
        text += choice["delta"].value("content", "");
        if (choice["finish_reason"].is_string()) reason += choice["finish_reason"];
      }
      EXPECT_EQ(text, c.text);
      EXPECT_EQ(reason, c.reason);
    }
  }
}

TEST_F(ServeTest, AStopInOneChoiceLeavesTheOthers) {
  Begin();
  const J script = {{"tokens", {{65, 66, 67, 68, 69}, {70, 71, 72, 73, 74}}}};
  const J answer = J::parse(Post("/v1/completions", Request("/v1/completions", script,
                                                            {{"stop", "BC"}, {"n", 2}, {"max_tokens", 50}}))
                                .body);
  EXPECT_EQ(answer["choices"][0]["text"], "A");
  EXPECT_EQ(answer["choices"][0]["matched_stop"], "BC");
  EXPECT_EQ(answer["choices"][1]["text"], "FGHIJ");
  EXPECT_EQ(answer["choices"][1]["matched_stop"], kScriptEnd);
  EXPECT_EQ(answer["usage"]["completion_tokens"], 3 + 6);
}

TEST_F(ServeTest, CharactersSplitOverTokensAndChoicesStayWhole) {
  Begin();
  const auto ask = [&](const J& tokens, int n, int max_tokens) {
    return J::parse(
        Post("/v1/chat/completions", Request("/v1/chat/completions", {{"tokens", tokens}},
                                             {{"n", n}, {"max_tokens", max_tokens}, {"logprobs", true}}))
            .body);
  };
  EXPECT_EQ(ask(J{{240, 159, 164, 151}}, 1, 9)["choices"][0]["message"]["content"], "🤗");
  EXPECT_EQ(ask(J{{104, 240, 159}}, 1, 3)["choices"][0]["message"]["content"], "h\uFFFD");
  EXPECT_EQ(ask(J{{240, 97}}, 1, 9)["choices"][0]["message"]["content"], "\uFFFDa");
  EXPECT_EQ(ask(J{{255, 254}}, 1, 9)["choices"][0]["message"]["content"], "\uFFFD\uFFFD");
  const J two = ask(J{{195, 169}, {195, 65}}, 2, 9);
  EXPECT_EQ(two["choices"][0]["message"]["content"], "é");
  EXPECT_EQ(two["choices"][1]["message"]["content"], "\uFFFDA");
  J bytes = J::array();
  for (const J& entry : two["choices"][0]["logprobs"]["content"]) {
    for (const J& b : entry["bytes"]) bytes.push_back(b);
  }
  EXPECT_EQ(bytes, (J{195, 169}));
  EXPECT_EQ(two["choices"][0]["logprobs"]["content"][0]["top_logprobs"], J::array());
}

TEST_F(ServeTest, EveryTokenHasItsOwnAlternativesWithSeveralPerStep) {
  Begin();
  const J script = {{"say", "ABCDE"}, {"per_step", 3}};
  std::string text;
  int position = 0;
  for (const std::string& record : Records(Post(
           "/v1/chat/completions", Request("/v1/chat/completions", script,
                                           {{"stream", true}, {"logprobs", true}, {"top_logprobs", 2}})))) {
    if (record == "[DONE]") continue;
    const J choice = J::parse(record)["choices"][0];
    if (!choice["logprobs"].is_object()) continue;
    for (const J& entry : choice["logprobs"]["content"]) {
      const char letter = char('A' + position);
      EXPECT_EQ(entry["token"], std::string(1, letter));
      EXPECT_EQ(entry["logprob"], -(position + 1) / 8.0);
      EXPECT_EQ(entry["top_logprobs"][0]["token"], std::string(1, char(letter + 1)));
      EXPECT_EQ(entry["top_logprobs"].size(), 2u);
      ++position;
    }
  }
  EXPECT_EQ(position, 5);
}

TEST_F(ServeTest, CompletionsEchoAndScorePrompts) {
  Begin();
  const J echo = J::parse(
      Post("/v1/completions", {{"prompt", "xy"}, {"max_tokens", 0}, {"echo", true}, {"logprobs", 1}}).body);
  EXPECT_EQ(echo["choices"][0]["text"], "xy");
  EXPECT_EQ(echo["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(echo["choices"][0]["logprobs"]["tokens"], (J{"x", "y"}));
  EXPECT_EQ(echo["choices"][0]["logprobs"]["token_logprobs"], (J{nullptr, -0.125}));
  EXPECT_EQ(echo["usage"]["completion_tokens"], 0);
  const J plain = J::parse(Post("/v1/completions", {{"prompt", "xy"}, {"max_tokens", 0}}).body);
  EXPECT_EQ(plain["choices"][0]["text"], "");
  EXPECT_EQ(plain["choices"][0]["finish_reason"], "length");
  const J both =
      J::parse(Post("/v1/completions",
                    {{"prompt", {{120, 121}, {122}}}, {"max_tokens", 1}, {"echo", true}, {"logprobs", 0}})
                   .body);
  ASSERT_EQ(both["choices"].size(), 2u);
  EXPECT_EQ(both["choices"][0]["text"], "xyx");
  EXPECT_EQ(both["choices"][0]["logprobs"]["token_logprobs"], (J{nullptr, -0.125, -0.125}));
  EXPECT_EQ(both["choices"][0]["logprobs"]["text_offset"], (J{0, 1, 2}));
  EXPECT_EQ(both["choices"][1]["text"], "zz");
  EXPECT_EQ(both["choices"][0]["logprobs"]["top_logprobs"], nullptr);
}

TEST_F(ServeTest, UsageIsExactAndOnlyWhenAskedFor) {
  Begin();
  for (const char* path : {"/v1/chat/completions", "/v1/completions"}) {
    for (int mode = 0; mode < 3; ++mode) {
      J more = {{"stream", true}, {"n", 3}};
      if (mode > 0) more["stream_options"] = {{"include_usage", mode == 2}};
      const J script = {{"say", "ABCDEF"}, {"per_step", 4}};
      const auto records = Records(Post(path, Request(path, script, more)));
      ASSERT_EQ(records.back(), "[DONE]");
      int with_usage = 0;
      for (const std::string& record : records) {
        if (record == "[DONE]") continue;
        const J j = J::parse(record);
        if (!j.contains("usage") || j["usage"].is_null()) continue;
        ++with_usage;
        EXPECT_EQ(&record, &records[records.size() - 2]);
        EXPECT_EQ(j["choices"], J::array());
        EXPECT_EQ(j["usage"]["prompt_tokens"], script.dump().size());
        EXPECT_EQ(j["usage"]["completion_tokens"], 3 * 7);
        EXPECT_EQ(j["usage"]["total_tokens"], script.dump().size() + 21);
      }
      EXPECT_EQ(with_usage, mode == 2) << path;
    }
  }
}

TEST_F(ServeTest, CachedTokensAreAlwaysThereAndApartByNamespace) {
  Begin();
  const std::string prompt(200, 'p');
  const auto ask = [&](J more) {
    J body = {{"prompt", prompt}, {"max_tokens", 1}, {"return_cached_tokens_details", true}};
    body.update(more);
    return J::parse(Post("/v1/completions", body).body);
  };
  const auto cached = [&](J more) {
    return ask(more)["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  EXPECT_EQ(cached(J::object()), 0);
  EXPECT_EQ(cached(J::object()), 192);
  EXPECT_EQ(cached({{"cache_salt", "a"}}), 0);
  EXPECT_EQ(cached({{"cache_salt", "a"}}), 192);
  EXPECT_EQ(cached({{"extra_key", "a"}}), 0);
  EXPECT_EQ(ask(J::object())["sglext"]["cached_tokens_details"]["device"], 192);
}

TEST_F(ServeTest, TooLongIsRefusedBeforeAnyStream) {
  Begin({.step_us = 500, .context = 100});
  for (const bool stream : {false, true}) {
    for (const size_t length : {size_t(99), size_t(100), size_t(101), size_t(100000)}) {
      const HttpResponse r = Post(
          "/v1/completions", {{"prompt", std::string(length, 'x')}, {"stream", stream}, {"max_tokens", 100}});
      if (length == 99) {
        EXPECT_EQ(r.status, 200);
        continue;
      }
      EXPECT_EQ(r.status, 400);
      EXPECT_EQ(J::parse(r.body)["error"]["code"], "context_length_exceeded");
    }
  }
  EXPECT_EQ(engine_->Snapshot().requests_finished, 2);
}

TEST_F(ServeTest, AFullQueueIsSaidBeforeTheStreamAndEveryClientIsAnswered) {
  Begin({.step_us = 2000, .max_running = 2, .max_queued = 8});
  std::vector<std::thread> clients;
  std::atomic<int> ok{0}, refused{0};
  for (int i = 0; i < 64; ++i) {
    clients.emplace_back([&, i] {
      auto client = HttpClient::Make();
      HttpCall call{.url = *HttpUrl::Parse("127.0.0.1:" + std::to_string(server_->port()))};
      call.request = {.method = "POST",
                      .path = "/v1/completions",
                      .headers = {{"Content-Type", "application/json"}},
                      .body = J{{"prompt", "abcdef"}, {"stream", i % 2 == 0}}.dump()};
      const auto r = client->Fetch(call);
      ASSERT_TRUE(r.ok()) << r.status();
      if (r->status == 200) {
        ++ok;
        return;
      }
      ++refused;
      EXPECT_EQ(r->status, 503);
      EXPECT_EQ(J::parse(r->body)["error"]["code"], "overloaded");
      bool retry_after = false;
      for (const auto& [name, value] : r->headers) retry_after |= name == "retry-after";
      EXPECT_TRUE(retry_after);
    });
  }
  for (auto& c : clients) c.join();
  EXPECT_EQ(ok + refused, 64);
  EXPECT_GT(refused, 0);
  EXPECT_THAT(Call("GET", "/metrics").body,
              HasSubstr("sluice:num_rejected_requests_total{model_name=\"scripted\",reason=\"queue_full\"} " +
                        std::to_string(refused)));
}

TEST_F(ServeTest, KeysAreCheckedOnEveryRouteWithOneAnswer) {
  AppServerOptions options;
  options.api_key = "sesame";
  options.admin_api_key = "boss";
  Begin({.step_us = 500}, options);
  std::string body;
  for (const char* path :
       {"/v1/models", "/metrics", "/server_info", "/generate", "/flush_cache", "/nowhere", "/v1/loads",
        "/v1/chat/completions", "/abort_request", "/health_generate", "/tokenize", "/v1/models?key=sesame"}) {
    for (const HttpHeaders& headers :
         std::vector<HttpHeaders>{{},
                                  {{"Authorization", "Bearer"}},
                                  {{"Authorization", "bearer sesame"}},
                                  {{"Authorization", "Bearer  sesame"}},
                                  {{"Authorization", "Bearer sesam"}},
                                  {{"Authorization", "Bearer sesame2"}},
                                  {{"Authorization", "sesame"}},
                                  {{"Authorization", "Basic sesame"}},
                                  {{"Authorization", std::string("Bearer sesame\0", 14)}},
                                  {{"Authorization", "Bearer " + std::string(1 << 20, 'k')}},
                                  {{"Authorization", "Bearer sesame"}, {"Authorization", "Bearer x"}}}) {
      const HttpResponse r = Call("GET", path, "", headers);
      EXPECT_EQ(r.status, 401) << path;
      if (body.empty()) body = r.body;
      EXPECT_EQ(r.body, body);
    }
  }
  EXPECT_THAT(body, Not(HasSubstr("sesame")));
  EXPECT_EQ(Call("GET", "/health").status, 200);
  const HttpHeaders key = {{"Authorization", "Bearer sesame"}};
  EXPECT_EQ(Call("GET", "/v1/models", "", key).status, 200);
  EXPECT_EQ(Call("GET", "/nowhere", "", key).status, 404);
  EXPECT_EQ(Call("POST", "/flush_cache", "", key).status, 401);
  EXPECT_EQ(Call("POST", "/flush_cache", "", {{"Authorization", "Bearer boss"}}).status, 200);
  EXPECT_THAT(Call("GET", "/server_info", "", key).body, Not(HasSubstr("sesame")));
}

TEST_F(ServeTest, AClientThatLeavesEndsItsWork) {
  Begin({.step_us = 2000, .max_running = 4});
  class Sink final : public HttpSink {
   public:
    void OnData(std::string_view bytes) override { seen += int(bytes.size()); }
    void OnEnd(Status) override { ended = true; }
    std::atomic<int> seen{0};
    std::atomic<bool> ended{false};
  };
  const J endless = {{"say", "abc"}, {"end", "hang"}};
  for (const char* path : kEndpoints) {
    for (const bool stream : {true, false}) {
      for (const int n : {1, 4}) {
        J more = {{"stream", stream}};
        if (std::string(path) == "/generate") {
          more["sampling_params"] = {{"n", n}};
        } else {
          more["n"] = n;
        }
        HttpCall call{.url = *HttpUrl::Parse("127.0.0.1:" + std::to_string(server_->port()))};
        call.request = {.method = "POST",
                        .path = path,
                        .headers = {{"Content-Type", "application/json"}},
                        .body = Request(path, endless, more).dump()};
        auto sink = std::make_shared<Sink>();
        const uint64_t id = client_->Start(call, sink);
        for (int i = 0; i < 20000 && (engine_->Snapshot().running == 0 || (stream && sink->seen == 0)); ++i) {
          std::this_thread::sleep_for(1ms);
        }
        const int64_t aborted = engine_->Snapshot().requests_aborted;
        client_->Cancel(id);
        WaitIdle();
        EXPECT_EQ(engine_->Snapshot().requests_aborted, aborted + 1);
      }
    }
  }
  const std::string metrics = Call("GET", "/metrics").body;
  EXPECT_THAT(metrics,
              HasSubstr("num_aborted_requests_total{model_name=\"scripted\",reason=\"client_gone\"} 12"));
  EXPECT_THAT(metrics, Not(HasSubstr("result=\"ok\"")));
}

TEST_F(ServeTest, AbortRequestEndsOneByName) {
  Begin();
  HttpResponse answer;
  std::thread asker([&] {
    answer = Post("/generate", Request("/generate", {{"say", "ab"}, {"end", "hang"}}, {{"rid", "mine"}}));
  });
  for (int i = 0; i < 20000 && engine_->Snapshot().generation_tokens_total < 2; ++i)
    std::this_thread::sleep_for(1ms);
  EXPECT_EQ(Post("/generate", {{"text", "x"}, {"rid", "mine"}}).status, 409);
  EXPECT_EQ(J::parse(Post("/abort_request", {{"rid", "mine"}}).body)["aborted"], 1);
  asker.join();
  EXPECT_EQ(answer.status, 200);
  const J j = J::parse(answer.body);
  EXPECT_EQ(j["text"], "ab");
  EXPECT_EQ(j["meta_info"]["finish_reason"]["type"], "abort");
  EXPECT_EQ(Post("/generate", {{"text", "x"}, {"rid", "mine"}}).status, 200);  // the name is free again
}

TEST_F(ServeTest, AbortByNameEndsOnePromptOfSeveralNamedOnes) {
  Begin();
  const std::string hang = J{{"say", "ab"}, {"end", "hang"}}.dump();
  HttpResponse answer;
  std::thread asker([&] { answer = Post("/generate", {{"text", {hang, hang}}, {"rid", {"b1", "b2"}}}); });
  for (int i = 0; i < 20000 && engine_->Snapshot().generation_tokens_total < 4; ++i)
    std::this_thread::sleep_for(1ms);
  EXPECT_EQ(J::parse(Post("/abort_request", {{"rid", "b1"}}).body)["aborted"], 1);
  for (int i = 0; i < 20000 && engine_->Snapshot().running > 1; ++i) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(engine_->Snapshot().running, 1);  // b2 goes on
  EXPECT_EQ(J::parse(Post("/abort_request", {{"rid", "b2"}}).body)["aborted"], 1);
  EXPECT_EQ(J::parse(Post("/abort_request", {{"rid", "nobody"}}).body)["aborted"], 0);
  asker.join();
  for (const J& one : J::parse(answer.body)) {
    EXPECT_EQ(one["meta_info"]["finish_reason"]["type"], "abort");
    EXPECT_EQ(one["meta_info"]["finish_reason"].value("message", "").find("client"), std::string::npos);
  }
  const HttpResponse twins = Post("/generate", {{"text", {"a", "b"}}, {"rid", {"same", "same"}}});
  EXPECT_EQ(twins.status, 400);
  EXPECT_THAT(twins.body, HasSubstr("rid"));
}

TEST_F(ServeTest, EncodedBodiesAndCutMethodNamesAreRefused) {
  Begin();
  const HttpResponse zipped =
      Call("POST", "/v1/completions", R"({"prompt":"a"})", {{"Content-Encoding", "gzip"}});
  EXPECT_EQ(zipped.status, 415);
  EXPECT_THAT(zipped.body, HasSubstr("content-encoding"));
  EXPECT_EQ(Call("OST", "/v1/completions", R"({"prompt":"a"})").status, 405);
  const HttpResponse wrong = Call("DELETE", "/flush_cache");
  EXPECT_EQ(wrong.status, 405);
  const auto allow = std::find_if(wrong.headers.begin(), wrong.headers.end(), [](const auto& header) {
    return header.first == "Allow" || header.first == "allow";
  });
  ASSERT_NE(allow, wrong.headers.end());
  EXPECT_EQ(allow->second, "GET, POST");
}

TEST_F(ServeTest, ARequestsTimeIsLimited) {
  Begin();
  const HttpResponse r =
      Post("/v1/chat/completions",
           Request("/v1/chat/completions", {{"say", "ab"}, {"end", "hang"}}, {{"timeout", 0.05}}));
  EXPECT_EQ(r.status, 504);
  EXPECT_EQ(J::parse(r.body)["error"]["code"], "timeout");
}

TEST_F(ServeTest, DrainRefusesNewWorkAndLetsTheRunningFinish) {
  Begin({.step_us = 20000});
  std::atomic<int> streams_done{0};
  std::vector<std::thread> streams;
  for (int i = 0; i < 8; ++i) {
    streams.emplace_back([&, i] {
      auto client = HttpClient::Make();
      HttpCall call{.url = *HttpUrl::Parse("127.0.0.1:" + std::to_string(server_->port()))};
      const J script = i < 4 ? J{{"say", "abcdef"}} : J{{"say", "ab"}, {"end", "hang"}};
      call.request = {.method = "POST",
                      .path = "/v1/completions",
                      .headers = {{"Content-Type", "application/json"}},
                      .body = Request("/v1/completions", script, {{"stream", true}}).dump()};
      const auto r = client->Fetch(call);
      ASSERT_TRUE(r.ok()) << r.status();
      const auto records = Records(*r);
      if (i < 4) {
        EXPECT_EQ(records.back(), "[DONE]");
      } else {
        EXPECT_THAT(records.back(), HasSubstr("\"error\""));
      }
      ++streams_done;
    });
  }
  while (engine_->Snapshot().running < 8) std::this_thread::sleep_for(1ms);
  server_->BeginDrain();
  std::thread drain([&] { engine_->Drain(clock_.Now() + Nanos(600e6)); });
  EXPECT_EQ(Call("GET", "/health").status, 503);
  EXPECT_EQ(Post("/v1/completions", {{"prompt", "x"}}).status, 503);
  drain.join();
  server_->Stop(2);
  for (auto& s : streams) s.join();
  EXPECT_EQ(streams_done, 8);
}

TEST_F(ServeTest, NativeListsStreamsAndLogprobs) {
  Begin();
  const J list = J::parse(
      Post("/generate", {{"text", {"ab", "cd"}}, {"sampling_params", {{"max_new_tokens", 5}}}}).body);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[1]["text"], "cd");
  EXPECT_EQ(list[1]["output_ids"], (J{99, 100, 256}));
  EXPECT_EQ(list[1]["meta_info"]["finish_reason"], (J{{"type", "stop"}, {"matched", 256}}));
  const J scored = J::parse(Post("/generate", {{"input_ids", {97, 98}},
                                               {"return_logprob", true},
                                               {"logprob_start_len", 0},
                                               {"top_logprobs_num", 2},
                                               {"sampling_params", {{"max_new_tokens", 1}}}})
                                .body);
  EXPECT_EQ(scored["meta_info"]["input_token_logprobs"][0], (J{nullptr, 97, nullptr}));
  EXPECT_EQ(scored["meta_info"]["input_token_logprobs"][1][0], -0.125);
  EXPECT_EQ(scored["meta_info"]["output_token_logprobs"][0][1], 97);
  EXPECT_EQ(scored["meta_info"]["output_top_logprobs"][0].size(), 2u);
  std::string last_text;
  for (const std::string& record : Records(Post("/generate", {{"text", "hey"}, {"stream", true}}))) {
    if (record == "[DONE]") continue;
    const std::string text = J::parse(record)["text"];
    EXPECT_EQ(text.substr(0, last_text.size()), last_text);  // cumulative
    last_text = text;
  }
  EXPECT_EQ(last_text, "hey");
  std::string joined;
  J ids = J::array();
  for (const std::string& record : Records(
           Post("/generate", {{"text", "hey"}, {"stream", true}, {"incremental_streaming_output", true}}))) {
    if (record == "[DONE]") continue;
    const J j = J::parse(record);
    joined += j["text"];
    for (const J& id : j["output_ids"]) ids.push_back(id);
  }
  EXPECT_EQ(joined, "hey");
  EXPECT_EQ(ids, (J{104, 101, 121, 256}));
}

TEST_F(ServeTest, InformationRoutesAnswer) {
  AppServerOptions options;
  options.sglang_metrics = true;
  options.server_info = {{"page_size", 64}};
  Begin({.step_us = 500}, options);
  EXPECT_EQ(J::parse(Call("GET", "/v1/models").body)["data"][0]["id"], "scripted");
  EXPECT_EQ(Call("GET", "/v1/models/scripted").status, 200);
  EXPECT_EQ(Call("GET", "/v1/models/other").status, 404);
  EXPECT_EQ(J::parse(Call("GET", "/get_server_info").body)["page_size"], 64);
  EXPECT_EQ(J::parse(Call("GET", "/get_model_info").body)["is_generation"], true);
  EXPECT_EQ(J::parse(Call("GET", "/v1/loads?include=core").body)["loads"][0]["num_running_reqs"], 0);
  EXPECT_EQ(Call("GET", "/health_generate").status, 200);
  EXPECT_EQ(J::parse(Post("/tokenize", {{"prompt", "ab"}}).body)["tokens"], (J{97, 98}));
  EXPECT_EQ(J::parse(Post("/detokenize", {{"tokens", {97, 98, 256}}}).body)["text"], "ab");
  EXPECT_EQ(Call("POST", "/flush_cache").body, "Cache flushed.\n");
  EXPECT_EQ(Call("GET", "/hicache/storage-backend").status, 501);  // this engine has no host tier
  EXPECT_EQ(Call("POST", "/hicache/storage-backend/clear").status, 501);
  EXPECT_EQ(Call("GET", "/v1/chat/completions").status, 405);
  EXPECT_EQ(Post("/v1/responses", J::object()).status, 404);
  EXPECT_THAT(Post("/v1/responses", J::object()).body, HasSubstr("/v1/chat/completions"));
  const std::string metrics = Call("GET", "/metrics").body;
  EXPECT_THAT(metrics, HasSubstr("# TYPE sluice:num_running_reqs gauge"));
  EXPECT_THAT(metrics, HasSubstr("sglang:num_running_reqs{model_name=\"scripted\"} 0"));
}

std::string HeaderOf(const HttpResponse& r, std::string_view name) {
  for (const auto& [key, value] : r.headers) {
    if (key == name) return value;
  }
  return "";
}

TEST_F(ServeTest, AnyContentTypeWillDoButForPagesOfOtherSites) {
  AppServerOptions options;
  options.origins = Origins::Parse("https://good.example").value();
  Begin({.step_us = 500}, std::move(options));
  const std::string body = R"({"prompt":"a","max_tokens":1})";
  for (const char* type : {"application/x-www-form-urlencoded", "text/plain", "", "application/json"}) {
    EXPECT_EQ(Call("POST", "/v1/completions", body, {{"Content-Type", type}}).status, 200) << type;
    EXPECT_EQ(
        Call("POST", "/v1/completions", body, {{"Content-Type", type}, {"Origin", "https://good.example"}})
            .status,
        200);
  }
  const HttpHeaders foreign = {{"Content-Type", "text/plain"}, {"Origin", "https://evil.example"}};
  const HttpResponse refused = Call("POST", "/v1/completions", body, foreign);
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(J::parse(refused.body)["error"]["param"], "content-type");
  // The server's own pages.
  const std::string self = "http://127.0.0.1:" + std::to_string(server_->port());
  EXPECT_EQ(Call("POST", "/v1/completions", body, {{"Content-Type", "text/plain"}, {"Origin", self}}).status,
            200);
}

TEST_F(ServeTest, PagesOfAllowedOriginsGetTheirHeadersOnEveryAnswer) {
  AppServerOptions options;
  options.api_key = "k";
  options.origins = Origins::Parse("https://good.example").value();
  Begin({.step_us = 500}, std::move(options));
  const HttpHeaders ask = {{"Origin", "https://good.example"},
                           {"Access-Control-Request-Method", "POST"},
                           {"Access-Control-Request-Headers", "authorization,content-type,x-stainless-lang"}};
  const HttpResponse preflight = Call("OPTIONS", "/v1/chat/completions", "", ask);
  EXPECT_EQ(preflight.status, 204);
  EXPECT_EQ(HeaderOf(preflight, "access-control-allow-origin"), "https://good.example");
  EXPECT_EQ(HeaderOf(preflight, "access-control-allow-headers"),
            "authorization,content-type,x-stainless-lang");
  EXPECT_THAT(HeaderOf(preflight, "access-control-allow-methods"), HasSubstr("POST"));
  const HttpHeaders from = {{"Origin", "https://good.example"}, {"Authorization", "Bearer k"}};
  const std::string request = Request("/v1/completions", {{"say", "a"}}, {{"stream", true}}).dump();
  for (const HttpResponse& r :
       {Call("GET", "/v1/models", "", from), Call("POST", "/v1/completions", "{", from),
        Call("POST", "/v1/completions", request, from),
        Call("GET", "/v1/models", "", {{"Origin", "https://good.example"}}),  // 401
        Call("GET", "/nowhere", "", from)}) {
    EXPECT_EQ(HeaderOf(r, "access-control-allow-origin"), "https://good.example") << r.status;
    EXPECT_EQ(HeaderOf(r, "vary"), "Origin");
  }
  // Others get none, and their preflight is an unauthorised request like any other.
  HttpHeaders evil = ask;
  evil[0].second = "https://evil.example";
  EXPECT_EQ(Call("OPTIONS", "/v1/chat/completions", "", evil).status, 401);
  EXPECT_EQ(HeaderOf(Call("GET", "/health", "", {{"Origin", "https://evil.example"}}),
                     "access-control-allow-origin"),
            "");
}

TEST_F(ServeTest, TheServersTimeoutIsThatOfRequestsWithoutTheirOwn) {
  AppServerOptions options;
  options.request_timeout_s = 0.05;
  Begin({.step_us = 500}, std::move(options));
  for (const char* path : {"/v1/chat/completions", "/v1/completions", "/generate"}) {
    const HttpResponse r = Post(path, Request(path, {{"say", "ab"}, {"end", "hang"}}));
    EXPECT_EQ(r.status, 504) << path;
    EXPECT_EQ(J::parse(r.body)["error"]["code"], "timeout");
  }
  const HttpResponse own =
      Post("/v1/completions",
           Request("/v1/completions", {{"say", "ab"}, {"prefill_steps", 200}}, {{"timeout", 30}}));
  EXPECT_EQ(own.status, 200) << own.body;
}

TEST_F(ServeTest, TemplateErrorsAreTheClientsAndNameTheMessage) {
  Begin();
  const HttpResponse r =
      Post("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "bad template"}}}}});
  EXPECT_EQ(r.status, 400);
  EXPECT_THAT(r.body, HasSubstr("messages[0]"));
}

TEST_F(ServeTest, AnIdleStreamIsKeptAliveByComments) {
  AppServerOptions options;
  options.ping_interval_s = 0.02;
  Begin({.step_us = 500}, options);
  const HttpResponse r =
      Post("/v1/completions",
           Request("/v1/completions", {{"say", "a"}, {"prefill_steps", 200}}, {{"stream", true}}));
  EXPECT_THAT(r.body, HasSubstr(": ping\n\n"));
  EXPECT_EQ(Records(r).back(), "[DONE]");
}

}  // namespace
}  // namespace sluice
