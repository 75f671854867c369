#include "router/router.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "fmt/format.h"

namespace sluice::router {
namespace {

std::vector<Candidate> Idle(int n) {
  std::vector<Candidate> c;
  for (int i = 0; i < n; ++i) c.push_back({i, 0});
  return c;
}

TEST(Policy, RoundRobinVisitsEveryWorkerInTurnAlsoWhenOneIsMissing) {
  auto p = *MakePolicy("round_robin", 1);
  std::vector<int> seen;
  for (int i = 0; i < 6; ++i) seen.push_back(int(p->Pick(Idle(3), "")));
  EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 0, 1, 2}));
  const std::vector<Candidate> without_one = {{0, 0}, {2, 0}};
  EXPECT_EQ(without_one[p->Pick(without_one, "")].worker, 0);
  EXPECT_EQ(without_one[p->Pick(without_one, "")].worker, 2);
}

TEST(Policy, EqualLoadsAreDrawnAtRandomBySeed) {
  for (const char* name : {"random", "power_of_two", "cache_aware"}) {
    auto p = *MakePolicy(name, 7);
    std::map<size_t, int> count;
    for (int i = 0; i < 300; ++i) ++count[p->Pick(Idle(3), "")];
    ASSERT_EQ(count.size(), 3u) << name;
    for (const auto& [worker, n] : count) EXPECT_GT(n, 50) << name << " worker " << worker;
  }
}

TEST(Policy, PowerOfTwoTakesTheLessLoaded) {
  auto p = *MakePolicy("power_of_two", 3);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(p->Pick({{0, 9}, {1, 2}}, ""), 1u);
}

TEST(Policy, CacheAwareFollowsThePrefixUntilTheLoadsAreFarApart) {
  auto p = *MakePolicy("cache_aware", 3);
  const std::string prompt(4000, 'x');
  const size_t first = p->Pick(Idle(3), prompt);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(p->Pick(Idle(3), prompt + std::to_string(i)), first);
  std::vector<Candidate> loaded = Idle(3);
  loaded[first].load = 100;
  EXPECT_NE(p->Pick(loaded, prompt), first);
  p->Forget(int(first));
  std::map<size_t, int> count;
  for (int i = 0; i < 60; ++i) {
    auto fresh = *MakePolicy("cache_aware", uint64_t(i));
    ++count[fresh->Pick(Idle(3), prompt)];
  }
  EXPECT_EQ(count.size(), 3u);
}

TEST(PrefixIndex, KeepsABoundAndMatchesWholeBlocksOnly) {
  PrefixIndex index(64);
  index.Insert(std::string(1000, 'a'), 1);
  EXPECT_EQ(index.Match(std::string(1000, 'a'), {0, 1}), (std::vector<size_t>{0, 896}));
  EXPECT_EQ(index.Match(std::string(100, 'a'), {0, 1}), (std::vector<size_t>{0, 0}));
  for (int i = 0; i < 1000; ++i) index.Insert(std::to_string(i) + std::string(500, 'b'), i % 3);
  EXPECT_LE(index.nodes(), 70u);
}

TEST(Router, RefusesALineThatNamesNoWholePair) {
  RouterOptions o;
  EXPECT_FALSE(Router::Start(o).ok());
  o.workers = {{WorkerSpec::Role::kPrefill, "127.0.0.1:1", 1}};
  EXPECT_NE(Message(Router::Start(o).status()).find("--decode"), std::string_view::npos);
  o.workers.push_back({WorkerSpec::Role::kWhole, "127.0.0.1:1", 0});
  EXPECT_FALSE(Router::Start(o).ok());
}

// Says that it is well, begins an answer and never ends it.
class Endless final : public HttpHandler {
 public:
  std::optional<HttpResponse> CheckHead(const HttpRequest&) override { return std::nullopt; }
  void Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override {
    if (request.path == "/health") return exchange->Respond({.body = "{}"});
    const bool stream = request.body.find("\"stream\":true") != std::string::npos;
    if (stream) {
      exchange->StartStream({});
      exchange->Write("data: {}\n\n");
    }
    std::lock_guard lock(mutex_);
    held_.push_back(std::move(exchange));
    ++asked;
  }
  HttpResponse ErrorResponse(HttpError, std::string_view) override { return {.status = 400}; }
  std::atomic<int> asked{0};

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<HttpExchange>> held_;
};

// Keeps what came of one call's answer and tells when it began and when it ended.
class Kept final : public HttpSink {
 public:
  void OnHead(int status, const HttpHeaders&) override { status_ = status; }
  void OnData(std::string_view bytes) override {
    std::lock_guard lock(mutex_);
    body_ += bytes;
    begun_.notify_all();
  }
  void OnEnd(Status) override { ended_.set_value(); }
  // False after 30 s without a byte.
  bool WaitForData() {
    std::unique_lock lock(mutex_);
    return begun_.wait_for(lock, std::chrono::seconds(30), [&] { return !body_.empty(); });
  }
  std::pair<int, std::string> Answer() {
    ended_.get_future().wait();
    return {status_, body_};
  }

 private:
  std::mutex mutex_;
  std::condition_variable begun_;
  std::promise<void> ended_;
  std::string body_;
  int status_ = 0;
};

TEST(Router, RequestsWhoseTimeIsOverLearnWhy) {
  Endless endless;
  auto worker = *HttpServer::Start({}, &endless);
  RouterOptions o;
  o.workers = {{WorkerSpec::Role::kWhole, fmt::format("127.0.0.1:{}", worker->port()), 0}};
  o.health_interval_s = 0.05;
  auto router = *Router::Start(o);
  const auto client = HttpClient::Make();
  const std::shared_ptr<Kept> kept[] = {std::make_shared<Kept>(), std::make_shared<Kept>()};
  for (int i = 0; i < 2; ++i) {
    HttpCall call;
    call.url = *HttpUrl::Parse(fmt::format("127.0.0.1:{}/generate", router->port()));
    call.request.method = "POST";
    call.request.path = "/generate";
    call.request.headers.push_back({"content-type", "application/json"});
    call.request.body = i == 0 ? R"({"text":"a"})" : R"({"text":"a","stream":true})";
    client->Start(std::move(call), kept[i]);
  }
  // One answer has begun at its client, of the other nothing has come: what is said of the end differs.
  ASSERT_TRUE(kept[1]->WaitForData());
  for (int i = 0; i < 30000 && endless.asked < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_EQ(endless.asked, 2);
  router->EndAll("the time is over");
  const auto whole = kept[0]->Answer(), streamed = kept[1]->Answer();
  EXPECT_EQ(whole.first, 503);
  EXPECT_NE(whole.second.find("the time is over"), std::string::npos) << whole.second;
  EXPECT_EQ(streamed.first, 200);
  EXPECT_NE(streamed.second.find("the time is over"), std::string::npos) << streamed.second;
}

}  // namespace
}  // namespace sluice::router
