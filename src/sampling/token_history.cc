#include "sampling/token_history.h"

namespace sluice {

TokenHistory::Seen& TokenHistory::Entry(int32_t token) {
  const auto [it, added] = index_.try_emplace(token, int32_t(seen_.size()));
  if (added) seen_.push_back({token, 0});
  return seen_[size_t(it->second)];
}

void TokenHistory::Reset(std::span<const int32_t> prompt, std::span<const int32_t> output) {
  seen_.clear();
  index_.clear();
  for (const int32_t t : prompt) Entry(t);
  for (const int32_t t : output) AddOutput(t);
}

void TokenHistory::AddOutput(int32_t token) { ++Entry(token).produced; }

}  // namespace sluice
