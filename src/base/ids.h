// Strong indices: no two kinds convert into each other, nor from a plain integer without naming the kind.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace sluice {

template <typename Tag, typename Rep = int32_t>
struct Id {
  Rep value = Rep(-1);
  constexpr Id() = default;
  constexpr explicit Id(Rep v) : value(v) {}
  constexpr bool valid() const { return value >= 0; }
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using PageId = Id<struct PageTag>;  // a device page of the pool (all layers of 64 tokens), global over lanes
using HostPageId = Id<struct HostPageTag>;  // a page of the host tier
using LogicalLayer =
    Id<struct LayerTag>;  // layer number as in the checkpoint; the draft layer is num_hidden_layers
using CompactLayer =
    Id<struct CompactTag>;  // slot of a layer among those that own the component; derived, never sent
using RequestId = Id<struct RequestTag, int64_t>;
using SlotId = Id<struct SlotTag>;  // a running sequence's place in the executor's per-sequence state
using Rank = Id<struct RankTag>;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t AlignUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }
constexpr int64_t AlignDown(int64_t a, int64_t b) { return a / b * b; }

}  // namespace sluice

template <typename Tag, typename Rep>
struct std::hash<sluice::Id<Tag, Rep>> {
  size_t operator()(const sluice::Id<Tag, Rep>& id) const { return std::hash<Rep>()(id.value); }
};
