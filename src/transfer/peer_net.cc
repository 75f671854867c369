#include "transfer/peer_net.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/check.h"
#include "fmt/format.h"

namespace sluice::transfer {
namespace {

constexpr uint32_t kControlMagic = 0x31434c53;  // "SLC1"
constexpr uint32_t kBulkMagic = 0x31444c53;     // "SLD1"
constexpr size_t kBulkPrefix = 16;
constexpr size_t kReadBytes = 256 << 10;
constexpr size_t kPartsPerCall = 256;
constexpr int kReadsPerTurn = 16;  // then other connections get their turn
constexpr size_t kThrottledBytes = 64 << 10;
constexpr uint64_t kListenerTag = uint64_t(-1), kWakeTag = uint64_t(-2), kOtherTag = uint64_t(-3);

Nanos Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <typename T>
void Put(std::vector<std::byte>* out, T v) {
  const auto* p = reinterpret_cast<const std::byte*>(&v);
  out->insert(out->end(), p, p + sizeof(T));
}
template <typename T>
T Load(const std::byte* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

Status ParseBulkHeader(std::span<const std::byte> in, BulkHeader* h) {
  size_t at = 0;
  const auto has = [&](size_t n) { return in.size() - at >= n; };
  const auto list = [&](std::vector<int32_t>* out) {
    if (!has(4)) return false;
    const uint32_t n = Load<uint32_t>(in.data() + at);
    at += 4;
    if (n > in.size() / 4 || !has(size_t(n) * 4)) return false;
    out->resize(n);
    if (n > 0) std::memcpy(out->data(), in.data() + at, size_t(n) * 4);
    at += size_t(n) * 4;
    return true;
  };
  if (!has(16)) return Invalid("bulk frame: a header of {} bytes is too short", in.size());
  h->room = Load<uint64_t>(in.data());
  h->token = Load<uint64_t>(in.data() + 8);
  at = 16;
  if (!list(&h->layers) || !list(&h->pages) || at != in.size())
    return Invalid("bulk frame: its header of {} bytes is malformed", in.size());
  return OkStatus();
}

}  // namespace

PeerNet::PeerNet(PeerEvents* events) : events_(events) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  SLUICE_CHECK(epoll_ >= 0 && wake_ >= 0, "epoll: {}", std::strerror(errno));
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.u64 = kWakeTag;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &e);
}

PeerNet::~PeerNet() {
  for (auto& [id, c] : connections_) close(c->fd);
  if (listener_ >= 0) close(listener_);
  close(wake_);
  close(epoll_);
}

Status PeerNet::Listen(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  if (const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); rc != 0)
    return Unavailable("bootstrap port: cannot resolve {}: {}", host, gai_strerror(rc));
  listener_ = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int one = 1;
  setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  const bool ok = listener_ >= 0 && bind(listener_, found->ai_addr, found->ai_addrlen) == 0 &&
                  listen(listener_, 1024) == 0;
  const int error = errno;
  freeaddrinfo(found);
  if (!ok)
    return Unavailable(
        "cannot listen on {}:{} for decode instances: {}; choose another "
        "--disaggregation-bootstrap-port",
        host, port, std::strerror(error));
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  getsockname(listener_, reinterpret_cast<sockaddr*>(&bound), &length);
  port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                            : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.u64 = kListenerTag;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, listener_, &e);
  return OkStatus();
}

PeerNet::Connection& PeerNet::Add(int fd, bool incoming, bool connecting) {
  auto owned = std::make_unique<Connection>();
  Connection& c = *owned;
  c.peer = PeerId(next_peer_++);
  c.fd = fd;
  c.incoming = incoming;
  c.connecting = connecting;
  c.heard = Now();
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  connections_[c.peer.value] = std::move(owned);
  epoll_event e{};
  e.events = connecting ? EPOLLOUT : EPOLLIN;
  e.data.u64 = uint64_t(c.peer.value);
  c.want_write = connecting;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e);
  return c;
}

PeerId PeerNet::Connect(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  Status failed;
  int fd = -1;
  if (const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); rc != 0) {
    failed = Unavailable("prefill instance {}:{}: cannot resolve the name: {}", host, port, gai_strerror(rc));
  } else {
    fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || (connect(fd, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS)) {
      failed = Unavailable("prefill instance {}:{}: {}", host, port, std::strerror(errno));
      if (fd >= 0) close(fd);
      fd = -1;
    }
    freeaddrinfo(found);
  }
  if (fd < 0) {  // reported like any other end, from Poll
    fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
  }
  return Add(fd, false, true).peer;
}

