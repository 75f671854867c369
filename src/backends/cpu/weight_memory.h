// Memory of packed weights. Many matrices share a mapping that the system may back with huge pages: a decode
// step streams through all of them, and on small pages it would wait at every border for a translation and
// for the processor's prefetch to begin anew, more or less of it as the pages happen to lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/status.h"

namespace sluice::cpu {

// Hands out memory that lives as long as its owner holds it. Thread-safe.
class WeightMemory {
 public:
  // Zeroed, on a border of kAlign. Exhausted when the system has no room.
  StatusOr<std::shared_ptr<std::byte>> Take(int64_t bytes);

  static constexpr int64_t kAlign = 4096;
  static constexpr int64_t kHugePage = 2 << 20;
  static constexpr int64_t kMapping = 64 << 20;  // reserved at once; committed when touched

 private:
  std::mutex mutex_;
  std::shared_ptr<std::byte> mapping_;  // the newest; what was taken of it shares its ownership
  int64_t size_ = 0, used_ = 0;
};

}  // namespace sluice::cpu
