#include "replay_storage.h"

#include <algorithm>

namespace sluice {

TraceStorage::TraceStorage(const KvLayout& layout, const ReplayOptions& options, const Clock* clock)
    : clock_(clock),
      page_bytes_(layout.page_bytes()),
      capacity_(std::max<int64_t>(1, options.storage_tokens / kPageTokens)),
      latency_(Nanos(options.storage_latency_ms * 1e6)),
      nanos_per_byte_(1 / options.storage_gb_s) {
  format_.content_fingerprint = layout.content_fingerprint();
  for (const KvPiece& p : layout.pieces()) format_.piece_bytes.push_back(uint32_t(p.bytes));
}

StatusOr<StorageTicket> TraceStorage::Submit(StorageBatch batch) {
  StorageCompletion c{next_++, batch.op, {}};
  int64_t moved = 0;
  for (const StorageItem& item : batch.items) {
    const auto it = objects_.find(item.key);
    const bool there = it != objects_.end();
    if (there) order_.splice(order_.end(), order_, it->second);
    c.outcomes.push_back(there || batch.op == StorageOp::kPut ? StorageOutcome::kOk : StorageOutcome::kMiss);
    moved += batch.op == StorageOp::kGet ? there : batch.op == StorageOp::kPut && !there;
    if (batch.op != StorageOp::kPut || there) continue;
    objects_[item.key] = order_.insert(order_.end(), item.key);
    if (int64_t(objects_.size()) > capacity_) {
      objects_.erase(order_.front());
      order_.pop_front();
    }
  }
  free_at_ = std::max(free_at_, clock_->Now()) + Nanos(double(moved * page_bytes_) * nanos_per_byte_);
  queue_.push_back({free_at_ + latency_, std::move(c)});
  return queue_.back().completion.ticket;
}

size_t TraceStorage::Poll(std::vector<StorageCompletion>* out, size_t max) {
  size_t n = 0;
  for (; n < max && !queue_.empty() && queue_.front().due <= clock_->Now(); ++n) {
    out->push_back(std::move(queue_.front().completion));
    queue_.pop_front();
  }
  return n;
}

Status TraceStorage::Clear() {
  objects_.clear();
  order_.clear();
  return OkStatus();
}

StorageStats TraceStorage::Stats() const {
  StorageStats s;
  s.objects = int64_t(objects_.size());
  s.in_flight = int64_t(queue_.size());
  return s;
}

}  // namespace sluice
