#include "serve/origins.h"

#include <algorithm>

namespace sluice {
namespace {

// scheme://host[:port], no path: what browsers send as Origin.
bool IsOrigin(std::string_view s) {
  const size_t scheme = s.find("://");
  if (scheme == 0 || scheme == s.npos || scheme + 3 >= s.size()) return false;
  return std::all_of(s.begin(), s.end(), [](char c) { return c > ' ' && c < 127 && c != ',' && c != '*'; }) &&
         s.find('/', scheme + 3) == s.npos;
}

}  // namespace

StatusOr<Origins> Origins::Parse(std::string_view list) {
  Origins out;
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    std::string_view entry = list.substr(0, end);
    list.remove_prefix(std::min(end + 1, list.size()));
    while (entry.starts_with(' ')) entry.remove_prefix(1);
    while (entry.ends_with(' ')) entry.remove_suffix(1);
    if (entry.empty()) continue;
    if (entry == "*") {
      out.all_ = true;
    } else if (IsOrigin(entry)) {
      out.allowed_.emplace_back(entry);
    } else {
      return Invalid(
          "--cors-origins: '{}' is not an origin; write scheme://host or scheme://host:port without a path, "
          "or * for "
          "every page",
          entry);
    }
  }
  return out;
}

bool Origins::Allows(std::string_view origin) const {
  if (origin.empty()) return false;
  return all_ || std::find(allowed_.begin(), allowed_.end(), origin) != allowed_.end();
}

HttpHeaders Origins::AnswerHeaders(const HttpRequest& request) const {
  const std::string_view origin = request.Header("origin");
  if (!Allows(origin)) return {};
  if (all_) return {{"Access-Control-Allow-Origin", "*"}, {"Access-Control-Expose-Headers", "Retry-After"}};
  return {{"Access-Control-Allow-Origin", std::string(origin)},
          {"Access-Control-Expose-Headers", "Retry-After"},
          {"Vary", "Origin"}};
}

std::optional<HttpResponse> Origins::Preflight(const HttpRequest& request) const {
  if (request.method != "OPTIONS" || request.Header("access-control-request-method").empty() ||
      !Allows(request.Header("origin"))) {
    return std::nullopt;
  }
  HttpResponse response{.status = 204};
  response.headers = {{"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                      {"Access-Control-Max-Age", "600"}};
  // Clients add headers of their own (x-stainless-... of OpenAI's): the ones asked for are allowed.
  std::string_view asked = request.Header("access-control-request-headers");
  const bool plain = asked.size() <= 4096 && std::all_of(asked.begin(), asked.end(), [](char c) {
                       return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                              c == '-' || c == '_' || c == ',' || c == ' ';
                     });
  response.headers.emplace_back("Access-Control-Allow-Headers",
                                plain && !asked.empty() ? std::string(asked) : "Authorization, Content-Type");
  return response;
}

bool Origins::Foreign(const HttpRequest& request) const {
  const std::string_view origin = request.Header("origin");
  if (origin.empty() || Allows(origin)) return false;
  const size_t host = origin.find("://");
  return host == origin.npos || origin.substr(host + 3) != request.Header("host");
}

}  // namespace sluice
