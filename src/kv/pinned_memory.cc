#include "kv/pinned_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace sluice {

StatusOr<std::unique_ptr<PinnedMemory>> PinnedMemory::Reserve(int64_t bytes, DeviceMemory* device) {
  void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED) {
    return Exhausted("host tier: cannot reserve {} bytes: {}; lower --hicache-size", bytes,
                     std::strerror(errno));
  }
  std::unique_ptr<PinnedMemory> memory(new PinnedMemory(static_cast<std::byte*>(p), bytes));
  // Where the system allows it; fewer address translations in copies of whole pages.
  (void)madvise(p, size_t(bytes), MADV_HUGEPAGE);
  if (device != nullptr) {
    ASSIGN_OR_RETURN(memory->registration_, device->Pin(memory->base_, bytes));
  }
  return memory;
}

PinnedMemory::~PinnedMemory() {
  registration_.reset();
  munmap(base_, size_t(bytes_));
}

}  // namespace sluice
