#include "ops/reference/reference_kv.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace sluice::ops::reference {
namespace {

void StoreFloats(DType dtype, const float* x, int64_t n, std::byte* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, x, size_t(n) * 4);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t b = F32ToBF16(x[i]);
    std::memcpy(out + 2 * i, &b, 2);
  }
}

void LoadFloats(DType dtype, const std::byte* in, int64_t n, float* x) {
  if (dtype == DType::kF32) {
    std::memcpy(x, in, size_t(n) * 4);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    uint16_t b = 0;
    std::memcpy(&b, in + 2 * i, 2);
    x[i] = BF16ToF32(b);
  }
}

void Quantise(const float* x, int64_t n, float scale, std::byte* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = std::byte(F32ToE4M3(x[i] / scale));
}

void Dequantise(const std::byte* in, int64_t n, float scale, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = E4M3ToF32(uint8_t(in[i])) * scale;
}

}  // namespace

float E4M3Scale(const float* x, int64_t n) {
  float amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return x[i];  // a NaN row stays NaN instead of becoming numbers
    amax = std::max(amax, std::fabs(x[i]));
  }
  return std::max(amax / 448.0f, FLT_MIN);
}

void StoreLatentRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset,
                    const float* row) {
  const KvLayout& layout = pool.layout();
  const int64_t lora = layout.kv_lora(), rope = layout.rope();
  std::byte* out = pool.Latent(layer, page) + offset * layout.latent_row_bytes();
  if (layout.latent_dtype() != DType::kF8E4M3) {
    StoreFloats(layout.latent_dtype(), row, lora + rope, out);
    return;
  }
  std::byte* scales = out + lora;
  int64_t tile = 0;
  for (int64_t i = 0; i < lora; i += kScaleTile, ++tile) {
    const int64_t n = std::min(kScaleTile, lora - i);
    const float scale = E4M3Scale(row + i, n);
    Quantise(row + i, n, scale, out + i);
    std::memcpy(scales + 4 * tile, &scale, 4);
  }
  StoreFloats(DType::kBF16, row + lora, rope, scales + 4 * tile);
}

void LoadLatentRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset, float* row) {
  const KvLayout& layout = pool.layout();
  const int64_t lora = layout.kv_lora(), rope = layout.rope();
  const std::byte* in = pool.Latent(layer, page) + offset * layout.latent_row_bytes();
  if (layout.latent_dtype() != DType::kF8E4M3) {
    LoadFloats(layout.latent_dtype(), in, lora + rope, row);
    return;
  }
  const std::byte* scales = in + lora;
  int64_t tile = 0;
  for (int64_t i = 0; i < lora; i += kScaleTile, ++tile) {
    float scale = 0;
    std::memcpy(&scale, scales + 4 * tile, 4);
    Dequantise(in + i, std::min(kScaleTile, lora - i), scale, row + i);
  }
  LoadFloats(DType::kBF16, scales + 4 * tile, rope, row + lora);
}

void StoreIndexRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset,
                   const float* row) {
  const KvLayout& layout = pool.layout();
  const int64_t dim = layout.index_dim();
  std::byte* block = pool.Index(layer, page);
  if (layout.index_dtype() != DType::kF8E4M3) {
    StoreFloats(layout.index_dtype(), row, dim, block + offset * dim * SizeOf(layout.index_dtype()));
    return;
  }
  const float scale = E4M3Scale(row, dim);
  Quantise(row, dim, scale, block + offset * dim);
  std::memcpy(block + kPageTokens * dim + offset * 4, &scale, 4);
}

void LoadIndexRow(const DevicePool& pool, LogicalLayer layer, PageId page, int32_t offset, float* row) {
  const KvLayout& layout = pool.layout();
  const int64_t dim = layout.index_dim();
  const std::byte* block = pool.Index(layer, page);
  if (layout.index_dtype() != DType::kF8E4M3) {
    LoadFloats(layout.index_dtype(), block + offset * dim * SizeOf(layout.index_dtype()), dim, row);
    return;
  }
  float scale = 0;
  std::memcpy(&scale, block + kPageTokens * dim + offset * 4, 4);
  Dequantise(block + offset * dim, dim, scale, row);
}

}  // namespace sluice::ops::reference