PeerNet::Connection* PeerNet::Find(PeerId peer) {
  const auto it = connections_.find(peer.value);
  return it == connections_.end() ? nullptr : it->second.get();
}

Nanos PeerNet::LastHeard(PeerId peer) const {
  const auto it = connections_.find(peer.value);
  return it == connections_.end() ? 0 : it->second->heard;
}

void PeerNet::Watch(Connection& c) {
  const bool wait = !c.out.empty() || c.connecting;
  if (wait == c.want_write) return;
  c.want_write = wait;
  epoll_event e{};
  e.events = (c.connecting ? 0u : uint32_t(EPOLLIN)) | (wait ? uint32_t(EPOLLOUT) : 0u);
  e.data.u64 = uint64_t(c.peer.value);
  epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &e);
}

void PeerNet::Send(PeerId peer, const ControlMessage& message) {
  Connection* c = Find(peer);
  if (c == nullptr || c->half_closed) return;
  // A sign of life that waits for megabytes of a slow line is none, and a room that is over does not wait for
  // the pages of others.
  const auto at =
      std::find_if(c->out.begin(), c->out.end(), [](const Out& o) { return o.id != 0 && !o.begun; });
  Out& out = *c->out.emplace(at);
  out.owned = Encode(message);
  out.parts.push_back({out.owned.data(), out.owned.size()});
  if (!c->connecting && c->out.size() == 1) Flush(*c);
}

void PeerNet::SendBulk(PeerId peer, WriteId id, const BulkHeader& header, std::vector<iovec> payload,
                       bool last) {
  Connection* c = Find(peer);
  if (c == nullptr || c->half_closed) {
    if (last) written_.push_back({id, Unavailable("the connection is gone")});
    return;
  }
  Out& out = c->out.emplace_back();
  out.id = id;
  out.last = last;
  out.room = header.room;
  const uint32_t header_bytes = uint32_t(24 + 4 * (header.layers.size() + header.pages.size()));
  uint64_t bytes = 0;
  for (const iovec& part : payload) bytes += part.iov_len;
  out.owned.reserve(kBulkPrefix + header_bytes);
  Put(&out.owned, kBulkMagic);
  Put(&out.owned, header_bytes);
  Put(&out.owned, bytes);
  Put(&out.owned, header.room);
  Put(&out.owned, header.token);
  for (const auto* list : {&header.layers, &header.pages}) {
    Put(&out.owned, uint32_t(list->size()));
    for (const int32_t v : *list) Put(&out.owned, v);
  }
  out.parts.reserve(payload.size() + 1);
  out.parts.push_back({out.owned.data(), out.owned.size()});
  out.parts.insert(out.parts.end(), payload.begin(), payload.end());
  if (!c->connecting && c->out.size() == 1) Flush(*c);
}

void PeerNet::DropBulk(RoomId room) {
  for (auto& [id, c] : connections_) {
    Out* under_way = c->out.empty() || !c->out.front().begun ? nullptr : &c->out.front();
    std::erase_if(c->out, [&](const Out& o) {
      if (o.id == 0 || o.room != room || o.begun) return false;
      if (!o.last) return true;
      const Status why = Aborted("the room ended before the write");
      if (under_way != nullptr && under_way->id == o.id) {  // its memory is read until that frame is out
        under_way->last = true;
        under_way->status = why;
      } else {
        written_.push_back({o.id, why});
      }
      return true;
    });
    Watch(*c);
  }
}

