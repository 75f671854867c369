#include "transfer/transfer_plan.h"

#include <algorithm>

#include "base/check.h"
#include "kv/device_pool.h"

namespace sluice::transfer {

PageSpan ChunkPages(const Chunk& c, int32_t first_page) {
  const int32_t begin = c.first ? first_page : std::max(first_page, int32_t(c.start / kPageTokens));
  const int32_t end = int32_t(c.last ? CeilDiv(c.end, kPageTokens) : c.end / kPageTokens);
  return {begin, std::max(begin, end)};
}

PageSpan RequestPages(int64_t prompt_tokens, int32_t first_page) {
  const int32_t end = int32_t(CeilDiv(prompt_tokens, kPageTokens));
  return {first_page, std::max(first_page, end)};
}

std::vector<PageMove> Moves(PageSpan span, int32_t first_page, std::span<const PageId> source,
                            std::span<const PageId> destination, int32_t lanes, int32_t lane) {
  std::vector<PageMove> moves;
  moves.reserve(size_t(span.size()));
  for (int32_t i = span.begin; i < span.end; ++i) {
    SLUICE_CHECK(i >= first_page && size_t(i) < source.size() && size_t(i - first_page) < destination.size(),
                 "page ordinal {} outside source [0, {}) or destination [{}, {})", i, source.size(),
                 first_page, size_t(first_page) + destination.size());
    const PageId from = source[size_t(i)];
    if (lane >= 0 && PageOwner(from, lanes) != lane) continue;
    moves.push_back({i, from, destination[size_t(i - first_page)]});
  }
  return moves;
}

std::vector<std::vector<LogicalLayer>> LayerGroups(std::span<const LogicalLayer> layers, int32_t group) {
  SLUICE_CHECK(group >= 1, "layer group of {}", group);
  std::vector<std::vector<LogicalLayer>> groups;
  for (size_t i = 0; i < layers.size(); i += size_t(group))
    groups.emplace_back(layers.begin() + int64_t(i),
                        layers.begin() + int64_t(std::min(layers.size(), i + size_t(group))));
  return groups;
}

}  // namespace sluice::transfer
