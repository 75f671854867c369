#include "allocation_counter.h"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace {
thread_local int64_t allocations = 0;

void* Allocate(size_t bytes, size_t align) {
  ++allocations;
  void* p = align <= alignof(std::max_align_t)
                ? std::malloc(bytes > 0 ? bytes : 1)
                : std::aligned_alloc(align, (bytes + align - 1) / align * align);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
}  // namespace

// The other forms (array, nothrow, sized) end in these.
void* operator new(size_t bytes) { return Allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t align) { return Allocate(bytes, size_t(align)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace sluice {
int64_t ThreadAllocations() { return allocations; }
}  // namespace sluice
