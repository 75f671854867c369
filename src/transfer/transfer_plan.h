// Which pages of which layers move when: one function for both modes (per layer and monolithic), so that
// their sets are equal.
//
// Positions are absolute: page ordinal i of a request holds its tokens [64 i, 64 i + 64), whatever chunk
// computed them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "kv/kv_layout.h"

namespace sluice::transfer {

struct PageSpan {  // half-open range of page ordinals
  int32_t begin = 0, end = 0;
  int32_t size() const { return end > begin ? end - begin : 0; }
  friend bool operator==(const PageSpan&, const PageSpan&) = default;
};

struct Chunk {
  int64_t start = 0, end = 0;  // tokens computed by this forward, absolute
  bool first = false, last = false;
};

// Pages that become final with the chunk and that decode lacks. The first chunk brings the cached prefix
// along; a page that the chunk leaves partly filled goes with the chunk that fills it, or with the last one.
PageSpan ChunkPages(const Chunk& chunk, int32_t first_page);
// Everything that a request sends: [first_page, ceil(prompt / 64)).
PageSpan RequestPages(int64_t prompt_tokens, int32_t first_page);

struct PageMove {
  int32_t ordinal = 0;
  PageId from, to;
  friend bool operator==(const PageMove&, const PageMove&) = default;
};

// source: pages of the whole sequence by ordinal; destination: pages of [first_page, ...), as reserved. Only
// pages whose owner lane is `lane` of `lanes` (lane < 0: all). REQUIRES the span to lie inside both lists.
std::vector<PageMove> Moves(PageSpan span, int32_t first_page, std::span<const PageId> source,
                            std::span<const PageId> destination, int32_t lanes, int32_t lane);

// Logical layers in the order in which a forward makes them final, cut into groups.
std::vector<std::vector<LogicalLayer>> LayerGroups(std::span<const LogicalLayer> layers, int32_t group);

}  // namespace sluice::transfer
