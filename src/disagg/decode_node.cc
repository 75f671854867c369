#include "disagg/decode_node.h"

#include <algorithm>

#include "base/log.h"

namespace sluice::disagg {

using namespace transfer;  // NOLINT: every name here is one of its

namespace {
constexpr uint64_t kLandingBytes = 4 << 20;  // what prefill stages at once: seldom is more needed
constexpr Nanos kReachPace = 100'000'000;
}  // namespace

StatusOr<std::unique_ptr<DecodeNode>> DecodeNode::Start(const NodeOptions& options, const KvLayout& layout,
                                                        const DevicePool& pool, std::function<void()> wake) {
  std::unique_ptr<DecodeNode> node(new DecodeNode(options, layout, pool, std::move(wake)));
  if (options.backend == "ucx") {
    ASSIGN_OR_RETURN(node->ucx_, UcxReceiver::Make(pool, &node->net_, node.get()));
  }
  node->StartThread();
  return node;
}

DecodeNode::DecodeNode(const NodeOptions& options, const KvLayout& layout, const DevicePool& pool,
                       std::function<void()> wake)
    : Node(options, layout, pool, Role::kDecode, std::move(wake)),
      rooms_(layout, options_.rooms),
      fake_(options.backend == "fake") {}

DecodeNode::~DecodeNode() { StopThread(); }

PeerId DecodeNode::Reach(const std::string& address) {
  if (const auto it = by_address_.find(address); it != by_address_.end()) return it->second;
  const size_t colon = address.rfind(':');
  const PeerId peer = net_.Connect(address.substr(0, colon), std::atoi(address.c_str() + colon + 1));
  by_address_[address] = peer;
  peers_[peer] = Peer{.address = address, .since = Now()};
  return peer;
}

void DecodeNode::Announce(RoomId id, std::string host, int port) {
  Post([=, this, host = std::move(host)] {
    if (open_.contains(id)) {  // an earlier request of that room is not over yet
      Emit({RoomEvent::Kind::kFailed,
            id,
            absl::AlreadyExistsError(fmt::format("bootstrap_room: {} is in use; rooms are unique", id)),
            {}});
      return;
    }
    Room& room = open_[id];
    room.since = Now();
    room.address = fmt::format("{}:{}", host, port);
    if (!fake_) room.peer = Reach(room.address);
  });
}

void DecodeNode::Open(RoomId id, int64_t prompt_tokens, const Digest256& digest, int32_t first_page,
                      std::vector<PageId> pages) {
  Post([=, this, pages = std::move(pages)] {
    const auto it = open_.find(id);
    if (it == open_.end()) {  // it failed meanwhile; the engine has been told, the pages have no writer
      Emit({RoomEvent::Kind::kEnded, id, Unavailable("the room ended before it was opened"), {}});
      return;
    }
    Room& room = it->second;
    room.wants_open = true;
    room.prompt_tokens = prompt_tokens;
    room.digest = digest;
    room.first_page = first_page;
    room.pages = pages;
    for (const PageId p : pages) room.page_set.insert(p.value);
    TryOpen(id, room);
  });
}

void DecodeNode::TryOpen(RoomId id, Room& room) {
  if (room.opened || !room.wants_open) return;
  if (fake_) {
    Aux aux;
    aux.first_token = 0;
    Emit({RoomEvent::Kind::kReady, id, {}, aux});
    Emit({RoomEvent::Kind::kEnded, id, {}, {}});
    open_.erase(id);
    return;
  }
  const auto peer = peers_.find(room.peer);
  if (peer == peers_.end() || !peer->second.ready) return;  // opened when the handshake is over
  if (const Status s = rooms_.Open(id, room.peer, peer->second.hello.epoch, room.prompt_tokens, room.digest,
                                   room.first_page, room.pages, Now());
      !s.ok()) {
    FailUnopened(id, s);
    return;
  }
  room.opened = true;
  room.opened_at = Now();
  if (options_.record == nullptr) return;
  NodeOptions::Record record;
  record.room = id;
  record.registered = {room.first_page, room.first_page + int32_t(room.pages.size())};
  for (const PageId p : room.pages) record.destination.push_back(p.value);
  options_.record(record);
}

void DecodeNode::KeepTimeline(RoomId id, const Room& room, Nanos now, const Status& end) {
  auto timeline = std::make_shared<RoomTimeline>();
  timeline->room = id;
  timeline->prompt_tokens = room.prompt_tokens;
  timeline->announced = room.since;
  timeline->ready = room.opened_at;
  if (const auto peer = peers_.find(room.peer); peer != peers_.end()) timeline->transport = peer->second.via;
  // Prefill writes by itself: which layer came when is on its timeline. Here it is one move.
  const int64_t pages = int64_t(room.pages.size());
  if (room.opened_at > 0 && end.ok() && pages > 0)
    timeline->moves.push_back({room.opened_at, now, layout_.latent_layers().front().value,
                               layout_.latent_layers().back().value, int32_t(pages),
                               layout_.page_bytes() * pages});
  Keep(std::move(timeline), now, end);
}

void DecodeNode::FailUnopened(RoomId id, const Status& why) {
  const bool leased = open_.at(id).wants_open;
  totals_.last_error = std::string(Message(why));
  ++totals_.rooms_failed;
  Emit({RoomEvent::Kind::kFailed, id, why, {}});
  if (leased) Emit({RoomEvent::Kind::kEnded, id, why, {}});
  open_.erase(id);
}

void DecodeNode::Cancel(RoomId id, Status why) {
  Post([=, this, why = std::move(why)] {
    const auto it = open_.find(id);
    if (it == open_.end()) return;
    if (it->second.opened) return rooms_.Cancel(id, why, Now());
    // Nothing is reserved yet: prefill learns that nobody will come, the answer does not matter.
    if (const auto p = peers_.find(it->second.peer); p != peers_.end() && p->second.ready)
      net_.Send(p->first, Abort{id, 0, std::string(Message(why)), options_.rooms.epoch});
    FailUnopened(id, why);
  });
}

void DecodeNode::OnConnected(PeerId peer, bool) {
  Hello hello = self_;
  hello.own_end = net_.LocalEnd(peer);
  net_.Send(peer, hello);
}

const Hello* DecodeNode::PeerHello(PeerId peer) const {
  const auto it = peers_.find(peer);
  return it == peers_.end() ? nullptr : &it->second.hello;
}

void DecodeNode::OnFrame(PeerId peer, const ControlMessage& message) {
  const auto it = peers_.find(peer);
  if (it == peers_.end()) return;
  Peer& p = it->second;
  const auto refuse = [&](const Status& why) {
    net_.Close(peer);
    Closed(peer, why, false);
  };
  if (const auto* hello = std::get_if<Hello>(&message)) {
    p.hello = *hello;
    if (const Status s = CheckCompatible(self_, *hello, options_.allow_mixed_numerics); !s.ok()) refuse(s);
    return;
  }
  if (const auto* ack = std::get_if<HelloAck>(&message)) {
    if (!ack->refusal.empty()) return refuse(Unavailable("{}", ack->refusal));
    if (!p.via.empty()) return refuse(Invalid("a second HelloAck"));
    if (p.hello.epoch == 0 || p.hello.epoch != ack->epoch)
      return refuse(Invalid("HelloAck of epoch {} before its Hello", ack->epoch));
    if (std::find(self_.transports.begin(), self_.transports.end(), ack->transport) == self_.transports.end())
      return refuse(
          Invalid("transport {} chosen, {} offered", ack->transport, fmt::join(self_.transports, "|")));
    p.via = ack->transport;
    p.one_sided = p.via == "shm";
    if (p.via != "ucx") {
      OnReady(peer);
      return;
    }
    StatusOr<std::string> address = ucx_->Add(peer);
    if (!address.ok()) return refuse(address.status());
    net_.Send(peer, DataPath{*std::move(address)});  // ready with the first message that comes by it
    return;
  }
  if (!p.ready) {
    // Prefill counts us as joined since its HelloAck, while the way of the pages is still being made.
    if (!p.via.empty() && std::holds_alternative<Heartbeat>(message)) return;
    return refuse(Invalid("{} before the handshake", TypeName(message)));
  }
  const Nanos now = Now();
  if (const auto* complete = std::get_if<Complete>(&message); complete != nullptr && options_.self_check) {
    if (const auto room = open_.find(complete->room); room != open_.end() && room->second.peer == peer) {
      if (const Status s = CheckDigests(room->second, *complete); !s.ok()) {
        spdlog::error("{}", Message(s));
        rooms_.OnCorrupt(peer, complete->room, s, now);
        return;
      }
    }
  }
  if (const auto* failed = std::get_if<Failed>(&message)) {
    if (const auto room = open_.find(failed->room);
        room != open_.end() && room->second.peer == peer && !room->second.opened) {
      FailUnopened(failed->room, Unavailable("room {}: prefill failed in its {} phase: {}", failed->room,
                                             failed->phase, failed->reason));
      return;
    }
  }
  rooms_.OnFrame(peer, message, now);
}

void DecodeNode::OnReady(PeerId peer) {
  const auto it = peers_.find(peer);
  if (it == peers_.end()) return;
  it->second.ready = true;
  std::vector<RoomId> waiting, cut;
  for (const auto& [id, room] : open_) {
    if (room.peer != peer) continue;
    if (room.wants_open && !room.opened) waiting.push_back(id);
    if (room.opened) cut.push_back(id);
  }
  for (const RoomId id : waiting) TryOpen(id, open_.at(id));
  const uint64_t epoch = it->second.hello.epoch;
  for (const RoomId id : cut) rooms_.Resume(id, peer, epoch, Now());
}

Status DecodeNode::CheckDigests(const Room& room, const Complete& complete) {
  if (complete.page_digests.size() != room.pages.size())
    return Internal(
        "room {}: self-check: digests of {} pages came, {} pages were reserved; give both sides "
        "--disaggregation-self-check",
        complete.room, complete.page_digests.size(), room.pages.size());
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < room.pages.size(); ++i) {
    Hasher hasher;
    for (const KvPiece& piece : layout_.pieces()) hasher.Add(pool_.Readable(piece, room.pages[i], &bytes));
    if (hasher.Finish() != complete.page_digests[i])
      return Internal(
          "room {}: self-check: page {} of the prompt (page {} here) differs from what prefill sent",
          complete.room, room.first_page + int32_t(i), room.pages[i].value);
  }
  totals_.digests_checked += int64_t(room.pages.size());
  return OkStatus();
}

