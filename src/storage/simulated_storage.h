// A storage tier in memory under a virtual clock, with faults drawn from a seed: for simulation and tests.
//
// It stores real objects (object_format.h) and damages them as media do, so the real header and checksum code
// decides what a reader gets. It is as hard on its caller as the contract allows: it reads the spans of a put
// and writes the spans of a get anywhere between Submit and the completion, completes in any order, and lets
// go of a hung batch long after its deadline. Same seed and same calls, same behaviour. Single-threaded.
#pragma once

#include <map>
#include <utility>

#include "base/random.h"
#include "storage/object_format.h"

namespace sluice {

// Probabilities are per item unless said otherwise.
struct StorageFaults {
  Nanos delay_min = 20'000, delay_max = 2'000'000;  // of a batch
  double slow = 0;                                  // per batch: takes up to slow_max instead
  Nanos slow_max = 2'000'000'000;
  double hang = 0;  // per batch: holds its spans for hang_hold, Cancel or not
  Nanos hang_hold = 60'000'000'000;
  double refuse = 0;                        // per batch: Submit says Exhausted
  double error = 0;                         // EIO and relatives
  double full = 0;                          // put: no room
  double lose = 0;                          // put: acknowledged, not stored
  double flip = 0, truncate = 0, swap = 0;  // damage to the stored object, found when it is read
  double vanish = 0;                        // exists: yes, and gone afterwards
};

// What outlives a process: several SimulatedStorage objects, one after the other or side by side, may share
// one.
struct SimulatedMedium {
  std::map<std::pair<Digest256, Digest256>, std::vector<std::byte>>
      objects;  // (fingerprint, key) > header + payload
  uint64_t generation = 1;
  size_t capacity_objects = 0;  // 0: unbounded
};

class SimulatedStorage final : public StorageBackend {
 public:
  SimulatedStorage(StorageFormat format, SimulatedMedium* medium, const Clock* clock, uint64_t seed,
                   StorageFaults faults);

  const StorageFormat& format() const override { return object_.format(); }
  std::string Describe() const override { return "simulated"; }
  StatusOr<StorageTicket> Submit(StorageBatch batch) override;
  void Cancel(StorageTicket ticket) override;
  size_t Poll(std::vector<StorageCompletion>* out, size_t max) override;
  void SetWakeup(std::function<void()>) override {}
  Status Clear() override;
  StorageStats Stats() const override;

  Nanos NextDue() const;  // when the next completion appears; max() without one
  void set_faults(const StorageFaults& faults) { faults_ = faults; }

 private:
  struct InFlight {
    StorageTicket ticket;
    StorageBatch batch;
    std::vector<StorageOutcome> early;  // items already performed (kOk etc.); others are performed at the end
    size_t performed = 0;
    Nanos due = 0;
    bool hung = false;
    bool cancelled = false;
  };
  StorageOutcome Perform(StorageOp op, StorageItem& item);
  StorageOutcome Put(StorageItem& item);
  StorageOutcome Get(StorageItem& item);
  void Damage(std::vector<std::byte>* object);
  void Scribble(StorageItem& item);

  ObjectFormat object_;
  SimulatedMedium* medium_;
  const Clock* clock_;
  SeededStream random_;
  StorageFaults faults_;
  std::vector<InFlight> in_flight_;
  StorageTicket next_ticket_ = 1;
  StorageStats stats_;
};

}  // namespace sluice
