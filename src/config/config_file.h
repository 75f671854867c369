// The file behind --config: one `key: value` or `key = value` a line, with comments, quotes and lists;
// internal to config.
//
//   model-path: /models/GLM-5        # yaml style
//   port = 8000                      # toml style
//   cuda-graph-bs: [1, 2, 4]         # or a line "- 1" for each item under "cuda-graph-bs:"
//   enable-hierarchical-cache: true
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace sluice {

struct ConfigEntry {
  std::string key;
  std::vector<std::string> values;
  int line = 0;
};

// Invalid with file and line: no key, a nested table, a key given twice, a quote that does not close.
// NotFound: no such file.
StatusOr<std::vector<ConfigEntry>> ReadFlagFile(const std::string& path);
StatusOr<std::vector<ConfigEntry>> ParseFlagFile(std::string_view text, std::string_view name);

}  // namespace sluice
