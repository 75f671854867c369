// What both room tables share: actions as data, options, the peer and write ids.
//
// The tables are pure state machines. Inputs are frames, layer events, write completions, lost peers and
// time; outputs are actions, taken in order by the progress thread (or by a simulation). Nothing here reads a
// clock, a socket or memory.
#pragma once

#include <algorithm>
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
// Cut the connection so that no write of the peer (decode) or to the peer (prefill) can be under way any
// more, then call OnFenced (decode) or fail its writes and call OnPeerLost (prefill).
struct FencePeer {
  PeerId peer;
};
// For --debug-kv: what one chunk of a room registered, when RoomOptions::record is on.
struct ChunkRegistered {
  RoomId room = 0;
  Chunk chunk;
  PageSpan pages;                            // that the chunk makes final and decode lacks
  std::vector<std::vector<PageMove>> moves;  // of them, by the rank that owns the source
};
using Action =
    std::variant<SendFrame, PostWrite, RoomReady, RoomFailed, RoomEnded, FencePeer, ChunkRegistered>;

struct RoomOptions {
  Nanos bootstrap_timeout = 30'000'000'000;
  Nanos waiting_timeout = 30'000'000'000;   // without a sign of life of the peer
  Nanos sending_timeout = 120'000'000'000;  // writes are under way and none has ended: a line may be slow
  Nanos abort_repeat = 500'000'000;         // an unanswered ABORT is sent again
  Nanos abort_fence = 5'000'000'000;        // and after this the peer is fenced
  Nanos resume_timeout = 5'000'000'000;  // for which a room outlives its connection; at most waiting_timeout
  Nanos tombstone = 120'000'000'000;     // longer than any peer's deadline
  int32_t layer_group = 8;
  bool per_layer = true;
  int32_t lanes = 1;          // ranks of this instance that own pages: each of them is a writer of its own
  int32_t write_retries = 2;  // a write that failed while its peer lives goes out again that often
  bool record = false;
  size_t max_rooms = 4096;
  uint64_t epoch = 0;  // of this instance; a reservation made for another one is refused
  Nanos ResumeTime() const { return std::min(resume_timeout, waiting_timeout); }
};

// What a room says of itself, while it lives and once more when it is over. Seconds are never negative.
struct RoomRecord {
  RoomId room = 0;
  const char* phase = "";   // bootstrap, queued, sending, draining; decode: waiting, aborting; ended
  const char* result = "";  // ok, failed, aborted; "" while it lives
  const char* mode = "";    // per_layer, monolithic, empty (nothing to send); prefill only
  std::string fallback;     // why it is monolithic
  std::string error;        // the last one
  int64_t prompt_tokens = 0, pages = 0;
  int32_t layers_done = 0, layers = 0;  // moved whole
  int64_t bytes_done = 0, bytes = 0;
  int64_t latent_bytes = 0, index_bytes = 0, draft_bytes = 0, aux_bytes = 0;
  int64_t bytes_overlapped = 0;  // moved before the end of the last forward
  int64_t chunks = 0, writes = 0, retries = 0;
  int64_t resumes = 0;        // on another connection, since the one before broke
  int32_t layers_at_end = 0;  // sent after the forward for want of a hook, and their bytes
  int64_t bytes_at_end = 0;
  double bootstrap_s = 0;         // until decode reserved
  double queue_s = 0;             // then until the first forward
  double wait_layers_s = 0;       // in forwards, with no write under way: for layers that were not final
  double wait_completions_s = 0;  // from the end of the last forward to the last byte: the exposed time
  double transfer_s = 0;          // from the first write to the last byte
};
// "3 of 79 layers, 12 of 34 bytes done; last error: ..."
std::string ProgressText(const RoomRecord& record);

}  // namespace sluice::transfer
