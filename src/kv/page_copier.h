// The two ways in which whole pages go between a device's pool and the host tier (--hicache-io-backend):
//
//   direct  64-bit page ids in host memory, in the caller's order; neighbours in both pools become one copy.
//           Layouts in which a piece of a page is one run.
//   kernel  page indices in device memory; the device fetches and scatters by itself. layer_first, and
//           page_first, whose rows only it can scatter.
//
// A pair that has no copier is refused when it is made; none takes the place of another.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kv/page_copy.h"

namespace sluice {

enum class IoBackend : uint8_t { kDirect, kKernel };
StatusOr<IoBackend> ParseIoBackend(std::string_view name);

class DirectCopier {
 public:
  // Pools outlive the copier.
  static StatusOr<DirectCopier> Make(const DevicePool& device, const HostPool& host);
  // Page device_pages[i] and host page host_pages[i], for all i in order; an invalid layer means all layers.
  // Invalid: lists of different lengths, a page that is not in the pool, or a list that lies on the device.
  StatusOr<CopyCount> Copy(CopyDirection direction, std::span<const int64_t> device_pages,
                           std::span<const int64_t> host_pages, LogicalLayer layer = LogicalLayer()) const;

 private:
  DirectCopier(const DevicePool& device, const HostPool& host) : device_(&device), host_(&host) {}
  const DevicePool* device_;
  const HostPool* host_;
};

class KernelCopier {
 public:
  // Unsupported without a device that has memory of its own.
  static StatusOr<KernelCopier> Make(const DevicePool& device, const HostPool& host);
  // `count` pages of one lane by their places in it (page id / lanes), [count] in device memory each.
  // Invalid: lists in host memory. What lies outside of the pools is not looked at: the device alone reads
  // the lists.
  StatusOr<CopyCount> Copy(CopyDirection direction, int32_t lane, const int32_t* device_index,
                           const int32_t* host_index, int64_t count,
                           LogicalLayer layer = LogicalLayer()) const;

 private:
  KernelCopier(const DevicePool& device, const HostPool& host) : device_(&device), host_(&host) {}
  const DevicePool* device_;
  const HostPool* host_;
};

// Performs the plans of one step by one of the two, or in place where the device works in host memory. Used
// by one thread.
class PlanCopier {
 public:
  static StatusOr<std::unique_ptr<PlanCopier>> Make(IoBackend backend, const DevicePool& device,
                                                    const HostPool& host);
  ~PlanCopier();

  // Makes the index lists of these plans, which stay as they are until the next call.
  void Begin(std::span<const CopyPlan> plans);
  // One layer of all plans, or all layers of all plans.
  CopyCount Layer(LogicalLayer layer);
  CopyCount All() { return Layer(LogicalLayer()); }

 private:
  PlanCopier(const DevicePool& device, const HostPool& host) : device_(device), host_(host) {}
  struct LaneList {  // of one plan and lane, in index_ (kernel)
    CopyDirection direction{};
    int32_t lane = 0;
    int64_t begin = 0, count = 0;
  };
  void Upload(std::span<const CopyPlan> plans);

  const DevicePool& device_;
  const HostPool& host_;
  std::unique_ptr<DirectCopier> direct_;  // or
  std::unique_ptr<KernelCopier> kernel_;
  std::span<const CopyPlan> plans_;
  std::vector<int64_t> device_pages_, host_pages_;  // of all plans, one after the other (direct)
  std::vector<int32_t> staged_;                     // [device | host] indices of all plans (kernel)
  std::vector<LaneList> lists_;
  std::shared_ptr<std::byte> index_;  // staged_ in device memory
  int64_t index_words_ = 0;
};

}  // namespace sluice
