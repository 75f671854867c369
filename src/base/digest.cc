#include "base/digest.h"

#include <openssl/evp.h>

#include "base/check.h"

namespace sluice {
namespace {
EVP_MD_CTX* Ctx(void* p) { return static_cast<EVP_MD_CTX*>(p); }
}  // namespace

Hasher::Hasher() : ctx_(EVP_MD_CTX_new()) {
  SLUICE_CHECK(EVP_DigestInit_ex(Ctx(ctx_), EVP_sha256(), nullptr) == 1);
}
Hasher::~Hasher() { EVP_MD_CTX_free(Ctx(ctx_)); }

Hasher& Hasher::Add(std::span<const std::byte> bytes) {
  SLUICE_CHECK(EVP_DigestUpdate(Ctx(ctx_), bytes.data(), bytes.size()) == 1);
  return *this;
}
Hasher& Hasher::AddU32(uint32_t v) {
  const uint8_t b[4] = {uint8_t(v), uint8_t(v >> 8), uint8_t(v >> 16), uint8_t(v >> 24)};
  return Add(std::as_bytes(std::span(b)));
}
Hasher& Hasher::AddU64(uint64_t v) { return AddU32(uint32_t(v)).AddU32(uint32_t(v >> 32)); }
Hasher& Hasher::AddFramed(std::string_view s) {
  AddU64(s.size());
  return Add(std::as_bytes(std::span(s.data(), s.size())));
}
Hasher& Hasher::AddTokens(std::span<const int32_t> tokens) {
  static_assert(std::endian::native == std::endian::little, "token bytes are hashed as they lie in memory");
  return Add(std::as_bytes(tokens));
}
Digest256 Hasher::Finish() {
  Digest256 d;
  unsigned n = 0;
  SLUICE_CHECK(EVP_DigestFinal_ex(Ctx(ctx_), d.data(), &n) == 1 && n == d.size());
  return d;
}

Digest256 Sha256(std::span<const std::byte> bytes) {
  Hasher h;
  h.Add(bytes);
  return h.Finish();
}

std::string Hex(const Digest256& d) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string s;
  s.reserve(64);
  for (uint8_t b : d) {
    s.push_back(kDigits[b >> 4]);
    s.push_back(kDigits[b & 15]);
  }
  return s;
}

Digest256 PageDigest(const Digest256& parent, std::span<const int32_t> page_tokens) {
  Hasher h;
  h.Add(std::as_bytes(std::span(parent))).AddTokens(page_tokens);
  return h.Finish();
}

}  // namespace sluice
