#include "commands.h"

#include <filesystem>
#include <iostream>

namespace sluice {

const std::vector<Command>& Commands() {
  static const std::vector<Command> commands = [] {
    std::vector<Command> present;
    for (const Command& c : kCommandTable) {
      if (c.run != nullptr) present.push_back(c);
    }
    return present;
  }();
  return commands;
}

ExitCode ExitCodeOf(const Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
      return kExitUsage;
    case absl::StatusCode::kInternal:
      return kExitCheckFailed;
    default:
      return kExitEnvironment;
  }
}

// A complaint that begins with the name of a file is about that file: --help knows nothing of it.
static bool AboutAFile(std::string_view message) {
  std::error_code error;
  return std::filesystem::exists(message.substr(0, message.find(": ")), error);
}

int FailWith(std::string_view command, const Status& status) {
  const ExitCode code = ExitCodeOf(status);
  std::cerr << "sluice " << command << ": " << Message(status) << "\n";
  if (code == kExitUsage && !AboutAFile(Message(status)))
    std::cerr << "see: sluice " << command << " --help\n";
  return code;
}

}  // namespace sluice
