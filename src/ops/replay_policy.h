// Which recurring passes are worth a recorded launch, and which recording goes when there are too many. To
// record one costs the step in which it happens about as much as its ops; a replay saves a small part of
// that.
//
// One thread. Follows from the keys that came alone, never from time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "ops/backend.h"

namespace sluice::ops {

class ReplayPolicy {
 public:
  // most: recordings that are kept. comings: at which a key is recorded once steps are served; before, in the
  // warm-up, at the second.
  ReplayPolicy(int64_t most, int64_t comings) : most_(most), comings_(comings) {}

  // A key comes that has no recording. True: record it now, and when *evict names a key, drop that one's
  // recording first.
  bool Comes(const ReplayKey& key, std::optional<ReplayKey>* evict);
  void Replayed(const ReplayKey& key);
  // A recording came to nothing, or all are gone.
  void Failed(const ReplayKey& key) { keys_.erase(key); }
  void Clear() { keys_.clear(); }
  void WarmedUp() { warm_ = true; }
  int64_t recorded() const;

 private:
  struct Key {
    int64_t comings = 0;
    int64_t last = 0;  // of all comings, the one of its last
    bool recorded = false;
  };
  void ForgetRareOnes();
  const int64_t most_, comings_;
  bool warm_ = false;
  int64_t now_ = 0;  // comings of all keys
  std::map<ReplayKey, Key> keys_;
};

}  // namespace sluice::ops
