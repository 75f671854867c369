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

// The array forms end in these. The nothrow forms are replaced too: a sanitizer brings its own, whose memory
// the deletes below must not see.
void* operator new(size_t bytes) { return Allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t align) { return Allocate(bytes, size_t(align)); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return Allocate(bytes, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(size_t bytes, std::align_val_t align, const std::nothrow_t&) noexcept {
  try {
    return Allocate(bytes, size_t(align));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace sluice {
int64_t ThreadAllocations() { return allocations; }
}  // namespace sluice
