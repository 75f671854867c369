// Nodes that may be evicted from one tier, cheapest loss first: an indexed 4-ary heap, no scans.
//
// An entry may be out of date while its node is held: keys only grow (except under mru, where every change is
// announced by Offer), so an entry's key is a lower bound and is corrected when it reaches the top. A node
// that cannot be evicted when it reaches the top is dropped, and offered again when it can.
#pragma once

#include <cstdint>
#include <vector>

#include "base/check.h"

namespace sluice {

enum class EvictionPolicy : uint8_t { kLru, kLfu, kFifo, kMru, kPriority };

struct EvictKey {
  int64_t first = 0, second = 0;
  friend bool operator<(const EvictKey& a, const EvictKey& b) {
    return a.first != b.first ? a.first < b.first : a.second < b.second;
  }
  friend bool operator==(const EvictKey&, const EvictKey&) = default;
};

// Pos(node) gives a reference to the node's int32 position in this heap, -1 when absent.
template <typename Node, typename Pos>
class EvictOrder {
 public:
  explicit EvictOrder(Pos pos) : pos_(pos) {}
  bool empty() const { return heap_.empty(); }
  int64_t size() const { return int64_t(heap_.size()); }
  Node* top() const { return heap_[0].node; }
  EvictKey top_key() const { return heap_[0].key; }
  EvictKey key_of(Node* n) const { return heap_[size_t(pos_(n))].key; }

  void Push(Node* n, EvictKey key) {
    SLUICE_DCHECK(pos_(n) < 0);
    heap_.push_back({key, n});
    Up(heap_.size() - 1);
  }
  void Rekey(Node* n, EvictKey key) {
    const size_t i = size_t(pos_(n));
    const bool less = key < heap_[i].key;
    heap_[i].key = key;
    less ? Up(i) : Down(i);
  }
  void Remove(Node* n) {
    const int32_t at = pos_(n);
    if (at < 0) return;
    pos_(n) = -1;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (size_t(at) == heap_.size()) return;
    const bool less = last.key < heap_[size_t(at)].key;
    heap_[size_t(at)] = last;
    less ? Up(size_t(at)) : Down(size_t(at));
  }

 private:
  struct Entry {
    EvictKey key;
    Node* node;
  };
  void Up(size_t i) {
    const Entry e = heap_[i];
    while (i > 0) {
      const size_t p = (i - 1) / 4;
      if (!(e.key < heap_[p].key)) break;
      heap_[i] = heap_[p];
      pos_(heap_[i].node) = int32_t(i);
      i = p;
    }
    heap_[i] = e;
    pos_(e.node) = int32_t(i);
  }
  void Down(size_t i) {
    const Entry e = heap_[i];
    const size_t n = heap_.size();
    for (;;) {
      const size_t c = 4 * i + 1;
      if (c >= n) break;
      size_t best = c;
      for (size_t j = c + 1; j < c + 4 && j < n; ++j) {
        if (heap_[j].key < heap_[best].key) best = j;
      }
      if (!(heap_[best].key < e.key)) break;
      heap_[i] = heap_[best];
      pos_(heap_[i].node) = int32_t(i);
      i = best;
    }
    heap_[i] = e;
    pos_(e.node) = int32_t(i);
  }

  Pos pos_;
  std::vector<Entry> heap_;
};

}  // namespace sluice
