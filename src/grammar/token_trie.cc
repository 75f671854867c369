#include "grammar/token_trie.h"

#include <algorithm>
#include <string>

namespace sluice {

TokenTrie::TokenTrie(const Tokenizer& tokenizer) : vocab_size_(tokenizer.vocab_size()) {
  std::vector<std::pair<std::string_view, int32_t>> tokens;
  for (int32_t id = 0; id < vocab_size_; ++id) {
    const std::string_view bytes = tokenizer.TokenBytes(id);
    if (bytes.empty() || bytes.size() > 60000 || tokenizer.IsSpecial(id)) continue;
    tokens.emplace_back(bytes, id);
  }
  std::sort(tokens.begin(), tokens.end());
  std::vector<int32_t> path;  // nodes of the bytes of the token before
  std::string_view before;
  for (const auto& [bytes, id] : tokens) {
    size_t common = 0;
    while (common < before.size() && common < bytes.size() && before[common] == bytes[common]) ++common;
    if (common == bytes.size()) {  // sorted: the same bytes again
      doubles_.emplace_back(nodes_[size_t(path[common - 1])].token, id);
      continue;
    }
    while (path.size() > common) {
      nodes_[size_t(path.back())].skip = int32_t(nodes_.size());
      path.pop_back();
    }
    for (size_t i = common; i < bytes.size(); ++i) {
      path.push_back(int32_t(nodes_.size()));
      nodes_.push_back({.byte = uint8_t(bytes[i]), .depth = uint16_t(i + 1), .skip = 0});
    }
    nodes_.back().token = id;
    depth_max_ = std::max(depth_max_, int32_t(bytes.size()));
    before = bytes;
  }
  for (const int32_t node : path) nodes_[size_t(node)].skip = int32_t(nodes_.size());
}

}  // namespace sluice
