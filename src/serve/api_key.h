// The one place that compares API keys.
#pragma once

#include <optional>
#include <string_view>

#include "base/digest.h"
#include "http/message.h"

namespace sluice {

// Holds the digest of a key, never the key. Thread-safe.
class ApiKey {
 public:
  ApiKey() = default;                     // no key: everybody may
  explicit ApiKey(std::string_view key);  // "": no key
  bool enabled() const { return digest_.has_value(); }
  // Exactly one header "Authorization: Bearer <key>" or "x-api-key: <key>". The comparison takes the same
  // time for every wrong key.
  bool Allows(const HttpRequest& request) const;

 private:
  std::optional<Digest256> digest_;
};

}  // namespace sluice
