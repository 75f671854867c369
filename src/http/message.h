// HTTP requests and responses as plain values; no socket, no JSON.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sluice {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;   // "GET", upper case as sent
  std::string path;     // target up to '?', percent-encoding kept
  std::string query;    // after '?', may be empty
  HttpHeaders headers;  // names in lower case, in the order of arrival
  std::string body;
  std::shared_ptr<void> body_charge;  // what the server counts for the body; keep it as long as the body

  // Value of the first header of that (lower-case) name; "" when there is none.
  std::string_view Header(std::string_view name) const;
  int HeaderCount(std::string_view name) const;
  // Value of a query parameter ("" when absent); no percent-decoding.
  std::string_view QueryParam(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  HttpHeaders headers;  // besides content type, length, date and connection
  std::string body;
  bool close = false;  // end the connection after this answer
};

// "OK", "Not Found", ...; "Status" for an unknown number.
std::string_view ReasonPhrase(int status);

}  // namespace sluice
