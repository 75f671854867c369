// Host memory in the place of a device's, for tests: what goes through DeviceMemory works, events pass when
// the test says so, and copies fail on request.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "tensor/device_memory.h"

namespace sluice::testing {

class FakeEvent final : public DeviceEvent {
 public:
  Status Wait() override {
    std::unique_lock lock(mutex_);
    ++waits_;
    changed_.wait(lock, [&] { return passed_; });
    return status_;
  }
  void Pass(Status status = OkStatus()) {
    {
      std::lock_guard lock(mutex_);
      passed_ = true;
      status_ = std::move(status);
    }
    changed_.notify_all();
  }
  int waits() {
    std::lock_guard lock(mutex_);
    return waits_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  int waits_ = 0;
  Status status_;
};

class FakeDevice final : public DeviceMemory {
 public:
  StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes, const char*) override {
    void* p = std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64));
    return std::shared_ptr<std::byte>(static_cast<std::byte*>(p), [](std::byte* q) { std::free(q); });
  }
  StatusOr<std::shared_ptr<std::byte>> AllocateShared(int64_t bytes, const char* what) override {
    return Allocate(bytes, what);
  }
  StatusOr<std::shared_ptr<void>> Pin(std::byte* host, int64_t) override {
    return std::shared_ptr<void>(host, [](void*) {});
  }
  void Copy(void* dst, const void* src, int64_t bytes) override { std::memcpy(dst, src, size_t(bytes)); }
  void CopyRuns(std::span<const MemoryRun> runs) override {
    for (const MemoryRun& r : runs) std::memcpy(r.dst, r.src, size_t(r.bytes));
  }
  void Fill(void* dst, uint8_t value, int64_t bytes) override { std::memset(dst, value, size_t(bytes)); }
  void CopyIndexed(std::span<const IndexedPages> copies) override {
    for (const IndexedPages& c : copies)
      for (int64_t i = 0; i < c.count; ++i)
        for (int64_t r = 0; r < c.rows; ++r)
          std::memcpy(c.dst + c.dst_index[i] * c.dst_page + r * c.dst_row,
                      c.src + c.src_index[i] * c.src_page + r * c.src_row, size_t(c.row_bytes));
  }
  int64_t free_bytes() const override { return int64_t(1) << 30; }
  bool Holds(const void*) const override { return false; }  // all of it is the host's
  int64_t pinned_ranges() const override { return 0; }
  StatusOr<std::unique_ptr<DeviceCopier>> MakeCopier() override {
    return std::unique_ptr<DeviceCopier>(std::make_unique<Copier>(this));
  }

  // The copy after `good` more ones fails with `why`, once; then copies work again.
  void FailCopy(int good, Status why) {
    std::lock_guard lock(mutex_);
    good_ = good;
    why_ = std::move(why);
  }
  int copies() {
    std::lock_guard lock(mutex_);
    return copies_;
  }

 private:
  class Copier final : public DeviceCopier {
   public:
    explicit Copier(FakeDevice* device) : device_(device) {}
    Status Bind() override { return OkStatus(); }
    Status CopyRuns(std::span<const MemoryRun> runs) override {
      std::lock_guard lock(device_->mutex_);
      ++device_->copies_;
      if (!device_->why_.ok() && device_->good_-- == 0) return std::exchange(device_->why_, OkStatus());
      device_->FakeDevice::CopyRuns(runs);
      return OkStatus();
    }

   private:
    FakeDevice* const device_;
  };
  std::mutex mutex_;
  int good_ = 0, copies_ = 0;
  Status why_;
};

}  // namespace sluice::testing
