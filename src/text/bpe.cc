#include "text/bpe.h"

#include <algorithm>
#include <array>
#include <functional>

namespace sluice {
namespace {
// Up to here a scan for the lowest rank beats a heap (measured on English and code; ordinary words are under
// 16 symbols).
constexpr size_t kShortWord = 48;
}  // namespace

void BpeMerges::Add(int32_t left, int32_t right, uint32_t rank, int32_t merged) {
  rules_.insert_or_assign(Key(left, right), Rule{rank, merged});
}

void BpeMerges::Merge(std::span<int32_t> symbols, std::vector<int32_t>* out) const {
  size_t kept = symbols.size();
  if (kept > kShortWord) {
    kept = MergeLong(symbols);
  } else if (kept > 1) {
    kept = MergeShort(symbols);
  }
  out->insert(out->end(), symbols.begin(), symbols.begin() + static_cast<ptrdiff_t>(kept));
}

size_t BpeMerges::MergeShort(std::span<int32_t> symbols) const {
  std::array<Rule, kShortWord> pairs;  // pairs[i]: the rule for symbols i, i+1
  int32_t* s = symbols.data();
  size_t n = symbols.size();
  for (size_t i = 0; i + 1 < n; ++i) pairs[i] = Find(s[i], s[i + 1]);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (pairs[i].rank < pairs[best].rank) best = i;
    }
    if (pairs[best].rank == kNoRank) break;
    s[best] = pairs[best].merged;
    std::copy(s + best + 2, s + n, s + best + 1);
    if (best + 2 < n) std::copy(pairs.begin() + best + 2, pairs.begin() + n - 1, pairs.begin() + best + 1);
    --n;
    if (best > 0) pairs[best - 1] = Find(s[best - 1], s[best]);
    if (best + 1 < n) pairs[best] = Find(s[best], s[best + 1]);
  }
  return n;
}

size_t BpeMerges::MergeLong(std::span<int32_t> symbols) const {
  struct Node {
    int32_t id;  // -1: merged away
    uint32_t prev, next;
  };
  constexpr uint32_t kEnd = 0xFFFFFFFFu;
  const size_t n = symbols.size();
  // Heap of (rank, position), smallest first. An entry is stale when the pair at its position has another
  // rank by now.
  std::vector<uint64_t> heap;
  const auto entry = [](uint32_t rank, uint32_t pos) { return (static_cast<uint64_t>(rank) << 32) | pos; };
  for (uint32_t i = 0; i + 1 < n; ++i) {
    const Rule rule = Find(symbols[i], symbols[i + 1]);
    if (rule.rank != kNoRank) heap.push_back(entry(rule.rank, i));
  }
  if (heap.empty()) return n;
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  std::vector<Node> nodes(n);
  for (size_t i = 0; i < n; ++i) {
    nodes[i] = {symbols[i], i == 0 ? kEnd : static_cast<uint32_t>(i - 1),
                i + 1 == n ? kEnd : static_cast<uint32_t>(i + 1)};
  }
  const auto offer = [&](uint32_t pos) {
    const Rule rule = Find(nodes[pos].id, nodes[nodes[pos].next].id);
    if (rule.rank == kNoRank) return;
    heap.push_back(entry(rule.rank, pos));
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto pos = static_cast<uint32_t>(top);
    Node& node = nodes[pos];
    if (node.id < 0 || node.next == kEnd) continue;
    const Rule rule = Find(node.id, nodes[node.next].id);
    if (rule.rank != static_cast<uint32_t>(top >> 32)) continue;
    Node& right = nodes[node.next];
    node.id = rule.merged;
    node.next = right.next;
    right.id = -1;
    if (node.next != kEnd) nodes[node.next].prev = pos;
    if (node.prev != kEnd) offer(node.prev);
    if (node.next != kEnd) offer(pos);
  }
  size_t kept = 0;
  for (uint32_t pos = 0; pos != kEnd; pos = nodes[pos].next) symbols[kept++] = nodes[pos].id;
  return kept;
}

}  // namespace sluice
