// A device with memory of its own, played by the heap: knows what it was asked for and refuses what a real
// one would. For tests of what pools and copiers do with such a device.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tensor/device_memory.h"

namespace sluice::testing {

class FakeDeviceMemory final : public DeviceMemory {
 public:
  StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes, const char*) override {
    std::lock_guard lock(mutex_);
    auto* p = new std::byte[size_t(bytes)];
    owned_[p] = bytes;
    return std::shared_ptr<std::byte>(p, [this](std::byte* q) {
      std::lock_guard again(mutex_);
      owned_.erase(q);
      delete[] q;
    });
  }
  StatusOr<std::shared_ptr<std::byte>> AllocateShared(int64_t bytes, const char*) override {
    return std::shared_ptr<std::byte>(new std::byte[size_t(bytes)], std::default_delete<std::byte[]>());
  }
  StatusOr<std::shared_ptr<void>> Pin(std::byte* host, int64_t bytes) override {
    for (const auto& [base, size] : pinned_)
      if (host < base + size && base < host + bytes) return Internal("pinned twice: an owner left it behind");
    pinned_[host] = bytes;
    return std::shared_ptr<void>(host, [this](void* p) {
      auto* base = static_cast<std::byte*>(p);
      unsigned char resident[1];
      EXPECT_EQ(mincore(base, 1, resident), 0) << "unmapped before it was unregistered";
      pinned_.erase(base);
    });
  }
  void Copy(void* dst, const void* src, int64_t bytes) override { std::memcpy(dst, src, size_t(bytes)); }
  void CopyRuns(std::span<const MemoryRun> runs) override {
    run_calls.emplace_back(runs.begin(), runs.end());
    for (const MemoryRun& r : runs) std::memcpy(Reach(r.dst), Reach(r.src), size_t(r.bytes));
  }
  void CopyIndexed(std::span<const IndexedPages> copies) override {
    ++indexed_calls;
    for (const IndexedPages& c : copies) {
      EXPECT_TRUE(Holds(c.src_index) && Holds(c.dst_index));
      for (int64_t i = 0; i < c.count; ++i) {
        for (int64_t r = 0; r < c.rows; ++r) {
          std::memcpy(Reach(c.dst + c.dst_index[i] * c.dst_page + r * c.dst_row),
                      Reach(c.src + c.src_index[i] * c.src_page + r * c.src_row), size_t(c.row_bytes));
        }
      }
    }
  }
  void Fill(void* dst, uint8_t value, int64_t bytes) override { std::memset(dst, value, size_t(bytes)); }
  int64_t free_bytes() const override { return int64_t(1) << 40; }
  bool Holds(const void* address) const override {
    std::lock_guard lock(mutex_);
    for (const auto& [base, size] : owned_)
      if (address >= base && address < base + size) return true;
    return false;
  }
  int64_t pinned_ranges() const override { return int64_t(pinned_.size()); }

  std::vector<std::vector<MemoryRun>> run_calls;
  int64_t indexed_calls = 0;

 private:
  // Its own memory or pinned host memory: what a device can reach.
  template <typename T>
  T* Reach(T* p) const {
    bool pinned = false;
    for (const auto& [base, size] : pinned_) pinned |= p >= base && p < base + size;
    EXPECT_TRUE(pinned || Holds(p)) << "the device cannot reach this address";
    return p;
  }
  mutable std::mutex mutex_;
  std::map<std::byte*, int64_t> owned_, pinned_;
};

}  // namespace sluice::testing
