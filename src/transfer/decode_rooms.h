// The receiving side of every room: reserves, waits, verifies, and keeps its pages leased until no writer can
// touch them.
//
//   Waiting --Complete, counts right--> Ended (RoomReady)
//   Waiting --Cancel, Failed, deadline, wrong counts--> Aborting --ABORT_ACK | peer fenced--> Ended
//   Waiting --connection broken--> Cut --same instance, other connection--> Waiting
//   Cut --Cancel, resume_timeout, another epoch--> Ended
//
// Owner: the progress thread. Rules: one ABORT is in force a room, repeated while unanswered; RoomFailed
// tells the client at once, RoomEnded comes only when the writer has drained or is fenced; a frame for an
// ended room changes nothing; a room outlives its connection when the same prefill instance is reached again
// in time, and gets what has not arrived.
#pragma once

#include <deque>
#include <unordered_map>

#include "kv/kv_layout.h"
#include "transfer/rooms.h"

namespace sluice::transfer {

struct DecodeRoomStats {
  int64_t rooms_completed = 0, rooms_failed = 0;
  int64_t bytes_received = 0;
  int64_t aborts_sent = 0, abort_acks = 0, fences = 0, late_frames = 0, leased_pages = 0, resumes = 0;
};

class DecodeRooms {
 public:
  DecodeRooms(const KvLayout& layout, const RoomOptions& options);

  // pages: destinations of [first_page, ceil(prompt_tokens / 64)), leased by the caller until RoomEnded.
  // Empty pages: decode holds the prompt entirely; the room still waits for the aux data.
  Status Open(RoomId room, PeerId peer, uint64_t peer_epoch, int64_t prompt_tokens,
              const Digest256& prompt_digest, int32_t first_page, std::span<const PageId> pages, Nanos now);
  void Cancel(RoomId room, const Status& why, Nanos now);
  void OnFrame(PeerId peer, const ControlMessage& message,
               Nanos now);  // Complete, Failed, AbortAck; a Heartbeat is a sign of life
  // Connection reset or heartbeats missing. `fenced`: no write can arrive any more (reset); else FencePeer is
  // asked for.
  void OnPeerLost(PeerId peer, const Status& why, bool fenced, Nanos now);
  void OnFenced(PeerId peer, Nanos now);
  // The connection broke, and so nothing of the peer lands any more. Rooms that waited for it wait for
  // Resume; those that are being aborted end.
  void OnPeerCut(PeerId peer, const Status& why, Nanos now);
  bool IsCut(RoomId room) const;
  // The address of the room's prefill instance is reached again; another epoch ends the room.
  void Resume(RoomId room, PeerId peer, uint64_t peer_epoch, Nanos now);
  // It cannot be.
  void GiveUp(RoomId room, const Status& why, Nanos now);
  // Bytes of the room have arrived through this side's own hands (a one-sided writer's come with its
  // heartbeat).
  void OnBytes(PeerId peer, RoomId room, uint64_t bytes, Nanos now);
  // What the peer declared complete is not what it sent: its writes are done, the bytes are wrong.
  void OnCorrupt(PeerId peer, RoomId room, const Status& why, Nanos now);
  bool Waiting(RoomId room) const;  // its pages may be written
  void Tick(Nanos now);

  std::vector<Action> TakeActions();
  const DecodeRoomStats& stats() const { return stats_; }
  std::vector<RoomRecord> Records(size_t most) const;  // of active rooms
  std::vector<RoomRecord> TakeEndedRecords();          // since the last call, at most kEndedKept
  static constexpr size_t kEndedKept = 64;
  size_t active() const { return rooms_.size(); }
  size_t held() const { return rooms_.size() + actions_.size() + ended_.size(); }  // without tombstones

 private:
  enum class State { kWaiting, kCut, kAborting };
  static constexpr int kFruitlessMax = 3;  // connections that broke one after another without a byte
  static constexpr int64_t kResumesMax = 256;
  struct Room {
    State state = State::kWaiting;
    PeerId peer;
    uint32_t pages = 0;
    Reserve reserve;  // as it was sent
    Nanos cut = 0;
    int fruitless = 0;
    uint64_t bytes_at_cut = 0;
    int64_t resumes = 0;
    Nanos opened = 0, sign_of_life = 0;
    Nanos abort_since = 0, abort_next = 0;
    uint32_t attempts = 0;
    bool fencing = false;
    Status failure;
    int64_t prompt_tokens = 0;
    uint64_t bytes_seen = 0;  // of our own hands
    RoomProgress reported;    // of the writer's heartbeats
  };
  RoomRecord RecordOf(RoomId id, const Room& room) const;
  void Fail(RoomId id, Room& room, const Status& why, bool drained, Nanos now);
  void End(RoomId id, Status status, Nanos now);
  Status Verify(const Room& room, const Complete& complete) const;

  const KvLayout layout_;
  const RoomOptions options_;
  std::unordered_map<RoomId, Room> rooms_;
  std::unordered_map<RoomId, Nanos> tombstones_;
  std::vector<Action> actions_;
  std::deque<RoomRecord> ended_;
  DecodeRoomStats stats_;
};

}  // namespace sluice::transfer
