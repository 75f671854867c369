#include "api/json_reader.h"

#include <cmath>
#include <cstdlib>
#include <unordered_set>

#include "text/utf8.h"

namespace sluice {

namespace dom = simdjson::dom;

namespace {

// The key before the first number that strtod or a 64-bit integer cannot hold; only for the text of an error.
std::string KeyOfBadNumber(std::string_view body) {
  std::string key, last;
  for (size_t i = 0; i < body.size();) {
    if (body[i] == '"') {
      const size_t begin = ++i;
      while (i < body.size() && body[i] != '"') i += body[i] == '\\' ? 2 : 1;
      last = std::string(body.substr(begin, std::min(i, body.size()) - begin));
      ++i;
      continue;
    }
    if (body[i] == ':') key = last;
    if (body[i] != '-' && (body[i] < '0' || body[i] > '9')) {
      ++i;
      continue;
    }
    const size_t begin = i;
    while (i < body.size() && std::string_view("+-.0123456789eE").find(body[i]) != std::string_view::npos)
      ++i;
    const std::string number(body.substr(begin, i - begin));
    const bool whole = number.find_first_of(".eE") == std::string::npos;
    if (!std::isfinite(std::strtod(number.c_str(), nullptr))) return key;
    errno = 0;
    if (whole && number[0] == '-') (void)std::strtoll(number.c_str(), nullptr, 10);
    if (whole && number[0] != '-') (void)std::strtoull(number.c_str(), nullptr, 10);
    if (errno == ERANGE) return key;
  }
  return {};
}

bool CheckDuplicates(dom::object object, const std::string& path, std::optional<ApiError>* error) {
  if (object.size() > kJsonKeysMax) {
    if (!*error) {
      *error = ApiError{.message = fmt::format("{}{} keys in one object are too many; send at most {}",
                                               path.empty() ? "" : path + ": ", object.size(), kJsonKeysMax)};
    }
    return false;
  }
  std::unordered_set<std::string_view> seen;
  for (const auto [key, value] : object) {
    if (seen.insert(key).second) continue;
    if (!*error) {
      const std::string field = path + std::string(key.substr(0, 64));
      *error = ApiError{
          .message = fmt::format("{}: the key is there twice; send it once", Quoted(path + std::string(key))),
          .param = IsValidUtf8(field) ? field : ""};
    }
    return false;
  }
  return true;
}

}  // namespace

std::optional<ApiError> JsonBody::Parse(std::string_view body, JsonBody* out) {
  const auto refuse = [](std::string message, std::string param = "") {
    return ApiError{.message = std::move(message), .param = std::move(param), .code = "invalid_json"};
  };
  out->parser_ = std::make_unique<dom::parser>();
  if (out->parser_->allocate(std::max<size_t>(body.size(), 32), kJsonDepthMax) != simdjson::SUCCESS) {
    return ApiError{
        .http_status = 503, .message = "no memory for the request body", .type = "overloaded_error"};
  }
  dom::element root;
  const simdjson::error_code ec = out->parser_->parse(body.data(), body.size()).get(root);
  switch (ec) {
    case simdjson::SUCCESS:
      break;
    case simdjson::EMPTY:
      return refuse("the body is empty; send a JSON object");
    case simdjson::UTF8_ERROR:
      return refuse("the body is not UTF-8; encode the JSON text as UTF-8");
    case simdjson::DEPTH_ERROR:
      return refuse(fmt::format("the body is nested deeper than {} objects and arrays", kJsonDepthMax));
    case simdjson::STRING_ERROR:
      return refuse("the body has a string with a wrong escape or half a surrogate pair");
    case simdjson::NUMBER_ERROR: {
      const std::string key = KeyOfBadNumber(body);
      return refuse(
          fmt::format("{}a number is malformed or out of range (integers: 64 bits; others: finite doubles)",
                      key.empty() ? "" : Quoted(key) + ": "),
          IsValidUtf8(key) && key.size() <= 64 ? key : "");
    }
    default:
      return refuse(fmt::format("the body is not valid JSON: {}", simdjson::error_message(ec)));
  }
  if (root.get(out->root_) != simdjson::SUCCESS) {
    return refuse(fmt::format("the body is {}; send a JSON object", Shown(root)));
  }
  return std::nullopt;
}

std::string Shown(JsonElement element) {
  switch (element.type()) {
    case dom::element_type::ARRAY:
      return "an array";
    case dom::element_type::OBJECT:
      return "an object";
    case dom::element_type::INT64:
      return fmt::format("{}", int64_t(element));
    case dom::element_type::UINT64:
      return fmt::format("{}", uint64_t(element));
    case dom::element_type::DOUBLE:
      return fmt::format("{}", double(element));
    case dom::element_type::STRING:
      return Quoted(std::string_view(element));
    case dom::element_type::BOOL:
      return bool(element) ? "true" : "false";
    case dom::element_type::NULL_VALUE:
      return "null";
  }
  return "?";
}

std::optional<int64_t> AsInt(JsonElement element) {
  int64_t i;
  if (element.is_int64() && element.get(i) == simdjson::SUCCESS) return i;
  double d;
  if (element.is_double() && element.get(d) == simdjson::SUCCESS && std::abs(d) <= 0x1p53 &&
      d == std::trunc(d)) {
    return int64_t(d);
  }
  return std::nullopt;
}

std::optional<double> AsNumber(JsonElement element) {
  double d;
  if (!element.is_number() || element.get(d) != simdjson::SUCCESS || !std::isfinite(d)) return std::nullopt;
  return d;
}

FieldReader::FieldReader(dom::object object, std::string path, std::optional<ApiError>* error)
    : object_(object), path_(std::move(path)), error_(error) {
  CheckDuplicates(object_, path_, error_);
}

std::optional<JsonElement> FieldReader::Find(std::string_view name) const {
  JsonElement element;
  if (object_.at_key(name).get(element) != simdjson::SUCCESS || element.is_null()) return std::nullopt;
  return element;
}

void FieldReader::Fail(std::string_view field, std::string message, std::string code) {
  if (failed()) return;
  const std::string param = path_ + std::string(field);
  *error_ = ApiError{.message = param + ": " + message, .param = param, .code = std::move(code)};
}

bool FieldReader::Bool(std::string_view name, bool* out) {
  const auto element = Find(name);
  if (!element || failed()) return false;
  if (element->get(*out) == simdjson::SUCCESS) return true;
  Fail(name, fmt::format("{} is not a boolean; send true or false", Shown(*element)));
  return false;
}

bool FieldReader::Int(std::string_view name, int64_t low, int64_t high, int64_t* out) {
  const auto element = Find(name);
  if (!element || failed()) return false;
  const std::optional<int64_t> value = AsInt(*element);
  if (!value && !element->is_uint64()) {
    Fail(name,
         fmt::format("{} is not a whole number; send an integer from {} to {}", Shown(*element), low, high));
  } else if (!value || *value < low || *value > high) {
    Fail(name, fmt::format("{} is out of range; send an integer from {} to {}", Shown(*element), low, high));
  } else {
    *out = *value;
    return true;
  }
  return false;
}

bool FieldReader::Int32(std::string_view name, int32_t low, int32_t high, int32_t* out) {
  int64_t value;
  if (!Int(name, low, high, &value)) return false;
  *out = int32_t(value);
  return true;
}

bool FieldReader::Float(std::string_view name, double low, double high, float* out, bool exclusive_low) {
  const auto element = Find(name);
  if (!element || failed()) return false;
  const std::optional<double> value = AsNumber(*element);
  if (!value) {
    Fail(name, fmt::format("{} is not a number; send one from {} to {}", Shown(*element), low, high));
  } else if (!(*value >= low && *value <= high) || (exclusive_low && !(*value > low))) {
    Fail(name, fmt::format("{} is out of range; send a number {} {} and at most {}", Shown(*element),
                           exclusive_low ? "above" : "of at least", low, high));
  } else {
    *out = float(*value);
    return true;
  }
  return false;
}

bool FieldReader::String(std::string_view name, size_t bytes_max, std::string* out) {
  const auto element = Find(name);
  if (!element || failed()) return false;
  std::string_view value;
  if (element->get(value) != simdjson::SUCCESS) {
    Fail(name, fmt::format("{} is not a string", Shown(*element)));
  } else if (value.size() > bytes_max) {
    Fail(name, fmt::format("{} bytes are too many; send at most {}", value.size(), bytes_max));
  } else {
    *out = std::string(value);
    return true;
  }
  return false;
}

bool FieldReader::ReadInts(JsonElement element, const std::string& field, int64_t low, int64_t high,
                           size_t count_max, std::vector<int32_t>* out) {
  dom::array array;
  if (element.get(array) != simdjson::SUCCESS) {
    Fail(field, fmt::format("{} is not an array of integers", Shown(element)));
    return false;
  }
  // size() saturates at 2^24 - 1; the body's byte limit is below that.
  if (array.size() > count_max) {
    Fail(field, fmt::format("{} entries are too many; send at most {}", array.size(), count_max));
    return false;
  }
  out->clear();
  out->reserve(array.size());
  size_t i = 0;
  for (const JsonElement entry : array) {
    const std::optional<int64_t> value = AsInt(entry);
    if (!value || *value < low || *value > high) {
      Fail(fmt::format("{}[{}]", field, i),
           fmt::format("{} is not an integer from {} to {}", Shown(entry), low, high));
      return false;
    }
    out->push_back(int32_t(*value));
    ++i;
  }
  return true;
}

bool FieldReader::Ints(std::string_view name, int64_t low, int64_t high, size_t count_max,
                       std::vector<int32_t>* out) {
  const auto element = Find(name);
  if (!element || failed()) return false;
  return ReadInts(*element, std::string(name), low, high, count_max, out);
}

bool ToJson(JsonElement element, const std::string& path, size_t* budget, std::optional<ApiError>* error,
            nlohmann::ordered_json* out) {
  if (*budget == 0) {
    if (!*error) *error = ApiError{.message = path + ": too many JSON values; shorten it", .param = path};
    return false;
  }
  --*budget;
  switch (element.type()) {
    case dom::element_type::OBJECT: {
      const dom::object object(element);
      if (!CheckDuplicates(object, path.empty() ? "" : path + ".", error)) return false;
      *out = nlohmann::ordered_json::object();
      auto& members =
          out->get_ref<nlohmann::ordered_json::object_t&>();  // a vector: push_back, no search per key
      for (const auto [key, value] : object) {
        nlohmann::ordered_json converted;
        if (!ToJson(value, path, budget, error, &converted)) return false;
        members.push_back({std::string(key), std::move(converted)});
      }
      return true;
    }
    case dom::element_type::ARRAY: {
      *out = nlohmann::ordered_json::array();
      for (const JsonElement value : dom::array(element)) {
        nlohmann::ordered_json converted;
        if (!ToJson(value, path, budget, error, &converted)) return false;
        out->push_back(std::move(converted));
      }
      return true;
    }
    case dom::element_type::INT64:
      *out = int64_t(element);
      return true;
    case dom::element_type::UINT64:
      *out = uint64_t(element);
      return true;
    case dom::element_type::DOUBLE:
      *out = double(element);
      return true;
    case dom::element_type::STRING:
      *out = std::string(std::string_view(element));
      return true;
    case dom::element_type::BOOL:
      *out = bool(element);
      return true;
    case dom::element_type::NULL_VALUE:
      *out = nullptr;
      return true;
  }
  return true;
}

}  // namespace sluice
