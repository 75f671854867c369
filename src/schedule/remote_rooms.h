// What a scheduler tells and learns when requests are prefilled in one instance and decoded in another. It
// knows rooms by number and never what is behind them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "batch/forward_batch.h"
#include "request/request.h"

namespace sluice {

enum class RemoteRole : uint8_t { kNone, kPrefill, kDecode };

// Engine thread.
class RemoteRooms {
 public:
  virtual ~RemoteRooms() = default;
  // Decode: the pages of [first_page, ceil(prompt / 64)) are reserved. They stay so until
  // Scheduler::RoomEnded, or until RoomFilled.
  virtual void Open(const Request& request, int32_t first_page, std::span<const PageId> pages) = 0;
  // Prefill: the step that is submitted next computes rows [start, end) of the room's prompt. `source`: the
  // prompt's pages from the first on, leased until Scheduler::RoomEnded. first: everything before `start`
  // came from the cache.
  virtual void Chunk(int64_t step, uint64_t room, int32_t start, int32_t end, bool first, bool last,
                     std::span<const PageId> source) = 0;
  // Prefill, with speculation: the state before the first sampled token, from which decode drafts. Before
  // that token is sent.
  virtual void FirstState(uint64_t room, std::span<const float> state) = 0;
};

// What prefill computed besides the pages.
struct RemoteResult {
  std::vector<SampledToken> first;  // the first token of every choice
  std::vector<TokenOut> prompt_logprobs;
  CachedTokens cached;
  std::vector<float> first_state;  // before first[0]; with speculation
};

}  // namespace sluice
