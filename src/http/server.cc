#include "http/server.h"

#include <pthread.h>
#include <time.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <future>
#include <vector>

#include "base/log.h"
#include "http/connection.h"

namespace sluice {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using http_internal::Connection;
using http_internal::IoThread;
using http_internal::ServerShared;
using std::chrono::steady_clock;

class Server final : public HttpServer {
 public:
  Server(const HttpServerOptions& options, HttpHandler* handler) : shared_(std::make_shared<ServerShared>()) {
    shared_->options = options;
    shared_->handler = handler;
    for (int i = 0; i < std::max(1, options.io_threads); ++i)
      threads_.push_back(std::make_shared<IoThread>());
  }

  ~Server() override { Stop(0); }

  Status Listen() {
    const HttpServerOptions& options = shared_->options;
    error_code ec;
    asio::ip::tcp::resolver resolver(threads_[0]->context);
    const auto found =
        resolver.resolve(options.host, std::to_string(options.port),
                         asio::ip::resolver_base::passive | asio::ip::resolver_base::numeric_service, ec);
    if (ec || found.empty()) {
      return Unavailable("cannot resolve --host {}: {}; use an address of this machine, 127.0.0.1 or 0.0.0.0",
                         options.host, ec.message());
    }
    const asio::ip::tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.emplace(threads_[0]->context);
    acceptor_->open(endpoint.protocol(), ec);
    if (!ec) acceptor_->set_option(asio::socket_base::reuse_address(true), ec);
    if (!ec) acceptor_->bind(endpoint, ec);
    if (!ec) acceptor_->listen(4096, ec);
    if (ec == asio::error::address_in_use) {
      return Unavailable("port {} on {} is in use; stop the other process or choose another --port",
                         options.port, options.host);
    }
    if (ec == asio::error::access_denied) {
      return Unavailable("port {} on {} is not allowed for this user; choose another --port (1024 or above)",
                         options.port, options.host);
    }
    if (ec)
      return Unavailable(
          "cannot listen on --host {} --port {}: {}; use an address of this machine, 127.0.0.1 or 0.0.0.0",
          options.host, options.port, ec.message());
    port_ = acceptor_->local_endpoint(ec).port();
    return OkStatus();
  }

  void Run() {
    asio::co_spawn(threads_[0]->context, Accept(), asio::detached);
    for (auto& io : threads_) {
      io->thread = std::thread([io] {
        pthread_setname_np(pthread_self(), "sluice-http");
        io->context.run();
      });
    }
  }

  uint16_t port() const override { return port_; }
  int64_t connections() const override { return shared_->connections; }
  double cpu_seconds() const override {
    double seconds = 0;
    for (const auto& io : threads_) {
      clockid_t clock;
      timespec t{};
      if (stopped_ || pthread_getcpuclockid(io->thread.native_handle(), &clock) != 0) continue;
      if (clock_gettime(clock, &t) == 0) seconds += double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
    }
    return seconds;
  }

  void Stop(double grace_s) override {
    if (stopped_.exchange(true)) return;
    shared_->stopping = true;
    asio::post(threads_[0]->context, [this] {
      error_code ignored;
      if (acceptor_) acceptor_->close(ignored);
    });
    ForEachConnection([](Connection& c) { c.CloseIfIdle(); });
    const auto until = steady_clock::now() + std::chrono::milliseconds(int64_t(grace_s * 1000));
    WaitForConnections(until);
    ForEachConnection([](Connection& c) { c.Close(GoneReason::kShutdown); });
    WaitForConnections(steady_clock::now() + std::chrono::seconds(1));
    for (auto& io : threads_) {
      io->work.reset();
      io->context.stop();
    }
    for (auto& io : threads_) {
      if (io->thread.joinable()) io->thread.join();
      io->stopped = true;
      io->context.restart();
      io->context.poll();  // what was posted meanwhile lets its exchange go
    }
  }

 private:
  template <typename F>
  void ForEachConnection(F fn) {
    for (auto& io : threads_) {
      asio::post(io->context, [io, fn] {
        std::vector<std::shared_ptr<Connection>> alive;
        for (auto& entry : io->connections) {
          if (auto c = entry.second.lock()) alive.push_back(std::move(c));
        }
        for (auto& c : alive) fn(*c);
      });
    }
  }

  void WaitForConnections(steady_clock::time_point until) {
    while (shared_->connections > 0 && steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  asio::awaitable<void> Accept() {
    size_t next = 0;
    while (!shared_->stopping) {
      auto& io = threads_[next++ % threads_.size()];
      auto [ec, socket] = co_await acceptor_->async_accept(io->context, asio::as_tuple(asio::use_awaitable));
      if (ec == asio::error::operation_aborted || ec == asio::error::bad_descriptor) co_return;
      if (ec) {  // out of descriptors: answering others frees some
        asio::steady_timer pause(threads_[0]->context, std::chrono::milliseconds(50));
        co_await pause.async_wait(asio::as_tuple(asio::use_awaitable));
        continue;
      }
      if (shared_->connections >= shared_->options.max_connections) {
        HttpResponse full = shared_->handler->ErrorResponse(
            HttpError::kTooManyConnections,
            fmt::format("{} connections are open (--max-connections)", shared_->options.max_connections));
        auto bytes = std::make_shared<std::string>(http_internal::Serialise(full, false, false));
        error_code ignored;
        socket.non_blocking(true, ignored);
        socket.write_some(asio::buffer(*bytes), ignored);
        socket.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
        continue;
      }
      asio::post(io->context, [io, shared = shared_, s = std::move(socket)]() mutable {
        std::make_shared<Connection>(std::move(s), io, shared)->Start();
      });
    }
  }

  std::shared_ptr<ServerShared> shared_;
  std::vector<std::shared_ptr<IoThread>> threads_;
  std::optional<asio::ip::tcp::acceptor> acceptor_;
  uint16_t port_ = 0;
  std::atomic<bool> stopped_{false};
};

}  // namespace

Status HttpServer::CanListen(const HttpServerOptions& options) { return Server(options, nullptr).Listen(); }

StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpServerOptions& options,
                                                        HttpHandler* handler) {
  auto server = std::make_unique<Server>(options, handler);
  RETURN_IF_ERROR(server->Listen());
  server->Run();
  return server;
}

}  // namespace sluice
