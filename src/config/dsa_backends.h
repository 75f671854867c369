// --dsa-prefill-backend and --dsa-decode-backend: names of kernels that users know, read as what they need of
// the cache. One layout holds the rows of both phases, so both sides must need the same row format, and the
// layout (--kv-cache-dtype) must have it; the device's own kernels for that format run.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "config/server_config.h"

namespace sluice {

enum class RowFormat : uint8_t {
  kF32,
  kBF16,       // all values bf16: 1152 bytes for 512 + 64
  kPackedFp8,  // e4m3 with a scale for 128 values, rope part bf16: 656 bytes
  kRawFp8,     // all values e4m3 without scales: 576 bytes; no layout here has such rows
};
std::string_view Name(RowFormat format);

// The names that may be given, without auto.
std::span<const std::string_view> DsaBackendNames();
// What the kernel of that name reads when the cache is of this type. REQUIRES a name of DsaBackendNames.
RowFormat DsaRowFormat(std::string_view backend, std::string_view kv_cache_dtype);

struct DsaBackends {
  std::string prefill, decode;  // auto: neither was named
  RowFormat rows = RowFormat::kBF16;
};

// An unset side (auto) gets the name that goes with the set one's rows. Invalid: sides with different rows
// (both are named), or rows that the layout does not have.
StatusOr<DsaBackends> ChooseDsaBackends(std::string_view prefill, std::string_view decode,
                                        std::string_view kv_cache_dtype, std::string_view dtype);

}  // namespace sluice
