// The sending side of every room: waits for decode's reservation, follows the forward layer by layer, and
// knows at each moment which writes are outstanding.
//
//   Bootstrapping --Reserve--> Ready --BeginForward--> Sending --all writes done + aux--> (Complete) Ended
//   any state --Abort, Cancel, peer lost, failed write, deadline--> Draining --no write outstanding--> Ended
//
// Owner: the progress thread. Rules: a layer of a chunk is enqueued once, whatever hooks fire; layers without
// a hook are sent when the forward ends, so that both modes move the same set; writes of a room are posted in
// order; ABORT_ACK is sent only when no write of the room is outstanding; an ended room answers ABORT at once
// and never comes back to life.
#pragma once

#include <map>
#include <set>
#include <unordered_map>

#include "kv/kv_layout.h"
#include "transfer/rooms.h"

namespace sluice::transfer {

struct PrefillRoomStats {
  int64_t rooms_completed = 0, rooms_failed = 0, rooms_aborted = 0;
  int64_t writes_posted = 0, pages_sent = 0, bytes_sent = 0;
  int64_t layers_sent_at_end = 0;  // for want of a hook
  int64_t bytes_before_forward_end = 0;
  int64_t early_reservations = 0, repeated_hooks = 0, late_frames = 0;
};

class PrefillRooms {
 public:
  PrefillRooms(const KvLayout& layout, const RoomOptions& options);

  // The router's request arrived. AlreadyExists: an active or recently ended room has this id (409).
  // Exhausted: too many.
  Status Add(RoomId room, int64_t prompt_tokens, const Digest256& prompt_digest, Nanos now);
  void Cancel(RoomId room, const Status& why, Nanos now);

  void OnFrame(PeerId peer, const ControlMessage& message,
               Nanos now);  // Reserve, Abort, Heartbeat; others are counted and dropped
  void OnPeerLost(PeerId peer, const Status& why, Nanos now);

  // The forward `step` computes this chunk of the room. source: pages of the sequence by ordinal, prefix
  // included. Calling it again for the same (room, chunk start) changes nothing. Its pages must stay leased
  // until RoomEnded.
  void BeginForward(int64_t step, RoomId room, const Chunk& chunk, std::span<const PageId> source);
  // Every KV row of this layer, prefix included, is final in the forward. Repeated calls change nothing.
  void OnLayerFinal(int64_t step, LogicalLayer layer, Nanos now);
  void EndForward(int64_t step, const Status& status, Nanos now);
  void SetAux(RoomId room, Aux aux, Nanos now);

  void OnWriteDone(WriteId id, const Status& status, Nanos now);
  void Tick(Nanos now);

  std::vector<Action> TakeActions();
  const PrefillRoomStats& stats() const { return stats_; }
  std::vector<RoomId> RoomsOf(
      PeerId peer) const;  // for the heartbeat: active, or reserved and awaiting their request
  size_t active() const { return rooms_.size(); }
  size_t outstanding_writes() const { return writes_.size(); }

 private:
  enum class State { kBootstrapping, kReady, kSending, kDraining };
  struct Room {
    State state = State::kBootstrapping;
    PeerId peer;
    int64_t prompt_tokens = 0;
    Digest256 digest{};
    int32_t first_page = 0;
    std::vector<PageId> destination;
    Nanos deadline = 0;
    Status failure;
    bool abort_wanted = false;  // the peer waits for our ABORT_ACK
    bool last_chunk_sent = false;
    bool has_aux = false;
    Aux aux;
    int64_t bytes = 0;
    std::map<std::pair<uint8_t, int32_t>, uint32_t> counts;  // (component, layer) -> pages
    std::set<int64_t> chunks;                                // starts already registered
    int32_t outstanding = 0;
    int32_t forwards = 0;  // forwards that may still read its context
  };
  struct Context {  // one chunk of one room inside one forward
    RoomId room = 0;
    Chunk chunk;
    std::vector<PageMove> moves;
    std::vector<bool> enqueued;  // by position in the layout's layers
    std::vector<LogicalLayer> pending;
  };
  void Enqueue(Context& context, Room& room, LogicalLayer layer);
  void Flush(Context& context, Room& room);
  void Fail(RoomId id, Room& room, const Status& why, bool tell_peer, Nanos now);
  void MaybeFinish(RoomId id, Nanos now);
  void End(RoomId id, Room& room, const Status& status, Nanos now);
  void OnReserve(PeerId peer, const Reserve& reserve, Nanos now);
  void OnAbort(PeerId peer, const Abort& abort, Nanos now);

  const KvLayout layout_;
  const RoomOptions options_;
  std::unordered_map<int32_t, size_t> layer_position_;
  std::unordered_map<RoomId, Room> rooms_;
  std::unordered_map<RoomId, Nanos> tombstones_;  // ended room -> forget at
  struct Early {
    PeerId peer;
    Reserve reserve;
    Nanos deadline;
  };
  std::unordered_map<RoomId, Early> early_;                     // reservations that came before their request
  std::unordered_map<int64_t, std::vector<Context>> forwards_;  // by step
  struct Write {
    RoomId room;
    int64_t bytes;
  };
  std::unordered_map<WriteId, Write> writes_;
  WriteId next_write_ = 1;
  std::vector<Action> actions_;
  PrefillRoomStats stats_;
};

}  // namespace sluice::transfer
