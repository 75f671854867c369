#include "transfer/ucx_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <unordered_map>

#include "transfer/ucx_api.h"

namespace sluice::transfer {
namespace {

constexpr unsigned kPages = 1, kFirst = 2;    // active message ids
constexpr uint64_t kFirstToken = 0;           // that answers the first message
constexpr int64_t kMessageBytes = 240 << 10;  // with its header one piece of 256 KiB, see LoadUcx
constexpr int64_t kWindowBytes =
    16 << 20;  // unanswered messages of one peer: what an abort waits for at most
constexpr int kProgressPerTurn = 64;
constexpr Nanos kThrottleSlack = 5'000'000;

// Header of a kPages message, followed by the receiver's pages. The payload is theirs, in that order.
struct PagesHeader {
  uint64_t token = 0;  // the answer names it
  uint64_t room = 0;
  int32_t layer = 0;
  uint32_t component = 0;
  uint32_t pages = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(PagesHeader) == 32);

StatusOr<std::shared_ptr<UcxContext>> ContextFor(const DevicePool& pool) {
  if (pool.memory() != nullptr)
    return Unavailable("transport ucx: required pages in host memory, found pages of a device");
  return UcxContext::Make();
}

class UcxTransport final : public Transport {
 public:
  UcxTransport(std::shared_ptr<UcxContext> context, const DevicePool& pool, PeerNet* net,
               const TransportOptions& options)
      : context_(std::move(context)),
        pool_(pool),
        net_(net),
        rate_(options.bytes_per_second_max),
        pages_max_((context_->header_bytes_max() - sizeof(PagesHeader)) / sizeof(int32_t)) {}
  ~UcxTransport() override {
    while (!peers_.empty()) RemovePeer(peers_.begin()->first);
  }

  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::vector<std::string> Regions() const override { return {}; }

  Status AddPeer(PeerId peer, const Hello& theirs) override {
    auto owned = std::make_unique<Peer>();
    ASSIGN_OR_RETURN(owned->link, UcxLink::Make(context_));
    owned->pages = int64_t(theirs.pages_per_lane) * theirs.lanes;
    net_->Watch(owned->link->descriptor());
    peers_[peer] = std::move(owned);
    return OkStatus();
  }
  Status Connect(PeerId peer, const std::string& address) override {
    const auto it = peers_.find(peer);
    if (it == peers_.end()) return Invalid("transport ucx: an address of a peer that does not use it");
    UcxLink& link = *it->second->link;
    uint16_t port = 0;
    if (address.size() == sizeof port) std::memcpy(&port, address.data(), sizeof port);
    if (port == 0) return Invalid("transport ucx: {} bytes that are no port of it", address.size());
    ASSIGN_OR_RETURN(const PeerNet::Ends ends, net_->EndsOf(peer));
    RETURN_IF_ERROR(link.Connect(ends.remote, port));
    return link.Send(kFirst, {}, {}, &UcxTransport::OnFirstSent, it->second.get()).status();
  }

  Status OnTaken(PeerId peer, const std::vector<uint64_t>& tokens) override {
    const auto it = peers_.find(peer);
    if (it == peers_.end()) return Invalid("transport ucx: messages of a peer that does not use it");
    Peer& p = *it->second;
    if (!p.link->connected())
      return Invalid("transport ucx: messages were taken before there was a way for them");
    for (const uint64_t token : tokens) {
      if (token == kFirstToken && !std::exchange(p.open, true)) continue;
      const auto m = p.messages.find(token);
      if (m == p.messages.end() || m->second.answered)
        return Invalid("transport ucx: message {} was taken and waits for nothing", token);
      m->second.answered = true;
      if (m->second.sent) p.over.push_back(token);
    }
    return OkStatus();
  }

  void Post(const PostWrite& write) override {
    const auto it = peers_.find(write.peer);
    if (it == peers_.end()) {
      done_.push_back({write.id, Unavailable("the peer is not connected")});
      return;
    }
    Peer& peer = *it->second;
    for (const PageMove& m : write.pages) {
      if (m.to.value >= 0 && m.to.value < peer.pages) continue;
      done_.push_back({write.id, Internal("destination page {} of a pool of {}", m.to.value, peer.pages)});
      return;
    }
    peer.writes.push_back({.post = write});
    Pump(peer);
  }

  void Poll(std::vector<WriteDone>* done) override {
    for (auto& [id, peer] : peers_) {
      for (int i = 0; i < kProgressPerTurn && peer->link->Progress(); ++i) {
      }
      Reap(*peer);
      Pump(*peer);
      if (!peer->link->failed().ok() && !peer->told) {
        peer->told = true;
        broken_.emplace_back(id, peer->link->failed());
      }
    }
    for (WriteDone& d : done_) done->push_back(std::move(d));
    done_.clear();
  }
  std::vector<std::pair<PeerId, Status>> TakeBroken() override { return std::exchange(broken_, {}); }