bool PeerNet::Flush(Connection& c) {
  while (!c.out.empty() && c.failed.ok()) {
    Out& out = c.out.front();
    iovec parts[kPartsPerCall];
    size_t n = 0, bytes = 0;
    size_t limit = SIZE_MAX;
    if (rate_ > 0 && out.id != 0) {
      if (Now() < c.may_send_at) return true;  // Poll comes back in time
      limit = kThrottledBytes;
    }
    for (size_t i = out.part; i < out.parts.size() && n < kPartsPerCall && bytes < limit; ++i) {
      parts[n] = out.parts[i];
      parts[n].iov_len = std::min(parts[n].iov_len, limit - bytes);
      bytes += parts[n++].iov_len;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = n;
    const ssize_t sent = sendmsg(c.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      c.failed = Unavailable("the connection broke while sending: {}", std::strerror(errno));
      broken_ = true;
      break;
    }
    out.begun = true;
    if (rate_ > 0 && out.id != 0)
      c.may_send_at = std::max(c.may_send_at, Now() - 5'000'000) + Nanos(double(sent) / rate_ * 1e9);
    size_t left = size_t(sent);
    while (left > 0) {
      iovec& part = out.parts[out.part];
      const size_t take = std::min(left, part.iov_len);
      part.iov_base = static_cast<std::byte*>(part.iov_base) + take;
      part.iov_len -= take;
      left -= take;
      if (part.iov_len == 0) ++out.part;
    }
    while (out.part < out.parts.size() && out.parts[out.part].iov_len == 0) ++out.part;
    if (out.part < out.parts.size()) continue;
    if (out.last) written_.push_back({out.id, out.status});
    c.out.pop_front();
  }
  if (c.out.empty() && c.failed.ok() && c.flush_then_close) {
    shutdown(c.fd, SHUT_WR);
    const PeerId peer = c.peer;
    Close(peer);
    return false;
  }
  Watch(c);
  return true;
}

void PeerNet::Leave(const Connection& c, const Status& why) {
  for (const Out& o : c.out)
    if (o.last) written_.push_back({o.id, why});
  epoll_ctl(epoll_, EPOLL_CTL_DEL, c.fd, nullptr);
}

void PeerNet::Drop(Connection& c, const Status& why) {
  Leave(c, why);
  close(c.fd);
  connections_.erase(c.peer.value);
}

void PeerNet::Close(PeerId peer) {
  if (Connection* c = Find(peer)) Drop(*c, Unavailable("the connection was cut"));
}

void PeerNet::CloseAfterFlush(PeerId peer) {
  Connection* c = Find(peer);
  if (c == nullptr) return;
  c->flush_then_close = true;
  if (!c->connecting) Flush(*c);
}

void PeerNet::HalfClose(PeerId peer) {
  Connection* c = Find(peer);
  if (c == nullptr || c->half_closed) return;
  c->half_closed = true;
  shutdown(c->fd, SHUT_WR);
}

void PeerNet::End(PeerId peer, const Status& why) {
  const auto it = connections_.find(peer.value);
  if (it == connections_.end()) return;
  const std::unique_ptr<Connection> c = std::move(it->second);
  connections_.erase(it);
  Leave(*c, why);
  events_->OnClosed(peer, why);
  close(c->fd);  // last: the peer takes it for the end of all that this side writes
}

void PeerNet::EndBroken() {
  while (std::exchange(broken_, false)) {
    std::vector<std::pair<PeerId, Status>> ended;
    for (const auto& [id, c] : connections_)
      if (!c->failed.ok()) ended.emplace_back(c->peer, c->failed);
    for (const auto& [peer, why] : ended) End(peer, why);
  }
}

void PeerNet::Accept() {
  for (int i = 0; i < 64; ++i) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    const PeerId peer = Add(fd, true, false).peer;
    events_->OnConnected(peer, true);
  }
}

void PeerNet::TakeBulkBytes(Connection& c, std::span<const std::byte> bytes) {
  c.bulk_left -= bytes.size();
  while (!bytes.empty() && c.place_at < c.place.size()) {
    iovec& part = c.place[c.place_at];
    const size_t take = std::min(bytes.size(), part.iov_len);
    std::memcpy(part.iov_base, bytes.data(), take);
    part.iov_base = static_cast<std::byte*>(part.iov_base) + take;
    part.iov_len -= take;
    bytes = bytes.subspan(take);
    if (part.iov_len == 0) ++c.place_at;
  }
}

bool PeerNet::StartBulk(PeerId peer, size_t header_at, uint32_t header_bytes, uint64_t payload) {
  Connection* c = Find(peer);
  BulkHeader header;
  Status ok = ParseBulkHeader({c->in.data() + header_at, header_bytes}, &header);
  header.payload_bytes = payload;
  StatusOr<std::vector<iovec>> place = std::vector<iovec>();
  if (ok.ok()) {
    place = events_->Place(peer, header);
    ok = place.status();
  }
  if (!ok.ok()) {
    End(peer, ok);
    return false;
  }
  c = Find(peer);
  if (c == nullptr) return false;
  c->bulk = true;
  c->header = std::move(header);
  c->place = std::move(*place);
  c->place_at = 0;
  c->bulk_left = payload;
  return true;
}

