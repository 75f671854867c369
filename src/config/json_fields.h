// Checked access to one JSON object of a model folder. Errors name the key, its value and what is right.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "nlohmann/json.hpp"

namespace sluice {

using Json = nlohmann::ordered_json;

// Refuses text that is not one JSON object; `what` names the file in the message.
StatusOr<Json> ParseJsonObject(std::string_view text, std::string_view what);

// A view of an object that outlives it. null counts as absent everywhere.
class JsonFields {
 public:
  // `prefix` is put before keys in messages, e.g. "rope_parameters.".
  explicit JsonFields(const Json& object, std::string prefix = "")
      : object_(object), prefix_(std::move(prefix)) {}

  const Json* Find(std::string_view key) const;  // nullptr when absent or null
  bool Has(std::string_view key) const { return Find(key) != nullptr; }

  static constexpr int64_t kNoMax = std::numeric_limits<int64_t>::max();
  StatusOr<int64_t> Int(std::string_view key, std::optional<int64_t> fallback, int64_t min,
                        int64_t max = kNoMax) const;
  StatusOr<double> Real(std::string_view key, std::optional<double> fallback) const;
  StatusOr<bool> Bool(std::string_view key, std::optional<bool> fallback) const;
  StatusOr<std::string> String(std::string_view key, std::optional<std::string> fallback) const;

  Status Missing(std::string_view key) const;
  Status WrongType(std::string_view key, const Json& value, std::string_view wanted) const;

 private:
  const Json& object_;
  std::string prefix_;
};

}  // namespace sluice