// Nobody listening is the end of a process; a frame that made no sense will make none on another connection.
void DecodeNode::OnClosed(PeerId peer, const Status& why) { Closed(peer, why, absl::IsUnavailable(why)); }

void DecodeNode::Closed(PeerId peer, const Status& why, bool may_return) {
  const auto it = peers_.find(peer);
  if (it == peers_.end()) return;
  const std::string name = it->second.hello.instance_id.empty()
                               ? it->second.address
                               : it->second.hello.instance_id + " at " + it->second.address;
  const Status status = absl::Status(
      absl::IsInvalidArgument(why) || absl::IsNotFound(why) ? absl::StatusCode::kUnavailable : why.code(),
      fmt::format("prefill instance {}: {}", name, Message(why)));
  const std::string address = it->second.address;
  const bool was_ready = it->second.ready;
  Forget(peer, address);
  landings_.erase(peer);
  if (ucx_ != nullptr) ucx_->Remove(peer);  // it may be writing still
  peers_.erase(it);
  totals_.last_error = std::string(Message(status));
  const Nanos now = Now();
  if (may_return && was_ready) rooms_.OnPeerCut(peer, status, now);
  std::vector<RoomId> unopened, cut;
  for (auto& [id, room] : open_) {
    if (room.peer != peer) continue;
    // Now after a connection that broke; at a pace while none comes about.
    const bool again = may_return && (room.opened ? rooms_.IsCut(id) : was_ready);
    if (again)
      room.reach_at = was_ready ? now : now + kReachPace;
    else
      (room.opened ? cut : unopened).push_back(id);
  }
  for (const RoomId id : unopened) FailUnopened(id, status);
  for (const RoomId id : cut) rooms_.GiveUp(id, status, now);
  // The peer closes only after its last write, and so does the system when the process dies.
  rooms_.OnPeerLost(peer, status, true, now);
  rooms_.OnFenced(peer, now);
}

