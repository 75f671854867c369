// Function table between checksum.cc and the per-instruction-class bodies. No standard headers (see
// checksum_impl.inc).
#pragma once

namespace sluice {
constexpr decltype(sizeof(0)) kChecksumStateBytes = 640;
struct ChecksumFunctions {
  void (*reset)(void* state);
  void (*add)(void* state, const void* bytes, decltype(sizeof(0)) n);
  void (*finish)(const void* state, unsigned char* out16);
};
namespace xxh_baseline {
extern const ChecksumFunctions kFunctions;
}
namespace xxh_avx512 {
extern const ChecksumFunctions kFunctions;
}
}  // namespace sluice
