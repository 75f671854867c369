// Finds stop strings in text that arrives in pieces, and holds back what could still become one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// One automaton (Knuth-Morris-Pratt) per stop string: time is linear in the text, whatever the pieces. The
// match that is complete first wins; of several complete at one byte the longest.
class StopMatcher {
 public:
  // Non-empty strings of valid UTF-8. keep_match: the stop string stays in the text.
  StopMatcher(const std::vector<std::string>& stops, bool keep_match);

  // Appends to *ready what is certain. True: a stop string is complete; what comes after it is dropped.
  bool Add(std::string_view text, std::string* ready);
  // The text is over: what was held is no stop string.
  void Finish(std::string* ready);
  // Text that cannot be part of a stop string: nothing held before it survives as a match.
  void Pass(std::string_view text, std::string* ready);
  int32_t matched() const { return matched_; }  // index of the stop string; -1: none yet
  bool empty() const { return stops_.empty(); }

 private:
  struct Stop {
    std::string text;
    std::vector<uint32_t> fallback;  // [i]: longest proper prefix of text that ends text[0..i]
    uint32_t state = 0;              // bytes matched so far
  };
  std::vector<Stop> stops_;
  const bool keep_match_;
  std::string held_;
  int32_t matched_ = -1;
};

}  // namespace sluice
