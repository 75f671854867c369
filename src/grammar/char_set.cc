#include "grammar/char_set.h"

#include <algorithm>

#include "text/utf8.h"

namespace sluice {
namespace {

// Splits until both ends have one length and every byte range but the first changing one is whole.
void Split(char32_t low, char32_t high, std::vector<Utf8Sequence>* out) {
  if (low > high) return;
  for (const char32_t last : {char32_t(0x7F), char32_t(0x7FF), char32_t(0xFFFF)}) {
    if (low <= last && last < high) {
      Split(low, last, out);
      Split(last + 1, high, out);
      return;
    }
  }
  for (int shift = 6; shift <= 18; shift += 6) {
    const char32_t mask = (char32_t(1) << shift) - 1;
    if ((low & ~mask) == (high & ~mask)) break;
    if ((low & mask) != 0) {
      Split(low, low | mask, out);
      Split((low | mask) + 1, high, out);
      return;
    }
    if ((high & mask) != mask) {
      Split(low, (high & ~mask) - 1, out);
      Split(high & ~mask, high, out);
      return;
    }
  }
  std::string first, last;
  AppendUtf8(low, &first);
  AppendUtf8(high, &last);
  Utf8Sequence sequence;
  sequence.length = int(first.size());
  for (size_t i = 0; i < first.size(); ++i) sequence.bytes[i] = {uint8_t(first[i]), uint8_t(last[i])};
  out->push_back(sequence);
}

}  // namespace

void CharSet::Add(char32_t low, char32_t high) {
  high = std::min(high, kCodepointMax);
  if (low > high) return;
  if (low <= 0xDFFF && high >= 0xD800) {
    if (low < 0xD800) Add(low, 0xD7FF);
    if (high > 0xDFFF) Add(0xE000, high);
    return;
  }
  std::vector<CodepointRange> merged;
  for (const CodepointRange& r : ranges_) {
    if (r.high + 1 < low || high + 1 < r.low) {
      merged.push_back(r);
    } else {
      low = std::min(low, r.low);
      high = std::max(high, r.high);
    }
  }
  merged.push_back({low, high});
  std::sort(merged.begin(), merged.end(), [](const auto& a, const auto& b) { return a.low < b.low; });
  ranges_ = std::move(merged);
}

CharSet CharSet::Complement() const {
  CharSet out;
  char32_t next = 0;
  for (const CodepointRange& r : ranges_) {
    if (r.low > next) out.Add(next, r.low - 1);
    next = r.high + 1;
  }
  if (next <= kCodepointMax) out.Add(next, kCodepointMax);
  return out;
}

CharSet CharSet::Without(const CharSet& other) const {
  CharSet kept = Complement();
  kept.Add(other);
  return kept.Complement();
}

bool CharSet::Has(char32_t c) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [c](const CodepointRange& r) { return r.low <= c && c <= r.high; });
}

std::vector<Utf8Sequence> Utf8Sequences(const CharSet& set) {
  std::vector<Utf8Sequence> out;
  for (const CodepointRange& r : set.ranges()) Split(r.low, r.high, &out);
  return out;
}

}  // namespace sluice
