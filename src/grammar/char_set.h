// Sets of Unicode code points, and their UTF-8 as sequences of byte ranges.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct CodepointRange {
  char32_t low, high;
};

constexpr char32_t kCodepointMax = 0x10FFFF;

// Ranges stay sorted, disjoint and free of surrogates.
class CharSet {
 public:
  CharSet() = default;
  CharSet(std::initializer_list<CodepointRange> ranges) {
    for (const CodepointRange& r : ranges) Add(r.low, r.high);
  }
  static CharSet All() { return {{0, kCodepointMax}}; }

  void Add(char32_t low, char32_t high);
  void Add(const CharSet& other) {
    for (const CodepointRange& r : other.ranges_) Add(r.low, r.high);
  }
  CharSet Complement() const;
  CharSet Without(const CharSet& other) const;
  bool Has(char32_t c) const;
  bool empty() const { return ranges_.empty(); }
  const std::vector<CodepointRange>& ranges() const { return ranges_; }

 private:
  std::vector<CodepointRange> ranges_;
};

// 1 to 4 ranges of bytes, one after another.
struct Utf8Sequence {
  struct Bytes {
    uint8_t low, high;
  };
  Bytes bytes[4];
  int length = 0;
};
std::vector<Utf8Sequence> Utf8Sequences(const CharSet& set);

}  // namespace sluice
