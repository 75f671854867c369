// How often a drafted token has stood, by how sure the draft layer was of it, how far ahead it is and whether
// tokens are drawn or the likeliest is taken. What the layer says of itself is worth little further ahead;
// what became of such drafts before is what counts. And what a further draft has been worth behind such a
// one. Pure: the same drafts in the same order give the same answers. One thread.
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

  // What a draft behind such a one has been worth beyond its row, on average: its chance less what a row must
  // bring, 0 where it is less.
  double Gain(bool drawn, int32_t place, float share) const {
    const Cell& c = gains_[Index(drawn, place, share)];
    return c.stood / c.seen;
  }
  void ObserveGain(bool drawn, int32_t place, float share, double gain) {
    Cell& c = gains_[Index(drawn, place, share)];
    c.stood = c.stood * kDecay + gain;
    c.seen = c.seen * kDecay + 1;
  }

  DraftTrust() {
    for (size_t i = 0; i < cells_.size(); ++i) {
      const bool next = i < 2 * kFirst.size();
      cells_[i] = {(next ? kFirst : kFirstFurther)[i % kFirst.size()] * kWeight, kWeight};
      gains_[i] = {kFirstGain * kWeight, kWeight};
    }
  }

 private:
  struct Cell {
    double stood = 0, seen = 0;
  };
  static constexpr double kDecay = 0.98, kWeight = 2;  // weight of what is believed at first
  static constexpr int32_t kPlaces = 4;                // places further ahead share the last
  static constexpr std::array<float, 7> kEdges = {0.3f, 0.5f, 0.7f, 0.85f, 0.95f, 0.99f, 0.999f};
  // The next token is what the layer was trained for.
  static constexpr std::array<double, 8> kFirst = {0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99};
  static constexpr std::array<double, 8> kFirstFurther = {0.15, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.95};
  static constexpr double kFirstGain = 0.3;

  static size_t Index(bool drawn, int32_t place, float share) {
    const auto at = size_t(std::upper_bound(kEdges.begin(), kEdges.end(), share) - kEdges.begin());
    return (size_t(std::min(place, kPlaces - 1)) * 2 + size_t(drawn)) * kFirst.size() + at;
  }

  std::array<Cell, size_t(2 * kPlaces) * kFirst.size()> cells_, gains_;
};

}  // namespace sluice
