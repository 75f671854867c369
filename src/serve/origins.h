// Which web pages may call the server: the CORS protocol, and what a page of another site may not do unasked.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "http/message.h"

namespace sluice {

class Origins {
 public:
  Origins() = default;  // no page of another site
  // "https://a.example,http://localhost:3000", or "*" for every page. Invalid names the bad entry.
  static StatusOr<Origins> Parse(std::string_view list);

  // Headers that every answer to the request gets; empty when it comes from no page that is allowed.
  HttpHeaders AnswerHeaders(const HttpRequest& request) const;
  // The answer to a preflight (OPTIONS with Origin and Access-Control-Request-Method); nullopt: it is none.
  std::optional<HttpResponse> Preflight(const HttpRequest& request) const;
  // A browser sends some requests to other sites without asking first (forms, text/plain). True for a request
  // of a page that is neither allowed nor served from the host that it calls.
  bool Foreign(const HttpRequest& request) const;

 private:
  bool Allows(std::string_view origin) const;

  bool all_ = false;
  std::vector<std::string> allowed_;
};

}  // namespace sluice
