// Files of a model folder are regular files: opening a pipe or a device in their place would wait forever.
#pragma once

#include <sys/stat.h>

#include <string>

#include "base/status.h"

namespace sluice {

// Ok also when nothing is there: whoever opens it says so in its own words.
inline Status CheckRegularFile(const std::string& path) {
  struct stat s {};
  if (::stat(path.c_str(), &s) != 0 || S_ISREG(s.st_mode)) return OkStatus();
  return Invalid("{}: not a regular file but a {}; put the file itself there", path,
                 S_ISDIR(s.st_mode) ? "folder" : "pipe or device");
}

}  // namespace sluice
