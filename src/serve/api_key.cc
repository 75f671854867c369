#include "serve/api_key.h"

#include <span>

namespace sluice {
namespace {

Digest256 DigestOf(std::string_view text) {
  return Sha256(std::as_bytes(std::span(text.data(), text.size())));
}

// Both digests have one length, and every byte is looked at.
bool EqualInConstantTime(const Digest256& a, const Digest256& b) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | uint8_t(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

ApiKey::ApiKey(std::string_view key) {
  if (!key.empty()) digest_ = DigestOf(key);
}

bool ApiKey::Allows(const HttpRequest& request) const {
  if (!digest_) return true;
  const int bearers = request.HeaderCount("authorization"), plain = request.HeaderCount("x-api-key");
  if (bearers + plain != 1) return false;
  if (plain == 1) return EqualInConstantTime(DigestOf(request.Header("x-api-key")), *digest_);
  constexpr std::string_view kScheme = "Bearer ";
  const std::string_view value = request.Header("authorization");
  const bool scheme = value.starts_with(kScheme);
  return EqualInConstantTime(DigestOf(scheme ? value.substr(kScheme.size()) : value), *digest_) && scheme;
}

}  // namespace sluice