  Nanos MaySleep(Nanos now) override {
    Nanos sleep = std::numeric_limits<Nanos>::max();
    for (auto& [id, peer] : peers_) {
      if (!peer->told && !peer->link->failed().ok()) return 0;
      if (rate_ > 0 && peer->window < kWindowBytes && HasUnsent(*peer))
        sleep = std::min(sleep, std::max<Nanos>(0, peer->may_send_at - now));
      if (!peer->link->Arm()) return 0;
    }
    return sleep;
  }

  void DropRoom(RoomId room) override {
    for (auto& [id, peer] : peers_) {
      for (Write& w : peer->writes)
        if (w.post.room == room) w.dropped = true;
      Reap(*peer);
    }
  }

  void RemovePeer(PeerId peer) override {
    const auto it = peers_.find(peer);
    if (it == peers_.end()) return;
    Peer& p = *it->second;
    net_->Forget(p.link->descriptor());
    p.link->Close();  // callbacks of what was under way come here, for the last time
    for (const Write& w : p.writes) done_.push_back({w.post.id, Unavailable("the connection was cut")});
    peers_.erase(it);
  }

 private:
  struct Write {
    PostWrite post;
    size_t layer = 0;  // the next message's
    KvComponent component = KvComponent::kLatent;
    size_t page = 0;
    int64_t unanswered = 0;  // messages
    bool dropped = false;
  };
  struct Peer;
  struct Message {
    Peer* peer = nullptr;
    std::list<Write>::iterator write;
    uint64_t token = 0;
    int64_t bytes = 0;
    std::vector<std::byte> header;
    std::vector<ucp_dt_iov_t> pieces;
    bool sent = false, answered = false;
  };
  struct Peer {
    std::unique_ptr<UcxLink> link;
    int64_t pages = 0;
    std::list<Write> writes;                         // in order; leaves when its last message is answered
    std::unordered_map<uint64_t, Message> messages;  // by token
    std::vector<uint64_t> over;                      // sent and answered
    uint64_t next_token = 1;
    int64_t window = 0;
    Nanos may_send_at = 0;
    bool open = false;  // the first message was answered
    bool told = false;
  };

  static Nanos Now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  static bool Sent(const Write& w) { return w.dropped || w.layer == w.post.layers.size(); }
  static bool HasUnsent(const Peer& peer) {
    return peer.open &&
           std::any_of(peer.writes.begin(), peer.writes.end(), [](const Write& w) { return !Sent(w); });
  }

  void Pump(Peer& peer) {
    if (!peer.open || !peer.link->failed().ok()) return;
    for (auto w = peer.writes.begin(); w != peer.writes.end();) {
      if (Sent(*w)) {
        ++w;
        continue;
      }
      if (peer.window >= kWindowBytes) return;
      if (rate_ > 0) {
        const Nanos now = Now();
        if (now < peer.may_send_at) return;
        peer.may_send_at = std::max(peer.may_send_at, now - kThrottleSlack);
      }
      SendNext(peer, w);
      if (!peer.link->failed().ok()) return;
    }
  }

  void SendNext(Peer& peer, std::list<Write>::iterator w) {
    const KvLayout& layout = pool_.layout();
    const LogicalLayer layer = w->post.layers[w->layer];
    const int64_t page_bytes =
        w->component == KvComponent::kLatent ? layout.latent_page_bytes() : layout.index_page_bytes();
    size_t most = size_t(std::clamp<int64_t>(kMessageBytes / page_bytes, 1, int64_t(pages_max_)));
    if (rate_ > 0) most = std::max<size_t>(1, most / 16);  // a slow line in small steps
    const size_t n = std::min(most, w->post.pages.size() - w->page);
    const uint64_t token = peer.next_token++;
    Message& m = peer.messages[token];
    m.peer = &peer;
    m.write = w;
    m.token = token;
    m.bytes = page_bytes * int64_t(n);
    const PagesHeader header{token, w->post.room, layer.value, uint32_t(w->component), uint32_t(n), 0};
    m.header.resize(sizeof header + n * sizeof(int32_t));
    std::memcpy(m.header.data(), &header, sizeof header);
    from_.clear();
    for (size_t i = 0; i < n; ++i) {
      const PageMove& move = w->post.pages[w->page + i];
      from_.push_back(move.from.value);
      std::memcpy(m.header.data() + sizeof header + i * sizeof(int32_t), &move.to.value, sizeof(int32_t));
    }
    for (const iovec& piece : PagePieces::Of(pool_, {&layer.value, 1}, from_, w->component))
      m.pieces.push_back({piece.iov_base, piece.iov_len});
    w->page += n;
    ++w->unanswered;
    if (w->page == w->post.pages.size()) {
      w->page = 0;
      const bool index = w->component == KvComponent::kLatent && layout.IndexSlot(layer).valid();
      w->component = index ? KvComponent::kIndex : KvComponent::kLatent;
      if (!index) ++w->layer;
    }
    peer.window += m.bytes;
    if (rate_ > 0) peer.may_send_at += Nanos(double(m.bytes) / rate_ * 1e9);
    const StatusOr<void*> request = peer.link->Send(kPages, m.header, m.pieces, &UcxTransport::OnSent, &m);
    if (!request.ok()) return peer.link->Fail(request.status());
    if (*request == nullptr) m.sent = true;
  }

