// Text to typed values of flags and back; internal to config.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "config/flags.h"

namespace sluice {

// Non-empty parts of `text` between separators.
std::vector<std::string_view> SplitWords(std::string_view text, char separator);
// true, on, yes, false, off, no: a word that may follow a switch. "0" and "1" only count in env and files
// (SetFlagValue).
std::optional<bool> ParseSwitchWord(std::string_view word);
// Checks type, range and choices, and stores the value where the flag's target says. No value = a bare
// switch. Errors leave the flag's name to the caller.
Status SetFlagValue(const FlagSpec& flag, const std::vector<std::string>& values, ServerConfig* config);

}  // namespace sluice
