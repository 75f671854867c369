#include "transfer/prefill_rooms.h"

#include <algorithm>

#include "base/check.h"
#include "base/plant.h"

namespace sluice::transfer {
namespace {
double Seconds(Nanos n) { return n > 0 ? double(n) * 1e-9 : 0; }
}  // namespace

std::string ProgressText(const RoomRecord& r) {
  return fmt::format("{} of {} layers, {} of {} bytes done; last error: {}", r.layers_done, r.layers,
                     r.bytes_done, r.bytes, r.error.empty() ? "none" : r.error);
}

PrefillRooms::PrefillRooms(const KvLayout& layout, const RoomOptions& options)
    : layout_(layout), options_(options) {
  const auto& layers = layout_.latent_layers();
  for (size_t i = 0; i < layers.size(); ++i) layer_position_[layers[i].value] = i;
}

std::vector<Action> PrefillRooms::TakeActions() { return std::exchange(actions_, {}); }

Heartbeat PrefillRooms::BeatFor(PeerId peer, uint64_t epoch, uint64_t sequence) const {
  Heartbeat beat{epoch, sequence, {}, {}};
  for (const auto& [id, room] : rooms_) {
    if (room.peer != peer) continue;
    const RoomRecord r = RecordOf(id, room);
    beat.rooms.push_back(id);
    beat.progress.push_back({uint32_t(r.layers_done), uint64_t(r.bytes_done), r.error.substr(0, 200)});
  }
  for (const auto& [id, early] : early_) {
    if (early.peer != peer) continue;
    beat.rooms.push_back(id);
    beat.progress.push_back({});
  }
  return beat;
}

bool PrefillRooms::IsDraft(LogicalLayer layer) const {
  return layout_.options().with_draft && layer == layout_.latent_layers().back();
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
  room.added = now;
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
    if (const auto f = finished_.find(reserve.room);
        f != finished_.end() && reserve.sender_epoch != 0 && f->second.decode_epoch == reserve.sender_epoch) {
      actions_.push_back(SendFrame{peer, f->second.complete});
      return;
    }
    ++stats_.late_frames;
    actions_.push_back(SendFrame{peer, Failed{reserve.room, "bootstrap", "the room has already ended here"}});
    return;
  }
  const auto it = rooms_.find(reserve.room);
  if (it == rooms_.end()) {
    const auto early = early_.find(reserve.room);
    if (early != early_.end() && reserve.sender_epoch != 0 &&
        early->second.reserve.sender_epoch == reserve.sender_epoch) {
      early->second.peer = peer;  // on another connection
      return;
    }
    if (early != early_.end() || early_.size() >= options_.max_rooms) {
      ++stats_.late_frames;
      return;
    }
    ++stats_.early_reservations;
    early_[reserve.room] = {peer, reserve, now + options_.bootstrap_timeout};
    return;
  }
  Room& room = it->second;
  if (room.state != State::kBootstrapping) {  // doubled frame, another connection, or a second decode
    const bool again =
        peer != room.peer && reserve.sender_epoch != 0 && reserve.sender_epoch == room.reserve.sender_epoch;
    if (again && room.state == State::kDraining) {
      room.peer = peer;  // who hears when it has drained
      actions_.push_back(
          SendFrame{peer, Failed{reserve.room, "draining", std::string(Message(room.failure))}});
      return;
    }
    if (again && room.cut.has_value()) return Resume(peer, reserve, room, now);
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
  room.reserve = reserve;
  room.first_page = int32_t(reserve.first_page);
  for (const int32_t p : reserve.pages) room.destination.push_back(PageId(p));
  room.registered.assign(size_t(pages), false);
  room.reserved = now;
  room.record.bootstrap_s = Seconds(now - room.added);
  room.state = State::kReady;
  actions_.push_back(RoomReady{reserve.room, {}});
}

void PrefillRooms::Resume(PeerId peer, const Reserve& reserve, Room& room, Nanos now) {
  if (reserve != room.reserve) {
    room.peer = peer;
    Fail(reserve.room, room,
         Invalid("room {}: decode came back with another reservation than it made first", reserve.room), true,
         now);
    return;
  }
  room.peer = peer;
  room.cut.reset();
  room.progress = now;
  ++room.record.resumes;
  ++stats_.resumes;
  for (auto& [first, write] : std::exchange(room.held, {})) {
    write.post.peer = peer;
    Post(room, std::move(write), now);
  }
  MaybeFinish(reserve.room, now);
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
  if (room.peer != peer && abort.sender_epoch != 0 && abort.sender_epoch == room.reserve.sender_epoch)
    room.peer = peer;       // on another connection
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

void PrefillRooms::OnPeerCut(PeerId peer, const Status& why, Nanos now) {
  for (auto it = early_.begin(); it != early_.end();)
    it = it->second.peer == peer ? early_.erase(it) : std::next(it);
  for (auto& [id, room] : rooms_) {
    if (room.peer != peer || room.cut.has_value() ||
        (room.state != State::kReady && room.state != State::kSending))
      continue;
    room.cut = now;
    room.record.error = std::string(Message(why));
  }
}

PeerId PrefillRooms::PeerOf(RoomId id) const {
  const auto it = rooms_.find(id);
  return it == rooms_.end() ? PeerId() : it->second.peer;
}

void PrefillRooms::Cancel(RoomId id, const Status& why, Nanos now) {
  if (const auto it = rooms_.find(id); it != rooms_.end()) Fail(id, it->second, why, true, now);
}

Status PrefillRooms::Register(Room& room, const Chunk& chunk, std::span<const PageId> source) const {
  const PageSpan span = ChunkPages(chunk, room.first_page);
  const int32_t end = room.first_page + int32_t(room.destination.size());
  if (!chunk.first && chunk.start != room.next_token)
    return Internal("a chunk starts at token {}, the one before ended at {}", chunk.start, room.next_token);
  if (span.end > end || size_t(span.end) > source.size())
    return Internal("a chunk fills pages [{}, {}), the sequence has {} pages and decode reserved up to {}",
                    span.begin, span.end, source.size(), end);
  for (int32_t i = span.begin; i < span.end; ++i)
    if (room.registered[size_t(i - room.first_page)])
      return Internal("page {} of the prompt is in two chunks", i);
  for (int32_t i = span.begin; i < span.end; ++i) room.registered[size_t(i - room.first_page)] = true;
  return OkStatus();
}

std::vector<std::vector<PageMove>> PrefillRooms::MovesByLane(const Room& room, PageSpan span,
                                                             std::span<const PageId> source) const {
  std::vector<std::vector<PageMove>> moves;
  for (int32_t lane = 0; lane < options_.lanes; ++lane)
    moves.push_back(Moves(span, room.first_page, source, room.destination, options_.lanes, lane));
  return moves;
}

void PrefillRooms::BeginForward(int64_t step, RoomId id, const Chunk& chunk, std::span<const PageId> source,
                                Nanos now) {
  const auto it = rooms_.find(id);
  if (it == rooms_.end() || it->second.state == State::kDraining) return;
  Room& room = it->second;
  SLUICE_CHECK(room.state != State::kBootstrapping, "room {} runs before decode reserved pages", id);
  if (!room.chunks.insert(chunk.start).second) return;
  if (room.state == State::kReady) room.record.queue_s = Seconds(now - room.reserved);
  room.state = State::kSending;
  ++room.forwards;
  if (room.outstanding == 0 && room.idle_since == 0) room.idle_since = now;
  room.progress = now;
  Context context;
  context.room = id;
  context.chunk = chunk;
  context.per_layer = options_.per_layer;
  if (const Status fault = Register(room, chunk, source); fault.ok()) {
    const PageSpan span = ChunkPages(chunk, room.first_page);
    context.moves = MovesByLane(room, span, source);
    if (options_.record) actions_.push_back(ChunkRegistered{id, chunk, span, context.moves});
  } else {
    context.per_layer = false;
    context.moves.resize(size_t(options_.lanes));
    if (room.fallback.empty()) room.fallback = std::string(Message(fault));
    room.record.error = room.fallback;
  }
  room.next_token = chunk.end;
  if (!room.fallback.empty() && source.size() > room.source.size())
    room.source.assign(source.begin(), source.end());
  if (Planted(Plant::kRelativeChunk))
    for (auto& moves : context.moves)
      for (PageMove& move : moves) move.to = room.destination[size_t(move.ordinal - moves.front().ordinal)];
  if (Planted(Plant::kSharedContext) && !forwards_[step].empty())
    context.moves = forwards_[step].front().moves;
  context.enqueued.assign(layout_.latent_layers().size(), false);
  forwards_[step].push_back(std::move(context));
}

void PrefillRooms::Enqueue(Context& context, Room& room, LogicalLayer layer, Nanos now) {
  const size_t at = layer_position_.at(layer.value);
  if (context.enqueued[at]) {
    ++stats_.repeated_hooks;
    if (!Planted(Plant::kRepeatedHooks)) return;
  }
  context.enqueued[at] = true;
  context.pending.push_back(layer);
  if (int32_t(context.pending.size()) >= options_.layer_group) Flush(context, room, now);
}

void PrefillRooms::Flush(Context& context, Room& room, Nanos now) {
  if (context.pending.empty()) return;
  const std::vector<LogicalLayer> layers = std::exchange(context.pending, {});
  for (const std::vector<PageMove>& moves : context.moves) {
    if (moves.empty()) continue;  // nothing of this rank's to receive: no bytes, no sample, complete at once
    const uint32_t pages = uint32_t(moves.size());
    for (const LogicalLayer l : layers) {
      room.counts[{uint8_t(KvComponent::kLatent), l.value}] += pages;
      if (!layout_.IndexSlot(l).valid()) continue;
      const int32_t name = Planted(Plant::kPositionalLayers) ? layout_.IndexSlot(l).value : l.value;
      room.counts[{uint8_t(KvComponent::kIndex), name}] += pages;
    }
    Post(room, {.post = {0, context.room, room.peer, layers, moves}}, now);
  }
}

void PrefillRooms::Post(Room& room, Write write, Nanos now) {
  write.post.id = next_write_++;
  if (write.first == 0) write.first = write.post.id;
  if (room.cut.has_value()) {
    room.held[write.first] = std::move(write);
    return;
  }
  if (room.first_write == 0) room.first_write = now;
  StopWaiting(room, now);
  ++room.outstanding;
  ++room.record.writes;
  ++stats_.writes_posted;
  room.progress = now;
  actions_.push_back(write.post);
  writes_[write.post.id] = std::move(write);
}

void PrefillRooms::Credit(Room& room, std::span<const LogicalLayer> layers, int64_t pages) {
  for (const LogicalLayer l : layers) {
    const int64_t latent = pages * layout_.latent_page_bytes();
    const int64_t index = layout_.IndexSlot(l).valid() ? pages * layout_.index_page_bytes() : 0;
    if (IsDraft(l)) {
      room.record.draft_bytes += latent + index;
      stats_.draft_bytes += latent + index;
    } else {
      room.record.latent_bytes += latent;
      room.record.index_bytes += index;
      stats_.latent_bytes += latent;
      stats_.index_bytes += index;
    }
    room.done[l.value] += uint32_t(pages);
    room.bytes += latent + index;
    stats_.bytes_sent += latent + index;
    if (room.forwards > 0) {
      room.record.bytes_overlapped += latent + index;
      stats_.bytes_before_forward_end += latent + index;
    }
  }
}

void PrefillRooms::StopWaiting(Room& room, Nanos now) {
  if (room.idle_since != 0) room.record.wait_layers_s += Seconds(now - room.idle_since);
  room.idle_since = 0;
}

void PrefillRooms::OnLayerFinal(int64_t step, LogicalLayer layer, Nanos now) {
  if (!options_.per_layer) return;
  const auto it = forwards_.find(step);
  if (it == forwards_.end()) return;
  for (Context& context : it->second) {
    if (!context.per_layer) continue;
    const auto room = rooms_.find(context.room);
    if (room == rooms_.end() || room->second.state != State::kSending) continue;
    Enqueue(context, room->second, layer, now);
    // The short group at the end has nothing to wait for, and much of the forward is still to come.
    if (layer == layout_.latent_layers().back()) Flush(context, room->second, now);
  }
}

// Layers of the chunk that no hook has reported; in a monolithic chunk all of them.
void PrefillRooms::SendAll(Context& context, Room& room, Nanos now) {
  size_t left = layout_.latent_layers().size();
  if (Planted(Plant::kCountedLayers) && options_.per_layer) --left;  // those that have hooks
  int64_t pages = 0;
  for (const auto& moves : context.moves) pages += int64_t(moves.size());
  for (const LogicalLayer layer : layout_.latent_layers()) {
    if (left-- == 0) break;
    if (context.enqueued[layer_position_.at(layer.value)]) continue;
    if (context.per_layer && pages > 0) {
      const int64_t bytes = pages * (layout_.latent_page_bytes() +
                                     (layout_.IndexSlot(layer).valid() ? layout_.index_page_bytes() : 0));
      ++stats_.layers_sent_at_end;
      ++room.record.layers_at_end;
      stats_.bytes_sent_at_end += bytes;
      room.record.bytes_at_end += bytes;
    }
    Enqueue(context, room, layer, now);
  }
  Flush(context, room, now);
}

// What chunks with a fault left out, so that the union is that of a room without one.
void PrefillRooms::SendUnregistered(RoomId id, Room& room, const Chunk& chunk, Nanos now) {
  const PageSpan whole = RequestPages(room.prompt_tokens, room.first_page);
  if (room.source.size() < size_t(whole.end)) {
    Fail(id, room,
         Internal("room {}: {}; the last forward named {} of {} pages, so they cannot be sent", id,
                  room.fallback, room.source.size(), whole.end),
         true, now);
    return;
  }
  Context rest;
  rest.room = id;
  rest.chunk = chunk;
  rest.per_layer = false;
  rest.moves = MovesByLane(room, whole, room.source);
  for (auto& moves : rest.moves)
    std::erase_if(moves,
                  [&](const PageMove& m) { return room.registered[size_t(m.ordinal - room.first_page)]; });
  rest.enqueued.assign(layout_.latent_layers().size(), false);
  room.registered.assign(room.registered.size(), true);
  SendAll(rest, room, now);
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
    if (--room.forwards == 0) StopWaiting(room, now);
    room.progress = now;
    if (room.state == State::kSending && !status.ok()) {
      Fail(context.room, room, status, true, now);
      continue;
    }
    if (room.state == State::kSending) {
      if (context.chunk.last) room.forward_end = now;
      SendAll(context, room, now);
      if (context.chunk.last) {
        room.last_chunk_sent = true;
        if (!room.fallback.empty()) SendUnregistered(context.room, room, context.chunk, now);
      }
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

void PrefillRooms::OnWriteDone(WriteId id, const Status& status, Nanos now, int32_t layers) {
  const auto it = writes_.find(id);
  SLUICE_CHECK(it != writes_.end(), "write {} completed twice or was never posted", id);
  Write write = std::move(it->second);
  writes_.erase(it);
  const RoomId room_id = write.post.room;
  Room& room = rooms_.at(room_id);  // a room with outstanding writes is never erased
  --room.outstanding;
  room.progress = now;
  if (status.ok()) {
    const int64_t pages = int64_t(write.post.pages.size());
    Credit(room, write.post.layers, pages);
    stats_.pages_sent += pages;
    room.last_done = now;
  } else if (const bool broken = room.cut.has_value() || write.post.peer != room.peer;
             room.state == State::kSending && absl::IsUnavailable(status) &&
             (broken || write.attempt < options_.write_retries)) {
    // The peer lives, or its loss would have ended the room. What was acknowledged stays so; the rest goes
    // again, on the next connection when this one broke.
    room.record.error = std::string(Message(status));
    ++room.record.retries;
    ++stats_.write_retries;
    const auto arrived =
        write.post.layers.begin() + std::min<size_t>(size_t(layers), write.post.layers.size());
    Credit(room, {write.post.layers.begin(), arrived}, int64_t(write.post.pages.size()));
    write.post.layers.erase(write.post.layers.begin(), arrived);
    if (!write.post.layers.empty()) {
      write.post.peer = room.peer;
      write.attempt += !broken;
      Post(room, std::move(write), now);
      return;
    }
    room.last_done = now;
  } else {
    Fail(room_id, room, status, true, now);
    return;
  }
  if (room.outstanding == 0 && room.forwards > 0) room.idle_since = now;
  MaybeFinish(room_id, now);
}

void PrefillRooms::Fail(RoomId id, Room& room, const Status& why, bool tell_peer, Nanos now) {
  if (room.state != State::kDraining) {
    const char* phase = RecordOf(id, room).phase;
    room.state = State::kDraining;
    room.failure = why;
    room.deadline = now + options_.sending_timeout;
    room.record.error = std::string(Message(why));
    if (tell_peer && room.peer.valid() && !room.abort_wanted)
      actions_.push_back(SendFrame{room.peer, Failed{id, phase, std::string(Message(why))}});
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
  if (room.state != State::kSending || !room.last_chunk_sent || !room.has_aux || room.cut.has_value() ||
      !room.held.empty())
    return;
  const int64_t aux_bytes = int64_t(EncodedBytes(room.aux));
  room.record.aux_bytes = aux_bytes;
  stats_.aux_bytes += aux_bytes;
  Complete complete{id, uint64_t(room.bytes), {}, std::move(room.aux), {}};
  if (Planted(Plant::kMixedAux)) std::swap(complete.aux.cached_device, complete.aux.cached_host);
  for (const auto& [key, pages] : room.counts) complete.counts.push_back({key.first, key.second, pages});
  if (finished_.size() >= kFinishedKept)  // the newest are those whose connection may have broken just now
    finished_.erase(std::ranges::min_element(finished_, {}, [](const auto& f) { return f.second.until; }));
  finished_[id] = {room.reserve.sender_epoch, complete, now + options_.ResumeTime()};
  actions_.push_back(SendFrame{room.peer, std::move(complete)});
  ++stats_.rooms_completed;
  CountMode(room);
  End(id, room, OkStatus(), now);
}

// A room that had nothing to send is no sample of any mode's times.
void PrefillRooms::CountMode(Room& room) {
  if (room.record.writes == 0) {
    ++stats_.rooms_empty;
    return;
  }
  ++(!room.fallback.empty() ? stats_.rooms_by_fault
     : options_.per_layer   ? stats_.rooms_per_layer
                            : stats_.rooms_by_flag);
  room.record.wait_completions_s = Seconds(room.last_done - room.forward_end);
  room.record.transfer_s = Seconds(room.last_done - room.first_write);
  stats_.wait_layers_s += room.record.wait_layers_s;
  stats_.wait_completions_s += room.record.wait_completions_s;
  stats_.transfer_s += room.record.transfer_s;
}

RoomRecord PrefillRooms::RecordOf(RoomId id, const Room& room) const {
  RoomRecord r = room.record;
  r.room = id;
  r.phase = room.state == State::kBootstrapping ? "bootstrap"
            : room.state == State::kDraining    ? "draining"
            : room.cut.has_value()              ? "cut"
            : room.state == State::kReady       ? "queued"
                                                : "sending";
  r.fallback = !room.fallback.empty() ? room.fallback : options_.per_layer ? "" : "asked for by flag";
  r.mode = room.destination.empty() && room.state != State::kBootstrapping ? "empty"
           : r.fallback.empty()                                            ? "per_layer"
                                                                           : "monolithic";
  r.prompt_tokens = room.prompt_tokens;
  r.pages = int64_t(room.destination.size());
  r.chunks = int64_t(room.chunks.size());
  r.layers = int32_t(layout_.latent_layers().size());
  if (room.destination.empty()) r.layers_done = room.last_chunk_sent ? r.layers : 0;
  for (const auto& [layer, pages] : room.done)
    r.layers_done += !room.destination.empty() && pages >= room.destination.size();
  r.bytes_done = room.bytes;
  r.bytes = r.pages * layout_.page_bytes();
  return r;
}

std::vector<RoomRecord> PrefillRooms::Records(size_t most) const {
  std::vector<RoomRecord> records;
  for (const auto& [id, room] : rooms_) {
    if (records.size() >= most) break;
    records.push_back(RecordOf(id, room));
  }
  return records;
}

std::vector<RoomRecord> PrefillRooms::TakeEndedRecords() {
  std::vector<RoomRecord> records(std::make_move_iterator(ended_.begin()),
                                  std::make_move_iterator(ended_.end()));
  ended_.clear();
  return records;
}

void PrefillRooms::End(RoomId id, Room& room, const Status& status, Nanos now) {
  RoomRecord record = RecordOf(id, room);
  record.phase = "ended";
  record.result = status.ok() ? "ok" : absl::IsAborted(status) ? "aborted" : "failed";
  if (ended_.size() >= kEndedKept) ended_.pop_front();
  ended_.push_back(std::move(record));
  actions_.push_back(RoomEnded{id, status});
  rooms_.erase(id);
  if (!Planted(Plant::kNoTombstone)) tombstones_[id] = now + options_.tombstone;
}

void PrefillRooms::Tick(Nanos now) {
  std::vector<RoomId> expired, forsaken;
  std::vector<PeerId> fence;
  for (auto& [id, room] : rooms_) {
    if ((room.state == State::kReady || room.state == State::kSending) && room.cut.has_value()) {
      if (now - *room.cut >= options_.ResumeTime()) forsaken.push_back(id);
      continue;
    }
    if (room.state == State::kBootstrapping && now >= room.deadline) expired.push_back(id);
    // No write of it has ended for so long although the peer seems to live.
    if (room.state == State::kSending && room.outstanding > 0 &&
        now - room.progress >= options_.sending_timeout)
      expired.push_back(id);
    if (room.state == State::kDraining && room.outstanding > 0 && now >= room.deadline && !room.fencing) {
      room.fencing = true;
      bool known = false;
      for (const PeerId p : fence) known |= p == room.peer;
      if (!known) fence.push_back(room.peer);
    }
  }
  for (const RoomId id : forsaken) {
    Room& room = rooms_.at(id);
    Fail(id, room,
         Unavailable("room {}: its connection broke and decode did not come back within {:.1f} s ({})", id,
                     double(now - *room.cut) * 1e-9, ProgressText(RecordOf(id, room))),
         false, now);
  }
  for (const RoomId id : expired) {
    Room& room = rooms_.at(id);
    const RoomRecord record = RecordOf(id, room);
    Fail(id, room,
         room.state == State::kBootstrapping
             ? DeadlineExceeded(
                   "room {}: no reservation of a decode instance within {} s (bootstrap phase: {})", id,
                   options_.bootstrap_timeout / 1'000'000'000, ProgressText(record))
             : DeadlineExceeded("room {}: no write has ended for {} s ({} phase: {})", id,
                                options_.sending_timeout / 1'000'000'000, record.phase, ProgressText(record)),
         true, now);
  }
  for (const PeerId peer : fence) {
    ++stats_.fences;
    actions_.push_back(FencePeer{peer});
  }
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
  std::erase_if(finished_, [&](const auto& f) { return now >= f.second.until; });
}

}  // namespace sluice::transfer
