// Memory of a device that does not work on the host's: what pools, buffers and weights are allocated from. A
// backend whose device reads host memory directly has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"

namespace sluice {

struct MemoryRun {
  const std::byte* src = nullptr;
  std::byte* dst = nullptr;
  int64_t bytes = 0;
};

// A place in a queue's order of work. Thread-safe.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Returns when everything that the queue held before it is done, or with the device's error. The thread has
  // bound the device (DeviceCopier::Bind).
  virtual Status Wait() = 0;
};

// Copies of one thread that runs no forward, on a stream of its own. Errors are values: whoever moves pages
// for others ends what the copy was for, not the process.
class DeviceCopier {
 public:
  virtual ~DeviceCopier() = default;
  virtual Status Bind() = 0;  // first, on the thread that makes the other calls
  // Device to device, or between the device and shared or pinned host memory; returns when the bytes are
  // there.
  virtual Status CopyRuns(std::span<const MemoryRun> runs) = 0;
};

// Pages by index: page i is read at src + src_index[i] * src_page and written at dst + dst_index[i] *
// dst_page, as `rows` runs of row_bytes that lie src_row and dst_row bytes apart.
struct IndexedPages {
  const std::byte* src = nullptr;
  std::byte* dst = nullptr;
  int64_t src_page = 0, dst_page = 0;
  const int32_t* src_index = nullptr;  // [count] in device memory
  const int32_t* dst_index = nullptr;
  int64_t count = 0;
  int64_t rows = 1, row_bytes = 0, src_row = 0, dst_row = 0;
};

// Thread-safe. Calls wait until their work is done and are ordered with no queue.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // Freed when the last copy of the pointer goes. Exhausted names what was asked for and what is free.
  virtual StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes, const char* what) = 0;
  // Host memory that the device reads and writes too.
  virtual StatusOr<std::shared_ptr<std::byte>> AllocateShared(int64_t bytes, const char* what) = 0;
  // Makes existing host memory reachable by the device for as long as the result lives.
  virtual StatusOr<std::shared_ptr<void>> Pin(std::byte* host, int64_t bytes) = 0;
  virtual void Copy(void* dst, const void* src, int64_t bytes) = 0;
  // Device to device, or between the device and shared or pinned host memory.
  virtual void CopyRuns(std::span<const MemoryRun> runs) = 0;
  // The same by indices that lie in device memory; done by the device alone.
  virtual void CopyIndexed(std::span<const IndexedPages> copies) = 0;
  virtual void Fill(void* dst, uint8_t value, int64_t bytes) = 0;
  virtual int64_t free_bytes() const = 0;
  // For a thread that moves pages; the memory outlives it.
  virtual StatusOr<std::unique_ptr<DeviceCopier>> MakeCopier() {
    return Unsupported("this device gives no copies to other threads");
  }
  // Whether the address lies in the device's memory.
  virtual bool Holds(const void* address) const = 0;
  // Results of Pin that are alive.
  virtual int64_t pinned_ranges() const = 0;
};

}  // namespace sluice
