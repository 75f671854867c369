// XXH3-128 as a stream, with the widest vector code the processor has: the checksum of storage objects.
//
// Not cryptographic: it finds what media and crashes do to bytes, not what an attacker does. It is bound to
// an object by hashing the object's header (key, fingerprint, generation, piece table) first. On the
// development machine (Zen4, one core): 45 GB/s from L2 with AVX-512, 18 GB/s without; SHA-256 reaches 2.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice {

using Checksum128 = std::array<uint8_t, 16>;

class ChecksumStream {
 public:
  ChecksumStream();
  ChecksumStream(const ChecksumStream&) = delete;
  ChecksumStream& operator=(const ChecksumStream&) = delete;
  void Reset();
  void Add(std::span<const std::byte> bytes);
  Checksum128 Finish() const;  // of what was added so far; big endian (canonical)

 private:
  alignas(64) std::byte state_[640];
};

}  // namespace sluice
