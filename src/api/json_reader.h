// Reads request bodies: strict JSON (simdjson) and typed access to members, whose errors name field, value,
// limit and remedy.
//
// Rules: at most kJsonDepthMax nested objects and arrays and kJsonKeysMax keys in an object that is read;
// UTF-8 only; a lone surrogate, a key that is there twice, a number outside 64-bit integers and finite
// doubles are refused; null means absent. Internal to api/ (includes simdjson).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/error.h"
#include "nlohmann/json.hpp"
#include "simdjson.h"

namespace sluice {

constexpr size_t kJsonDepthMax = 128;
constexpr size_t kJsonKeysMax = 4096;  // of one object that is read

using JsonElement = simdjson::dom::element;

// A parsed body. Elements taken from it live as long as it does.
class JsonBody {
 public:
  // An error with status 400, or the document whose root is an object.
  static std::optional<ApiError> Parse(std::string_view body, JsonBody* out);
  simdjson::dom::object root() const { return root_; }

 private:
  std::unique_ptr<simdjson::dom::parser> parser_;
  simdjson::dom::object root_;
};

// The members of one object. The first problem is kept in *error and everything after it is a no-op, so that
// a caller reads all its fields and looks once. Each reader returns true when the field is there, is not null
// and is right.
class FieldReader {
 public:
  // `path` is "" for the root, else "stream_options." or "messages[3]."
  FieldReader(simdjson::dom::object object, std::string path, std::optional<ApiError>* error);

  bool Has(std::string_view name) const { return Find(name).has_value(); }
  std::optional<JsonElement> Find(std::string_view name) const;
  bool Bool(std::string_view name, bool* out);
  bool Int(std::string_view name, int64_t low, int64_t high, int64_t* out);
  bool Int32(std::string_view name, int32_t low, int32_t high, int32_t* out);
  // exclusive_low: low itself is refused. NaN cannot pass.
  bool Float(std::string_view name, double low, double high, float* out, bool exclusive_low = false);
  bool String(std::string_view name, size_t bytes_max, std::string* out);
  // Whole numbers in [low, high], at most count_max of them; null entries are refused.
  bool Ints(std::string_view name, int64_t low, int64_t high, size_t count_max, std::vector<int32_t>* out);
  bool ReadInts(JsonElement element, const std::string& field, int64_t low, int64_t high, size_t count_max,
                std::vector<int32_t>* out);

  void Fail(std::string_view field, std::string message, std::string code = "");
  bool failed() const { return error_->has_value(); }
  const std::string& path() const { return path_; }
  std::optional<ApiError>* error() const { return error_; }

 private:
  simdjson::dom::object object_;
  std::string path_;
  std::optional<ApiError>* error_;
};

// "5", "\"abc\"", "an array": for error messages.
std::string Shown(JsonElement element);
// Whole numbers only: an integer, or a double without a fraction up to 2^53.
std::optional<int64_t> AsInt(JsonElement element);
std::optional<double> AsNumber(JsonElement element);
// A copy for the template engine; keys that are there twice are refused with their path, and more values than
// *budget, which counts down.
bool ToJson(JsonElement element, const std::string& path, size_t* budget, std::optional<ApiError>* error,
            nlohmann::ordered_json* out);

}  // namespace sluice
