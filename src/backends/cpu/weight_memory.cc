#include "backends/cpu/weight_memory.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/ids.h"

namespace sluice::cpu {
namespace {

// A mapping that begins on a huge page.
StatusOr<std::shared_ptr<std::byte>> Map(int64_t bytes) {
  const size_t reserved = size_t(bytes + WeightMemory::kHugePage);
  void* m =
      mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return Exhausted("cannot reserve {} bytes for packed weights", bytes);
  auto* begin = static_cast<std::byte*>(m);
  const auto over = int64_t(reinterpret_cast<uintptr_t>(begin) % uintptr_t(WeightMemory::kHugePage));
  std::byte* aligned = begin + (over == 0 ? 0 : WeightMemory::kHugePage - over);
  (void)madvise(aligned, size_t(bytes), MADV_HUGEPAGE);  // where the system allows it
  return std::shared_ptr<std::byte>(aligned, [begin, reserved](std::byte*) { munmap(begin, reserved); });
}

}  // namespace

StatusOr<std::shared_ptr<std::byte>> WeightMemory::Take(int64_t bytes) {
  bytes = AlignUp(std::max<int64_t>(bytes, 1), kAlign);
  const std::lock_guard lock(mutex_);
  if (bytes > kMapping / 4 && used_ + bytes > size_) return Map(AlignUp(bytes, kHugePage));
  if (used_ + bytes > size_) {
    auto mapping = Map(kMapping);
    if (!mapping.ok()) return Map(AlignUp(bytes, kHugePage));  // where address space is short: what is needed
    mapping_ = *std::move(mapping);
    size_ = kMapping;
    used_ = 0;
  }
  std::byte* at = mapping_.get() + used_;
  used_ += bytes;
  return std::shared_ptr<std::byte>(mapping_, at);
}

}  // namespace sluice::cpu
