// The one table of working flags that other flags leave without effect. One that is given all the same gets a
// notice line at start; docs/flags.md shows the table and the tests walk it row by row.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/flags.h"

namespace sluice {

struct IdleFlagRow {
  std::string_view flag;  // its first name
  std::string_view when;  // for documents: "without --enable-hierarchical-cache"
  std::string_view why;   // what holds, and what gives the flag its effect
  bool (*idle)(const ServerConfig& config);
  std::string_view idle_example, working_example;  // command lines for the test
};

std::span<const IdleFlagRow> IdleFlagTable();

// One line for each flag that is `given` and without effect, in the table's order.
std::vector<std::string> IdleFlagNotices(const ServerConfig& config,
                                         const std::function<bool(const FlagSpec*)>& given);

}  // namespace sluice
