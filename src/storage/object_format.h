// The bytes of a stored object: header, then the page's pieces in canonical order. Shared by every backend.
//
//    offset  bytes  field (little endian)
//         0      8  magic "SLUICEKV"
//         8      4  version (1)
//        12      4  header_bytes: 128 + 4 * num_pieces, rounded up to the backend's alignment, zero filled
//        16      4  num_pieces
//        20      4  0
//        24      8  payload_bytes
//        32     32  key (page digest)
//        64     32  content fingerprint
//        96      8  generation
//       104      8  0
//       112     16  checksum: XXH3-128 over the header with this field zero, then the payload
//       128    4*n  piece_bytes
#pragma once

#include <vector>

#include "storage/checksum.h"
#include "storage/storage.h"

namespace sluice {

class ObjectFormat {
 public:
  ObjectFormat(StorageFormat format, int64_t header_align);

  const StorageFormat& format() const { return format_; }
  int64_t header_bytes() const { return int64_t(template_.size()); }
  int64_t payload_bytes() const { return payload_bytes_; }

  // Header with a zero checksum; what the checksum stream starts with. `out` has header_bytes().
  void Encode(const Digest256& key, uint64_t generation, std::span<std::byte> out) const;
  static void PutChecksum(const Checksum128& sum, std::span<std::byte> header);
  static uint64_t Generation(std::span<const std::byte> header);

  // Everything but the payload: kOk, kCorrupt, or kMiss for an intact header of another generation.
  StorageOutcome CheckHeader(std::span<const std::byte> header, const Digest256& key,
                             uint64_t generation) const;
  static Checksum128 ChecksumOf(std::span<const std::byte> header);

 private:
  StorageFormat format_;
  int64_t payload_bytes_;
  std::vector<std::byte> template_;
};

}  // namespace sluice