bool PeerNet::Parse(PeerId peer) {
  for (;;) {
    Connection* c = Find(peer);
    if (c == nullptr) return false;
    const size_t have = c->in.size() - c->in_begin;
    const std::byte* p = c->in.data() + c->in_begin;
    if (c->bulk) {
      const size_t take = size_t(std::min<uint64_t>(have, c->bulk_left));
      TakeBulkBytes(*c, {p, take});
      c->in_begin += take;
      if (c->bulk_left > 0) break;
      c->bulk = false;
      events_->OnBulkDone(peer, c->header.room, c->place.empty() ? 0 : c->header.payload_bytes);
      if (received_.empty() || received_.back().peer != peer) received_.push_back({peer, 0});
      received_.back().token = c->header.token;
      continue;
    }
    if (have < 12) break;
    if (Load<uint32_t>(p) == kBulkMagic) {
      if (have < kBulkPrefix) break;
      const uint32_t header_bytes = Load<uint32_t>(p + 4);
      if (header_bytes > kMaxPayloadBytes) {
        End(peer, Invalid("bulk frame: a header of {} bytes, limit {}", header_bytes, kMaxPayloadBytes));
        return false;
      }
      if (have < kBulkPrefix + header_bytes) break;
      const uint64_t payload = Load<uint64_t>(p + 8);
      const size_t at = c->in_begin + kBulkPrefix;
      c->in_begin += kBulkPrefix + header_bytes;
      if (!StartBulk(peer, at, header_bytes, payload)) return false;
      continue;
    }
    // Anything else must be a control frame: Decode names what is wrong with it.
    const uint32_t length = Load<uint32_t>(p + 8);
    const bool plausible = Load<uint32_t>(p) == kControlMagic && length <= kMaxPayloadBytes;
    if (plausible && have < 12 + size_t(length)) break;
    const StatusOr<ControlMessage> message = Decode({p, plausible ? 12 + size_t(length) : have});
    if (!message.ok()) {
      End(peer, message.status());
      return false;
    }
    c->in_begin += 12 + size_t(length);
    events_->OnFrame(peer, *message);
  }
  Connection* c = Find(peer);
  if (c == nullptr) return false;
  if (c->in_begin == c->in.size()) {
    c->in.clear();
    c->in_begin = 0;
  } else if (c->in_begin > kReadBytes) {
    c->in.erase(c->in.begin(), c->in.begin() + long(c->in_begin));
    c->in_begin = 0;
  }
  return true;
}

void PeerNet::Readable(PeerId peer) {
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    Connection* c = Find(peer);
    if (c == nullptr) return;
    ssize_t got;
    if (c->bulk && c->place_at < c->place.size() && c->in_begin == c->in.size()) {
      // Straight into the pages, never past the payload's end.
      iovec parts[kPartsPerCall];
      size_t n = 0;
      for (size_t i = c->place_at; i < c->place.size() && n < kPartsPerCall; ++i) parts[n++] = c->place[i];
      got = readv(c->fd, parts, int(n));
      if (got > 0) {
        c->heard = Now();
        c->bulk_left -= uint64_t(got);
        for (size_t left = size_t(got); left > 0;) {
          iovec& part = c->place[c->place_at];
          const size_t take = std::min(left, part.iov_len);
          part.iov_base = static_cast<std::byte*>(part.iov_base) + take;
          part.iov_len -= take;
          left -= take;
          if (part.iov_len == 0) ++c->place_at;
        }
        if (c->bulk_left == 0 && !Parse(peer)) return;
        continue;
      }
    } else {
      const size_t old = c->in.size();
      c->in.resize(old + kReadBytes);
      got = read(c->fd, c->in.data() + old, kReadBytes);
      c->in.resize(old + size_t(std::max<ssize_t>(0, got)));
      if (got > 0) {
        c->heard = Now();
        if (!Parse(peer)) return;
        if (size_t(got) < kReadBytes) return;
        continue;
      }
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    End(peer, got == 0 ? Unavailable("the peer closed the connection")
                       : Unavailable("the connection broke: {}", std::strerror(errno)));
    return;
  }
}

