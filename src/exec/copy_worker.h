// Moves pages between device and host tier on a thread of its own, layer by layer, while the forward pass
// runs.
//
// One step at a time: Start, WaitLoaded for each layer from the forward's thread, Finish. Loads go first, all
// plans of layer 0, then of layer 1, and so on; backups follow. Debug builds check that nobody reads a layer
// before it was waited for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "kv/copy_plan.h"
#include "kv/device_pool.h"
#include "kv/host_pool.h"
#include "kv/page_copier.h"

namespace sluice {

class CopyWorker {
 public:
  // Pools outlive the worker. REQUIRES a backend that goes with the pools (PlanCopier::Make).
  CopyWorker(const DevicePool& device, const HostPool& host, IoBackend backend);
  ~CopyWorker();

  // REQUIRES the step before to be finished. The plans stay as they are until Finish.
  void Start(std::span<const CopyPlan> loads, std::span<const CopyPlan> backups);
  // Returns when all loads of the layer have arrived. Called by any rank's threads.
  void WaitLoaded(LogicalLayer layer);
  // True when the layer's loads of this step have arrived or there are none.
  bool Loaded(LogicalLayer layer) const;
  // Returns when everything of this step is done.
  void Finish();

  int64_t bytes_loaded() const { return bytes_loaded_.load(std::memory_order_relaxed); }
  int64_t bytes_backed_up() const { return bytes_backed_up_.load(std::memory_order_relaxed); }
  int64_t waits() const {
    return waits_.load(std::memory_order_relaxed);
  }  // layers that the forward had to wait for

 private:
  void Loop();
  void Advance(int32_t layers);

  const std::unique_ptr<PlanCopier> copier_;  // the thread's
  const std::vector<LogicalLayer> layers_;
  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::span<const CopyPlan> loads_, backups_;
  uint64_t started_ = 0, finished_ = 0;    // steps
  std::atomic<int32_t> loaded_layers_{0};  // of the current step, in order of layers_
  std::atomic<int64_t> bytes_loaded_{0}, bytes_backed_up_{0};
  std::atomic<int64_t> waits_{0};
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sluice
