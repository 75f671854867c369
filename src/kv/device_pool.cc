#include "kv/device_pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace sluice {
namespace {
constexpr int64_t kSlabAlign =
    4096;  // slabs start on memory pages so that an untouched layer commits nothing
}

DevicePool::DevicePool(const KvLayout& layout, int32_t lanes, int64_t pages_per_lane)
    : layout_(layout), lanes_(lanes), pages_per_lane_(pages_per_lane) {
  latent_slab_.resize(layout_.latent_layers().size());
  index_slab_.resize(layout_.index_layers().size());
  for (const KvPiece& piece : layout_.pieces()) {
    auto& slabs = piece.component == KvComponent::kLatent ? latent_slab_ : index_slab_;
    slabs[size_t(piece.slot.value)] = lane_bytes_;
    lane_bytes_ += AlignUp(piece.bytes * pages_per_lane_, kSlabAlign);
  }
}

DevicePool::~DevicePool() {
  if (base_ != nullptr && memory_ == nullptr) munmap(base_, size_t(reserved_bytes()));
  if (fd_ >= 0) close(fd_);
}

StatusOr<std::unique_ptr<DevicePool>> DevicePool::Sized(const KvLayout& layout, int32_t lanes,
                                                        int64_t pages_per_lane) {
  SLUICE_CHECK(lanes >= 1, "lanes {}", lanes);
  if (pages_per_lane < 2) {
    return Invalid(
        "device pool: {} pages a lane; at least 2 are needed (one is scratch): raise --max-total-tokens or "
        "--mem-fraction-static",
        pages_per_lane);
  }
  const int64_t limit = std::numeric_limits<int32_t>::max() / lanes;
  if (pages_per_lane > limit) {
    return Invalid("device pool: {} pages a lane exceed the limit of {}; lower --max-total-tokens",
                   pages_per_lane, limit);
  }
  return std::unique_ptr<DevicePool>(new DevicePool(layout, lanes, pages_per_lane));
}

Status DevicePool::Map(int flags) {
  void* p = mmap(nullptr, size_t(reserved_bytes()), PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd_, 0);
  if (p == MAP_FAILED) {
    return Exhausted("device pool: cannot reserve {} bytes: {}; lower --max-total-tokens", reserved_bytes(),
                     std::strerror(errno));
  }
  base_ = static_cast<std::byte*>(p);
  (void)madvise(p, size_t(reserved_bytes()), MADV_HUGEPAGE);  // where the system allows it
  return OkStatus();
}

StatusOr<std::unique_ptr<DevicePool>> DevicePool::Make(const KvLayout& layout, int32_t lanes,
                                                       int64_t pages_per_lane, DeviceMemory* memory) {
  ASSIGN_OR_RETURN(std::unique_ptr<DevicePool> pool, Sized(layout, lanes, pages_per_lane));
  if (memory != nullptr) {
    ASSIGN_OR_RETURN(pool->arena_, memory->Allocate(pool->reserved_bytes(), "device pages"));
    pool->base_ = pool->arena_.get();
    pool->memory_ = memory;
    return pool;
  }
  RETURN_IF_ERROR(pool->Map(MAP_PRIVATE | MAP_ANONYMOUS));
  return pool;
}

StatusOr<std::unique_ptr<DevicePool>> DevicePool::MakeShared(const KvLayout& layout, int32_t lanes,
                                                             int64_t pages_per_lane) {
  ASSIGN_OR_RETURN(std::unique_ptr<DevicePool> pool, Sized(layout, lanes, pages_per_lane));
  pool->fd_ = memfd_create("sluice-kv", MFD_CLOEXEC);
  if (pool->fd_ < 0 || ftruncate(pool->fd_, pool->reserved_bytes()) != 0) {
    return Exhausted("device pool: cannot make {} bytes of shared memory: {}; lower --max-total-tokens",
                     pool->reserved_bytes(), std::strerror(errno));
  }
  RETURN_IF_ERROR(pool->Map(MAP_SHARED));
  return pool;
}

