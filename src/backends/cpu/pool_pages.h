// Addresses of one layer's pages, resolved once per op: the pool's slabs by lane, and the caller's own
// blocks.
#pragma once

#include <array>

#include "base/check.h"
#include "kv/device_pool.h"
#include "ops/backend.h"

namespace sluice::cpu {

class PoolPages {
 public:
  static PoolPages Latent(const DevicePool& pool, LogicalLayer layer, const ops::OwnBlocks& own) {
    return PoolPages(pool, layer, true, pool.layout().latent_page_bytes(), own);
  }
  static PoolPages Index(const DevicePool& pool, LogicalLayer layer, const ops::OwnBlocks& own) {
    return PoolPages(pool, layer, false, pool.layout().index_page_bytes(), own);
  }
  std::byte* operator()(PageId page) const {
    if (page.value >= own_.first) return own_.base + (page.value - own_.first) * page_bytes_;
    if (lanes_ == 1) return slab_[0] + page.value * page_bytes_;
    return slab_[size_t(PageOwner(page, lanes_))] + PageLocal(page, lanes_) * page_bytes_;
  }

 private:
  PoolPages(const DevicePool& pool, LogicalLayer layer, bool latent, int64_t page_bytes,
            const ops::OwnBlocks& own)
      : own_(own), lanes_(pool.lanes()), page_bytes_(page_bytes) {
    SLUICE_CHECK(lanes_ <= int32_t(slab_.size()), "lanes {}", lanes_);
    for (int32_t i = 0; i < lanes_; ++i) {
      if (own.lane >= 0 && i != own.lane) continue;  // null: a touch ends here and not in a peer's memory
      slab_[size_t(i)] = latent ? pool.LatentSlab(layer, i) : pool.IndexSlab(layer, i);
    }
  }
  std::array<std::byte*, 64> slab_{};
  ops::OwnBlocks own_;
  int32_t lanes_;
  int64_t page_bytes_;
};

}  // namespace sluice::cpu
