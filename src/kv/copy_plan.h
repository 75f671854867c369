// Copies as data: the cache decides, the executor performs, in the caller's order.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace sluice {

enum class CopyDirection : uint8_t { kDeviceToHost, kHostToDevice };

struct PagePair {
  PageId device;
  HostPageId host;
};

// All layers of the listed pages move; performed layer by layer, so that a forward may start on layer 0 while
// later layers still load. Neighbouring pages are merged by whoever performs it. `id` comes back in
// StepResult::copies_done.
struct CopyPlan {
  int64_t id = 0;
  CopyDirection direction{};
  std::vector<PagePair> pages;
};

}  // namespace sluice
