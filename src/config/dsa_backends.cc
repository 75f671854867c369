#include "config/dsa_backends.h"

#include <algorithm>

#include "base/check.h"

namespace sluice {
namespace {

using enum RowFormat;

struct Backend {
  std::string_view name;
  RowFormat of_bf16, of_fp8;  // rows it reads of a bf16 and of an fp8 cache
};

// flashmla_kv reads packed rows only; fa3 and tilelang bf16 rows only; trtllm and aiter keep an fp8 cache
// without scales.
constexpr Backend kBackends[] = {
    {"flashmla_sparse", kBF16, kPackedFp8},
    {"flashmla_kv", kPackedFp8, kPackedFp8},
    {"flashmla_auto", kBF16, kPackedFp8},
    {"fa3", kBF16, kBF16},
    {"tilelang", kBF16, kBF16},
    {"aiter", kBF16, kRawFp8},
    {"trtllm", kBF16, kRawFp8},
};
constexpr std::string_view kNames[] = {"flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3",
                                       "tilelang",        "aiter",       "trtllm"};
static_assert(std::size(kNames) == std::size(kBackends));

bool Unset(std::string_view name) { return name == "auto"; }

// For an unset side: decode has a name of its own for packed rows.
std::string_view Partner(RowFormat rows, bool decode) {
  if (rows == kRawFp8) return "trtllm";
  if (rows == kPackedFp8 && decode) return "flashmla_kv";
  return rows == kBF16 && decode ? "fa3" : "flashmla_sparse";
}

}  // namespace

std::string_view Name(RowFormat format) {
  switch (format) {
    case kF32:
      return "float32 rows";
    case kBF16:
      return "bf16 rows";
    case kPackedFp8:
      return "packed fp8 rows (e4m3, scales, bf16 rope)";
    case kRawFp8:
      return "raw fp8 rows (e4m3 without scales)";
  }
  return "?";
}

std::span<const std::string_view> DsaBackendNames() { return kNames; }

RowFormat DsaRowFormat(std::string_view backend, std::string_view kv_cache_dtype) {
  const auto* found = std::ranges::find(kBackends, backend, &Backend::name);
  SLUICE_CHECK(found != std::end(kBackends), "{}", backend);
  return kv_cache_dtype == "fp8_e4m3" ? found->of_fp8 : found->of_bf16;
}

StatusOr<DsaBackends> ChooseDsaBackends(std::string_view prefill, std::string_view decode,
                                        std::string_view kv_cache_dtype, std::string_view dtype) {
  const bool f32 = kv_cache_dtype == "float32" || (kv_cache_dtype == "auto" && dtype == "float32");
  DsaBackends chosen{std::string(prefill), std::string(decode),
                     f32                            ? kF32
                     : kv_cache_dtype == "fp8_e4m3" ? kPackedFp8
                                                    : kBF16};
  if (Unset(prefill) && Unset(decode)) return chosen;
  if (!Unset(prefill) && !Unset(decode)) {
    const RowFormat p = DsaRowFormat(prefill, kv_cache_dtype), d = DsaRowFormat(decode, kv_cache_dtype);
    if (p != d)
      return Invalid(
          "--dsa-prefill-backend {} reads {} and --dsa-decode-backend {} reads {}: one cache holds the rows "
          "of "
          "both phases; name one of the two and leave the other out, or name two of the same rows",
          prefill, Name(p), decode, Name(d));
  }
  const bool by_prefill = !Unset(prefill);
  const std::string_view set = by_prefill ? prefill : decode;
  const RowFormat rows = DsaRowFormat(set, kv_cache_dtype);
  if (rows != chosen.rows)
    return Invalid("{} {} reads {}, and --kv-cache-dtype {} gives {}; {}",
                   by_prefill ? "--dsa-prefill-backend" : "--dsa-decode-backend", set, Name(rows),
                   kv_cache_dtype, Name(chosen.rows),
                   f32 ? "no named kernel reads float32 rows: leave the name out, or use --kv-cache-dtype "
                         "bf16 or fp8_e4m3"
                   : rows == kPackedFp8 ? "use --kv-cache-dtype fp8_e4m3, or flashmla_sparse"
                   : rows == kBF16      ? "use --kv-cache-dtype bf16, or flashmla_sparse"
                                        : "use flashmla_sparse or flashmla_kv, or --kv-cache-dtype bf16");
  if (Unset(prefill)) chosen.prefill = Partner(rows, false);
  if (Unset(decode)) chosen.decode = Partner(rows, true);
  return chosen;
}

}  // namespace sluice
