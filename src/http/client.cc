#include "http/client.h"

#include <sys/socket.h>

#include <atomic>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <charconv>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

namespace sluice {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using boost::system::error_code;

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);
constexpr size_t kIdleConnectionsMax = 256;  // per host and port

auto Seconds(double s) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(s));
}

class Client final : public HttpClient {
 public:
  Client() : thread_([this] { context_.run(); }) {}

  ~Client() override {
    asio::post(context_, [this] {
      for (auto& [id, running] : running_) CancelCall(*running);
      idle_.clear();
      work_.reset();
    });
    thread_.join();
  }

  uint64_t Start(HttpCall call, std::shared_ptr<HttpSink> sink) override {
    auto running = std::make_shared<Running>();
    running->id = next_id_.fetch_add(1);
    running->call = std::move(call);
    running->sink = std::move(sink);
    const uint64_t id = running->id;
    asio::post(context_, [this, running = std::move(running)] {
      running_.emplace(running->id, running);
      asio::co_spawn(context_, Run(running), asio::detached);
    });
    return id;
  }

  void Cancel(uint64_t id) override {
    asio::post(context_, [this, id] {
      if (auto it = running_.find(id); it != running_.end()) CancelCall(*it->second);
    });
  }

 private:
  struct Running {
    uint64_t id = 0;
    HttpCall call;
    std::shared_ptr<HttpSink> sink;
    std::unique_ptr<beast::tcp_stream> stream;
    std::optional<asio::ip::tcp::resolver> resolver;
    bool cancelled = false;
  };

  static void CancelCall(Running& running) {
    running.cancelled = true;
    if (running.resolver) running.resolver->cancel();
    if (running.stream) running.stream->close();
  }

  static Status Failed(const Running& r, std::string_view what, error_code ec) {
    if (r.cancelled) return Aborted("cancelled");
    const std::string where = "http://" + r.call.url.Authority();
    if (ec == beast::error::timeout) return DeadlineExceeded("{}: {} took too long", where, what);
    return Unavailable("{}: {}: {}", where, what, ec.message());
  }

  asio::awaitable<void> Run(std::shared_ptr<Running> running) {
    Status status = co_await Exchange(*running);
    running_.erase(running->id);
    running->sink->OnEnd(std::move(status));
  }

  // A kept connection that the server has not closed, or a new one.
  asio::awaitable<Status> Connect(Running& r) {
    const HttpUrl& url = r.call.url;
    auto& kept = idle_[url.Authority()];
    while (!kept.empty()) {
      auto stream = std::move(kept.back());
      kept.pop_back();
      char byte;
      const ssize_t n = ::recv(stream->socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        r.stream = std::move(stream);
        co_return OkStatus();
      }
    }
    r.resolver.emplace(context_);
    auto [resolve_ec, found] = co_await r.resolver->async_resolve(url.host, std::to_string(url.port), kTuple);
    if (resolve_ec || r.cancelled) co_return Failed(r, "resolving the name", resolve_ec);
    r.stream = std::make_unique<beast::tcp_stream>(context_);
    r.stream->expires_after(Seconds(r.call.connect_timeout_s));
    auto [ec, endpoint] = co_await r.stream->async_connect(found, kTuple);
    if (ec || r.cancelled) co_return Failed(r, "connecting", ec);
    error_code ignored;
    r.stream->socket().set_option(asio::ip::tcp::no_delay(true), ignored);
    co_return OkStatus();
  }

  asio::awaitable<Status> Exchange(Running& r) {
    if (r.cancelled) co_return Aborted("cancelled");
    if (Status s = co_await Connect(r); !s.ok()) co_return s;
    const HttpRequest& request = r.call.request;
    std::string bytes = fmt::format("{} {}{} HTTP/1.1\r\nHost: {}\r\n", request.method,
                                    request.path.empty() ? r.call.url.path : request.path,
                                    request.query.empty() ? "" : "?" + request.query, r.call.url.Authority());
    for (const auto& [name, value] : request.headers) bytes += name + ": " + value + "\r\n";
    if (!request.body.empty() || request.method == "POST")
      bytes += fmt::format("Content-Length: {}\r\n", request.body.size());
    bytes += "\r\n";
    bytes += request.body;
    r.stream->expires_after(Seconds(r.call.stall_timeout_s));
    if (auto [ec, n] = co_await asio::async_write(*r.stream, asio::buffer(bytes), kTuple); ec) {
      co_return Failed(r, "sending the request", ec);
    }
    beast::flat_buffer buffer;
    std::optional<beast::http::response_parser<beast::http::string_body>> parser;
    do {  // interim answers (1xx) come before the real one
      parser.emplace();
      parser->body_limit(r.call.max_body_bytes);
      if (request.method == "HEAD") parser->skip(true);
      r.stream->expires_after(Seconds(r.call.stall_timeout_s));
      auto [ec, n] = co_await beast::http::async_read_header(*r.stream, buffer, *parser, kTuple);
      if (ec) co_return Failed(r, "reading the answer", ec);
    } while (parser->get().result_int() / 100 == 1);
    HttpHeaders headers;
    for (const auto& field : parser->get()) {
      std::string name(field.name_string());
      for (char& c : name) c = c >= 'A' && c <= 'Z' ? char(c + 32) : c;
      headers.emplace_back(std::move(name), std::string(field.value()));
    }
    r.sink->OnHead(int(parser->get().result_int()), headers);
    std::string& body = parser->get().body();
    for (;;) {
      if (!body.empty()) {
        r.sink->OnData(body);
        body.clear();
      }
      if (parser->is_done()) break;
      r.stream->expires_after(Seconds(r.call.stall_timeout_s));
      auto [ec, n] = co_await beast::http::async_read_some(*r.stream, buffer, *parser, kTuple);
      if (ec && !(ec == beast::http::error::end_of_stream && parser->is_done())) {
        co_return Failed(r, "reading the answer's body", ec);
      }
      if (r.cancelled) co_return Aborted("cancelled");
    }
    if (parser->keep_alive() && !r.cancelled) {
      auto& kept = idle_[fmt::format("{}:{}", r.call.url.host, r.call.url.port)];
      r.stream->expires_never();
      if (kept.size() < kIdleConnectionsMax) kept.push_back(std::move(r.stream));
    }
    co_return OkStatus();
  }

