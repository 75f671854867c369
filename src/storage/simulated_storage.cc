#include "storage/simulated_storage.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sluice {

SimulatedStorage::SimulatedStorage(StorageFormat format, SimulatedMedium* medium, const Clock* clock,
                                   uint64_t seed, StorageFaults faults)
    : object_(std::move(format), 64), medium_(medium), clock_(clock), random_(seed), faults_(faults) {}

StatusOr<StorageTicket> SimulatedStorage::Submit(StorageBatch batch) {
  if (Status s = CheckBatch(format(), batch); !s.ok()) return s;
  if (random_.Chance(faults_.refuse))
    return Exhausted("storage: {} batches in flight; retry later", in_flight_.size());
  const Nanos now = clock_->Now();
  InFlight f;
  f.ticket = next_ticket_++;
  f.hung = random_.Chance(faults_.hang);
  Nanos longest = random_.Chance(faults_.slow) ? faults_.slow_max : faults_.delay_max;
  longest = std::max(longest, faults_.delay_min + 1);
  f.due = f.hung ? now + faults_.hang_hold
                 : now + faults_.delay_min + Nanos(random_.Below(uint64_t(longest - faults_.delay_min)));
  // Without a hang the deadline ends the batch; then only a prefix has been performed.
  if (!f.hung && batch.deadline != 0 && f.due > batch.deadline) {
    f.due = std::max(now, batch.deadline);
    f.cancelled = true;
  }
  f.batch = std::move(batch);
  // Some items are performed at once, in order; the others just before the completion.
  const size_t early = f.hung ? 0 : random_.Below(f.batch.items.size() + 1);
  for (size_t i = 0; i < f.batch.items.size(); ++i) {
    if (i < early) {
      f.early.push_back(Perform(f.batch.op, f.batch.items[i]));
    } else if (f.batch.op == StorageOp::kGet) {
      Scribble(f.batch.items[i]);
    }
  }
  f.performed = early;
  in_flight_.push_back(std::move(f));
  return in_flight_.back().ticket;
}

void SimulatedStorage::Cancel(StorageTicket ticket) {
  for (InFlight& f : in_flight_) {
    if (f.ticket != ticket) continue;
    f.cancelled = true;
    f.batch.deadline = 0;
    // Not from the stream: the order in which a caller cancels several must not matter to a replay.
    if (!f.hung) f.due = std::min(f.due, clock_->Now() + Nanos(SeededStream(ticket).Below(1'000'000)));
  }
}

size_t SimulatedStorage::Poll(std::vector<StorageCompletion>* out, size_t max) {
  const Nanos now = clock_->Now();
  size_t n = 0;
  while (n < max) {
    auto next =
        std::min_element(in_flight_.begin(), in_flight_.end(), [](const InFlight& a, const InFlight& b) {
          return std::pair(a.due, a.ticket) < std::pair(b.due, b.ticket);
        });
    if (next == in_flight_.end() || next->due > now) break;
    InFlight f = std::move(*next);
    in_flight_.erase(next);
    StorageCompletion c{f.ticket, f.batch.op, std::move(f.early)};
    const bool timed_out = f.batch.deadline != 0 && f.due >= f.batch.deadline;
    for (size_t i = f.performed; i < f.batch.items.size(); ++i) {
      StorageItem& item = f.batch.items[i];
      if (f.cancelled || timed_out) {
        if (f.batch.op == StorageOp::kGet) Scribble(item);
        c.outcomes.push_back(timed_out ? StorageOutcome::kTimeout : StorageOutcome::kCancelled);
        ++(timed_out ? stats_.timeouts : stats_.cancelled);
      } else {
        c.outcomes.push_back(Perform(f.batch.op, item));
      }
    }
    out->push_back(std::move(c));
    ++n;
  }
  return n;
}

StorageOutcome SimulatedStorage::Perform(StorageOp op, StorageItem& item) {
  const auto id = std::pair(format().content_fingerprint, item.key);
  if (random_.Chance(faults_.error)) {
    if (op == StorageOp::kGet) Scribble(item);
    ++stats_.errors;
    return StorageOutcome::kError;
  }
  switch (op) {
    case StorageOp::kPut:
      return Put(item);
    case StorageOp::kGet:
      return Get(item);
    case StorageOp::kExists: {
      auto it = medium_->objects.find(id);
      if (it == medium_->objects.end()) return StorageOutcome::kMiss;
      if (random_.Chance(faults_.vanish)) medium_->objects.erase(it);
      return StorageOutcome::kOk;
    }
    case StorageOp::kDelete:
      medium_->objects.erase(id);
      return StorageOutcome::kOk;
  }
  return StorageOutcome::kError;
}

