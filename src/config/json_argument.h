// A flag's value that is a JSON object, or @FILE: the path of a file that holds one.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace sluice {

// The JSON text; "" stays "". Invalid, with the flag's name in front: no such file, or no JSON object.
StatusOr<std::string> ReadJsonArgument(std::string_view flag, std::string_view value);

}  // namespace sluice
