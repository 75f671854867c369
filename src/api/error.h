// What a client is told when its request fails: OpenAI's error form, whichever status the failure carries.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace sluice {

struct ApiError {
  int http_status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::string param;  // "" = null
  std::string code;   // "" = null
};

// Any status becomes an answer: known codes, codes this build does not know, and OK (an error without a
// reason).
ApiError ErrorFromStatus(const Status& status);
// {"error":{"message","type","param","code"}}; valid UTF-8 whatever the message holds.
std::string ErrorBody(const ApiError& error);

// A user's text for an error message: cut to `bytes_max` at a character border, bytes that are not UTF-8 and
// control characters replaced.
std::string Quoted(std::string_view text, size_t bytes_max = 48);

}  // namespace sluice