void PeerNet::Writable(PeerId peer) {
  Connection* c = Find(peer);
  if (c == nullptr) return;
  if (c->connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    if (error != 0) {
      End(peer,
          absl::Status(
              error == ECONNREFUSED ? absl::StatusCode::kNotFound : absl::StatusCode::kUnavailable,
              fmt::format("cannot connect: {}", std::strerror(error == ENOTSOCK ? EHOSTUNREACH : error))));
      return;
    }
    c->connecting = false;
    c->want_write = true;
    c->heard = Now();
    epoll_event e{};
    e.events = EPOLLIN | EPOLLOUT;
    e.data.u64 = uint64_t(peer.value);
    epoll_ctl(epoll_, EPOLL_CTL_MOD, c->fd, &e);
    events_->OnConnected(peer, false);
    c = Find(peer);
    if (c == nullptr) return;
  }
  Flush(*c);
}

void PeerNet::Poll(Nanos timeout) {
  if (rate_ > 0) {
    // Throttled connections: not by readiness, but by time.
    for (const auto& [id, c] : connections_)
      if (!c->out.empty() && c->out.front().id != 0)
        timeout = std::min(timeout, std::max<Nanos>(0, c->may_send_at - Now()));
    for (auto& [id, c] : connections_) {
      const bool throttled =
          !c->connecting && !c->out.empty() && c->out.front().id != 0 && Now() < c->may_send_at;
      const bool wait = (!c->out.empty() && !throttled) || c->connecting;
      if (wait == c->want_write) continue;
      c->want_write = wait;
      epoll_event e{};
      e.events = (c->connecting ? 0u : uint32_t(EPOLLIN)) | (wait ? uint32_t(EPOLLOUT) : 0u);
      e.data.u64 = uint64_t(c->peer.value);
      epoll_ctl(epoll_, EPOLL_CTL_MOD, c->fd, &e);
    }
  }
  EndBroken();
  if (!written_.empty()) timeout = 0;
  epoll_event events[64];
  timespec wait{time_t(timeout / 1'000'000'000), long(timeout % 1'000'000'000)};
  int n = epoll_pwait2(epoll_, events, 64, &wait, nullptr);
  if (n < 0 && errno == ENOSYS) n = epoll_wait(epoll_, events, 64, int((timeout + 999'999) / 1'000'000));
  for (int i = 0; i < n; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kWakeTag) {
      uint64_t value;
      [[maybe_unused]] const ssize_t r = read(wake_, &value, sizeof value);
      waking_ = false;  // who finds it set has left its word before this, and is heard when Poll returns
    } else if (tag == kListenerTag) {
      Accept();
    } else if (tag != kOtherTag) {
      const PeerId peer{int32_t(tag)};
      Connection* c = Find(peer);
      if (c == nullptr) continue;
      if (c->connecting) {
        Writable(peer);
      } else {
        if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) Readable(peer);
        if (events[i].events & EPOLLOUT) Writable(peer);
      }
    }
  }
  EndBroken();
}

StatusOr<PeerNet::Ends> PeerNet::EndsOf(PeerId peer) const {
  Ends ends{};
  socklen_t local = sizeof ends.local, remote = sizeof ends.remote;
  const auto it = connections_.find(peer.value);
  if (it == connections_.end() ||
      getsockname(it->second->fd, reinterpret_cast<sockaddr*>(&ends.local), &local) != 0 ||
      getpeername(it->second->fd, reinterpret_cast<sockaddr*>(&ends.remote), &remote) != 0)
    return Unavailable("the connection is gone");
  return ends;
}

namespace {
std::string NameOf(const sockaddr_storage& end) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&end), sizeof end, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "";
  std::string_view name = host;
  if (name.starts_with("::ffff:")) name.remove_prefix(7);  // a listener for both families sees IPv4 so
  return fmt::format("{} {}", name, port);
}
}  // namespace

std::string PeerNet::LocalEnd(PeerId peer) const {
  const StatusOr<Ends> ends = EndsOf(peer);
  return ends.ok() ? NameOf(ends->local) : "";
}

std::string PeerNet::RemoteEnd(PeerId peer) const {
  const StatusOr<Ends> ends = EndsOf(peer);
  return ends.ok() ? NameOf(ends->remote) : "";
}

void PeerNet::Watch(int fd) {
  epoll_event e{};
  e.events = EPOLLIN;
  e.data.u64 = kOtherTag;
  SLUICE_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e) == 0, "epoll: {}", std::strerror(errno));
}

void PeerNet::Forget(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

void PeerNet::Wake() {
  if (waking_.exchange(true)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t r = write(wake_, &one, sizeof one);
}

}  // namespace sluice::transfer
