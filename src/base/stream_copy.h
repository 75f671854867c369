// Copies of memory that nobody reads soon: the target does not pass through the caches, so a copy larger than
// they are costs two streams of memory traffic instead of three.
#pragma once

#include <cstddef>

namespace sluice {

// As memcpy for ranges that do not overlap; the bytes are visible to other threads when it returns. Worth it
// from some KiB on, for amounts that a cache would not hold anyway.
void StreamCopy(void* to, const void* from, size_t bytes);

}  // namespace sluice
