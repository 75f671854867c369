#include "commands.h"

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

int FailWith(std::string_view command, const Status& status) {
  const ExitCode code = ExitCodeOf(status);
  std::cerr << "sluice " << command << ": " << Message(status) << "\n";
  if (code == kExitUsage) std::cerr << "see: sluice " << command << " --help\n";
  return code;
}

}  // namespace sluice