StatusOr<std::unique_ptr<DevicePool>> DevicePool::Attach(const KvLayout& layout, int32_t lanes,
                                                         int64_t pages_per_lane, const std::string& handle) {
  ASSIGN_OR_RETURN(std::unique_ptr<DevicePool> pool, Sized(layout, lanes, pages_per_lane));
  pool->fd_ = open(handle.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info {};
  if (pool->fd_ < 0 || fstat(pool->fd_, &info) != 0)
    return Unavailable("shared pool {}: {}; the peer must run on this host under the same user", handle,
                       std::strerror(errno));
  if (info.st_size != pool->reserved_bytes())
    return Unavailable("shared pool {}: {} bytes there, {} expected from its layout, {} lanes and {} pages",
                       handle, info.st_size, pool->reserved_bytes(), lanes, pages_per_lane);
  RETURN_IF_ERROR(pool->Map(MAP_SHARED));
  return pool;
}

std::string DevicePool::ShareHandle() const {
  return fd_ < 0 ? "" : fmt::format("/proc/{}/fd/{}", getpid(), fd_);
}

std::byte* DevicePool::Latent(LogicalLayer layer, PageId page) const {
  const CompactLayer slot = layout_.LatentSlot(layer);
  SLUICE_DCHECK(slot.valid() && page.valid() && page.value < lanes_ * pages_per_lane_, "layer {} page {}",
                layer.value, page.value);
  return Block(latent_slab_[size_t(slot.value)], layout_.latent_page_bytes(), page);
}

std::byte* DevicePool::Index(LogicalLayer layer, PageId page) const {
  const CompactLayer slot = layout_.IndexSlot(layer);
  SLUICE_DCHECK(slot.valid() && page.valid() && page.value < lanes_ * pages_per_lane_, "layer {} page {}",
                layer.value, page.value);
  return Block(index_slab_[size_t(slot.value)], layout_.index_page_bytes(), page);
}

std::byte* DevicePool::Piece(const KvPiece& piece, PageId page) const {
  return piece.component == KvComponent::kLatent ? Latent(piece.layer, page) : Index(piece.layer, page);
}

std::span<const std::byte> DevicePool::Readable(const KvPiece& piece, PageId page,
                                                std::vector<std::byte>* room) const {
  const std::byte* at = Piece(piece, page);
  if (memory_ == nullptr) return {at, size_t(piece.bytes)};
  room->resize(size_t(piece.bytes));
  memory_->Copy(room->data(), at, piece.bytes);
  return *room;
}

std::byte* DevicePool::LatentSlab(LogicalLayer layer, int32_t lane) const {
  const CompactLayer slot = layout_.LatentSlot(layer);
  SLUICE_DCHECK(slot.valid() && lane >= 0 && lane < lanes_);
  return base_ + lane * lane_bytes_ + latent_slab_[size_t(slot.value)];
}

std::byte* DevicePool::IndexSlab(LogicalLayer layer, int32_t lane) const {
  const CompactLayer slot = layout_.IndexSlot(layer);
  SLUICE_DCHECK(slot.valid() && lane >= 0 && lane < lanes_);
  return base_ + lane * lane_bytes_ + index_slab_[size_t(slot.value)];
}

void DevicePool::Poison(PageId page) const {
  for (const KvPiece& piece : layout_.pieces()) {
    if (memory_ != nullptr) {
      memory_->Fill(Piece(piece, page), 0xff, piece.bytes);
    } else {
      std::memset(Piece(piece, page), 0xff, size_t(piece.bytes));
    }
  }
}

void DevicePool::CopyPage(PageId from, PageId to) const {
  for (const KvPiece& piece : layout_.pieces()) {
    if (memory_ != nullptr) {
      memory_->Copy(Piece(piece, to), Piece(piece, from), piece.bytes);
    } else {
      std::memcpy(Piece(piece, to), Piece(piece, from), size_t(piece.bytes));
    }
  }
}

}  // namespace sluice
