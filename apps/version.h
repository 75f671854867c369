// What this build is: version, commit, compiler, backends. Nothing in it depends on when or where it was
// built.
#pragma once

#include <string>
#include <string_view>

namespace sluice {

std::string_view Version();  // "0.1.0"
std::string_view
Commit();  // 12 hex digits, "-modified" appended when tracked files differ; "unknown" outside git
std::string_view Backends();  // "cpu" or "cpu cuda"
std::string VersionText();    // the lines that `sluice --version` prints

}  // namespace sluice
