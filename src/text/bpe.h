// Byte-pair merges over one pre-tokenised word, in O(n log n) for a word of n symbols.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace sluice {

// Transparent hash, so that lookups by std::string_view make no copy.
struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
};
struct StringEq {
  using is_transparent = void;
  bool operator()(std::string_view a, std::string_view b) const { return a == b; }
};
using TokenIds = absl::flat_hash_map<std::string, int32_t, StringHash, StringEq>;

// Merge rules. Immutable once filled; Merge may run on any thread.
class BpeMerges {
 public:
  void Reserve(size_t rules) { rules_.reserve(rules); }
  // The rank of a rule is its place in the list; as in the reference, a repeated pair keeps its last rule.
  void Add(int32_t left, int32_t right, uint32_t rank, int32_t merged);
  // Applies, again and again, the rule of lowest rank (leftmost first), and appends the result to `out`;
  // `symbols` is overwritten.
  void Merge(std::span<int32_t> symbols, std::vector<int32_t>* out) const;
  size_t size() const { return rules_.size(); }

 private:
  struct Rule {
    uint32_t rank;
    int32_t merged;
  };
  static constexpr uint32_t kNoRank = 0xFFFFFFFFu;
  static uint64_t Key(int32_t left, int32_t right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
  }
  Rule Find(int32_t left, int32_t right) const {
    const auto it = rules_.find(Key(left, right));
    return it == rules_.end() ? Rule{kNoRank, -1} : it->second;
  }
  // Both leave the result in front and return its length.
  size_t MergeShort(std::span<int32_t> symbols) const;
  size_t MergeLong(std::span<int32_t> symbols) const;

  absl::flat_hash_map<uint64_t, Rule> rules_;
};

}  // namespace sluice