void DecodeNode::ReachAgain(Nanos now) {
  for (auto& [id, room] : open_) {
    if (room.reach_at == 0 || now < room.reach_at) continue;
    room.reach_at = 0;
    room.peer = Reach(room.address);
    const Peer& peer = peers_.at(room.peer);
    if (!peer.ready) continue;
    reached_.push_back(id);
  }
  for (const RoomId id : std::exchange(reached_, {})) {
    Room& room = open_.at(id);
    if (room.opened)
      rooms_.Resume(id, room.peer, peers_.at(room.peer).hello.epoch, now);
    else
      TryOpen(id, room);  // may erase it
  }
}

// Of an address: only its own connection; another one may have been made since.
void DecodeNode::Forget(PeerId peer, const std::string& address) {
  if (const auto it = by_address_.find(address); it != by_address_.end() && it->second == peer)
    by_address_.erase(it);
}

void DecodeNode::OnSilent(PeerId peer, const Status& why) { rooms_.OnPeerLost(peer, why, false, Now()); }

StatusOr<std::vector<iovec>> DecodeNode::Place(PeerId peer, const BulkHeader& header) {
  const auto it = open_.find(header.room);
  if (it == open_.end() || it->second.peer != peer || !it->second.opened || !rooms_.Waiting(header.room))
    return std::vector<iovec>();  // late: thrown away
  if (header.pages.size() > it->second.page_set.size() ||
      header.layers.size() > layout_.latent_layers().size())
    return Invalid("bulk frame of room {}: {} layers and {} pages, more than there are", header.room,
                   header.layers.size(), header.pages.size());
  int64_t bytes = 0;
  for (const int32_t l : header.layers) {
    if (!layout_.LatentSlot(LogicalLayer(l)).valid())
      return Invalid("bulk frame of room {}: layer {} is none of this layout", header.room, l);
    if (header.component != KvComponent::kIndex) bytes += layout_.latent_page_bytes();
    if (header.component != KvComponent::kLatent && layout_.IndexSlot(LogicalLayer(l)).valid())
      bytes += layout_.index_page_bytes();
  }
  for (const int32_t p : header.pages)
    if (!it->second.page_set.contains(p))
      return Invalid("bulk frame of room {}: page {} was not reserved for it", header.room, p);
  if (uint64_t(bytes) * header.pages.size() != header.payload_bytes)
    return Invalid("bulk frame of room {}: {} bytes of payload, {} expected for {} layers and {} pages",
                   header.room, header.payload_bytes, bytes * int64_t(header.pages.size()),
                   header.layers.size(), header.pages.size());
  if (pool_.memory() != nullptr) return PlaceInLanding(peer, header);
  return PagePieces::Of(pool_, header.layers, header.pages, header.component);
}

