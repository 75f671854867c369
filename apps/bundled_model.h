// Where the model that comes with Sluice lies. Looked up from the executable, never from the working
// directory.
#pragma once

#include <string>

#include "base/status.h"

namespace sluice {

// The folder of the one model under, in this order:
//   <prefix>/share/sluice/models       the executable is <prefix>/bin/sluice (installed)
//   <source>/models                    named by the file sluice.source beside the executable (build tree)
// NotFound names the places that were tried.
StatusOr<std::string> BundledModelPath();

// The same for an executable at `executable`; for tests.
StatusOr<std::string> BundledModelPathFor(const std::string& executable);

}  // namespace sluice
