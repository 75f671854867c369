// The sending side of every room: waits for decode's reservation, follows the forward layer by layer, and
// knows at each moment which writes are outstanding.
//
//   Bootstrapping --Reserve--> Ready --BeginForward--> Sending --all writes done + aux--> (Complete) Ended
//   any state --Abort, Cancel, peer lost, failed write, deadline--> Draining --no write outstanding--> Ended
//   Ready, Sending --connection broken--> (cut) --the same reservation on another one--> as before
//
// Owner: the progress thread. Rules: a layer of a chunk is enqueued once, whatever hooks fire; layers without
// a hook are sent when the forward ends, so that both modes move the same set; writes of a room are posted in
// order; each rank that owns source pages writes its own, and one that owns none takes no part; a chunk that
// cannot be registered makes the rest of its room monolithic; a failed write goes out again while the peer
// lives; what was under way when a connection broke, and what the forward makes final meanwhile, waits for
// decode to come back and goes out on the next one; ABORT_ACK is sent only when no write of the room is
// outstanding; an ended room answers ABORT at once and never comes back to life.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "kv/kv_layout.h"
#include "transfer/rooms.h"

namespace sluice::transfer {

struct PrefillRoomStats {
  int64_t rooms_completed = 0, rooms_failed = 0, rooms_aborted = 0;
  int64_t writes_posted = 0, pages_sent = 0, bytes_sent = 0;
  int64_t write_retries = 0, fences = 0, resumes = 0;
  int64_t layers_sent_at_end = 0, bytes_sent_at_end = 0;  // for want of a hook
  int64_t bytes_before_forward_end = 0;
  int64_t latent_bytes = 0, index_bytes = 0, draft_bytes = 0, aux_bytes = 0;
  // Of completed rooms. A room with nothing to send has no mode and is no sample of any time.
  int64_t rooms_per_layer = 0, rooms_by_flag = 0, rooms_by_fault = 0, rooms_empty = 0;
  double wait_layers_s = 0, wait_completions_s = 0, transfer_s = 0;
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
  // The connection broke; the decode instance may live. Its rooms wait resume_timeout for it; fail the writes
  // to it all the same.
  void OnPeerCut(PeerId peer, const Status& why, Nanos now);
  // Who the room's pages go to. When a reservation or an abort comes from the same decode instance on another
  // connection, call OnPeerCut for that one first.
  PeerId PeerOf(RoomId room) const;

  // The forward `step` computes this chunk of the room. source: pages of the sequence by ordinal, prefix
  // included. Calling it again for the same (room, chunk start) changes nothing. Its pages must stay leased
  // until RoomEnded. A chunk that does not follow the last one or whose pages are missing is a fault: its
  // pages go at the end, with whatever else is missing then.
  void BeginForward(int64_t step, RoomId room, const Chunk& chunk, std::span<const PageId> source, Nanos now);
  // Every KV row of this layer, prefix included, is final in the forward. Repeated calls change nothing.
  void OnLayerFinal(int64_t step, LogicalLayer layer, Nanos now);
  void EndForward(int64_t step, const Status& status, Nanos now);
  void SetAux(RoomId room, Aux aux, Nanos now);

  // layers: as in WriteDone.
  void OnWriteDone(WriteId id, const Status& status, Nanos now, int32_t layers = 0);
  void Tick(Nanos now);

  std::vector<Action> TakeActions();
  const PrefillRoomStats& stats() const { return stats_; }
  // For the heartbeat: rooms that are active, or reserved and awaiting their request, and how far they are.
  Heartbeat BeatFor(PeerId peer, uint64_t epoch, uint64_t sequence) const;
  std::vector<RoomRecord> Records(size_t most) const;  // of active rooms
  std::vector<RoomRecord> TakeEndedRecords();          // since the last call, at most kEndedKept
  static constexpr size_t kEndedKept = 64;
  size_t active() const { return rooms_.size(); }
  size_t outstanding_writes() const { return writes_.size(); }
  // Everything that is kept in memory for some room or forward but tombstones and the last answers, which end
  // with time.
  size_t held() const {
    return rooms_.size() + writes_.size() + early_.size() + forwards_.size() + actions_.size() +
           ended_.size();
  }

 private:
  struct Write {
    PostWrite post;
    int32_t attempt = 0;
    WriteId first = 0;  // its number when it was posted first
  };
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
    int64_t next_token = -1;                                 // where the next chunk starts
    std::vector<bool> registered;                            // by ordinal - first_page
    std::string fallback;                                    // why its pages go at the end; "" if they do not
    std::vector<PageId> source;                              // the longest list seen, after a fault
    int32_t outstanding = 0;
    int32_t forwards = 0;  // forwards that may still read its context
    bool fencing = false;
    Reserve reserve;                // decode's, as it came
    std::optional<Nanos> cut;       // when its connection broke
    std::map<WriteId, Write> held;  // what goes out when decode is back, by the first number it had
    RoomRecord record;
    std::map<int32_t, uint32_t> done;  // layer -> pages that have arrived
    Nanos added = 0, reserved = 0, first_write = 0, last_done = 0, forward_end = 0, idle_since = 0;
    Nanos progress = 0;  // of anything while it is sending
  };
  struct Context {  // one chunk of one room inside one forward
    RoomId room = 0;
    Chunk chunk;
    bool per_layer = true;
    std::vector<std::vector<PageMove>> moves;  // by lane
    std::vector<bool> enqueued;                // by position in the layout's layers
    std::vector<LogicalLayer> pending;
  };
  Status Register(Room& room, const Chunk& chunk, std::span<const PageId> source) const;
  std::vector<std::vector<PageMove>> MovesByLane(const Room& room, PageSpan span,
                                                 std::span<const PageId> source) const;
  void Enqueue(Context& context, Room& room, LogicalLayer layer, Nanos now);
  void Flush(Context& context, Room& room, Nanos now);
  void Post(Room& room, Write write, Nanos now);
  void Credit(Room& room, std::span<const LogicalLayer> layers, int64_t pages);
  void Resume(PeerId peer, const Reserve& reserve, Room& room, Nanos now);
  void SendAll(Context& context, Room& room, Nanos now);
  void SendUnregistered(RoomId id, Room& room, const Chunk& chunk, Nanos now);
  void StopWaiting(Room& room, Nanos now);
  void CountMode(Room& room);
  RoomRecord RecordOf(RoomId id, const Room& room) const;
  bool IsDraft(LogicalLayer layer) const;
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
  std::unordered_map<WriteId, Write> writes_;
  // Rooms that have just ended well: decode asks again when the connection broke before it knew.
  struct Finished {
    uint64_t decode_epoch = 0;
    Complete complete;
    Nanos until = 0;
  };
  static constexpr size_t kFinishedKept = 256;
  std::unordered_map<RoomId, Finished> finished_;
  WriteId next_write_ = 1;
  std::vector<Action> actions_;
  std::deque<RoomRecord> ended_;
  PrefillRoomStats stats_;
};

}  // namespace sluice::transfer
