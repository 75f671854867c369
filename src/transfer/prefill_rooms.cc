#include "transfer/prefill_rooms.h"

#include "base/check.h"
#include "base/plant.h"

namespace sluice::transfer {

PrefillRooms::PrefillRooms(const KvLayout& layout, const RoomOptions& options)
    : layout_(layout), options_(options) {
  const auto& layers = layout_.latent_layers();
  for (size_t i = 0; i < layers.size(); ++i) layer_position_[layers[i].value] = i;
}

std::vector<Action> PrefillRooms::TakeActions() { return std::exchange(actions_, {}); }

std::vector<RoomId> PrefillRooms::RoomsOf(PeerId peer) const {
  std::vector<RoomId> ids;
  for (const auto& [id, room] : rooms_)
    if (room.peer == peer) ids.push_back(id);
  for (const auto& [id, early] : early_)
    if (early.peer == peer) ids.push_back(id);
  return ids;
}

Status PrefillRooms::Add(RoomId id, int64_t prompt_tokens, const Digest256& digest, Nanos now) {
  if (rooms_.contains(id) || tombstones_.contains(id))
    return absl::AlreadyExistsError(
        fmt::format("bootstrap_room: {} is in use or has just ended; rooms are unique", id));
  if (rooms_.size() >= options_.max_rooms)
    return Exhausted("bootstrap_room: {} rooms are active, the limit; send the request again later",
                     rooms_.size());
  Room& room = rooms_[id];
  room.prompt_tokens = prompt_tokens;
  room.digest = digest;
  room.deadline = now + options_.bootstrap_timeout;
  if (const auto early = early_.find(id); early != early_.end()) {
    const Early e = std::move(early->second);
    early_.erase(early);
    OnReserve(e.peer, e.reserve, now);
  }
  return OkStatus();
}

void PrefillRooms::OnFrame(PeerId peer, const ControlMessage& message, Nanos now) {
  if (const auto* reserve = std::get_if<Reserve>(&message)) {
    OnReserve(peer, *reserve, now);
  } else if (const auto* abort = std::get_if<Abort>(&message)) {
    OnAbort(peer, *abort, now);
  } else if (const auto* beat = std::get_if<Heartbeat>(&message)) {
    // These wait for room on a decode instance that lives: a queue, not a dead peer.
    for (const RoomId id : beat->rooms)
      if (const auto it = rooms_.find(id); it != rooms_.end() && it->second.state == State::kBootstrapping)
        it->second.deadline = now + options_.bootstrap_timeout;
  } else {
    ++stats_.late_frames;
  }
}

void PrefillRooms::OnReserve(PeerId peer, const Reserve& reserve, Nanos now) {
  if (reserve.epoch != options_.epoch && !Planted(Plant::kEpochIgnored)) {
    ++stats_.late_frames;
    actions_.push_back(SendFrame{
        peer, Failed{reserve.room, "bootstrap",
                     fmt::format("reserved for epoch {} of this instance, which is now {}: it has restarted",
                                 reserve.epoch, options_.epoch)}});
    return;
  }
  if (tombstones_.contains(reserve.room)) {
    ++stats_.late_frames;
    actions_.push_back(SendFrame{peer, Failed{reserve.room, "bootstrap", "the room has already ended here"}});
    return;
  }
  const auto it = rooms_.find(reserve.room);
  if (it == rooms_.end()) {
    if (early_.contains(reserve.room) || early_.size() >= options_.max_rooms) {
      ++stats_.late_frames;
      return;
    }
    ++stats_.early_reservations;
    early_[reserve.room] = {peer, reserve, now + options_.bootstrap_timeout};
    return;
  }
  Room& room = it->second;
  if (room.state != State::kBootstrapping) {  // doubled frame, or a second decode for the room
    ++stats_.late_frames;
    if (peer != room.peer)
      actions_.push_back(
          SendFrame{peer, Failed{reserve.room, "bootstrap", "another decode instance holds this room"}});
    return;
  }
  room.peer = peer;
  const int64_t pages = CeilDiv(room.prompt_tokens, kPageTokens) - int64_t(reserve.first_page);
  if (int64_t(reserve.prompt_tokens) != room.prompt_tokens || reserve.prompt_digest != room.digest) {
    Fail(reserve.room, room,
         Invalid("room {}: decode reserved for a prompt of {} tokens (digest {}), prefill has {} tokens "
                 "(digest {})",
                 reserve.room, reserve.prompt_tokens, Hex(reserve.prompt_digest).substr(0, 12),
                 room.prompt_tokens, Hex(room.digest).substr(0, 12)),
         true, now);
    return;
  }
  if (pages < 0 || int64_t(reserve.pages.size()) != pages) {
    Fail(reserve.room, room,
         Invalid("room {}: decode sent {} destination pages from page {}, the prompt of {} tokens needs {}",
                 reserve.room, reserve.pages.size(), reserve.first_page, room.prompt_tokens, pages),
         true, now);
    return;
  }
  room.first_page = int32_t(reserve.first_page);
  for (const int32_t p : reserve.pages) room.destination.push_back(PageId(p));
  room.state = State::kReady;
  actions_.push_back(RoomReady{reserve.room, {}});
}

void PrefillRooms::OnAbort(PeerId peer, const Abort& abort, Nanos now) {
  early_.erase(abort.room);
  const auto it = rooms_.find(abort.room);
  if (it == rooms_.end()) {
    // Never heard of, or ended: nothing of ours writes there, and nothing will.
    tombstones_.try_emplace(abort.room, now + options_.tombstone);
    if (Planted(Plant::kAckLost)) return;
    actions_.push_back(SendFrame{peer, AbortAck{abort.room}});
    return;
  }
  Room& room = it->second;
  if (!room.peer.valid()) room.peer = peer;
  if (room.peer != peer) {  // only the decode that holds the room may end it
    actions_.push_back(SendFrame{peer, AbortAck{abort.room}});
    return;
  }
  room.abort_wanted = true;
  Fail(abort.room, room, Aborted("room {}: decode aborted: {}", abort.room, abort.reason), false, now);
}

void PrefillRooms::OnPeerLost(PeerId peer, const Status& why, Nanos now) {
  for (auto it = early_.begin(); it != early_.end();)
    it = it->second.peer == peer ? early_.erase(it) : std::next(it);
  std::vector<RoomId> lost;
  for (const auto& [id, room] : rooms_)
    if (room.peer == peer) lost.push_back(id);
  for (const RoomId id : lost) Fail(id, rooms_.at(id), why, false, now);
}

void PrefillRooms::Cancel(RoomId id, const Status& why, Nanos now) {
  if (const auto it = rooms_.find(id); it != rooms_.end()) Fail(id, it->second, why, true, now);
}

void PrefillRooms::BeginForward(int64_t step, RoomId id, const Chunk& chunk, std::span<const PageId> source) {
  const auto it = rooms_.find(id);
  if (it == rooms_.end() || it->second.state == State::kDraining) return;
  Room& room = it->second;
  SLUICE_CHECK(room.state != State::kBootstrapping, "room {} runs before decode reserved pages", id);
  if (!room.chunks.insert(chunk.start).second) return;
  room.state = State::kSending;
  ++room.forwards;
  Context context;
  context.room = id;
  context.chunk = chunk;
  context.moves = Moves(ChunkPages(chunk, room.first_page), room.first_page, source, room.destination, 1, -1);
  if (Planted(Plant::kRelativeChunk))
    for (PageMove& move : context.moves)
      move.to = room.destination[size_t(move.ordinal - context.moves.front().ordinal)];
  if (Planted(Plant::kSharedContext) && !forwards_[step].empty())
    context.moves = forwards_[step].front().moves;
  context.enqueued.assign(layout_.latent_layers().size(), false);
  forwards_[step].push_back(std::move(context));
}

void PrefillRooms::Enqueue(Context& context, Room& room, LogicalLayer layer) {
  const size_t at = layer_position_.at(layer.value);
  if (context.enqueued[at]) {
    ++stats_.repeated_hooks;
    if (!Planted(Plant::kRepeatedHooks)) return;
  }
  context.enqueued[at] = true;
  context.pending.push_back(layer);
  if (int32_t(context.pending.size()) >= options_.layer_group) Flush(context, room);
}

void PrefillRooms::Flush(Context& context, Room& room) {
  if (context.pending.empty()) return;
  std::vector<LogicalLayer> layers = std::exchange(context.pending, {});
  if (context.moves.empty()) return;  // nothing to receive: no bytes, no sample, complete at once
  int64_t bytes = 0;
  const uint32_t pages = uint32_t(context.moves.size());
  for (const LogicalLayer l : layers) {
    bytes += layout_.latent_page_bytes() * pages;
    room.counts[{uint8_t(KvComponent::kLatent), l.value}] += pages;
    if (layout_.IndexSlot(l).valid()) {
      bytes += layout_.index_page_bytes() * pages;
      const int32_t name = Planted(Plant::kPositionalLayers) ? layout_.IndexSlot(l).value : l.value;
      room.counts[{uint8_t(KvComponent::kIndex), name}] += pages;
    }
  }
  const WriteId id = next_write_++;
  writes_[id] = {context.room, bytes};
  ++room.outstanding;
  ++stats_.writes_posted;
  actions_.push_back(PostWrite{id, context.room, room.peer, std::move(layers), context.moves});
}

void PrefillRooms::OnLayerFinal(int64_t step, LogicalLayer layer, Nanos) {
  if (!options_.per_layer) return;
  const auto it = forwards_.find(step);
  if (it == forwards_.end()) return;
  for (Context& context : it->second) {
    const auto room = rooms_.find(context.room);
    if (room == rooms_.end() || room->second.state != State::kSending) continue;
    Enqueue(context, room->second, layer);
  }
}

void PrefillRooms::EndForward(int64_t step, const Status& status, Nanos now) {
  const auto it = forwards_.find(step);
  if (it == forwards_.end()) return;
  std::vector<Context> contexts = std::move(it->second);
  forwards_.erase(it);
  for (Context& context : contexts) {
    const auto found = rooms_.find(context.room);
    if (found == rooms_.end()) continue;
    Room& room = found->second;
    --room.forwards;
    if (room.state == State::kSending && !status.ok()) {
      Fail(context.room, room, status, true, now);
    } else if (room.state == State::kSending) {
      size_t left = layout_.latent_layers().size();
      if (Planted(Plant::kCountedLayers) && options_.per_layer) --left;  // those that have hooks
      for (const LogicalLayer layer : layout_.latent_layers()) {
        if (left-- == 0) break;
        if (context.enqueued[layer_position_.at(layer.value)]) continue;
        if (options_.per_layer) ++stats_.layers_sent_at_end;
        Enqueue(context, room, layer);
      }
      Flush(context, room);
      if (context.chunk.last) room.last_chunk_sent = true;
    }
    MaybeFinish(context.room, now);
  }
}

void PrefillRooms::SetAux(RoomId id, Aux aux, Nanos now) {
  const auto it = rooms_.find(id);
  if (it == rooms_.end() || it->second.state == State::kDraining) return;
  it->second.aux = std::move(aux);
  it->second.has_aux = true;
  MaybeFinish(id, now);
}

void PrefillRooms::OnWriteDone(WriteId id, const Status& status, Nanos now) {
  const auto it = writes_.find(id);
  SLUICE_CHECK(it != writes_.end(), "write {} completed twice or was never posted", id);
  const Write write = it->second;
  writes_.erase(it);
  Room& room = rooms_.at(write.room);  // a room with outstanding writes is never erased
  --room.outstanding;
  if (status.ok()) {
    room.bytes += write.bytes;
    stats_.bytes_sent += write.bytes;
    if (room.forwards > 0) stats_.bytes_before_forward_end += write.bytes;
  } else {
    Fail(write.room, room, status, true, now);
  }
  MaybeFinish(write.room, now);
}

void PrefillRooms::Fail(RoomId id, Room& room, const Status& why, bool tell_peer, Nanos now) {
  if (room.state != State::kDraining) {
    room.state = State::kDraining;
    room.failure = why;
    if (tell_peer && room.peer.valid() && !room.abort_wanted)
      actions_.push_back(SendFrame{room.peer, Failed{id, "prefill", std::string(Message(why))}});
    actions_.push_back(RoomFailed{id, why});
  }
  MaybeFinish(id, now);
}

void PrefillRooms::MaybeFinish(RoomId id, Nanos now) {
  const auto it = rooms_.find(id);
  if (it == rooms_.end()) return;
  Room& room = it->second;
  if (Planted(Plant::kAckBeforeDrain) && room.state == State::kDraining && room.abort_wanted &&
      room.outstanding > 0)
    actions_.push_back(SendFrame{room.peer, AbortAck{id}});
  if (room.outstanding > 0) return;
  if (room.state == State::kDraining) {
    if (room.forwards > 0)
      return;  // its context could still be told of a layer; the pages are being read by the forward
    if (room.abort_wanted) actions_.push_back(SendFrame{room.peer, AbortAck{id}});
    (absl::IsAborted(room.failure) ? stats_.rooms_aborted : stats_.rooms_failed) += 1;
    End(id, room, room.failure, now);
    return;
  }
  if (room.state != State::kSending || !room.last_chunk_sent || !room.has_aux) return;
  Complete complete{id, uint64_t(room.bytes), {}, std::move(room.aux), {}};
  if (Planted(Plant::kMixedAux)) std::swap(complete.aux.cached_device, complete.aux.cached_host);
  for (const auto& [key, pages] : room.counts) complete.counts.push_back({key.first, key.second, pages});
  actions_.push_back(SendFrame{room.peer, std::move(complete)});
  ++stats_.rooms_completed;
  End(id, room, OkStatus(), now);
}

void PrefillRooms::End(RoomId id, Room&, const Status& status, Nanos now) {
  actions_.push_back(RoomEnded{id, status});
  rooms_.erase(id);
  if (!Planted(Plant::kNoTombstone)) tombstones_[id] = now + options_.tombstone;
}

void PrefillRooms::Tick(Nanos now) {
  std::vector<RoomId> expired;
  for (const auto& [id, room] : rooms_)
    if (room.state == State::kBootstrapping && now >= room.deadline) expired.push_back(id);
  for (const RoomId id : expired)
    Fail(id, rooms_.at(id),
         DeadlineExceeded("room {}: no reservation of a decode instance within {} s (bootstrap phase)", id,
                          options_.bootstrap_timeout / 1'000'000'000),
         true, now);
  for (auto it = early_.begin(); it != early_.end();) {
    if (now < it->second.deadline) {
      ++it;
      continue;
    }
    actions_.push_back(SendFrame{
        it->second.peer, Failed{it->first, "bootstrap", "the request never reached this prefill instance"}});
    tombstones_[it->first] = now + options_.tombstone;
    it = early_.erase(it);
  }
  std::erase_if(tombstones_, [&](const auto& t) { return now >= t.second; });
}

}  // namespace sluice::transfer
