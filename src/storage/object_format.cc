#include "storage/object_format.h"

#include <cstring>

#include "base/check.h"
#include "base/ids.h"
#include "base/plant.h"

namespace sluice {
namespace {

constexpr char kMagic[8] = {'S', 'L', 'U', 'I', 'C', 'E', 'K', 'V'};
constexpr uint32_t kVersion = 1;
constexpr size_t kKeyAt = 32, kFingerprintAt = 64, kGenerationAt = 96, kChecksumAt = 112, kPiecesAt = 128;

template <typename T>
void Store(std::vector<std::byte>* to, size_t at, T v) {
  for (size_t i = 0; i < sizeof(T); ++i) (*to)[at + i] = std::byte(uint8_t(v >> (8 * i)));
}

}  // namespace

ObjectFormat::ObjectFormat(StorageFormat format, int64_t header_align)
    : format_(std::move(format)), payload_bytes_(format_.object_bytes()) {
  if (Planted(Plant::kKeyWithoutDtype)) format_.content_fingerprint = {};
  const size_t n = format_.piece_bytes.size();
  template_.assign(size_t(AlignUp(int64_t(kPiecesAt + 4 * n), header_align)), std::byte{0});
  std::memcpy(template_.data(), kMagic, sizeof(kMagic));
  Store(&template_, 8, kVersion);
  Store(&template_, 12, uint32_t(template_.size()));
  Store(&template_, 16, uint32_t(n));
  Store(&template_, 24, uint64_t(payload_bytes_));
  std::memcpy(&template_[kFingerprintAt], format_.content_fingerprint.data(), 32);
  for (size_t i = 0; i < n; ++i) Store(&template_, kPiecesAt + 4 * i, format_.piece_bytes[i]);
}

void ObjectFormat::Encode(const Digest256& key, uint64_t generation, std::span<std::byte> out) const {
  SLUICE_CHECK(out.size() == template_.size());
  std::memcpy(out.data(), template_.data(), template_.size());
  std::memcpy(&out[kKeyAt], key.data(), key.size());
  for (size_t i = 0; i < 8; ++i) out[kGenerationAt + i] = std::byte(uint8_t(generation >> (8 * i)));
}

void ObjectFormat::PutChecksum(const Checksum128& sum, std::span<std::byte> header) {
  std::memcpy(&header[kChecksumAt], sum.data(), sum.size());
}

Checksum128 ObjectFormat::ChecksumOf(std::span<const std::byte> header) {
  Checksum128 sum;
  std::memcpy(sum.data(), &header[kChecksumAt], sum.size());
  return sum;
}

uint64_t ObjectFormat::Generation(std::span<const std::byte> header) {
  uint64_t g = 0;
  for (size_t i = 0; i < 8; ++i) g |= uint64_t(header[kGenerationAt + i]) << (8 * i);
  return g;
}

StorageOutcome ObjectFormat::CheckHeader(std::span<const std::byte> header, const Digest256& key,
                                         uint64_t generation) const {
  if (header.size() != template_.size()) return StorageOutcome::kCorrupt;
  const auto equal = [&](size_t from, size_t to) {
    return std::memcmp(&header[from], &template_[from], to - from) == 0;
  };
  if (!equal(0, kKeyAt) || !equal(kFingerprintAt, kGenerationAt) || !equal(kGenerationAt + 8, kChecksumAt) ||
      !equal(kPiecesAt, template_.size()) || std::memcmp(&header[kKeyAt], key.data(), key.size()) != 0)
    return StorageOutcome::kCorrupt;
  return Generation(header) == generation || Planted(Plant::kStaleGeneration) ? StorageOutcome::kOk
                                                                              : StorageOutcome::kMiss;
}

}  // namespace sluice
