// The server against raw sockets: limits, framing, clients that leave, half close, slow readers, stop; and
// the client.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "http/client.h"
#include "http/server.h"

namespace sluice {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class RawClient {
 public:
  explicit RawClient(uint16_t port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    timeval timeout{10, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    ::inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~RawClient() { Close(); }
  void Close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void HalfClose() { ::shutdown(fd_, SHUT_WR); }
  void Send(std::string_view s) {
    while (!s.empty()) {
      const ssize_t n = ::send(fd_, s.data(), s.size(), MSG_NOSIGNAL);
      if (n <= 0) return;
      s.remove_prefix(size_t(n));
    }
  }
  std::string ReadAll() {
    std::string out;
    char buffer[4096];
    ssize_t n;
    while ((n = ::recv(fd_, buffer, sizeof(buffer), 0)) > 0) out.append(buffer, size_t(n));
    closed_ = n == 0;
    return out;
  }
  bool closed() const { return closed_; }  // by the server, as the last ReadAll saw
  bool ReadByte() {
    char c;
    return ::recv(fd_, &c, 1, 0) == 1;
  }
  std::string ReadUntil(std::string_view mark) {
    std::string out;
    char c;
    while (out.find(mark) == out.npos && ::recv(fd_, &c, 1, 0) == 1) out += c;
    return out;
  }

 private:
  int fd_;
  bool closed_ = false;
};

class TestHandler : public HttpHandler {
 public:
  std::optional<HttpResponse> CheckHead(const HttpRequest& head) override {
    if (head.path == "/denied") return HttpResponse{.status = 401, .body = "denied"};
    return std::nullopt;
  }
  void Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override {
    ++handled;
    if (request.path == "/echo") {
      exchange->Respond({.body = request.body + "|" + request.query});
    } else if (request.path == "/drop") {
      // the exchange ends here
    } else {
      if (request.path == "/stream" || request.path == "/flood") {
        exchange->StartStream({.idle_filler = ": ping\n\n", .idle_interval_s = 0.05});
      }
      exchange->OnGone([this](GoneReason reason) {
        last_reason = reason;
        ++gone;
      });
      std::lock_guard lock(mutex);
      held = exchange;
    }
  }
  HttpResponse ErrorResponse(HttpError error, std::string_view detail) override {
    static constexpr int kStatus[] = {400, 501, 431, 413, 408, 503, 503, 500};
    return {.status = kStatus[int(error)], .body = std::string(detail)};
  }
  std::shared_ptr<HttpExchange> Held() {
    for (int i = 0; i < 5000; ++i) {
      {
        std::lock_guard lock(mutex);
        if (held) return std::exchange(held, nullptr);
      }
      std::this_thread::sleep_for(1ms);
    }
    return nullptr;
  }
  bool WaitGone(int n, std::chrono::milliseconds limit) {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (gone < n && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
    return gone >= n;
  }
  std::mutex mutex;
  std::shared_ptr<HttpExchange> held;
  std::atomic<int> handled{0}, gone{0};
  std::atomic<GoneReason> last_reason{GoneReason::kClosed};
};

class HttpServerTest : public ::testing::Test {
 protected:
  void StartServer(HttpServerOptions options = {}) {
    options.max_body_bytes = 1000;
    options.max_head_bytes = 4096;
    auto server = HttpServer::Start(options, &handler_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
  }
  void SetUp() override { StartServer(); }
  uint16_t port() { return server_->port(); }
  TestHandler handler_;
  std::unique_ptr<HttpServer> server_;
};

constexpr std::string_view kEcho = "POST /echo?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi";

TEST_F(HttpServerTest, AnswersAndKeepsTheConnection) {
  RawClient c(port());
  for (int i = 0; i < 3; ++i) {
    c.Send(kEcho);
    const std::string answer = c.ReadUntil("hi|a=1");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
    EXPECT_THAT(answer, HasSubstr("Content-Length: 6\r\n"));
  }
}

TEST_F(HttpServerTest, AnswersPipelinedRequestsInOrder) {
  RawClient c(port());
  c.Send(std::string(kEcho) + "POST /echo?b=2 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nsec");
  EXPECT_THAT(c.ReadUntil("sec|b=2"), HasSubstr("hi|a=1"));
}

TEST_F(HttpServerTest, RefusesLargeBodiesEarlyInBothFramings) {
  {
    RawClient c(port());
    c.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n");  // not a byte of it is sent
    EXPECT_THAT(c.ReadUntil("\r\n"), StartsWith("HTTP/1.1 413 "));
  }
  {
    RawClient c(port());
    c.Send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n200\r\n" +
           std::string(512, 'x') + "\r\n200\r\n");
    EXPECT_THAT(c.ReadUntil("\r\n"), StartsWith("HTTP/1.1 413 "));
  }
  RawClient exact(port());
  exact.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + std::string(1000, 'y'));
  EXPECT_THAT(exact.ReadUntil("y|"), StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(handler_.handled, 1);
}

TEST_F(HttpServerTest, BoundsTheMemoryOfAllBodiesTogether) {
  server_.reset();
  StartServer({.max_all_body_bytes = 1500});
  RawClient first(port()), second(port());
  first.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n");
  std::this_thread::sleep_for(50ms);
  second.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n");
  EXPECT_THAT(second.ReadUntil("\r\n"), StartsWith("HTTP/1.1 503 "));
  first.Send(std::string(1000, 'x'));
  EXPECT_THAT(first.ReadUntil("x|"), StartsWith("HTTP/1.1 200 "));
  RawClient third(port());
  third.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + std::string(1000, 'z'));
  EXPECT_THAT(third.ReadUntil("z|"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, RefusesLargeHeadsAndNonsense) {
  RawClient big(port());
  big.Send("GET /echo HTTP/1.1\r\nX: " + std::string(9000, 'a') + "\r\n\r\n");
  EXPECT_THAT(big.ReadUntil("\r\n"), StartsWith("HTTP/1.1 431 "));
  RawClient bad(port());
  bad.Send("hello\r\n\r\n");
  EXPECT_THAT(bad.ReadUntil("\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_EQ(handler_.handled, 0);
}

TEST_F(HttpServerTest, NothingIsReadAfterARequestWhoseEndIsInDoubt) {
  const std::string next = "GET /echo HTTP/1.1\r\nHost: x\r\n\r\n";
  for (const auto& [status, head] : std::vector<std::pair<int, std::string>>{
           {501, "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n"},
           {501, "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\n"},
           {501, "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nContent-Length: 0\r\n\r\n"},
           {501,
            "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: "
            "chunked\r\n\r\n"},
           {400,
            "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: "
            "4\r\n\r\n0\r\n\r\n"},
           {400, "POST /echo HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
           {400, "GET /echo HTTP/1.1\r\n\r\n"},
           {400, "GET /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"}}) {
    RawClient c(port());
    c.Send(head + next);
    const std::string all = c.ReadAll();  // closed after one answer
    EXPECT_THAT(all, StartsWith("HTTP/1.1 " + std::to_string(status))) << head;
    EXPECT_EQ(all.find("HTTP/1.1 200"), all.npos) << head << all;
  }
  EXPECT_EQ(handler_.handled, 0);
}

TEST_F(HttpServerTest, SkipsAnEmptyLineBeforeARequest) {
  RawClient c(port());
  c.Send("\r\nGET /echo?a HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(c.ReadUntil("|a"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, CanListenSaysSoWithoutKeepingThePort) {
  HttpServerOptions free{.host = "127.0.0.1"};
  EXPECT_TRUE(HttpServer::CanListen(free).ok());
  free.port = port();
  EXPECT_THAT(std::string(HttpServer::CanListen(free).message()), HasSubstr("in use"));
}

TEST_F(HttpServerTest, ChecksTheHeadBeforeTheBodyIsRead) {
  RawClient c(port());
  c.Send("POST /denied HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n");
  EXPECT_THAT(c.ReadUntil("denied"), StartsWith("HTTP/1.1 401 "));
}

TEST_F(HttpServerTest, SendsContinueWhenAsked) {
  RawClient c(port());
  c.Send("POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n");
  EXPECT_THAT(c.ReadUntil("\r\n\r\n"), StartsWith("HTTP/1.1 100 Continue"));
  c.Send("z");
  EXPECT_THAT(c.ReadUntil("z|"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, AnExchangeLetGoIsAnswered500) {
  RawClient c(port());
  c.Send("GET /drop HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(c.ReadUntil("dropped"), StartsWith("HTTP/1.1 500 "));
}

TEST_F(HttpServerTest, NoticesAClientThatClosesWhileItWaits) {
  for (const char* path : {"/wait", "/stream"}) {
    const int before = handler_.gone;
    RawClient c(port());
    c.Send(std::string("GET ") + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
    auto exchange = handler_.Held();
    ASSERT_NE(exchange, nullptr);
    c.Close();
    EXPECT_TRUE(handler_.WaitGone(before + 1, 500ms)) << path;
    EXPECT_TRUE(exchange->gone());
    EXPECT_FALSE(exchange->Write("late"));
  }
}

TEST_F(HttpServerTest, NoticesACloseThatComesAfterAHalfClose) {
  RawClient c(port());
  c.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  c.HalfClose();
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(handler_.gone, 0);
  c.Close();
  EXPECT_TRUE(handler_.WaitGone(1, 1500ms));
}

TEST_F(HttpServerTest, AnswersAClientThatHalfClosed) {
  RawClient c(port());
  c.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  c.HalfClose();
  std::this_thread::sleep_for(400ms);  // several probes go out
  EXPECT_EQ(handler_.gone, 0);
  exchange->Respond({.status = 200, .body = "still here"});
  const std::string all = c.ReadAll();
  EXPECT_THAT(all, StartsWith("HTTP/1.1 200 OK\r\nServer"));
  EXPECT_THAT(all, HasSubstr("\r\n\r\nstill here"));
  EXPECT_TRUE(c.closed()) << "nothing can follow";
}

// Whether the server reads the end while it answers or behind its answer, it answers what came whole and
// closes.
TEST_F(HttpServerTest, ClosesBehindTheLastAnswerOfAClientThatHalfClosed) {
  struct Case {
    std::string behind;
    int answers;
  };
  const std::string get = "GET /echo HTTP/1.1\r\nHost: x\r\n\r\n";
  const std::vector<Case> cases = {
      {"", 0},
      {"\r\n", 0},
      {"GET /ec", 0},
      {get, 1},
      {get + get + "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi", 3},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n" + get, 2},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhi", 0},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n", 0},
      {get + "nonsense\r\n\r\n", 2},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\nhi", 1}};
  for (const bool seen : {true, false}) {
    for (const Case& one : cases) {
      RawClient c(port());
      c.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + one.behind);
      auto exchange = handler_.Held();
      ASSERT_NE(exchange, nullptr);
      c.HalfClose();
      if (seen) {
        ASSERT_TRUE(c.ReadByte());  // the probe: the end was read
      }
      exchange->Respond({.status = 200, .body = "first"});
      const std::string all = c.ReadAll();
      EXPECT_TRUE(c.closed()) << one.behind;
      int answers = 0;
      for (size_t at = 0; (at = all.find("TTP/1.1 ", at)) != all.npos; ++at)
        answers += all.compare(at + 8, 3, "100") != 0;
      EXPECT_EQ(answers, 1 + one.answers) << one.behind << "\n" << all;
    }
  }
}

TEST_F(HttpServerTest, StreamsChunksAndFillsSilence) {
  RawClient c(port());
  c.Send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  EXPECT_THAT(c.ReadUntil("\r\n\r\n"), HasSubstr("Content-Type: text/event-stream\r\n"));
  EXPECT_THAT(c.ReadUntil("\n\n\r\n"), HasSubstr(": ping\n\n"));
  EXPECT_TRUE(exchange->Write("data: 1\n\n"));
  EXPECT_THAT(c.ReadUntil("data: 1\n\n\r\n"), HasSubstr("9\r\ndata: 1\n\n\r\n"));
  exchange->EndStream();
  EXPECT_THAT(c.ReadUntil("0\r\n\r\n"), HasSubstr("0\r\n\r\n"));
  EXPECT_FALSE(exchange->Write("after the end"));
  c.Send(kEcho);  // the connection is reused
  EXPECT_THAT(c.ReadUntil("hi|"), StartsWith("HTTP/1.1 200"));
  EXPECT_EQ(handler_.gone, 0);
}

TEST_F(HttpServerTest, AStreamLetGoEndsWithoutItsLastChunk) {
  RawClient c(port());
  c.Send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  exchange->Write("data: 1\n\n");
  exchange.reset();
  EXPECT_THAT(c.ReadAll(), ::testing::Not(HasSubstr("\r\n0\r\n")));
}

TEST_F(HttpServerTest, DropsAReaderThatStopsAndBoundsItsOutput) {
  RawClient c(port(), 4096);
  c.Send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  const std::string block(4096, 'x');
  size_t written = 0;
  while (exchange->Write(block) && written < (64u << 20)) {
    written += block.size();
    if (written % (256 << 10) == 0) std::this_thread::sleep_for(2ms);
  }
  EXPECT_LT(written, 16u << 20);
  EXPECT_TRUE(handler_.WaitGone(1, 1000ms));
  EXPECT_EQ(handler_.last_reason, GoneReason::kSlowReader);
}

TEST_F(HttpServerTest, DropsAReaderWhoseSocketStalls) {
  server_.reset();
  StartServer({.write_stall_s = 0.2});
  RawClient c(port(), 4096);
  c.Send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  for (int i = 0; i < 200; ++i) exchange->Write(std::string(4096, 'x'));  // under the bound, over the socket
  EXPECT_TRUE(handler_.WaitGone(1, 3000ms));
  EXPECT_EQ(handler_.last_reason, GoneReason::kSlowReader);
}

TEST_F(HttpServerTest, SaysWhichPortIsInUse) {
  TestHandler other;
  auto second = HttpServer::Start({.port = port()}, &other);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(Message(second.status())),
              HasSubstr(std::to_string(port()) + " on 127.0.0.1 is in use"));
}

TEST_F(HttpServerTest, StopLetsARunningAnswerEnd) {
  RawClient idle(port());
  idle.Send(kEcho);
  idle.ReadUntil("hi|a=1");
  RawClient c(port());
  c.Send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  std::thread stopper([&] { server_->Stop(5); });
  EXPECT_EQ(idle.ReadAll(), "");  // closed at once
  exchange->Respond({.body = "done"});
  const std::string all = c.ReadAll();
  EXPECT_THAT(all, HasSubstr("Connection: close"));
  EXPECT_THAT(all, HasSubstr("done"));
  stopper.join();
  EXPECT_EQ(server_->connections(), 0);
}

TEST_F(HttpServerTest, StopCutsWhatDoesNotEnd) {
  RawClient c(port());
  c.Send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
  auto exchange = handler_.Held();
  server_->Stop(0.05);
  EXPECT_EQ(handler_.gone, 1);
  EXPECT_EQ(handler_.last_reason, GoneReason::kShutdown);
  EXPECT_FALSE(exchange->Write("x"));
}

TEST_F(HttpServerTest, HoldsAThousandOpenStreamsOnOneThread) {
  std::vector<std::unique_ptr<RawClient>> clients;
  std::vector<std::shared_ptr<HttpExchange>> exchanges;
  for (int i = 0; i < 1000; ++i) {
    clients.push_back(std::make_unique<RawClient>(port()));
    clients.back()->Send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
    exchanges.push_back(handler_.Held());
    ASSERT_NE(exchanges.back(), nullptr);
  }
  EXPECT_EQ(server_->connections(), 1000);
  for (auto& e : exchanges) e->Write("data: all\n\n");
  for (auto& c : clients) ASSERT_THAT(c->ReadUntil("data: all"), HasSubstr("data: all"));
}

class RecordingSink : public HttpSink {
 public:
  void OnHead(int s, const HttpHeaders&) override { status = s; }
  void OnData(std::string_view bytes) override {
    std::lock_guard lock(mutex);
    data += bytes;
  }
  void OnEnd(Status s) override {
    end = std::move(s);
    ended = true;
  }
  void WaitEnd() const {
    while (!ended) std::this_thread::sleep_for(1ms);
  }
  std::mutex mutex;
  std::string data;
  std::atomic<int> status{0};
  std::atomic<bool> ended{false};
  Status end;
};

TEST_F(HttpServerTest, ClientFetchesReusesAndReportsFailure) {
  auto client = HttpClient::Make();
  HttpCall call{.url = *HttpUrl::Parse("127.0.0.1:" + std::to_string(port()))};
  call.request = {.method = "POST", .path = "/echo", .body = "abc"};
  for (int i = 0; i < 3; ++i) {
    auto answer = client->Fetch(call);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->body, "abc|");
  }
  EXPECT_EQ(server_->connections(), 1);
  server_->Stop(0);
  EXPECT_TRUE(absl::IsUnavailable(client->Fetch(call).status()));
}

TEST_F(HttpServerTest, ClientStreamsAndCancelReachesTheServer) {
  auto client = HttpClient::Make();
  HttpCall call{.url = *HttpUrl::Parse("http://127.0.0.1:" + std::to_string(port()))};
  call.request = {.method = "GET", .path = "/stream"};
  auto sink = std::make_shared<RecordingSink>();
  const uint64_t id = client->Start(call, sink);
  auto exchange = handler_.Held();
  exchange->Write("data: one\n\n");
  for (bool seen = false; !seen;) {
    std::this_thread::sleep_for(1ms);
    std::lock_guard lock(sink->mutex);
    seen = sink->data.find("data: one") != std::string::npos;
  }
  EXPECT_EQ(sink->status, 200);
  client->Cancel(id);
  sink->WaitEnd();
  EXPECT_TRUE(absl::IsAborted(sink->end));
  EXPECT_TRUE(handler_.WaitGone(1, 1000ms));
}

TEST(HttpUrlTest, ParsesAndRefuses) {
  EXPECT_EQ(HttpUrl::Parse("http://a:81/v1/")->path, "/v1");
  EXPECT_EQ(HttpUrl::Parse("http://a")->port, 80);
  EXPECT_EQ(HttpUrl::Parse("[::1]:9")->host, "::1");
  EXPECT_FALSE(HttpUrl::Parse("https://a").ok());
  EXPECT_FALSE(HttpUrl::Parse("http://a:x").ok());
  EXPECT_THAT(std::string(HttpUrl::Parse("ftp://a").status().message()), testing::HasSubstr("only http://"));
  EXPECT_EQ(HttpUrl::ParseServer("http://a:81/v1/")->path, "/");
  EXPECT_EQ(HttpUrl::ParseServer("http://a:81/models/v1")->path, "/models");
  EXPECT_EQ(HttpUrl::ParseServer("http://a:81/v12")->path, "/v12");
  for (const char* url : {"http://a:80", "http://[::1]:9", "http://127.0.0.1:30000/models/v1"})
    EXPECT_EQ(HttpUrl::Parse(url)->ToString(), url);
  EXPECT_FALSE(HttpUrl::Parse("http://:1").ok());
}

TEST(HttpMessageTest, FindsQueryParameters) {
  HttpRequest r{.query = "include=core,queues&x&y=2"};
  EXPECT_EQ(r.QueryParam("include"), "core,queues");
  EXPECT_EQ(r.QueryParam("x"), "");
  EXPECT_EQ(r.QueryParam("y"), "2");
}

}  // namespace
}  // namespace sluice