  asio::io_context context_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_{context_.get_executor()};
  std::unordered_map<uint64_t, std::shared_ptr<Running>> running_;                         // I/O thread
  std::unordered_map<std::string, std::vector<std::unique_ptr<beast::tcp_stream>>> idle_;  // I/O thread
  std::atomic<uint64_t> next_id_{1};
  std::thread thread_;
};

class CollectingSink final : public HttpSink {
 public:
  void OnHead(int status, const HttpHeaders& headers) override {
    response_.status = status;
    response_.headers = headers;
    for (const auto& [name, value] : headers) {
      if (name == "content-type") response_.content_type = value;
    }
  }
  void OnData(std::string_view bytes) override { response_.body += bytes; }
  void OnEnd(Status status) override {
    if (status.ok()) {
      done_.set_value(std::move(response_));
    } else {
      done_.set_value(std::move(status));
    }
  }
  StatusOr<HttpResponse> Wait() { return done_.get_future().get(); }

 private:
  HttpResponse response_;
  std::promise<StatusOr<HttpResponse>> done_;
};

}  // namespace

StatusOr<HttpUrl> HttpUrl::Parse(std::string_view url) {
  const std::string_view whole = url;
  if (url.starts_with("https://")) {
    return Unsupported("{}: https is not built in; put a TLS proxy in front and use http://", whole);
  }
  if (url.starts_with("http://")) url.remove_prefix(7);
  if (url.find("://") != url.npos)
    return Unsupported("URL {}: only http:// is supported; write http://HOST:PORT", whole);
  HttpUrl out;
  const size_t slash = url.find('/');
  const std::string_view authority = url.substr(0, slash);
  out.path = slash == url.npos ? "/" : std::string(url.substr(slash));
  while (out.path.size() > 1 && out.path.back() == '/') out.path.pop_back();
  size_t colon = authority.rfind(':');
  if (authority.starts_with('[')) {
    const size_t bracket = authority.find(']');
    if (bracket == authority.npos) return Invalid("URL {}: '[' without ']'", whole);
    out.host = std::string(authority.substr(1, bracket - 1));
    colon = bracket + 1 < authority.size() ? bracket + 1 : authority.npos;
  } else {
    out.host = std::string(authority.substr(0, colon));
  }
  if (out.host.empty()) return Invalid("URL {}: no host; write http://HOST:PORT", whole);
  if (colon != authority.npos) {
    const std::string_view digits = authority.substr(colon + 1);
    const auto [end, ec] = std::from_chars(digits.data(), digits.data() + digits.size(), out.port);
    if (ec != std::errc() || end != digits.data() + digits.size() || out.port == 0) {
      return Invalid("URL {}: port \"{}\" is not a number from 1 to 65535", whole, digits);
    }
  }
  return out;
}

StatusOr<HttpUrl> HttpUrl::ParseServer(std::string_view url) {
  ASSIGN_OR_RETURN(HttpUrl out, Parse(url));
  constexpr std::string_view kBase = "/v1";
  if (out.path.ends_with(kBase)) out.path.resize(out.path.size() - kBase.size());
  if (out.path.empty()) out.path = "/";
  return out;
}

std::string HttpUrl::Authority() const {
  return host.find(':') == host.npos ? fmt::format("{}:{}", host, port) : fmt::format("[{}]:{}", host, port);
}

std::string HttpUrl::ToString() const { return "http://" + Authority() + (path == "/" ? "" : path); }

std::unique_ptr<HttpClient> HttpClient::Make() { return std::make_unique<Client>(); }

StatusOr<HttpResponse> HttpClient::Fetch(HttpCall call) {
  auto sink = std::make_shared<CollectingSink>();
  Start(std::move(call), sink);
  return sink->Wait();
}

}  // namespace sluice
