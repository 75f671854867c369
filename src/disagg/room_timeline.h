// When the parts of a room moved: what people look at, kept for the rooms that ended last.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sluice::disagg {

// Times are of this process's steady clock, in nanoseconds; 0: it never came to that.
struct RoomTimeline {
  struct Forward {  // prefill: one chunk of the prompt
    int64_t begin = 0, end = 0;
    int64_t from = 0, to = 0;  // tokens
  };
  struct Move {  // prefill: one write of some layers of some pages
    int64_t posted = 0, done = 0;
    int32_t first_layer = 0, last_layer = 0, pages = 0;
    int64_t bytes = 0;
  };
  uint64_t room = 0;
  int64_t prompt_tokens = 0;
  int64_t announced = 0;  // the request was queued here
  int64_t ready = 0;      // prefill: decode's pages are known. decode: pages are reserved
  int64_t ended = 0;
  bool failed = false;
  std::string transport;
  std::vector<Forward> forwards;
  std::vector<Move> moves;
  int32_t moves_left_out = 0;  // behind kMovesMax
};

// Rooms that ended last, newest last. Immutable, so that many may read while the next one is made.
using RoomTimelines = std::vector<std::shared_ptr<const RoomTimeline>>;

inline constexpr size_t kTimelinesMax = 8;
inline constexpr size_t kMovesMax = 256;

}  // namespace sluice::disagg
