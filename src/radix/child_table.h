// All parent-child edges of a tree in one open-addressing table: 64-bit hash of (parent, first page) to
// child.
//
// A hit is only a candidate: whoever asks compares tokens. Linear probing with backward-shift deletion, at
// most half full, so a miss ends within one or two cache lines without touching a node.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"

namespace sluice {

struct RadixNode;

// 64 bits over whole pages of tokens; page bytes are a multiple of 16. Never an identity.
inline uint64_t HashTokens(const int32_t* tokens, int64_t bytes, uint64_t seed) {
  auto mum = [](uint64_t a, uint64_t b) {
    const unsigned __int128 p = static_cast<unsigned __int128>(a) * b;
    return uint64_t(p) ^ uint64_t(p >> 64);
  };
  constexpr uint64_t k0 = 0xa0761d6478bd642full, k1 = 0xe7037ed1a0b428dbull, k2 = 0x8ebc6af09c88c6e3ull;
  const auto* p = reinterpret_cast<const char*>(tokens);
  uint64_t a = seed ^ k0, b = seed ^ k2;
  int64_t i = 0;
  uint64_t w[4];
  for (; i + 32 <= bytes; i += 32) {
    std::memcpy(w, p + i, 32);
    a = mum(w[0] ^ k1, w[1] ^ a);
    b = mum(w[2] ^ k0, w[3] ^ b);
  }
  for (; i + 16 <= bytes; i += 16) {
    std::memcpy(w, p + i, 16);
    a = mum(w[0] ^ k1, w[1] ^ a);
  }
  return mum(a ^ k2, b ^ k1 ^ uint64_t(bytes));
}

class ChildTable {
 public:
  ChildTable() : slots_(64), mask_(63) {}

  int64_t size() const { return size_; }

  void Insert(uint64_t hash, RadixNode* node) {
    if (2 * (size_ + 1) > int64_t(slots_.size())) Rehash(slots_.size() * 2);
    Place(slots_, mask_, hash, node);
    ++size_;
  }
  void Replace(uint64_t hash, RadixNode* old_node, RadixNode* new_node) {
    slots_[Find(hash, old_node)].node = new_node;
  }
  void Erase(uint64_t hash, RadixNode* node) {
    size_t hole = Find(hash, node);
    for (size_t i = (hole + 1) & mask_; slots_[i].node != nullptr; i = (i + 1) & mask_) {
      const size_t home = slots_[i].hash & mask_;
      if (((i - home) & mask_) >=
          ((i - hole) & mask_)) {  // may move back to the hole without passing its home
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = {};
    --size_;
  }
  // Calls f(node) for each candidate of the hash until it returns true.
  template <typename F>
  void ForEach(uint64_t hash, F&& f) const {
    for (size_t i = hash & mask_; slots_[i].node != nullptr; i = (i + 1) & mask_) {
      if (slots_[i].hash == hash && f(slots_[i].node)) return;
    }
  }

 private:
  struct Slot {
    uint64_t hash = 0;
    RadixNode* node = nullptr;
  };

  static void Place(std::vector<Slot>& slots, size_t mask, uint64_t hash, RadixNode* node) {
    size_t i = hash & mask;
    while (slots[i].node != nullptr) i = (i + 1) & mask;
    slots[i] = {hash, node};
  }
  size_t Find(uint64_t hash, RadixNode* node) const {
    size_t i = hash & mask_;
    while (slots_[i].node != node) {
      SLUICE_CHECK(slots_[i].node != nullptr, "edge {:x} is not in the table", hash);
      i = (i + 1) & mask_;
    }
    return i;
  }
  void Rehash(size_t n) {
    std::vector<Slot> slots(n);
    for (const Slot& s : slots_) {
      if (s.node != nullptr) Place(slots, n - 1, s.hash, s.node);
    }
    slots_ = std::move(slots);
    mask_ = n - 1;
  }

  std::vector<Slot> slots_;
  size_t mask_;
  int64_t size_ = 0;
};

}  // namespace sluice