StatusOr<std::vector<iovec>> DecodeNode::PlaceInLanding(PeerId peer, const BulkHeader& header) {
  Landing& landing = landings_[peer];
  if (landing.bytes < header.payload_bytes) {
    const uint64_t bytes = std::max(header.payload_bytes, kLandingBytes);
    landing.bytes = 0;
    landing.memory.reset();
    ASSIGN_OR_RETURN(landing.memory, pool_.memory()->AllocateShared(int64_t(bytes), "landing of a transfer"));
    landing.bytes = bytes;
  }
  landing.header = header;
  return std::vector<iovec>{{landing.memory.get(), size_t(header.payload_bytes)}};
}

Status DecodeNode::CopyLanded(const Landing& landing) {
  if (copier_ == nullptr) {
    ASSIGN_OR_RETURN(auto copier, pool_.memory()->MakeCopier());
    RETURN_IF_ERROR(copier->Bind());
    copier_ = std::move(copier);
  }
  runs_.clear();
  const std::byte* from = landing.memory.get();
  for (const iovec& part :
       PagePieces::Of(pool_, landing.header.layers, landing.header.pages, landing.header.component)) {
    runs_.push_back(
        {.src = from, .dst = static_cast<std::byte*>(part.iov_base), .bytes = int64_t(part.iov_len)});
    from += part.iov_len;
  }
  return copier_->CopyRuns(runs_);
}

void DecodeNode::OnBulkDone(PeerId peer, RoomId room, uint64_t bytes) {
  if (pool_.memory() != nullptr && bytes > 0) {
    if (!open_.contains(room)) return;  // over, and its pages may be another's
    if (const Status copied = CopyLanded(landings_.at(peer)); !copied.ok()) {
      rooms_.Cancel(room, copied, Now());  // more of it may be under way
      return;
    }
  }
  rooms_.OnBytes(peer, room, bytes, Now());
}

