#include "router/prefix_index.h"

#include <algorithm>
#include <functional>

namespace sluice::router {
namespace {

constexpr size_t kBlockBytes = 128;
constexpr size_t kBlocksMax = 4096;

uint64_t Join(uint64_t parent, std::string_view block) {
  uint64_t z = parent ^ (std::hash<std::string_view>()(block) + 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

PrefixIndex::Mask PrefixIndex::Find(uint64_t hash) const {
  Mask mask = 0;
  if (const auto it = young_.find(hash); it != young_.end()) mask |= it->second;
  if (const auto it = old_.find(hash); it != old_.end()) mask |= it->second;
  return mask;
}

std::vector<size_t> PrefixIndex::Match(std::string_view key, const std::vector<int>& workers) const {
  std::vector<size_t> matched(workers.size(), 0);
  uint64_t hash = 0;
  Mask alive = ~Mask(0);
  for (size_t at = 0, n = 0; at + kBlockBytes <= key.size() && n < kBlocksMax; at += kBlockBytes, ++n) {
    hash = Join(hash, key.substr(at, kBlockBytes));
    alive &= Find(hash);
    if (alive == 0) break;
    for (size_t i = 0; i < workers.size(); ++i)
      if (alive >> (workers[i] % 64) & 1) matched[i] = at + kBlockBytes;
  }
  return matched;
}

void PrefixIndex::Insert(std::string_view key, int worker) {
  uint64_t hash = 0;
  for (size_t at = 0, n = 0; at + kBlockBytes <= key.size() && n < kBlocksMax; at += kBlockBytes, ++n) {
    hash = Join(hash, key.substr(at, kBlockBytes));
    young_[hash] |= Mask(1) << (worker % 64);
  }
  if (young_.size() < nodes_max_ / 2) return;
  old_ = std::move(young_);
  young_.clear();
}

void PrefixIndex::Forget(int worker) {
  const Mask keep = ~(Mask(1) << (worker % 64));
  for (auto* map : {&young_, &old_})
    for (auto& [hash, mask] : *map) mask &= keep;
}

}  // namespace sluice::router
