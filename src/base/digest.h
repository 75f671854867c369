// SHA-256, the one digest of the product: cache keys, fingerprints, model identity, checksums that bind to a
// key.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace sluice {

using Digest256 = std::array<uint8_t, 32>;

// Streaming hasher. Every variable-length part is framed by AddFramed so that no two field lists hash alike.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;
  Hasher& Add(std::span<const std::byte> bytes);
  Hasher& AddU32(uint32_t v);                          // little endian
  Hasher& AddU64(uint64_t v);                          // little endian
  Hasher& AddFramed(std::string_view s);               // u64 length, then the bytes
  Hasher& AddTokens(std::span<const int32_t> tokens);  // u32 little endian each, no frame
  Digest256 Finish();                                  // the hasher may not be used afterwards

 private:
  void* ctx_;
};

Digest256 Sha256(std::span<const std::byte> bytes);
std::string Hex(const Digest256& d);

// The chain of page digests of a token sequence: digest(page i) = sha256(parent digest || tokens as u32 LE).
// The root parent is the namespace digest. One function for L1, L2, L3, PD and events.
Digest256 PageDigest(const Digest256& parent, std::span<const int32_t> page_tokens);

}  // namespace sluice
