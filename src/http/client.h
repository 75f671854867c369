// HTTP/1.1 client: many concurrent calls on one I/O thread, streaming bodies, reused connections.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "http/message.h"

namespace sluice {

struct HttpUrl {
  std::string host;
  uint16_t port = 80;
  std::string path = "/";  // starts with '/', never ends with one unless it is "/"; query kept

  // "http://host:port/path", "host:port". Every other scheme is refused; for https put a TLS proxy between.
  static StatusOr<HttpUrl> Parse(std::string_view url);
  // The address of a server, with or without the /v1 that OpenAI's clients end it with.
  static StatusOr<HttpUrl> ParseServer(std::string_view url);
  // "host:port", an IPv6 address in brackets.
  std::string Authority() const;
  // "http://host:port/path", the path only where there is one.
  std::string ToString() const;
};

struct HttpCall {
  HttpUrl url;
  HttpRequest request;  // method, headers, body; path "" = url.path
  double connect_timeout_s = 5;
  double stall_timeout_s = 600;  // without a byte of the answer
  uint64_t max_body_bytes = 256u << 20;
};

// Receives one call's answer, on the client's I/O thread. OnEnd comes exactly once and last.
class HttpSink {
 public:
  virtual ~HttpSink() = default;
  virtual void OnHead(int /*status*/, const HttpHeaders& /*headers*/) {}  // names in lower case
  virtual void OnData(std::string_view bytes) = 0;
  virtual void OnEnd(Status status) = 0;  // OK: the answer is complete
};

class HttpClient {
 public:
  virtual ~HttpClient() = default;  // cancels what runs
  static std::unique_ptr<HttpClient> Make();
  // Thread-safe. The id is for Cancel.
  virtual uint64_t Start(HttpCall call, std::shared_ptr<HttpSink> sink) = 0;
  virtual void Cancel(uint64_t id) = 0;
  // Blocks; not from the I/O thread.
  StatusOr<HttpResponse> Fetch(HttpCall call);
};

}  // namespace sluice
