// The host tier's memory: as many whole pages as one byte budget holds, all components together, in one of
// four layouts.
//
//   layer_first        [piece][page of all lanes]            a layer of a page is one run
//   layer_page_first   [lane][piece][page]                   the same, each lane apart
//   page_first_direct  [lane][page][piece]                   a page is one run
//   page_first         [lane][page][token][piece row]        a token is one run; a layer of a page is 64 rows
//
// Host page h lives on lane h % lanes, and holds device pages of the same lane only. Reserved at
// construction, committed when first written. Addresses only; thread-safe after construction.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kv/kv_layout.h"
#include "kv/pinned_memory.h"
#include "tensor/device_memory.h"

namespace sluice {

enum class HostLayout : uint8_t { kLayerFirst, kPageFirst, kPageFirstDirect, kLayerPageFirst };
std::string_view Name(HostLayout layout);
StatusOr<HostLayout> ParseHostLayout(std::string_view name);

// Which copy path moves whole pages of which layout (--hicache-io-backend): layer_page_first and
// page_first_direct go with direct, page_first with kernel, layer_first with both. Anything else is refused
// with the legal pairs named.
Status CheckHostLayout(HostLayout layout, std::string_view io_backend);

// `count` blocks of `bytes`: block i is at host + i * host_stride and belongs at device_offset + i * bytes of
// the piece.
struct HostRun {
  std::byte* host = nullptr;
  int64_t device_offset = 0, bytes = 0, count = 1, host_stride = 0;
};

class HostPool {
 public:
  // Pages of each lane that a budget for all lanes together holds.
  static int64_t PagesPerLane(const KvLayout& layout, int32_t lanes, int64_t budget_bytes) {
    return budget_bytes / (layout.page_bytes() * lanes);
  }
  static StatusOr<std::unique_ptr<HostPool>> Make(const KvLayout& layout, HostLayout order, int32_t lanes,
                                                  int64_t pages_per_lane, DeviceMemory* memory = nullptr);
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  const KvLayout& layout() const { return layout_; }
  HostLayout order() const { return order_; }
  int32_t lanes() const { return lanes_; }
  int64_t pages_per_lane() const { return pages_per_lane_; }
  int64_t tokens() const { return pages_per_lane_ * lanes_ * kPageTokens; }
  int64_t reserved_bytes() const { return layout_.page_bytes() * pages_per_lane_ * lanes_; }

  // Where one piece of a page lies: one run, or two (page_first with fp8 index K: values, then scales).
  int Runs(const KvPiece& piece, HostPageId page, HostRun out[2]) const;
  // The page's bytes in canonical order (KvLayout::pieces()), neighbouring runs merged.
  void AppendSpans(HostPageId page, std::vector<std::span<std::byte>>* out) const;
  std::span<std::byte> memory() const { return {base_, size_t(reserved_bytes())}; }

 private:
  HostPool(const KvLayout& layout, HostLayout order, int32_t lanes, int64_t pages_per_lane);

  KvLayout layout_;
  HostLayout order_;
  int32_t lanes_;
  int64_t pages_per_lane_;
  std::unique_ptr<PinnedMemory> arena_;
  std::byte* base_ = nullptr;  // of arena_
};

}  // namespace sluice
