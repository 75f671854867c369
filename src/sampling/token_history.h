// What penalties need to know of a sequence: which tokens it has seen and how often it produced each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace sluice {

class TokenHistory {
 public:
  struct Seen {
    int32_t token;
    int32_t produced;  // times among the output tokens; 0: in the prompt only
  };
  void Reset(std::span<const int32_t> prompt, std::span<const int32_t> output);
  void AddOutput(int32_t token);
  std::span<const Seen> seen() const { return seen_; }

 private:
  Seen& Entry(int32_t token);
  std::vector<Seen> seen_;
  absl::flat_hash_map<int32_t, int32_t> index_;
};

}  // namespace sluice
