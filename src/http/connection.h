// Internal to http/: one server connection as a coroutine, and the answer it is writing. Includes Asio and
// Beast; only server.cc and connection.cc may include it.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "http/server.h"

namespace sluice::http_internal {

class Connection;

// What all connections of a server share; outlives them.
struct ServerShared {
  HttpServerOptions options;
  HttpHandler* handler = nullptr;
  std::atomic<bool> stopping{false};
  std::atomic<int64_t> connections{0};
  std::atomic<uint64_t> body_bytes{0};  // of bodies that are being read or not parsed yet
};

// Bytes of a request's body, counted against what all bodies together may take. Given back when it goes.
class BodyCharge {
 public:
  explicit BodyCharge(std::shared_ptr<ServerShared> shared) : shared_(std::move(shared)) {}
  ~BodyCharge() { shared_->body_bytes -= bytes_; }
  BodyCharge(const BodyCharge&) = delete;
  BodyCharge& operator=(const BodyCharge&) = delete;
  // Raises the charge to `bytes`; false: all bodies together would be too much.
  [[nodiscard]] bool RaiseTo(uint64_t bytes) {
    if (bytes <= bytes_) return true;
    const uint64_t more = bytes - bytes_;
    if (shared_->body_bytes.fetch_add(more) + more > shared_->options.max_all_body_bytes) {
      shared_->body_bytes -= more;
      return false;
    }
    bytes_ = bytes;
    return true;
  }

 private:
  const std::shared_ptr<ServerShared> shared_;
  uint64_t bytes_ = 0;
};

// One I/O thread. Kept alive by the server and by every exchange, so that a late Write or Post finds it.
struct IoThread {
  // Any thread. Runs `fn` on this thread; functions that come while it is busy share one wake-up.
  void Post(std::function<void()> fn);

  boost::asio::io_context context{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{context.get_executor()};
  std::atomic<bool> stopped{false};
  std::unordered_map<Connection*, std::weak_ptr<Connection>> connections;  // this thread only
  std::thread thread;

 private:
  void RunInbox();

  std::mutex inbox_mutex_;
  std::vector<std::function<void()>> inbox_;
  std::vector<std::function<void()>> running_;  // this thread only; keeps its room
};

// State of one answer, shared by the connection (which writes) and the handle the handler has (which
// produces).
//
//   producer: Respond / StartStream, Write, EndStream  ->  pending (framed bytes, bounded)  ->  connection:
//   Pump
class ExchangeCore : public std::enable_shared_from_this<ExchangeCore> {
 public:
  ExchangeCore(std::shared_ptr<IoThread> io, std::shared_ptr<ServerShared> shared,
               std::weak_ptr<Connection> connection, bool http10, bool head_only, bool keep_alive,
               HttpHeaders extra_headers);

  // Producer side; any thread.
  void Respond(HttpResponse response);
  void StartStream(StreamHead head);
  bool Write(std::string_view bytes);
  void EndStream();
  void OnGone(std::function<void(GoneReason)> callback);
  bool gone() const;
  void Abandon();  // the handler let go: 500 if nothing was said, else the answer is cut

  // Connection side; I/O thread only.
  struct Chunk {
    std::string bytes;
    bool ended = false, cut = false, probe = false;
  };
  // With `direct`, and if there is nothing to do: later Writes on the I/O thread may send by themselves,
  // until the next Take.
  Chunk Take(bool direct);
  void Written();
  void MarkGone(GoneReason reason);
  void RequestProbe();
  bool streaming() const;
  bool close_after() const;
  std::string Filler() const;  // framed; "" = none
  double filler_interval_s() const;
  bool WroteDirectly();  // since the last call

  const std::shared_ptr<IoThread> io;
  boost::asio::steady_timer wake;  // I/O thread only; cancelled when there is something to do

 private:
  void WakeLocked();
  void AppendHeadLocked(int status, std::string_view content_type, const HttpHeaders& headers,
                        std::optional<size_t> content_length);
  void AppendFramedLocked(std::string_view bytes);
  void SendPendingLocked();

  const std::shared_ptr<ServerShared> shared_;
  const std::weak_ptr<Connection> connection_;
  const bool http10_, head_only_;
  const HttpHeaders extra_headers_;
  mutable std::mutex mutex_;
  std::string pending_;
  size_t in_flight_ = 0;
  bool keep_alive_, started_ = false, streaming_ = false, ended_ = false, cut_ = false, gone_ = false,
                    probe_ = false;
  bool wake_posted_ = false;
  bool direct_ = false, wrote_directly_ = false;
  GoneReason reason_ = GoneReason::kClosed;
  std::function<void(GoneReason)> on_gone_;
  std::string filler_;
  double filler_interval_s_ = 0;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(boost::asio::ip::tcp::socket socket, std::shared_ptr<IoThread> io,
             std::shared_ptr<ServerShared> shared);
  ~Connection();
  void Start();
  // I/O thread. Closes now if no request is being answered.
  void CloseIfIdle();
  void Close(GoneReason reason);
  // I/O thread. Sends what the socket takes without waiting; returns how many bytes.
  size_t SendNow(std::string_view bytes);

 private:
  boost::asio::awaitable<void> Run();
  // Reads one request and has it answered; false: the connection ends.
  boost::asio::awaitable<bool> ServeOne(bool first);
  boost::asio::awaitable<bool> Pump(std::shared_ptr<ExchangeCore> core);
  boost::asio::awaitable<void> Monitor(std::shared_ptr<ExchangeCore> core);
  boost::asio::awaitable<bool> WriteAll(std::string_view bytes);
  boost::asio::awaitable<void> Refuse(HttpResponse response);
  bool PeerGone();

  boost::beast::tcp_stream stream_;
  boost::beast::flat_buffer buffer_;
  std::shared_ptr<IoThread> io_;
  std::shared_ptr<ServerShared> shared_;
  std::shared_ptr<ExchangeCore> current_;  // being answered
  bool timed_out_ = false;
  // The client's sending half was seen closed. Nothing is read from then on: Asio waits for the socket to
  // become readable once more, which it does not.
  bool input_ended_ = false;
};

// "Tue, 15 Nov 1994 08:12:31 GMT", renewed once a second.
std::string HttpDate();
// Head and body of a whole answer.
std::string Serialise(const HttpResponse& response, bool keep_alive, bool head_only);

}  // namespace sluice::http_internal
