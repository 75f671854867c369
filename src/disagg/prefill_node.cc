#include "disagg/prefill_node.h"

#include <algorithm>

#include "base/log.h"
#include "transfer/staged_tcp_transport.h"
#include "transfer/tcp_transport.h"
#include "transfer/ucx_transport.h"

namespace sluice::disagg {

using namespace transfer;  // NOLINT: every name here is one of its

namespace {
const PeerId kFakePeer(0);
constexpr Nanos kWarningPace = 10'000'000'000;
constexpr size_t kDigestsKept = 256;
}  // namespace

StatusOr<std::unique_ptr<PrefillNode>> PrefillNode::Start(const NodeOptions& options, const KvLayout& layout,
                                                          const DevicePool& pool,
                                                          std::function<void()> wake) {
  std::unique_ptr<PrefillNode> node(new PrefillNode(options, layout, pool, std::move(wake)));
  RETURN_IF_ERROR(node->MakeTransports());
  if (options.backend != "fake") RETURN_IF_ERROR(node->net_.Listen(options.host, options.bootstrap_port));
  node->StartThread();
  return node;
}

PrefillNode::PrefillNode(const NodeOptions& options, const KvLayout& layout, const DevicePool& pool,
                         std::function<void()> wake)
    : Node(options, layout, pool, Role::kPrefill, std::move(wake)), rooms_(layout, options_.rooms) {}

Status PrefillNode::MakeTransports() {
  const std::string& backend = options_.backend;
  const bool device = pool_.memory() != nullptr;
  TransportOptions transport;
  transport.bytes_per_second_max = options_.bytes_per_second_max;
  transport.on_done = [this] { net_.Wake(); };
  if (!device && (backend == "auto" || backend == "shm")) shm_ = MakeShmTransport(pool_, transport);
  if (device && (backend == "auto" || backend == "tcp")) {
    ASSIGN_OR_RETURN(tcp_, MakeStagedTcpTransport(pool_, &net_, transport));
  } else if (backend == "auto" || backend == "tcp") {
    tcp_ = MakeTcpTransport(pool_, &net_, transport);
  }
  if (backend == "ucx") {
    ASSIGN_OR_RETURN(ucx_, MakeUcxTransport(pool_, &net_, transport));
  }
  if (backend == "fake") fake_ = MakeFakeTransport();
  return OkStatus();
}

PrefillNode::~PrefillNode() { StopThread(); }

void PrefillNode::Add(RoomId room, int64_t prompt_tokens, const Digest256& digest) {
  Post([=, this] {
    const Nanos now = Now();
    if (const Status s = rooms_.Add(room, prompt_tokens, digest, now); !s.ok()) {
      Emit({RoomEvent::Kind::kFailed, room, s, {}});
      Emit({RoomEvent::Kind::kEnded, room, s, {}});
      return;
    }
    RoomTimeline& timeline = *timing_[room].timeline;
    timeline.room = room;
    timeline.prompt_tokens = prompt_tokens;
    timeline.announced = now;
    if (fake_ == nullptr) return;
    Reserve reserve{room, options_.rooms.epoch, uint64_t(prompt_tokens), digest, 0, {}};
    reserve.pages.assign(size_t(CeilDiv(prompt_tokens, kPageTokens)), 1);
    rooms_.OnFrame(kFakePeer, reserve, now);
  });
}

void PrefillNode::Cancel(RoomId room, Status why) {
  Post([=, this, why = std::move(why)] { rooms_.Cancel(room, why, Now()); });
}

void PrefillNode::BeginForward(int64_t step, RoomId room, const Chunk& chunk, std::vector<PageId> source) {
  watched_forwards_.fetch_add(1, std::memory_order_relaxed);
  Post([=, this, source = std::move(source)] {
    rooms_.BeginForward(step, room, chunk, source, Now());
    const auto t = timing_.find(room);
    if (t == timing_.end()) return;
    std::vector<RoomTimeline::Forward>& forwards = t->second.timeline->forwards;
    forwards_[step].push_back({room, forwards.size()});
    forwards.push_back({Now(), 0, chunk.start, chunk.end});
  });
}

void PrefillNode::SetAux(RoomId room, Aux aux) {
  Post([=, this, aux = std::move(aux)]() mutable { rooms_.SetAux(room, std::move(aux), Now()); });
}

bool PrefillNode::PushEvent(LayerEvent event) {
  const uint64_t at = events_written_.load(std::memory_order_relaxed);
  if (at - events_read_.load(std::memory_order_acquire) >= kEvents) return false;
  events_[at % kEvents] = std::move(event);
  events_written_.store(at + 1, std::memory_order_release);
  return true;
}

void PrefillNode::TellLayer(LayerEvent event) {
  if (watched_forwards_.load(std::memory_order_relaxed) == 0 || !options_.rooms.per_layer) return;
  const LogicalLayer layer = event.layer;
  if (!PushEvent(std::move(event))) return;
  if (++since_wake_ < options_.rooms.layer_group && layer != layout_.latent_layers().back()) return;
  since_wake_ = 0;
  net_.Wake();
}

void PrefillNode::LayerFinal(int64_t step, LogicalLayer layer) {
  TellLayer({.step = step, .layer = layer, .queued = false, .event = nullptr});
}

bool PrefillNode::EndsGroup(LogicalLayer layer) const {
  if (watched_forwards_.load(std::memory_order_relaxed) == 0 || !options_.rooms.per_layer) return false;
  return (layer.value + 1) % options_.rooms.layer_group == 0 || layer == layout_.latent_layers().back();
}

void PrefillNode::LayerQueued(int64_t step, LogicalLayer layer, std::shared_ptr<DeviceEvent> event) {
  TellLayer({.step = step, .layer = layer, .queued = true, .event = std::move(event)});
}

void PrefillNode::ForwardDone(int64_t step, Status status) {
  if (watched_forwards_.load(std::memory_order_relaxed) == 0) return;
  if (!status.ok()) {
    std::lock_guard lock(failure_mutex_);
    failures_[step] = std::move(status);
  }
  while (!PushEvent({.step = step, .layer = {}, .queued = false, .event = nullptr})) {
    if (stopping()) return;
    std::this_thread::yield();
  }
  since_wake_ = 0;
  net_.Wake();
}

void PrefillNode::DrainLayers(Nanos now) {
  const uint64_t end = events_written_.load(std::memory_order_acquire);
  RunCommands();  // the forward of every event taken was announced before it
  for (uint64_t at = events_read_.load(std::memory_order_relaxed); at < end; ++at) {
    const LayerEvent e = std::move(events_[at % kEvents]);
    events_read_.store(at + 1, std::memory_order_release);
    if (e.layer.valid() && e.queued && e.event == nullptr) {
      behind_.push_back(e.layer);
      continue;
    }
    if (e.layer.valid()) {
      if (e.queued && tcp_ != nullptr) tcp_->SetGate(e.event);
      for (const LogicalLayer layer : std::exchange(behind_, {})) rooms_.OnLayerFinal(e.step, layer, now);
      rooms_.OnLayerFinal(e.step, e.layer, now);
      if (e.queued) Perform(now);  // what it posts waits for this event and for no later one
      continue;
    }
    behind_.clear();  // theirs is no event any more: they go with what no hook has told
    Status status;
    {
      std::lock_guard lock(failure_mutex_);
      if (const auto it = failures_.find(e.step); it != failures_.end()) {
        status = std::move(it->second);
        failures_.erase(it);
      }
    }
    if (const auto it = forwards_.find(e.step); it != forwards_.end()) {
      for (const Forward& forward : it->second) {
        const auto t = timing_.find(forward.room);
        if (t == timing_.end()) continue;
        t->second.timeline->forwards[forward.index].end = now;
      }
      forwards_.erase(it);
    }
    rooms_.EndForward(e.step, status, now);
  }
}

void PrefillNode::OnConnected(PeerId peer, bool) { peers_[peer] = Peer{.since = Now()}; }

void PrefillNode::Greet(PeerId peer, const Hello& theirs) {
  if (const Status s = CheckCompatible(self_, theirs, options_.allow_mixed_numerics); !s.ok())
    return Refuse(peer, s);
  const auto accepts = [&](const char* name) {
    for (const std::string& t : theirs.transports)
      if (t == name) return true;
    return false;
  };
  std::string via;
  std::vector<std::string> why;
  for (const char* name : {"shm", "ucx", "tcp"}) {
    Transport* const transport = Over(name);
    if (transport == nullptr || !accepts(name)) continue;
    Status status;
    if (transport->capabilities().same_host_only && theirs.host_id != self_.host_id)
      status = Unavailable("{}: host {} here, {} there", name, self_.host_id, theirs.host_id);
    else if (const std::string end = net_.RemoteEnd(peer);
             transport->capabilities().one_sided && theirs.own_end != end)
      // Decode takes the end of the connection for the end of all writes, which is a proxy's to give then.
      status = Unavailable("{}: the connection goes through a proxy ({} there, {} here)", name,
                           theirs.own_end, end);
    else
      status = transport->AddPeer(peer, theirs);
    if (status.ok()) {
      via = name;
      break;
    }
    why.emplace_back(Message(status));
  }
  if (via.empty()) {
    return Refuse(
        peer,
        Unavailable("no transport for {} and {}: --disaggregation-transfer-backend {} here, {} there ({})",
                    self_.instance_id, theirs.instance_id, options_.backend,
                    fmt::join(theirs.transports, "|"), fmt::join(why, "; ")));
  }
  Peer& p = peers_[peer];
  p.hello = theirs;
  p.ready = true;
  p.via = via;
  p.one_sided = Over(via)->capabilities().one_sided;
  spdlog::info("decode instance {} joined over {}", theirs.instance_id, via);
  net_.Send(peer, self_);
  net_.Send(peer, HelloAck{options_.rooms.epoch, "", via});
}

Transport* PrefillNode::Over(const std::string& via) const {
  return via == "shm" ? shm_.get() : via == "ucx" ? ucx_.get() : via == "tcp" ? tcp_.get() : nullptr;
}

void PrefillNode::OnFrame(PeerId peer, const ControlMessage& message) {
  const auto it = peers_.find(peer);
  if (it == peers_.end()) return;
  if (const auto* hello = std::get_if<Hello>(&message); hello != nullptr && !it->second.ready)
    return Greet(peer, *hello);
  if (!it->second.ready)
    return Refuse(peer, Invalid("the first frame must be Hello, got {}", TypeName(message)));
  const auto* path = std::get_if<DataPath>(&message);
  const auto* taken = std::get_if<Taken>(&message);
  if (path != nullptr || taken != nullptr) {
    Transport* const transport = Over(it->second.via);
    const Status s =
        path != nullptr ? transport->Connect(peer, path->address) : transport->OnTaken(peer, taken->messages);
    if (!s.ok())
      Lost(peer, Unavailable("decode instance {}: {}", it->second.hello.instance_id, Message(s)), false);
    return;
  }
  const auto* reserve = std::get_if<Reserve>(&message);
  const auto* abort = std::get_if<Abort>(&message);
  if (reserve != nullptr || abort != nullptr) {
    const uint64_t epoch = reserve != nullptr ? reserve->sender_epoch : abort->sender_epoch;
    if (epoch != it->second.hello.epoch) {
      Lost(peer,
           Unavailable("decode instance {}: a {} in the name of epoch {}, its own is {}",
                       it->second.hello.instance_id, TypeName(message), epoch, it->second.hello.epoch),
           false);
      return;
    }
    // It has noticed that a connection broke before we have.
    const auto before = peers_.find(rooms_.PeerOf(reserve != nullptr ? reserve->room : abort->room));
    if (before != peers_.end() && before->first != peer && before->second.hello.epoch == epoch)
      Lost(before->first,
           Unavailable("decode instance {}: it came back on another connection",
                       before->second.hello.instance_id),
           true);
  }
  if (reserve != nullptr) {
    const int64_t pages = int64_t(it->second.hello.pages_per_lane) * it->second.hello.lanes;
    for (const int32_t page : reserve->pages) {
      if (page >= 0 && page < pages) continue;
      net_.Send(peer, Failed{reserve->room, "bootstrap",
                             fmt::format("destination page {} of a pool of {}", page, pages)});
      return;
    }
  }
  rooms_.OnFrame(peer, message, Now());
}

StatusOr<std::vector<iovec>> PrefillNode::Place(PeerId, const BulkHeader&) {
  return Invalid("pages move from prefill to decode only");
}

void PrefillNode::Lost(PeerId peer, const Status& why, bool may_return) {
  if (may_return)
    rooms_.OnPeerCut(peer, why, Now());
  else
    rooms_.OnPeerLost(peer, why, Now());
  const auto it = peers_.find(peer);
  if (it == peers_.end()) return;
  if (Transport* const transport = Over(it->second.via)) transport->RemovePeer(peer);
  net_.Close(peer);
  peers_.erase(it);
}

void PrefillNode::OnClosed(PeerId peer, const Status& why) {
  const auto it = peers_.find(peer);
  if (it == peers_.end()) return;
  Lost(peer, Unavailable("decode instance {}: {}", it->second.hello.instance_id, Message(why)),
       it->second.ready && absl::IsUnavailable(why));
}

// Its pages may never be read: cutting the connection after the last write of ours is what ends its leases.
void PrefillNode::OnSilent(PeerId peer, const Status& why) { Lost(peer, why, false); }

void PrefillNode::Beat(Nanos) {
  for (const auto& [id, peer] : peers_)
    if (peer.ready) net_.Send(id, rooms_.BeatFor(id, options_.rooms.epoch, beats_));
}

std::vector<Digest256> PrefillNode::Digests(RoomId room) const {
  std::vector<Digest256> digests;
  std::vector<std::byte> room_bytes;
  const auto it = timing_.find(room);
  if (it == timing_.end()) return digests;
  for (const auto& [ordinal, page] : it->second.sent) {
    Hasher hasher;
    for (const KvPiece& piece : layout_.pieces()) hasher.Add(pool_.Readable(piece, page, &room_bytes));
    digests.push_back(hasher.Finish());
  }
  return digests;
}

size_t PrefillNode::Note(const PostWrite& write, const std::string& via, Nanos now,
                         RoomTimeline* timeline) const {
  timeline->transport = via;
  if (timeline->moves.size() == kMovesMax) {
    ++timeline->moves_left_out;
    return kMovesMax;
  }
  RoomTimeline::Move move{.posted = now, .pages = int32_t(write.pages.size())};
  if (!write.layers.empty()) {
    move.first_layer = write.layers.front().value;
    move.last_layer = write.layers.back().value;
  }
  for (const LogicalLayer l : write.layers) {
    const int64_t page =
        layout_.latent_page_bytes() + (layout_.IndexSlot(l).valid() ? layout_.index_page_bytes() : 0);
    move.bytes += page * int64_t(write.pages.size());
  }
  timeline->moves.push_back(move);
  return timeline->moves.size() - 1;
}

void PrefillNode::Perform(Nanos now) {
  for (bool more = true; more;) {
    more = false;
    for (Action& action : rooms_.TakeActions()) {
      more = true;
      if (auto* send = std::get_if<SendFrame>(&action)) {
        if (auto* complete = std::get_if<Complete>(&send->message);
            complete != nullptr && options_.self_check) {
          if (timing_.contains(complete->room)) {
            complete->page_digests = Digests(complete->room);
            digests_.emplace_back(complete->room, complete->page_digests);
            if (digests_.size() > kDigestsKept) digests_.pop_front();
          } else if (const auto said = std::ranges::find(digests_, complete->room, &SaidDigests::first);
                     said != digests_.end()) {  // it is said again
            complete->page_digests = said->second;
          }
        }
        if (send->peer != kFakePeer) net_.Send(send->peer, send->message);
      } else if (auto* write = std::get_if<PostWrite>(&action)) {
        const auto peer = peers_.find(write->peer);
        const std::string via = fake_ ? "fake" : peer == peers_.end() ? "" : peer->second.via;
        Write& posted = writes_[write->id] = {write->room, kMovesMax};
        if (const auto t = timing_.find(write->room); t != timing_.end()) {
          posted.move = Note(*write, via, now, t->second.timeline.get());
          if (options_.self_check)
            for (const PageMove& m : write->pages) t->second.sent[m.ordinal] = m.from;
        }
        Transport* transport = fake_ ? fake_.get() : Over(via);
        if (transport == nullptr) {
          done_.push_back({write->id, Unavailable("the decode instance is gone")});
        } else {
          transport->Post(*write);
        }
      } else if (auto* ready = std::get_if<RoomReady>(&action)) {
        if (const auto t = timing_.find(ready->room); t != timing_.end()) t->second.timeline->ready = now;
        Emit({RoomEvent::Kind::kReady, ready->room, {}, {}});
      } else if (auto* failed = std::get_if<RoomFailed>(&action)) {
        for (Transport* t : {shm_.get(), ucx_.get(), tcp_.get()})
          if (t != nullptr) t->DropRoom(failed->room);
        totals_.last_error = std::string(Message(failed->status));
        Emit({RoomEvent::Kind::kFailed, failed->room, failed->status, {}});
      } else if (auto* ended = std::get_if<RoomEnded>(&action)) {
        if (const auto t = timing_.find(ended->room); t != timing_.end()) {
          Keep(std::move(t->second.timeline), now, ended->status);
          timing_.erase(t);
        }
        Emit({RoomEvent::Kind::kEnded, ended->room, ended->status, {}});
      } else if (auto* fence = std::get_if<FencePeer>(&action)) {
        Lost(fence->peer,
             DeadlineExceeded("no write to it has ended for {} s",
                              2 * options_.rooms.sending_timeout / 1'000'000'000),
             true);
      } else if (auto* chunk = std::get_if<ChunkRegistered>(&action)) {
        for (size_t lane = 0; lane < chunk->moves.size(); ++lane) {
          NodeOptions::Record record{chunk->room, &chunk->chunk, chunk->pages, int32_t(lane), {}, {}};
          for (const PageMove& m : chunk->moves[lane]) {
            record.kept.push_back(m.from.value);
            record.destination.push_back(m.to.value);
          }
          options_.record(record);
        }
      }
    }
    for (WriteDone& d : std::exchange(done_, {})) {
      more = true;
      const auto it = writes_.find(d.id);
      if (it == writes_.end()) continue;
      if (const auto t = timing_.find(it->second.room); t != timing_.end()) {
        if (it->second.move < kMovesMax) t->second.timeline->moves[it->second.move].done = now;
      }
      writes_.erase(it);
      rooms_.OnWriteDone(d.id, d.status, now, d.layers);
    }
  }
}

// A fault in registering costs overlap, not answers: it is worth a line, and not one a request.
std::vector<RoomRecord> PrefillNode::TakeEndedRecords() {
  std::vector<RoomRecord> records = rooms_.TakeEndedRecords();
  if (!options_.rooms.per_layer) return records;
  const RoomRecord* last = nullptr;
  for (const RoomRecord& r : records) {
    if (r.fallback.empty()) continue;
    ++fallbacks_;
    last = &r;
  }
  if (last != nullptr && Now() >= next_warning_) {
    next_warning_ = Now() + kWarningPace;
    spdlog::warn("{} rooms were sent as a whole instead of layer by layer; room {}: {}",
                 std::exchange(fallbacks_, 0), last->room, last->fallback);
  }
  return records;
}

void PrefillNode::Turn(Nanos now) {
  for (;;) {
    DrainLayers(now);
    for (Transport* t : {shm_.get(), ucx_.get(), tcp_.get(), fake_.get()}) {
      if (t == nullptr) continue;
      t->Poll(&done_);
      for (const auto& [peer, why] : t->TakeBroken()) {
        const auto it = peers_.find(peer);
        if (it == peers_.end()) continue;
        Lost(peer, Unavailable("decode instance {}: {}", it->second.hello.instance_id, Message(why)), true);
      }
    }
    if (done_.empty()) break;
    Perform(now);
  }
  rooms_.Tick(now);
  Perform(now);
}

Nanos PrefillNode::MaySleep(Nanos now) {
  return ucx_ == nullptr ? std::numeric_limits<Nanos>::max() : ucx_->MaySleep(now);
}

NodeStats PrefillNode::MakeStats() const {
  const PrefillRoomStats& r = rooms_.stats();
  NodeStats s = totals_;
  if (fake_ == nullptr) {  // it moves nothing and is no sample of anything
    s.bytes_sent = r.bytes_sent;
    s.bytes_before_forward_end = r.bytes_before_forward_end;
    s.bytes_sent_at_end = r.bytes_sent_at_end;
    s.latent_bytes = r.latent_bytes;
    s.index_bytes = r.index_bytes;
    s.draft_bytes = r.draft_bytes;
    s.aux_bytes = r.aux_bytes;
    s.wait_layers_s = r.wait_layers_s;
    s.wait_completions_s = r.wait_completions_s;
    s.transfer_s = r.transfer_s;
  }
  s.rooms_completed = r.rooms_completed;
  s.rooms_failed = r.rooms_failed;
  s.rooms_aborted = r.rooms_aborted;
  s.rooms_per_layer = r.rooms_per_layer;
  s.rooms_by_flag = r.rooms_by_flag;
  s.rooms_by_fault = r.rooms_by_fault;
  s.rooms_empty = r.rooms_empty;
  s.layers_sent_at_end = r.layers_sent_at_end;
  s.writes = r.writes_posted;
  s.write_retries = r.write_retries;
  s.resumes = r.resumes;
  s.fences = r.fences;
  s.late_frames = r.late_frames;
  s.active_rooms = int64_t(rooms_.active());
  s.outstanding_writes = int64_t(rooms_.outstanding_writes());
  return s;
}

}  // namespace sluice::disagg
