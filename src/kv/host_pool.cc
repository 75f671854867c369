#include "kv/host_pool.h"

#include <limits>

#include "base/check.h"

namespace sluice {

std::string_view Name(HostLayout layout) {
  switch (layout) {
    case HostLayout::kLayerFirst:
      return "layer_first";
    case HostLayout::kPageFirst:
      return "page_first";
    case HostLayout::kPageFirstDirect:
      return "page_first_direct";
    case HostLayout::kLayerPageFirst:
      return "layer_page_first";
  }
  return "?";
}

StatusOr<HostLayout> ParseHostLayout(std::string_view name) {
  for (HostLayout l : {HostLayout::kLayerFirst, HostLayout::kPageFirst, HostLayout::kPageFirstDirect,
                       HostLayout::kLayerPageFirst}) {
    if (Name(l) == name) return l;
  }
  return Invalid(
      "--hicache-mem-layout: {} is unknown; use layer_first, page_first, page_first_direct or "
      "layer_page_first",
      name);
}

Status CheckHostLayout(HostLayout layout, std::string_view io_backend) {
  const bool direct = io_backend == "direct", kernel = io_backend == "kernel";
  bool legal = false;
  switch (layout) {
    case HostLayout::kLayerFirst:
      legal = direct || kernel;
      break;
    case HostLayout::kPageFirst:
      legal = kernel;
      break;
    case HostLayout::kPageFirstDirect:
    case HostLayout::kLayerPageFirst:
      legal = direct;
      break;
  }
  if (legal) return OkStatus();
  return Invalid(
      "--hicache-mem-layout {} does not go with --hicache-io-backend {}; legal pairs: layer_first with "
      "direct or "
      "kernel, page_first with kernel, page_first_direct with direct, layer_page_first with direct",
      Name(layout), io_backend);
}

HostPool::HostPool(const KvLayout& layout, HostLayout order, int32_t lanes, int64_t pages_per_lane)
    : layout_(layout), order_(order), lanes_(lanes), pages_per_lane_(pages_per_lane) {}

StatusOr<std::unique_ptr<HostPool>> HostPool::Make(const KvLayout& layout, HostLayout order, int32_t lanes,
                                                   int64_t pages_per_lane, DeviceMemory* memory) {
  SLUICE_CHECK(lanes >= 1, "lanes {}", lanes);
  if (pages_per_lane < 1) {
    return Invalid(
        "host tier: the budget holds no page of {} bytes for each of {} lanes; raise --hicache-size or "
        "--hicache-ratio",
        layout.page_bytes(), lanes);
  }
  if (pages_per_lane > std::numeric_limits<int32_t>::max() / lanes) {
    return Invalid("host tier: {} pages a lane are more than can be numbered; lower --hicache-size",
                   pages_per_lane);
  }
  std::unique_ptr<HostPool> pool(new HostPool(layout, order, lanes, pages_per_lane));
  ASSIGN_OR_RETURN(pool->arena_, PinnedMemory::Reserve(pool->reserved_bytes(), memory));
  pool->base_ = pool->arena_->data();
  return pool;
}

int HostPool::Runs(const KvPiece& piece, HostPageId page, HostRun out[2]) const {
  SLUICE_DCHECK(page.valid() && page.value < pages_per_lane_ * lanes_, "host page {}", page.value);
  const int64_t lane = page.value % lanes_, local = page.value / lanes_, all = layout_.page_bytes();
  const int64_t lane_base = lane * pages_per_lane_ * all;
  switch (order_) {
    case HostLayout::kLayerFirst:
      out[0] = {base_ + piece.offset * pages_per_lane_ * lanes_ + page.value * piece.bytes, 0, piece.bytes};
      return 1;
    case HostLayout::kLayerPageFirst:
      out[0] = {base_ + lane_base + piece.offset * pages_per_lane_ + local * piece.bytes, 0, piece.bytes};
      return 1;
    case HostLayout::kPageFirstDirect:
      out[0] = {base_ + lane_base + local * all + piece.offset, 0, piece.bytes};
      return 1;
    case HostLayout::kPageFirst:
      break;
  }
  // Pieces are 64 rows each, so a row of the piece lies at offset / 64 of a token's bytes.
  std::byte* at = base_ + lane_base + local * all + piece.offset / kPageTokens;
  const int64_t token = all / kPageTokens, row = piece.bytes / kPageTokens;
  if (piece.component == KvComponent::kIndex && layout_.index_dtype() == DType::kF8E4M3) {
    const int64_t values = layout_.index_dim();
    out[0] = {at, 0, values, kPageTokens, token};
    out[1] = {at + values, values * kPageTokens, row - values, kPageTokens, token};
    return 2;
  }
  out[0] = {at, 0, row, kPageTokens, token};
  return 1;
}

void HostPool::AppendSpans(HostPageId page, std::vector<std::span<std::byte>>* out) const {
  const size_t first = out->size();
  HostRun runs[2];
  for (const KvPiece& piece : layout_.pieces()) {
    const int n = Runs(piece, page, runs);
    for (int r = 0; r < n; ++r) {
      for (int64_t i = 0; i < runs[r].count; ++i) {
        std::byte* at = runs[r].host + i * runs[r].host_stride;
        if (out->size() > first && out->back().data() + out->back().size() == at) {
          out->back() = {out->back().data(), out->back().size() + size_t(runs[r].bytes)};
        } else {
          out->push_back({at, size_t(runs[r].bytes)});
        }
      }
    }
  }
}

}  // namespace sluice
