// HTTP/1.1 server: a few I/O threads, one coroutine per connection, thousands of open event streams.
//
// What it guarantees:
//   - head and body have limits; a body over the limit is answered 413 before it is read, for Content-Length
//   and for chunked;
//   - a client that goes away while its answer is being made is noticed at once (also when it only closes its
//   socket), a
//     client that only shuts down its sending half still gets its answer;
//   - output waiting for a slow reader is bounded; a reader that stops is dropped;
//   - every request gets exactly one answer: an exchange dropped without one is answered 500.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "http/message.h"

namespace sluice {

enum class HttpError : uint8_t {
  kMalformed,           // 400: not HTTP
  kUnknownCoding,       // 501: a transfer coding that nobody here can read
  kHeadTooLarge,        // 431
  kBodyTooLarge,        // 413
  kTimeout,             // 408: the client stopped sending in the middle of a request
  kTooManyConnections,  // 503
  kTooManyBodies,       // 503: the bodies of all requests together take too much memory
  kNoAnswer,            // 500: the handler let the exchange go
};

enum class GoneReason : uint8_t {
  kClosed,      // the client closed or reset the connection
  kSlowReader,  // it stopped reading and its output bound or stall time was reached
  kShutdown,    // the server was stopped
};

struct StreamHead {
  int status = 200;
  std::string content_type = "text/event-stream";
  HttpHeaders headers;
  std::string idle_filler;  // written whenever nothing else was for `idle_interval_s`; "" = never
  double idle_interval_s = 10;
};

// The answer to one request. Thread-safe; may outlive the connection. Either one Respond, or StartStream,
// Write*, EndStream.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual void Respond(HttpResponse response) = 0;
  virtual void StartStream(StreamHead head) = 0;
  // Appends to the bounded output. False: the client is gone or too slow; nothing more needs to be made.
  virtual bool Write(std::string_view bytes) = 0;
  virtual void EndStream() = 0;
  // Called at most once, on the I/O thread, when the client is gone before the answer is complete; at once if
  // it is already.
  virtual void OnGone(std::function<void(GoneReason)> callback) = 0;
  virtual bool gone() const = 0;
  // Runs fn on this connection's I/O thread; must be short. Dropped when the server has stopped.
  virtual void Post(std::function<void()> fn) = 0;
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // I/O thread, before the body is read (head.body is empty). An answer here ends the request and the
  // connection.
  virtual std::optional<HttpResponse> CheckHead(const HttpRequest& head) = 0;
  // I/O thread, right after the head was read: headers that every answer to this request gets.
  virtual HttpHeaders AnswerHeaders(const HttpRequest&) { return {}; }
  // I/O thread; must return soon. Long work goes to another thread with the exchange.
  virtual void Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) = 0;
  // The answer to what never became a request. `detail` is text of ours.
  virtual HttpResponse ErrorResponse(HttpError error, std::string_view detail) = 0;
};

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // 0: any free one
  int io_threads = 1;
  uint64_t max_body_bytes = 16 << 20;
  uint64_t max_all_body_bytes = 1 << 30;  // of all requests that are being read or not parsed yet
  uint32_t max_head_bytes = 64 << 10;
  int64_t max_connections = 8192;
  uint64_t max_output_bytes = 1 << 20;  // waiting output of one stream
  double head_timeout_s = 30;           // from the first byte of a head to its last
  double idle_timeout_s = 120;          // between requests
  double body_stall_s = 30;             // without a byte of the body
  double write_stall_s = 30;            // without the client taking a byte
};

class HttpServer {
 public:
  virtual ~HttpServer() = default;  // Stop(0) if it was not called
  // Listens and starts the threads. Unavailable names host, port and reason (port in use).
  static StatusOr<std::unique_ptr<HttpServer>> Start(const HttpServerOptions& options, HttpHandler* handler);
  // Whether Start could listen there now, so that a wrong --port is known before minutes of loading.
  static Status CanListen(const HttpServerOptions& options);
  virtual uint16_t port() const = 0;
  virtual int64_t connections() const = 0;
  virtual double cpu_seconds() const = 0;  // of the I/O threads, while they run
  // Closes the listener and idle connections, lets running answers end until the time is over, then cuts
  // them. Blocks.
  virtual void Stop(double grace_s) = 0;
};

}  // namespace sluice
