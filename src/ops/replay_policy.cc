#include "ops/replay_policy.h"

#include <algorithm>
#include <iterator>

namespace sluice::ops {

int64_t ReplayPolicy::recorded() const {
  return std::count_if(keys_.begin(), keys_.end(), [](const auto& k) { return k.second.recorded; });
}

// Of keys without a recording not more are remembered than there may be recordings.
void ReplayPolicy::ForgetRareOnes() {
  if (int64_t(keys_.size()) - recorded() <= most_) return;
  for (auto it = keys_.begin(); it != keys_.end();) {
    Key& key = it->second;
    if (!key.recorded) key.comings /= 2;
    it = key.recorded || key.comings > 0 ? std::next(it) : keys_.erase(it);
  }
}

bool ReplayPolicy::Comes(const ReplayKey& key, std::optional<ReplayKey>* evict) {
  evict->reset();
  ++now_;
  if (!keys_.contains(key)) ForgetRareOnes();
  Key& k = keys_[key];
  k.last = now_;
  if (++k.comings < (warm_ ? comings_ : 2)) return false;
  if (recorded() >= most_) {
    auto oldest = keys_.end();
    for (auto it = keys_.begin(); it != keys_.end(); ++it)
      if (it->second.recorded && (oldest == keys_.end() || it->second.last < oldest->second.last))
        oldest = it;
    // All of them come all the time: one more would only take its place from another.
    if (now_ - oldest->second.last < 2 * most_) {
      k.comings = 0;
      return false;
    }
    *evict = oldest->first;
    keys_.erase(oldest);
  }
  k.recorded = true;
  return true;
}

void ReplayPolicy::Replayed(const ReplayKey& key) {
  ++now_;
  if (const auto at = keys_.find(key); at != keys_.end()) at->second.last = now_;
}

}  // namespace sluice::ops
