// Host memory that a device may reach: reserved and made reachable together, and given up in the reverse
// order. The one place where memory that a device knows is unmapped.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/status.h"
#include "tensor/device_memory.h"

namespace sluice {

class PinnedMemory {
 public:
  // Committed when first written; with `device` (outlives the result) at once. Exhausted names what was asked
  // for.
  static StatusOr<std::unique_ptr<PinnedMemory>> Reserve(int64_t bytes, DeviceMemory* device);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* data() const { return base_; }
  int64_t size() const { return bytes_; }

 private:
  PinnedMemory(std::byte* base, int64_t bytes) : base_(base), bytes_(bytes) {}
  std::byte* const base_;
  const int64_t bytes_;
  std::shared_ptr<void> registration_;
};

}  // namespace sluice
