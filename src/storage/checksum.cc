#include "storage/checksum.h"

#include "storage/checksum_dispatch.h"

namespace sluice {
namespace {
const ChecksumFunctions& Functions() {
#if defined(__x86_64__)
  static const ChecksumFunctions& f =
      __builtin_cpu_supports("avx512f") ? xxh_avx512::kFunctions : xxh_baseline::kFunctions;
  return f;
#else
  return xxh_baseline::kFunctions;
#endif
}
}  // namespace

ChecksumStream::ChecksumStream() {
  static_assert(sizeof(state_) == kChecksumStateBytes);
  // The XXH3 state is reset in full except for its buffer; zero it once so that no copy of it is ever
  // indeterminate.
  for (auto& b : state_) b = std::byte{0};
  Reset();
}
void ChecksumStream::Reset() { Functions().reset(state_); }
void ChecksumStream::Add(std::span<const std::byte> bytes) {
  Functions().add(state_, bytes.data(), bytes.size());
}
Checksum128 ChecksumStream::Finish() const {
  Checksum128 out;
  Functions().finish(state_, out.data());
  return out;
}

}  // namespace sluice
