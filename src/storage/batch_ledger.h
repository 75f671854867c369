// Batches between the engine thread and a backend's I/O threads: who is in flight, who is done, who was
// cancelled.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "storage/storage.h"

namespace sluice {

// One accepted batch. The items belong to the I/O threads until remaining is 0; each writes only its own
// outcome.
struct InFlightBatch {
  StorageTicket ticket = 0;
  StorageBatch batch;
  std::vector<StorageOutcome> outcomes;
  std::atomic<size_t> remaining{0};
  std::atomic<bool> cancelled{false};

  // Why no further I/O may start for this batch; kOk: it may.
  StorageOutcome StopReason(Nanos now) const {
    if (cancelled.load(std::memory_order_acquire)) return StorageOutcome::kCancelled;
    if (batch.deadline != 0 && now >= batch.deadline) return StorageOutcome::kTimeout;
    return StorageOutcome::kOk;
  }
};

// Thread-safe. Counts outcomes into StorageStats as items end.
class BatchLedger {
 public:
  BatchLedger(size_t max_in_flight, int64_t object_bytes)
      : max_in_flight_(max_in_flight), object_bytes_(object_bytes) {}

  // Engine thread.
  StatusOr<std::shared_ptr<InFlightBatch>> Accept(StorageBatch batch);
  void Cancel(StorageTicket ticket);
  void CancelAll();
  size_t Poll(std::vector<StorageCompletion>* out, size_t max);
  void SetWakeup(std::function<void()> wakeup);
  StorageStats Stats() const;
  bool idle() const;

  // I/O threads: item `i` of `b` is over and its spans are not touched again.
  void Finish(InFlightBatch* b, size_t i, StorageOutcome outcome);
  void CountPresent();  // a put that found its object already stored
  void CountEvicted(int64_t objects, int64_t bytes);

 private:
  const size_t max_in_flight_;
  const int64_t object_bytes_;
  mutable std::mutex mutex_;
  StorageTicket next_ticket_ = 1;
  std::map<StorageTicket, std::shared_ptr<InFlightBatch>>
      in_flight_;  // includes the done ones until they are polled
  std::deque<StorageTicket> done_;
  StorageStats stats_;
  std::function<void()> wakeup_;
};

}  // namespace sluice
