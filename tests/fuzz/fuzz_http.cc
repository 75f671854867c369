// Raw bytes on a connection: one answer or a closed connection, and the server lives.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz_target.h"
#include "http/server.h"

using namespace sluice;

namespace {

class Echo final : public HttpHandler {
 public:
  std::optional<HttpResponse> CheckHead(const HttpRequest& head) override {
    if (head.path == "/no") return HttpResponse{.status = 404, .body = "no"};
    return std::nullopt;
  }
  void Handle(HttpRequest request, std::shared_ptr<HttpExchange> exchange) override {
    exchange->Respond({.body = std::move(request.body)});
  }
  HttpResponse ErrorResponse(HttpError, std::string_view detail) override {
    return {.status = 400, .body = std::string(detail)};
  }
};

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "GET /no HTTP/1.0\r\n\r\n",
          "POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
          "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
          "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na"};
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Echo handler;
  static const auto server = HttpServer::Start({.max_body_bytes = 4096}, &handler).value();
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(server->port());
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) __builtin_trap();
  for (size_t at = 0; at < size;) {  // in two pieces
    const ssize_t n = ::send(fd, data + at, at == 0 ? (size + 1) / 2 : size - at, MSG_NOSIGNAL);
    if (n <= 0) break;
    at += size_t(n);
  }
  const timeval patience{5, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  ::shutdown(fd, SHUT_WR);
  char buffer[4096];
  ssize_t n;
  while ((n = ::recv(fd, buffer, sizeof(buffer), 0)) > 0) {
  }
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) __builtin_trap();  // neither answered nor closed
  ::close(fd);
  return 0;
}