StorageOutcome SimulatedStorage::Put(StorageItem& item) {
  if (random_.Chance(faults_.full)) {
    ++stats_.full;
    return StorageOutcome::kFull;
  }
  const auto id = std::pair(format().content_fingerprint, item.key);
  if (auto it = medium_->objects.find(id); it != medium_->objects.end()) {
    if (ObjectFormat::Generation(it->second) == medium_->generation) {
      ++stats_.puts_present;
      return StorageOutcome::kOk;
    }
  }
  if (random_.Chance(faults_.lose)) return StorageOutcome::kOk;
  std::vector<std::byte> object(size_t(object_.header_bytes()));
  object_.Encode(item.key, medium_->generation, object);
  ChecksumStream sum;
  sum.Add(object);
  for (const auto& s : item.spans) {
    sum.Add(s);
    object.insert(object.end(), s.begin(), s.end());
  }
  ObjectFormat::PutChecksum(sum.Finish(), object);
  Damage(&object);
  medium_->objects[id] = std::move(object);
  if (medium_->capacity_objects != 0 && medium_->objects.size() > medium_->capacity_objects) {
    auto victim = std::next(medium_->objects.begin(), long(random_.Below(medium_->objects.size())));
    medium_->objects.erase(victim);
    ++stats_.evicted_objects;
    stats_.evicted_bytes += object_.payload_bytes();
  }
  ++stats_.puts;
  stats_.put_bytes += object_.payload_bytes();
  return StorageOutcome::kOk;
}

StorageOutcome SimulatedStorage::Get(StorageItem& item) {
  const auto id = std::pair(format().content_fingerprint, item.key);
  ++stats_.gets;
  auto it = medium_->objects.find(id);
  StorageOutcome outcome = StorageOutcome::kMiss;
  if (it != medium_->objects.end()) {
    const std::vector<std::byte>& object = it->second;
    const size_t header = size_t(object_.header_bytes());
    size_t at = header;
    for (auto& s : item.spans) {
      const size_t n = std::min(s.size(), object.size() > at ? object.size() - at : 0);
      std::memcpy(s.data(), object.data() + std::min(at, object.size()), n);
      at += s.size();
    }
    if (object.size() != header + size_t(object_.payload_bytes())) {
      outcome = StorageOutcome::kCorrupt;
    } else {
      outcome = object_.CheckHeader({object.data(), header}, item.key, medium_->generation);
      if (outcome == StorageOutcome::kOk) {
        std::vector<std::byte> clean(object.begin(), object.begin() + long(header));
        ObjectFormat::PutChecksum(Checksum128{}, clean);
        ChecksumStream sum;
        sum.Add(clean);
        for (const auto& s : item.spans) sum.Add(s);
        if (sum.Finish() != ObjectFormat::ChecksumOf(object)) outcome = StorageOutcome::kCorrupt;
      }
    }
    if (outcome == StorageOutcome::kCorrupt) medium_->objects.erase(it);
  }
  if (outcome == StorageOutcome::kOk) {
    ++stats_.hits;
    stats_.get_bytes += object_.payload_bytes();
  } else {
    Scribble(item);
    ++(outcome == StorageOutcome::kCorrupt ? stats_.corrupt : stats_.misses);
  }
  return outcome;
}

void SimulatedStorage::Damage(std::vector<std::byte>* object) {
  if (random_.Chance(faults_.flip)) {
    const uint64_t bit = random_.Below(object->size() * 8);
    (*object)[bit / 8] ^= std::byte(uint8_t(1u << (bit % 8)));
  }
  if (random_.Chance(faults_.truncate)) {
    const size_t sizes[] = {0, 1, object->size() - 1, object->size() + 1};
    object->resize(sizes[random_.Below(4)]);
  }
  if (random_.Chance(faults_.swap) && !medium_->objects.empty()) {
    auto other = std::next(medium_->objects.begin(), long(random_.Below(medium_->objects.size())));
    std::swap(*object, other->second);
  }
}

void SimulatedStorage::Scribble(StorageItem& item) {
  for (auto& s : item.spans) std::memset(s.data(), 0xA5, s.size());
}

// As a process does that dies after the first of its steps: what was stored stays, of an older generation.
Status SimulatedStorage::Clear() {
  ++medium_->generation;
  return OkStatus();
}

StorageStats SimulatedStorage::Stats() const {
  StorageStats s = stats_;
  s.in_flight = int64_t(in_flight_.size());
  s.objects = int64_t(medium_->objects.size());
  s.bytes = s.objects * object_.payload_bytes();
  s.capacity_bytes = int64_t(medium_->capacity_objects) * object_.payload_bytes();
  return s;
}

Nanos SimulatedStorage::NextDue() const {
  Nanos due = std::numeric_limits<Nanos>::max();
  for (const InFlight& f : in_flight_) due = std::min(due, f.due);
  return due;
}

}  // namespace sluice
