// Small files that users give us, as text: JSON, templates, lists. Errors name the path and what to do.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace sluice {

// The whole file. Never waits for a pipe or a device that stands where the file should be.
// Errors: NotFound only when nothing is there; Unavailable when it cannot be read; Invalid when it is no
// regular file, larger than kTextFileMax, or a Git LFS pointer.
inline constexpr int64_t kTextFileMax = int64_t(1) << 30;
StatusOr<std::string> ReadFileText(const std::string& path);

// Opens a regular file for reading; same errors as above, but for the LFS pointer. The caller closes it.
StatusOr<int> OpenRegularFile(const std::string& path);

// A clone without Git LFS leaves a few lines of text where a large file belongs. `head`: the file's first
// bytes.
bool IsLfsPointer(std::string_view head);
Status LfsPointerError(const std::string& path);

// What nlohmann's exceptions say, without the library's own prefix ("[json.exception.parse_error.101] ").
std::string_view JsonComplaint(std::string_view what);

}  // namespace sluice