  // Frees what is sent and answered, and ends writes whose messages all are.
  void Reap(Peer& peer) {
    for (const uint64_t token : std::exchange(peer.over, {})) {
      const auto it = peer.messages.find(token);
      Message& m = it->second;
      peer.window -= m.bytes;
      --m.write->unanswered;
      peer.messages.erase(it);
    }
    for (auto w = peer.writes.begin(); w != peer.writes.end();) {
      if (!Sent(*w) || w->unanswered > 0) {
        ++w;
        continue;
      }
      const bool whole = w->layer == w->post.layers.size();
      done_.push_back({w->post.id, whole ? OkStatus() : Aborted("the room ended before the write")});
      w = peer.writes.erase(w);
    }
  }

  static void OnFirstSent(void* request, ucs_status_t status, void* user) {
    UcxLink& link = *static_cast<Peer*>(user)->link;
    link.Free(request);
    if (status != UCS_OK) link.Fail(link.Error("the first message", status));
  }
  static void OnSent(void* request, ucs_status_t status, void* user) {
    auto& m = *static_cast<Message*>(user);
    UcxLink& link = *m.peer->link;
    link.Free(request);
    if (status != UCS_OK) return link.Fail(link.Error("a write", status));
    m.sent = true;
    if (m.answered) m.peer->over.push_back(m.token);
  }

  const std::shared_ptr<UcxContext> context_;
  const DevicePool& pool_;
  PeerNet* const net_;
  const double rate_;
  const size_t pages_max_;
  const TransportCapabilities capabilities_{.name = "ucx",
                                            .reason = "works between hosts, over RDMA where there is any"};
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  std::vector<WriteDone> done_;
  std::vector<std::pair<PeerId, Status>> broken_;
  std::vector<int32_t> from_;
};

}  // namespace

Status UcxSupport(const std::string& library) {
  static const Status status = [&]() -> Status {
    RETURN_IF_ERROR(LoadUcx(library).status());
    return UcxContext::Make().status();
  }();
  return status;
}

StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const DevicePool& pool, PeerNet* net,
                                                      const TransportOptions& options) {
  ASSIGN_OR_RETURN(std::shared_ptr<UcxContext> context, ContextFor(pool));
  return std::make_unique<UcxTransport>(std::move(context), pool, net, options);
}

namespace {

class Receiver final : public UcxReceiver {
 public:
  Receiver(std::shared_ptr<UcxContext> context, PeerNet* net, PeerEvents* events)
      : context_(std::move(context)), net_(net), events_(events) {}
  ~Receiver() override {
    while (!peers_.empty()) Remove(peers_.begin()->first);
    if (retired_.empty()) return;
    const auto until = std::chrono::steady_clock::now() + kLastWait;
    while (std::chrono::steady_clock::now() < until) Sweep();
  }

  StatusOr<std::string> Add(PeerId id) override {
    auto owned = std::make_unique<Peer>();
    Peer& peer = *owned;
    peer.id = id;
    peer.receiver = this;
    ASSIGN_OR_RETURN(peer.link, UcxLink::Make(context_));
    peer.link->OnMessage(kPages, &Receiver::OnPages, &peer);
    peer.link->OnMessage(kFirst, &Receiver::OnFirst, &peer);
    RETURN_IF_ERROR(peer.link->failed());
    ASSIGN_OR_RETURN(const PeerNet::Ends ends, net_->EndsOf(id));
    ASSIGN_OR_RETURN(const uint16_t port, peer.link->Listen(ends.local));
    net_->Watch(peer.link->descriptor());
    peers_[id] = std::move(owned);
    return std::string(reinterpret_cast<const char*>(&port), sizeof port);
  }

