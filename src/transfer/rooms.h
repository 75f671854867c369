// What both room tables share: actions as data, options, the peer and write ids.
//
// The tables are pure state machines. Inputs are frames, layer events, write completions, lost peers and
// time; outputs are actions, taken in order by the progress thread (or by a simulation). Nothing here reads a
// clock, a socket or memory.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "base/status.h"
#include "transfer/transfer_plan.h"
#include "transfer/wire.h"

namespace sluice::transfer {

// One connection to a peer, not its address: a peer that restarts or reconnects is a new PeerId, so that the
// end of an old connection never touches rooms of the new one.
using PeerId = Id<struct PeerTag>;
using WriteId = int64_t;

struct SendFrame {
  PeerId peer;
  ControlMessage message;
};
// Move these pages of these layers, in order, to the peer; OnWriteDone(id) follows exactly once.
struct PostWrite {
  WriteId id = 0;
  RoomId room = 0;
  PeerId peer;
  std::vector<LogicalLayer> layers;
  std::vector<PageMove> pages;
};
// The room's request may run its forward now (prefill) or decode (decode, with what prefill computed).
struct RoomReady {
  RoomId room = 0;
  Aux aux;
};
// Exactly one for each room that was added: after it no byte of the room moves, and its page leases may end.
struct RoomEnded {
  RoomId room = 0;
  Status status;
};
// The request has failed (tell the client); its pages stay leased until RoomEnded. At most one a room, before
// RoomEnded.
struct RoomFailed {
  RoomId room = 0;
  Status status;
};
// Cut the connection so that no write of the peer can arrive any more, then call OnFenced.
struct FencePeer {
  PeerId peer;
};
using Action = std::variant<SendFrame, PostWrite, RoomReady, RoomFailed, RoomEnded, FencePeer>;

struct RoomOptions {
  Nanos bootstrap_timeout = 30'000'000'000;
  Nanos waiting_timeout = 30'000'000'000;  // without a sign of life of the peer
  Nanos abort_repeat = 500'000'000;        // an unanswered ABORT is sent again
  Nanos abort_fence = 5'000'000'000;       // and after this the peer is fenced
  Nanos tombstone = 120'000'000'000;       // longer than any peer's deadline
  int32_t layer_group = 8;
  bool per_layer = true;
  size_t max_rooms = 4096;
  uint64_t epoch = 0;  // of this instance; a reservation made for another one is refused
};

}  // namespace sluice::transfer
