#include "storage/batch_ledger.h"

#include "base/check.h"

namespace sluice {

StatusOr<std::shared_ptr<InFlightBatch>> BatchLedger::Accept(StorageBatch batch) {
  auto b = std::make_shared<InFlightBatch>();
  b->outcomes.assign(batch.items.size(), StorageOutcome::kError);
  b->remaining = batch.items.size();
  b->batch = std::move(batch);
  std::lock_guard lock(mutex_);
  if (in_flight_.size() >= max_in_flight_)
    return Exhausted("storage: {} batches in flight, the limit is {}; poll completions first",
                     in_flight_.size(), max_in_flight_);
  b->ticket = next_ticket_++;
  in_flight_[b->ticket] = b;
  return b;
}

void BatchLedger::Cancel(StorageTicket ticket) {
  std::lock_guard lock(mutex_);
  if (auto it = in_flight_.find(ticket); it != in_flight_.end()) it->second->cancelled = true;
}

void BatchLedger::CancelAll() {
  std::lock_guard lock(mutex_);
  for (auto& [ticket, b] : in_flight_) b->cancelled = true;
}

size_t BatchLedger::Poll(std::vector<StorageCompletion>* out, size_t max) {
  std::lock_guard lock(mutex_);
  size_t n = 0;
  while (n < max && !done_.empty()) {
    auto it = in_flight_.find(done_.front());
    done_.pop_front();
    out->push_back({it->first, it->second->batch.op, std::move(it->second->outcomes)});
    in_flight_.erase(it);
    ++n;
  }
  return n;
}

void BatchLedger::SetWakeup(std::function<void()> wakeup) {
  std::lock_guard lock(mutex_);
  wakeup_ = std::move(wakeup);
}

StorageStats BatchLedger::Stats() const {
  std::lock_guard lock(mutex_);
  StorageStats s = stats_;
  s.in_flight = int64_t(in_flight_.size());
  return s;
}

bool BatchLedger::idle() const {
  std::lock_guard lock(mutex_);
  return in_flight_.size() == done_.size();
}

void BatchLedger::Finish(InFlightBatch* b, size_t i, StorageOutcome outcome) {
  b->outcomes[i] = outcome;
  const StorageOp op = b->batch.op;
  std::function<void()> wakeup;
  {
    std::lock_guard lock(mutex_);
    if (op == StorageOp::kGet) ++stats_.gets;
    switch (outcome) {
      case StorageOutcome::kOk:
        if (op == StorageOp::kPut) {
          ++stats_.puts;
          stats_.put_bytes += object_bytes_;
        } else if (op == StorageOp::kGet) {
          ++stats_.hits;
          stats_.get_bytes += object_bytes_;
        }
        break;
      case StorageOutcome::kMiss:
        stats_.misses += op == StorageOp::kGet;
        break;
      case StorageOutcome::kCorrupt:
        ++stats_.corrupt;
        break;
      case StorageOutcome::kError:
        ++stats_.errors;
        break;
      case StorageOutcome::kFull:
        ++stats_.full;
        break;
      case StorageOutcome::kTimeout:
        ++stats_.timeouts;
        break;
      case StorageOutcome::kCancelled:
        ++stats_.cancelled;
        break;
    }
    if (b->remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    done_.push_back(b->ticket);
    wakeup = wakeup_;
  }
  if (wakeup) wakeup();
}

void BatchLedger::CountPresent() {
  std::lock_guard lock(mutex_);
  ++stats_.puts_present;
  --stats_.puts;
  stats_.put_bytes -= object_bytes_;
}

void BatchLedger::CountEvicted(int64_t objects, int64_t bytes) {
  std::lock_guard lock(mutex_);
  stats_.evicted_objects += objects;
  stats_.evicted_bytes += bytes;
}

}  // namespace sluice
