#include "version.h"

#include "fmt/format.h"
#include "version_generated.h"

namespace sluice {

std::string_view Version() { return SLUICE_VERSION; }
std::string_view Commit() { return SLUICE_COMMIT; }
std::string_view Backends() { return SLUICE_BACKENDS; }

std::string VersionText() {
  return fmt::format("sluice {}\ncommit   {}\ncompiler {} ({})\nbackends {}\n", Version(), Commit(),
                     SLUICE_COMPILER, SLUICE_BUILD_TYPE, Backends());
}

}  // namespace sluice
