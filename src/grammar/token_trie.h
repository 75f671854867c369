// A vocabulary as a tree of bytes, laid out for one walk from front to back. Immutable.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace sluice {

class TokenTrie {
 public:
  // Special tokens and tokens without bytes are left out.
  explicit TokenTrie(const Tokenizer& tokenizer);

  struct Node {
    uint8_t byte;
    uint16_t depth;      // 1: first byte
    int32_t skip;        // index of the first node outside this one's subtree
    int32_t token = -1;  // that ends here; further ones of the same bytes: `same`
  };
  const std::vector<Node>& nodes() const { return nodes_; }
  // Tokens with the bytes of `token`, itself excluded.
  const std::vector<std::pair<int32_t, int32_t>>& doubles() const { return doubles_; }  // (token, its double)
  int32_t vocab_size() const { return vocab_size_; }
  int32_t depth_max() const { return depth_max_; }

 private:
  std::vector<Node> nodes_;
  std::vector<std::pair<int32_t, int32_t>> doubles_;
  int32_t vocab_size_ = 0, depth_max_ = 0;
};

}  // namespace sluice
