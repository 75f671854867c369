// Which worker has probably seen which beginnings of requests: an approximate tree over request bytes. It
// guides dispatch and is never an identity; a wrong guess costs a cache miss and nothing else.
//
// A request's bytes are cut into blocks; a node is the chain hash of all blocks up to it. Bounded: when one
// generation is full, the older one is forgotten. Not thread-safe.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sluice::router {

class PrefixIndex {
 public:
  explicit PrefixIndex(size_t nodes_max = 1 << 19) : nodes_max_(nodes_max) {}
  // Bytes of `key` that each of `workers` has probably seen, in their order.
  std::vector<size_t> Match(std::string_view key, const std::vector<int>& workers) const;
  void Insert(std::string_view key, int worker);
  void Forget(int worker);  // it has restarted or its cache was emptied
  size_t nodes() const { return young_.size() + old_.size(); }

 private:
  using Mask = uint64_t;  // worker w is bit w % 64
  Mask Find(uint64_t hash) const;

  const size_t nodes_max_;
  std::unordered_map<uint64_t, Mask> young_, old_;
};

}  // namespace sluice::router
