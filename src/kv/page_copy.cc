#include "kv/page_copy.h"

#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/stream_copy.h"

namespace sluice {
namespace {

// A piece of all pages of a plan from here on is more than the caches should be filled with, and so is each
// of its longer runs copied past them.
constexpr int64_t kStreamPlanBytes = 512 << 10, kStreamRunBytes = 4 << 10;

// Host memory is copied at once; runs of a device with memory of its own are collected and go in one call.
thread_local std::vector<MemoryRun>* collected = nullptr;

void Move(CopyDirection direction, std::byte* device, std::byte* host, int64_t bytes, bool stream) {
  std::byte* to = direction == CopyDirection::kDeviceToHost ? host : device;
  const std::byte* from = direction == CopyDirection::kDeviceToHost ? device : host;
  if (collected != nullptr) {
    collected->push_back({.src = from, .dst = to, .bytes = bytes});
  } else if (stream && bytes >= kStreamRunBytes) {
    StreamCopy(to, from, size_t(bytes));
  } else {
    std::memcpy(to, from, size_t(bytes));
  }
}

// What is copied: pair i of `size` pairs, in order.
struct PlanPages {
  std::span<const PagePair> pairs;
  size_t size() const { return pairs.size(); }
  PagePair operator[](size_t i) const { return pairs[i]; }
};
struct PageIds {
  std::span<const int64_t> device, host;
  size_t size() const { return device.size(); }
  PagePair operator[](size_t i) const { return {PageId(int32_t(device[i])), HostPageId(int32_t(host[i]))}; }
};

template <typename Pages>
CopyCount CopyPiece(CopyDirection direction, const Pages& pages, const KvPiece& piece,
                    const DevicePool& device, const HostPool& host, int32_t lane) {
  const bool stream = int64_t(pages.size()) * piece.bytes >= kStreamPlanBytes;
  CopyCount done;
  std::byte* device_run = nullptr;
  std::byte* host_run = nullptr;
  int64_t run = 0;
  auto flush = [&] {
    if (run == 0) return;
    Move(direction, device_run, host_run, run, stream);
    ++done.copies;
    done.bytes += run;
    run = 0;
  };
  HostRun runs[2];
  for (size_t i = 0; i < pages.size(); ++i) {
    const PagePair pair = pages[i];
    if (lane >= 0 && pair.device.value % device.lanes() != lane) continue;
    SLUICE_DCHECK(pair.device.value % device.lanes() == pair.host.value % host.lanes(),
                  "device page {}, host page {}", pair.device.value, pair.host.value);
    std::byte* d = device.Piece(piece, pair.device);
    const int n = host.Runs(piece, pair.host, runs);
    if (n == 1 && runs[0].count == 1) {
      if (run > 0 && device_run + run == d && host_run + run == runs[0].host) {
        run += piece.bytes;
        continue;
      }
      flush();
      device_run = d;
      host_run = runs[0].host;
      run = piece.bytes;
      continue;
    }
    for (int r = 0; r < n; ++r) {
      for (int64_t row = 0; row < runs[r].count; ++row) {
        Move(direction, d + runs[r].device_offset + row * runs[r].bytes,
             runs[r].host + row * runs[r].host_stride, runs[r].bytes, stream);
      }
      done.copies += runs[r].count;
      done.bytes += runs[r].count * runs[r].bytes;
    }
  }
  flush();
  return done;
}

// Hands what was collected to the device when it goes.
class Collect {
 public:
  explicit Collect(DeviceMemory* memory) : memory_(memory) {
    static thread_local std::vector<MemoryRun> runs;
    if (memory_ == nullptr) return;
    runs.clear();
    collected = &runs;
  }
  ~Collect() {
    if (memory_ == nullptr) return;
    memory_->CopyRuns(*collected);
    collected = nullptr;
  }
  Collect(const Collect&) = delete;
  Collect& operator=(const Collect&) = delete;

 private:
  DeviceMemory* const memory_;
};

}  // namespace

CopyCount CopyLayer(const CopyPlan& plan, LogicalLayer layer, const DevicePool& device, const HostPool& host,
                    int32_t lane) {
  CopyCount done;
  const Collect collect(device.memory());
  for (const KvPiece& piece : device.layout().pieces()) {
    if (piece.layer == layer)
      done += CopyPiece(plan.direction, PlanPages{plan.pages}, piece, device, host, lane);
  }
  return done;
}

CopyCount CopyPages(const CopyPlan& plan, const DevicePool& device, const HostPool& host, int32_t lane) {
  CopyCount done;
  const Collect collect(device.memory());
  for (const KvPiece& piece : device.layout().pieces())
    done += CopyPiece(plan.direction, PlanPages{plan.pages}, piece, device, host, lane);
  return done;
}

CopyCount CopyPageIds(CopyDirection direction, std::span<const int64_t> device_pages,
                      std::span<const int64_t> host_pages, LogicalLayer layer, const DevicePool& device,
                      const HostPool& host) {
  CopyCount done;
  const Collect collect(device.memory());
  for (const KvPiece& piece : device.layout().pieces()) {
    if (!layer.valid() || piece.layer == layer)
      done += CopyPiece(direction, PageIds{device_pages, host_pages}, piece, device, host, -1);
  }
  return done;
}

}  // namespace sluice
