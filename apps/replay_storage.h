// Storage for replays: remembers names, moves no bytes, and takes the time that a medium of a given latency
// and rate would take.
#pragma once

#include <deque>
#include <list>

#include "absl/container/flat_hash_map.h"
#include "base/clock.h"
#include "kv/kv_layout.h"
#include "replay.h"
#include "storage/storage.h"

namespace sluice {

class TraceStorage final : public StorageBackend {
 public:
  TraceStorage(const KvLayout& layout, const ReplayOptions& options, const Clock* clock);

  const StorageFormat& format() const override { return format_; }
  std::string Describe() const override { return "trace"; }
  StatusOr<StorageTicket> Submit(StorageBatch batch) override;
  void Cancel(StorageTicket) override {}
  size_t Poll(std::vector<StorageCompletion>* out, size_t max) override;
  void SetWakeup(std::function<void()>) override {}
  Status Clear() override;
  StorageStats Stats() const override;
  Nanos NextDue() const { return queue_.empty() ? INT64_MAX : queue_.front().due; }

 private:
  struct Done {
    Nanos due;
    StorageCompletion completion;
  };
  StorageFormat format_;
  const Clock* clock_;
  const int64_t page_bytes_, capacity_;  // objects
  const Nanos latency_;
  const double nanos_per_byte_;
  std::list<Digest256> order_;  // least recently used first
  absl::flat_hash_map<Digest256, std::list<Digest256>::iterator> objects_;
  std::deque<Done> queue_;
  Nanos free_at_ = 0;
  StorageTicket next_ = 1;
};

}  // namespace sluice
