#include "transfer/decode_rooms.h"

#include <algorithm>
#include <map>

#include "base/plant.h"

namespace sluice::transfer {

DecodeRooms::DecodeRooms(const KvLayout& layout, const RoomOptions& options)
    : layout_(layout), options_(options) {}

std::vector<Action> DecodeRooms::TakeActions() { return std::exchange(actions_, {}); }

Status DecodeRooms::Open(RoomId id, PeerId peer, uint64_t peer_epoch, int64_t prompt_tokens,
                         const Digest256& digest, int32_t first_page, std::span<const PageId> pages,
                         Nanos now) {
  if (rooms_.contains(id) || tombstones_.contains(id))
    return absl::AlreadyExistsError(
        fmt::format("bootstrap_room: {} is in use or has just ended; rooms are unique", id));
  if (rooms_.size() >= options_.max_rooms)
    return Exhausted("bootstrap_room: {} rooms are active, the limit; send the request again later",
                     rooms_.size());
  if (int64_t(pages.size()) != RequestPages(prompt_tokens, first_page).size())
    return Internal("room {}: {} destination pages for a prompt of {} tokens from page {}", id, pages.size(),
                    prompt_tokens, first_page);
  Room& room = rooms_[id];
  room.peer = peer;
  room.pages = uint32_t(pages.size());
  room.prompt_tokens = prompt_tokens;
  room.opened = room.sign_of_life = now;
  stats_.leased_pages += room.pages;
  room.reserve = {id, peer_epoch, uint64_t(prompt_tokens), digest, uint32_t(first_page), {}, options_.epoch};
  room.reserve.pages.reserve(pages.size());
  for (const PageId p : pages) room.reserve.pages.push_back(p.value);
  actions_.push_back(SendFrame{peer, room.reserve});
  return OkStatus();
}

Status DecodeRooms::Verify(const Room& room, const Complete& complete) const {
  std::map<std::pair<uint8_t, int32_t>, uint32_t> expected, got;
  if (room.pages > 0)
    for (const KvPiece& piece : layout_.pieces())
      expected[{uint8_t(piece.component), piece.layer.value}] = room.pages;
  for (const LayerCount& c : complete.counts) {
    if (!got.emplace(std::pair(c.component, c.layer), c.pages).second)
      return Internal("room {}: layer {} of component {} is reported twice", complete.room, c.layer,
                      c.component);
  }
  for (const auto& [key, pages] : expected) {
    const auto it = got.find(key);
    if (it == got.end() || it->second != pages)
      return Internal("room {}: component {} layer {}: {} pages arrived, {} expected", complete.room,
                      key.first, key.second, it == got.end() ? 0 : it->second, pages);
  }
  if (got.size() != expected.size())
    return Internal("room {}: {} (component, layer) pairs arrived, {} expected", complete.room, got.size(),
                    expected.size());
  const uint64_t bytes = uint64_t(layout_.page_bytes()) * room.pages;
  if (complete.bytes != bytes)
    return Internal("room {}: {} bytes arrived, {} expected", complete.room, complete.bytes, bytes);
  return OkStatus();
}

void DecodeRooms::OnFrame(PeerId peer, const ControlMessage& message, Nanos now) {
  if (const auto* beat = std::get_if<Heartbeat>(&message)) {
    for (size_t i = 0; i < beat->rooms.size(); ++i) {
      const auto it = rooms_.find(beat->rooms[i]);
      if (it == rooms_.end() || it->second.peer != peer) continue;
      it->second.sign_of_life = now;
      if (i < beat->progress.size()) it->second.reported = beat->progress[i];
    }
    return;
  }
  const auto find = [&](RoomId id) -> Room* {
    const auto it = rooms_.find(id);
    if (it == rooms_.end() || it->second.peer != peer) {
      ++stats_.late_frames;
      return nullptr;
    }
    it->second.sign_of_life = now;
    return &it->second;
  };
  if (const auto* complete = std::get_if<Complete>(&message)) {
    Room* room = find(complete->room);
    if (room == nullptr) return;
    if (room->state == State::kAborting) return;  // the answer to our ABORT decides
    if (const Status s = Verify(*room, *complete); !s.ok()) {
      Fail(complete->room, *room, s, true, now);  // Complete says that the sender's writes are done
      return;
    }
    stats_.bytes_received += int64_t(complete->bytes);
    ++stats_.rooms_completed;
    actions_.push_back(RoomReady{complete->room, complete->aux});
    End(complete->room, OkStatus(), now);
  } else if (const auto* failed = std::get_if<Failed>(&message)) {
    // The sender may still have writes under way: only its ABORT_ACK says that they are drained.
    if (Planted(Plant::kLateFailed) && !rooms_.contains(failed->room)) rooms_[failed->room].peer = peer;
    if (Room* room = find(failed->room); room != nullptr)
      Fail(failed->room, *room,
           Unavailable("room {}: prefill failed in its {} phase: {}", failed->room, failed->phase,
                       failed->reason),
           false, now);
  } else if (const auto* ack = std::get_if<AbortAck>(&message)) {
    Room* room = find(ack->room);
    if (room == nullptr || room->state != State::kAborting) return;
    ++stats_.abort_acks;
    End(ack->room, room->failure, now);
  } else {
    ++stats_.late_frames;
  }
}

void DecodeRooms::OnBytes(PeerId peer, RoomId id, uint64_t bytes, Nanos now) {
  const auto it = rooms_.find(id);
  if (it == rooms_.end() || it->second.peer != peer) return;
  it->second.sign_of_life = now;
  it->second.bytes_seen += bytes;
}

RoomRecord DecodeRooms::RecordOf(RoomId id, const Room& room) const {
  RoomRecord r;
  r.room = id;
  r.phase = room.state == State::kWaiting ? "waiting" : room.state == State::kCut ? "cut" : "aborting";
  r.resumes = room.resumes;
  r.error = room.failure.ok() ? room.reported.error : std::string(Message(room.failure));
  r.prompt_tokens = room.prompt_tokens;
  r.pages = room.pages;
  r.layers = int32_t(layout_.latent_layers().size());
  r.layers_done = std::min(r.layers, int32_t(room.reported.layers));
  r.bytes = r.pages * layout_.page_bytes();
  // The writer's word may be older than the bytes; neither can be more than what was asked for.
  r.bytes_done = std::min<int64_t>(r.bytes, int64_t(std::max(room.bytes_seen, room.reported.bytes)));
  return r;
}

std::vector<RoomRecord> DecodeRooms::Records(size_t most) const {
  std::vector<RoomRecord> records;
  for (const auto& [id, room] : rooms_) {
    if (records.size() >= most) break;
    records.push_back(RecordOf(id, room));
  }
  return records;
}

std::vector<RoomRecord> DecodeRooms::TakeEndedRecords() {
  std::vector<RoomRecord> records(std::make_move_iterator(ended_.begin()),
                                  std::make_move_iterator(ended_.end()));
  ended_.clear();
  return records;
}

void DecodeRooms::OnCorrupt(PeerId peer, RoomId id, const Status& why, Nanos now) {
  if (const auto it = rooms_.find(id); it != rooms_.end() && it->second.peer == peer)
    Fail(id, it->second, why, it->second.state == State::kWaiting, now);
}

bool DecodeRooms::Waiting(RoomId id) const {
  const auto it = rooms_.find(id);
  return it != rooms_.end() && it->second.state == State::kWaiting;
}

void DecodeRooms::Cancel(RoomId id, const Status& why, Nanos now) {
  if (const auto it = rooms_.find(id); it != rooms_.end()) Fail(id, it->second, why, false, now);
}

void DecodeRooms::Fail(RoomId id, Room& room, const Status& why, bool drained, Nanos now) {
  if (room.state == State::kAborting) {
    if (drained) End(id, room.failure, now);
    return;
  }
  drained |= room.state == State::kCut;  // there is no connection by which anything could come
  room.state = State::kAborting;
  room.failure = why;
  ++stats_.rooms_failed;
  actions_.push_back(RoomFailed{id, why});
  if (drained) {
    End(id, why, now);
    return;
  }
  room.abort_since = now;
  room.abort_next = now + options_.abort_repeat;
  ++stats_.aborts_sent;
  actions_.push_back(
      SendFrame{room.peer, Abort{id, room.attempts++, std::string(Message(why)), options_.epoch}});
}

void DecodeRooms::OnPeerLost(PeerId peer, const Status& why, bool fenced, Nanos now) {
  std::vector<RoomId> lost;
  for (const auto& [id, room] : rooms_)
    if (room.peer == peer && room.state != State::kCut) lost.push_back(id);
  for (const RoomId id : lost) Fail(id, rooms_.at(id), why, fenced, now);
  if (fenced || lost.empty()) return;
  bool asked = false;
  for (const RoomId id : lost) {
    Room& room = rooms_.at(id);
    asked |= room.fencing;
    room.fencing = true;
  }
  if (!asked) {
    ++stats_.fences;
    actions_.push_back(FencePeer{peer});
  }
}

void DecodeRooms::OnFenced(PeerId peer, Nanos now) {
  std::vector<RoomId> ended;
  for (const auto& [id, room] : rooms_)
    if (room.peer == peer && room.state != State::kCut) ended.push_back(id);
  // A fence cuts the connection for all rooms of the peer; those that were fine until now fail with it.
  for (const RoomId id : ended)
    Fail(id, rooms_.at(id), Unavailable("room {}: the connection to its prefill instance was cut", id), true,
         now);
}

void DecodeRooms::OnPeerCut(PeerId peer, const Status& why, Nanos now) {
  std::vector<RoomId> ended;
  for (auto& [id, room] : rooms_) {
    if (room.peer != peer || room.state == State::kCut) continue;
    const uint64_t bytes = std::max(room.bytes_seen, room.reported.bytes);
    room.fruitless = bytes > room.bytes_at_cut ? 0 : room.fruitless + 1;
    room.bytes_at_cut = bytes;
    if (room.state == State::kAborting || room.fruitless > kFruitlessMax || room.resumes >= kResumesMax) {
      ended.push_back(id);
      continue;
    }
    room.state = State::kCut;
    room.cut = now;
    room.reported.error = std::string(Message(why));
  }
  for (const RoomId id : ended) Fail(id, rooms_.at(id), why, true, now);
}

bool DecodeRooms::IsCut(RoomId id) const {
  const auto it = rooms_.find(id);
  return it != rooms_.end() && it->second.state == State::kCut;
}

void DecodeRooms::Resume(RoomId id, PeerId peer, uint64_t peer_epoch, Nanos now) {
  const auto it = rooms_.find(id);
  if (it == rooms_.end() || it->second.state != State::kCut) return;
  Room& room = it->second;
  if (peer_epoch != room.reserve.epoch && !Planted(Plant::kEpochIgnored)) {
    Fail(id, room, Unavailable("room {}: its prefill instance has restarted", id), true, now);
    return;
  }
  room.state = State::kWaiting;
  room.peer = peer;
  room.sign_of_life = now;
  ++room.resumes;
  ++stats_.resumes;
  actions_.push_back(SendFrame{peer, room.reserve});
}

void DecodeRooms::GiveUp(RoomId id, const Status& why, Nanos now) {
  if (IsCut(id)) Fail(id, rooms_.at(id), why, true, now);
}

void DecodeRooms::End(RoomId id, Status status, Nanos now) {
  const auto it = rooms_.find(id);
  stats_.leased_pages -= it->second.pages;
  RoomRecord record = RecordOf(id, it->second);
  record.phase = "ended";
  record.result = status.ok() ? "ok" : absl::IsAborted(status) ? "aborted" : "failed";
  if (status.ok()) {
    record.layers_done = record.layers;
    record.bytes_done = record.bytes;
  }
  if (ended_.size() >= kEndedKept) ended_.pop_front();
  ended_.push_back(std::move(record));
  rooms_.erase(it);
  tombstones_[id] = now + options_.tombstone;
  actions_.push_back(RoomEnded{id, std::move(status)});
}

void DecodeRooms::Tick(Nanos now) {
  std::vector<RoomId> silent, forsaken;
  std::vector<PeerId> fence;
  for (auto& [id, room] : rooms_) {
    if (room.state == State::kCut) {
      if (now - room.cut >= options_.ResumeTime()) forsaken.push_back(id);
      continue;
    }
    if (room.state == State::kWaiting) {
      if (now - room.sign_of_life >= options_.waiting_timeout) silent.push_back(id);
      continue;
    }
    if (!room.fencing && now - room.abort_since >= options_.abort_fence) {
      room.fencing = true;
      bool known = false;
      for (const PeerId p : fence) known |= p == room.peer;
      if (!known) fence.push_back(room.peer);
    } else if (!room.fencing && now >= room.abort_next) {
      room.abort_next = now + options_.abort_repeat;
      ++stats_.aborts_sent;
      actions_.push_back(SendFrame{
          room.peer, Abort{id, room.attempts++, std::string(Message(room.failure)), options_.epoch}});
    }
  }
  for (const RoomId id : silent) {
    Room& room = rooms_.at(id);
    Fail(id, room,
         DeadlineExceeded("room {}: no sign of life of its prefill instance for {} s (waiting phase: {})", id,
                          options_.waiting_timeout / 1'000'000'000, ProgressText(RecordOf(id, room))),
         Planted(Plant::kFreeWithoutFence), now);
  }
  for (const RoomId id : forsaken) {
    Room& room = rooms_.at(id);
    Fail(id, room,
         Unavailable("room {}: its connection broke and its prefill instance was not reached again within "
                     "{:.1f} s ({})",
                     id, double(now - room.cut) * 1e-9, ProgressText(RecordOf(id, room))),
         true, now);
  }
  for (const PeerId peer : fence) {
    ++stats_.fences;
    actions_.push_back(FencePeer{peer});
  }
  std::erase_if(tombstones_, [&](const auto& t) { return now >= t.second; });
}

}  // namespace sluice::transfer
