// Answers by a server over its OpenAI-compatible API.
#pragma once

#include <memory>
#include <string>

#include "eval/target.h"

namespace sluice::eval {

// Asks the server for its model's name first; an error names the URL. api_key may be "".
StatusOr<std::unique_ptr<Target>> MakeHttpTarget(const std::string& url, const std::string& api_key);

}  // namespace sluice::eval