  void Poll(Report* report) override {
    Sweep();
    for (auto& [id, peer] : peers_) {
      for (int i = 0; i < kProgressPerTurn && peer->link->Progress(); ++i) {
      }
      if (!peer->taken.empty() && peer->link->failed().ok())
        report->taken.emplace_back(id, std::exchange(peer->taken, {}));
      if (std::exchange(peer->reached, false)) report->reached.push_back(id);
      if (peer->link->failed().ok() || peer->told) continue;
      peer->told = true;
      report->broken.emplace_back(id, peer->link->failed());
    }
  }

  Nanos MaySleep() override {
    for (auto& [id, peer] : peers_)
      if ((!peer->told && !peer->link->failed().ok()) || !peer->link->Arm()) return 0;
    return retired_.empty() ? std::numeric_limits<Nanos>::max() : kSweepTurn;
  }

  void Remove(PeerId id) override {
    const auto it = peers_.find(id);
    if (it == peers_.end()) return;
    Peer& peer = *it->second;
    peer.closing = true;
    net_->Forget(peer.link->descriptor());
    peer.link->Retire();
    retired_.push_back({std::move(it->second), std::chrono::steady_clock::now() + kRetired});
    peers_.erase(it);
  }

 private:
  // Longer than a request to connect takes that was under way when the peer was removed.
  static constexpr std::chrono::seconds kRetired{5};
  static constexpr std::chrono::milliseconds kLastWait{100};  // at the end of the process there is no more
  static constexpr Nanos kSweepTurn = 50'000'000;

  struct Peer;
  struct Retired {
    std::unique_ptr<Peer> peer;
    std::chrono::steady_clock::time_point until;
  };

  void Sweep() {
    const auto now = std::chrono::steady_clock::now();
    for (const Retired& r : retired_) r.peer->link->Progress();
    std::erase_if(retired_, [&](const Retired& r) { return r.until <= now; });
  }

  struct Peer {
    PeerId id;
    Receiver* receiver = nullptr;
    std::vector<uint64_t> taken;  // not told yet
    bool reached = false, told = false, closing = false;
    std::unique_ptr<UcxLink> link;
  };

  static ucs_status_t OnFirst(void* arg, const void*, size_t, void*, size_t, const ucp_am_recv_param_t*) {
    auto& peer = *static_cast<Peer*>(arg);
    peer.reached = true;
    peer.taken.push_back(kFirstToken);
    return UCS_OK;
  }
  static ucs_status_t OnPages(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                              const ucp_am_recv_param_t* param) {
    auto& peer = *static_cast<Peer*>(arg);
    if (peer.closing || !peer.link->failed().ok()) return UCS_OK;  // dropped
    PagesHeader h;
    if (header_bytes >= sizeof h) std::memcpy(&h, header, sizeof h);
    if (header_bytes < sizeof h || header_bytes != sizeof h + size_t(h.pages) * sizeof(int32_t) ||
        h.component > uint32_t(KvComponent::kIndex) || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
      peer.link->Fail(Invalid("transport ucx: a message header of {} bytes is malformed", header_bytes));
      return UCS_OK;
    }
    BulkHeader bulk;
    bulk.room = h.room;
    bulk.layers = {h.layer};
    bulk.component = KvComponent(h.component);
    bulk.pages.resize(h.pages);
    std::memcpy(bulk.pages.data(), static_cast<const std::byte*>(header) + sizeof h,
                size_t(h.pages) * sizeof(int32_t));
    bulk.payload_bytes = bytes;
    StatusOr<std::vector<iovec>> place = peer.receiver->events_->Place(peer.id, bulk);
    if (!place.ok()) {
      peer.link->Fail(place.status());
      return UCS_OK;
    }
    const auto* from = static_cast<const std::byte*>(data);
    for (const iovec& piece : *place) {
      std::memcpy(piece.iov_base, from, piece.iov_len);
      from += piece.iov_len;
    }
    peer.receiver->events_->OnBulkDone(peer.id, h.room, place->empty() ? 0 : bytes);
    peer.taken.push_back(h.token);
    return UCS_OK;
  }

  const std::shared_ptr<UcxContext> context_;
  PeerNet* const net_;
  PeerEvents* const events_;
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  std::vector<Retired> retired_;  // oldest first
};

}  // namespace

StatusOr<std::unique_ptr<UcxReceiver>> UcxReceiver::Make(const DevicePool& pool, PeerNet* net,
                                                         PeerEvents* events) {
  ASSIGN_OR_RETURN(std::shared_ptr<UcxContext> context, ContextFor(pool));
  return std::make_unique<Receiver>(std::move(context), net, events);
}

}  // namespace sluice::transfer
