#include "config/json_argument.h"

#include <nlohmann/json.hpp>

#include "base/file_text.h"

namespace sluice {

StatusOr<std::string> ReadJsonArgument(std::string_view flag, std::string_view value) {
  std::string text(value), place;
  if (value.starts_with('@')) {
    StatusOr<std::string> read = ReadFileText(std::string(value.substr(1)));
    if (!read.ok())
      return Invalid(
          "{}: {}; write @FILE with the path of a file that holds a JSON object, or the JSON itself", flag,
          Message(read.status()));
    text = *std::move(read);
    place = std::string(value.substr(1)) + ": ";
  } else if (text.empty()) {
    return text;
  }
  if (!nlohmann::json::parse(text, nullptr, false).is_object())
    return Invalid("{}: {}not a JSON object{}; write {{\"key\": value}}, or @FILE for a file that holds it",
                   flag, place, place.empty() ? ": " + text : "");
  return text;
}

}  // namespace sluice
