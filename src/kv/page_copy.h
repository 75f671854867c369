// Performs a CopyPlan on host memory: for the executor, one layer at a time, so that a forward may start
// while later layers still load. Pairs keep the plan's order; neighbours in both pools become one longer
// copy.
#pragma once

#include <span>

#include "kv/copy_plan.h"
#include "kv/device_pool.h"
#include "kv/host_pool.h"

namespace sluice {

struct CopyCount {
  int64_t copies = 0, bytes = 0;
  CopyCount& operator+=(const CopyCount& o) {
    copies += o.copies;
    bytes += o.bytes;
    return *this;
  }
};

// All pieces of one layer, of the pages that live on `lane` (-1: all lanes). Thread-safe for disjoint pages
// or layers.
CopyCount CopyLayer(const CopyPlan& plan, LogicalLayer layer, const DevicePool& device, const HostPool& host,
                    int32_t lane);
// Pairs of page ids instead of a plan; an invalid layer means all of them. REQUIRES ids of the pools.
CopyCount CopyPageIds(CopyDirection direction, std::span<const int64_t> device_pages,
                      std::span<const int64_t> host_pages, LogicalLayer layer, const DevicePool& device,
                      const HostPool& host);
// Every layer, first to last.
CopyCount CopyPages(const CopyPlan& plan, const DevicePool& device, const HostPool& host, int32_t lane);

}  // namespace sluice
