// How often a drafted token has stood, by how sure the draft layer was of it, how far ahead it is and whether
// tokens are drawn or the likeliest is taken. What the layer says of itself is worth little further ahead;
// what became of such drafts before is what counts. Pure: the same drafts in the same order give the same
// answers. One thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice {

class DraftTrust {
 public:
  // Of a draft `place` tokens ahead (0: the next) to which the layer gives `share` of the probability, if all
  // before it stand.
  double Chance(bool drawn, int32_t place, float share) const {
    const Cell& c = cells_[Index(drawn, place, share)];
    return c.stood / c.seen;
  }
  void Observe(bool drawn, int32_t place, float share, bool stood) {
    Cell& c = cells_[Index(drawn, place, share)];
    c.stood = c.stood * kDecay + (stood ? 1 : 0);
    c.seen = c.seen * kDecay + 1;
  }

  DraftTrust() {
    for (size_t i = 0; i < cells_.size(); ++i) cells_[i] = {kFirst[i % kFirst.size()] * kWeight, kWeight};
  }

 private:
  struct Cell {
    double stood = 0, seen = 0;
  };
  static constexpr double kDecay = 0.98, kWeight = 2;  // weight of what is believed at first
  static constexpr int32_t kPlaces = 4;                // places further ahead share the last
  static constexpr std::array<float, 7> kEdges = {0.3f, 0.5f, 0.7f, 0.85f, 0.95f, 0.99f, 0.999f};
  static constexpr std::array<double, 8> kFirst = {0.15, 0.35, 0.5, 0.6, 0.75, 0.9, 0.95, 0.97};

  static size_t Index(bool drawn, int32_t place, float share) {
    const auto at = size_t(std::upper_bound(kEdges.begin(), kEdges.end(), share) - kEdges.begin());
    return (size_t(std::min(place, kPlaces - 1)) * 2 + size_t(drawn)) * kFirst.size() + at;
  }

  std::array<Cell, size_t(2 * kPlaces) * kFirst.size()> cells_;
};

}  // namespace sluice
