// Added tokens of a tokenizer: leftmost-longest search in text and the lstrip, rstrip and single_word rules.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct AddedToken {
  int32_t id = -1;
  std::string content;  // as searched (normalised when `normalized`)
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
  bool special = false;
};

// A byte trie over the contents. Immutable after the last Add.
class AddedTokenMatcher {
 public:
  struct Match {
    size_t begin, end;  // with the white space that lstrip and rstrip eat
    int32_t id;
  };
  AddedTokenMatcher();
  void Add(const AddedToken& token);
  bool empty() const { return tokens_.empty(); }

  // All matches whose content lies in text[begin, end), left to right. Conditions and stripping look at the
  // whole of `text`; `floor` is the end of what an earlier match has taken (in: 0 at first; out: updated), so
  // that no byte is taken twice.
  void Find(std::string_view text, size_t begin, size_t end, size_t* floor,
            std::vector<Match>* matches) const;

 private:
  struct Node {
    int32_t token = -1;                                   // index into tokens_
    std::vector<std::pair<unsigned char, int32_t>> next;  // sorted by byte
  };
  int32_t Child(int32_t node, unsigned char byte) const;
  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  bool starts_[256] = {};
};

}  // namespace sluice