void DecodeNode::Perform(Nanos now) {
  for (bool more = true; more;) {
    more = false;
    for (Action& action : rooms_.TakeActions()) {
      more = true;
      if (auto* send = std::get_if<SendFrame>(&action)) {
        net_.Send(send->peer, send->message);
      } else if (auto* ready = std::get_if<RoomReady>(&action)) {
        Emit({RoomEvent::Kind::kReady, ready->room, {}, std::move(ready->aux)});
      } else if (auto* failed = std::get_if<RoomFailed>(&action)) {
        totals_.last_error = std::string(Message(failed->status));
        if (const auto it = open_.find(failed->room); it != open_.end()) it->second.abort_since = now;
        Emit({RoomEvent::Kind::kFailed, failed->room, failed->status, {}});
      } else if (auto* ended = std::get_if<RoomEnded>(&action)) {
        if (const auto it = open_.find(ended->room); it != open_.end()) {
          if (it->second.abort_since > 0)
            totals_.abort_ack_seconds += double(now - it->second.abort_since) * 1e-9;
          KeepTimeline(ended->room, it->second, now, ended->status);
          open_.erase(it);
        }
        Emit({RoomEvent::Kind::kEnded, ended->room, ended->status, {}});
      } else if (auto* fence = std::get_if<FencePeer>(&action)) {
        const auto it = peers_.find(fence->peer);
        if (it == peers_.end()) {
          rooms_.OnFenced(fence->peer, now);
          continue;
        }
        spdlog::warn("cutting the connection to {}: it does not answer", it->second.hello.instance_id);
        if (it->second.via == "shm") {
          // It writes into our memory by itself: only its own end, or its word, is the end of its writes. New
          // requests meet it on a new connection.
          net_.HalfClose(fence->peer);
          Forget(fence->peer, it->second.address);
        } else {
          net_.Close(fence->peer);
          OnClosed(fence->peer, Unavailable("it did not answer an abort"));
        }
      }
    }
  }
}

void DecodeNode::Turn(Nanos now) {
  if (ucx_ != nullptr) {
    ucx_->Poll(&ucx_report_);
    for (const PeerId peer : std::exchange(ucx_report_.reached, {})) OnReady(peer);
    for (auto& [peer, messages] : std::exchange(ucx_report_.taken, {}))
      net_.Send(peer, Taken{std::move(messages)});
    for (const auto& [peer, why] : std::exchange(ucx_report_.broken, {})) {
      net_.Close(peer);
      OnClosed(peer, why);
    }
  }
  for (const PeerNet::Received& r : net_.TakeReceived()) net_.Send(r.peer, Taken{{r.token}});
  ReachAgain(now);
  std::vector<RoomId> late;
  for (const auto& [id, room] : open_)
    if (!room.opened && room.wants_open && now - room.since >= options_.rooms.bootstrap_timeout)
      late.push_back(id);
  for (const RoomId id : late)
    FailUnopened(
        id, DeadlineExceeded("room {}: no handshake with prefill instance {} within {} s (bootstrap phase)",
                             id, open_.at(id).address, options_.rooms.bootstrap_timeout / 1'000'000'000));
  rooms_.Tick(now);
  Perform(now);
}

void DecodeNode::Beat(Nanos) {
  for (const auto& [id, peer] : peers_) {
    if (!peer.ready && peer.via.empty()) continue;  // prefill counts us as joined since its HelloAck
    Heartbeat beat{options_.rooms.epoch, beats_, {}, {}};
    for (const auto& [room, state] : open_)
      if (state.peer == id) beat.rooms.push_back(room);
    net_.Send(id, beat);
  }
}

NodeStats DecodeNode::MakeStats() const {
  const DecodeRoomStats& r = rooms_.stats();
  NodeStats s = totals_;
  s.bytes_received = r.bytes_received;
  s.rooms_completed = r.rooms_completed;
  s.rooms_failed += r.rooms_failed;
  s.aborts_sent = r.aborts_sent;
  s.abort_acks = r.abort_acks;
  s.fences = r.fences;
  s.resumes = r.resumes;
  s.late_frames = r.late_frames;
  s.leased_pages = r.leased_pages;
  s.active_rooms = int64_t(open_.size());
  return s;
}

}  // namespace sluice::disagg
