// The device pages of one rank set: per lane one arena, inside it one slab per (component, layer) of
// page-sized blocks.
//
// Owns the memory; reserved at start (mmap, no commit), touched when first written. Which page is free or
// leased is the business of cache/; this class only turns (page, component, layer) into an address. Page id p
// of the pool lives on lane p % lanes at local index p / lanes (the one owner function). Local page 0 of each
// lane is a scratch page for dummy rows. Thread-safe after construction (addresses only).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "kv/kv_layout.h"
#include "tensor/device_memory.h"

namespace sluice {

inline int32_t PageOwner(PageId page, int32_t lanes) { return page.value % lanes; }
inline int32_t PageLocal(PageId page, int32_t lanes) { return page.value / lanes; }

class DevicePool {
 public:
  // pages_per_lane includes the scratch page. REQUIRES lanes >= 1.
  // `memory` (outlives the pool) gives the arena of a device with memory of its own.
  static StatusOr<std::unique_ptr<DevicePool>> Make(const KvLayout& layout, int32_t lanes,
                                                    int64_t pages_per_lane, DeviceMemory* memory = nullptr);
  // The same memory, but another process of this host may attach to it by ShareHandle().
  static StatusOr<std::unique_ptr<DevicePool>> MakeShared(const KvLayout& layout, int32_t lanes,
                                                          int64_t pages_per_lane);
  // Another process's shared pool, with that pool's lanes and pages. Unavailable when it is gone or of
  // another size.
  static StatusOr<std::unique_ptr<DevicePool>> Attach(const KvLayout& layout, int32_t lanes,
                                                      int64_t pages_per_lane, const std::string& handle);
  ~DevicePool();
  std::string ShareHandle() const;  // "" unless made by MakeShared
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  const KvLayout& layout() const { return layout_; }
  int32_t lanes() const { return lanes_; }
  int64_t pages_per_lane() const { return pages_per_lane_; }
  int64_t usable_pages() const { return (pages_per_lane_ - 1) * lanes_; }  // without the scratch pages
  int64_t reserved_bytes() const { return lane_bytes_ * lanes_; }
  int64_t tokens() const { return usable_pages() * kPageTokens; }

  std::byte* Latent(LogicalLayer layer, PageId page) const;  // latent_page_bytes()
  std::byte* Index(LogicalLayer layer, PageId page) const;   // index_page_bytes(); layer must own index K
  std::byte* Piece(const KvPiece& piece, PageId page) const;
  // A piece where the host reads it: itself, or a copy in `room`.
  std::span<const std::byte> Readable(const KvPiece& piece, PageId page, std::vector<std::byte>* room) const;
  // Start of the slab of one lane, for kernels that address pages themselves: block i is local page i.
  std::byte* LatentSlab(LogicalLayer layer, int32_t lane) const;
  std::byte* IndexSlab(LogicalLayer layer, int32_t lane) const;
  void CopyPage(PageId from, PageId to) const;      // all pieces
  DeviceMemory* memory() const { return memory_; }  // null: host memory
  void Poison(PageId page) const;                   // fills all pieces with 0xff bytes (NaN in every format)

 private:
  DevicePool(const KvLayout& layout, int32_t lanes, int64_t pages_per_lane);
  static StatusOr<std::unique_ptr<DevicePool>> Sized(const KvLayout& layout, int32_t lanes,
                                                     int64_t pages_per_lane);
  Status Map(int flags);
  std::byte* Block(int64_t slab, int64_t bytes, PageId page) const {
    return base_ + PageOwner(page, lanes_) * lane_bytes_ + slab + PageLocal(page, lanes_) * bytes;
  }

  KvLayout layout_;
  int32_t lanes_;
  int64_t pages_per_lane_;
  int64_t lane_bytes_ = 0;
  std::vector<int64_t> latent_slab_, index_slab_;  // offset of a slab inside its lane, by compact layer
  std::byte* base_ = nullptr;
  DeviceMemory* memory_ = nullptr;
  std::shared_ptr<std::byte> arena_;  // of memory_
  int fd_ = -1;
};

}  // namespace sluice
