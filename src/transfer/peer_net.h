// Connections between instances: control frames and bulk KV on one TCP stream a peer, in order.
//
// One thread (the progress thread of a role) calls everything but Wake. A connection is a PeerId for as long
// as it lives and never again: after OnClosed or Close not a byte of the peer is taken, so closing is a fence
// for everything that arrives through this class. Control frames keep their order and pass pages that have
// not begun: one that must come behind pages is sent when these are written or dropped.
//
// Bulk frame: u32 magic "SLD1" | u32 header bytes | u64 payload bytes | header | payload. The header says
// which pages of which layers follow; the receiver decides where they land, or that they are thrown away.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "kv/kv_layout.h"
#include "transfer/rooms.h"
#include "transfer/wire.h"

namespace sluice::transfer {

struct BulkHeader {
  RoomId room = 0;
  uint64_t token = 0;           // the sender's number of the frame, rising on a connection: see TakeReceived
  std::vector<int32_t> layers;  // logical ids; layer by layer, each with all pages: latent, then index K
  std::vector<int32_t> pages;   // of the receiver
  uint64_t payload_bytes = 0;
  std::optional<KvComponent> component;  // that one alone; not on this wire, other transports cut layers so
};

// Called from within Poll alone, so that whoever sends or closes is never surprised by the end of a peer.
class PeerEvents {
 public:
  virtual ~PeerEvents() = default;
  virtual void OnConnected(PeerId peer, bool incoming) = 0;
  virtual void OnFrame(PeerId peer, const ControlMessage& message) = 0;
  // The connection ended by itself; not after Close. Exactly once. NotFound: nobody listens at the address.
  virtual void OnClosed(PeerId peer, const Status& why) = 0;
  // Where the payload lands, payload_bytes in all; empty: it is read and thrown away. An error ends the
  // connection.
  virtual StatusOr<std::vector<iovec>> Place(PeerId peer, const BulkHeader& header) = 0;
  virtual void OnBulkDone(PeerId peer, RoomId room, uint64_t bytes) = 0;
};

class PeerNet {
 public:
  explicit PeerNet(PeerEvents* events);
  ~PeerNet();
  PeerNet(const PeerNet&) = delete;
  PeerNet& operator=(const PeerNet&) = delete;

  // Unavailable names host, port and reason. Port 0: any free one.
  Status Listen(const std::string& host, int port);
  int port() const { return port_; }
  // Ends in OnConnected or OnClosed. Resolving a name may block; addresses do not.
  PeerId Connect(const std::string& host, int port);
  void Send(PeerId peer, const ControlMessage& message);
  // One frame of a write, which may have several, in order; the write is reported with its last one. The
  // memory must stay readable until TakeWritten has reported it.
  void SendBulk(PeerId peer, WriteId id, const BulkHeader& header, std::vector<iovec> payload, bool last);
  // Drops frames of the room that have not begun; their writes are reported as failed once none is under way.
  void DropBulk(RoomId room);
  // Nothing is taken from or sent to the peer any more; its unfinished writes are reported as failed.
  void Close(PeerId peer);
  void CloseAfterFlush(PeerId peer);
  // Sends nothing more and waits for the peer to close: the fence of a writer that this side cannot stop.
  void HalfClose(PeerId peer);
  bool Has(PeerId peer) const { return connections_.contains(peer.value); }
  // Both ends of a connection. Unavailable: there is none.
  struct Ends {
    sockaddr_storage local, remote;
  };
  StatusOr<Ends> EndsOf(PeerId peer) const;
  // "address port" of this side's end and of the other's; "" when there is no connection.
  std::string LocalEnd(PeerId peer) const;
  std::string RemoteEnd(PeerId peer) const;
  Nanos LastHeard(PeerId peer) const;  // of any byte; 0 for an unknown peer
  void SetRateLimit(double bytes_per_second) { rate_ = bytes_per_second; }

  struct Written {
    WriteId id;
    Status status;
  };
  std::vector<Written> TakeWritten() { return std::exchange(written_, {}); }
  // The last frame whose payload is placed or thrown away, of each peer that has sent one since the last
  // call.
  struct Received {
    PeerId peer;
    uint64_t token = 0;
  };
  std::vector<Received> TakeReceived() { return std::exchange(received_, {}); }

  // Waits for sockets, Wake or the time, and serves what is there.
  void Poll(Nanos timeout);
  void Wake();  // any thread
  // Poll returns when this descriptor of somebody else is readable, too, and leaves it alone. REQUIRES it to
  // be forgotten before it is closed.
  void Watch(int fd);
  void Forget(int fd);

 private:
  struct Out {
    std::vector<std::byte> owned;
    std::vector<iovec> parts;
    size_t part = 0;  // first part that is not sent whole
    WriteId id = 0;
    RoomId room = 0;
    bool begun = false, last = false;
    Status status;  // what its end reports
  };
  struct Connection {
    PeerId peer;
    int fd = -1;
    bool connecting = false, incoming = false, flush_then_close = false, want_write = false,
         half_closed = false;
    std::deque<Out> out;
    std::vector<std::byte> in;
    size_t in_begin = 0;
    // A payload under way.
    bool bulk = false;
    BulkHeader header;
    std::vector<iovec> place;
    size_t place_at = 0;
    uint64_t bulk_left = 0;
    Nanos heard = 0;
    Nanos may_send_at = 0;
    Status failed;  // it broke while sending; Poll ends it
  };
  Connection* Find(PeerId peer);
  Connection& Add(int fd, bool incoming, bool connecting);
  void Accept();
  void Readable(PeerId peer);
  void Writable(PeerId peer);
  bool Flush(Connection& c);  // false: the connection is gone
  // Takes whole frames out of `in`; false: the connection is gone.
  bool Parse(PeerId peer);
  bool StartBulk(PeerId peer, size_t header_at, uint32_t header_bytes, uint64_t payload);
  void TakeBulkBytes(Connection& c, std::span<const std::byte> bytes);
  void End(PeerId peer, const Status& why);
  void EndBroken();
  void Leave(const Connection& c, const Status& why);
  void Drop(Connection& c, const Status& why);
  void Watch(Connection& c);

  PeerEvents* const events_;
  int epoll_ = -1, wake_ = -1, listener_ = -1, port_ = 0;
  std::map<int32_t, std::unique_ptr<Connection>> connections_;
  int32_t next_peer_ = 1;
  std::vector<Written> written_;
  std::vector<Received> received_;
  bool broken_ = false;              // some connection has failed
  std::atomic<bool> waking_{false};  // Wake was called since Poll last looked
  double rate_ = 0;
};

// Pieces of the pages that a write reads or a bulk header names, in the order of the payload; neighbours
// merged.
class PagePieces {
 public:
  template <typename Pool>
  static std::vector<iovec> Of(const Pool& pool, std::span<const int32_t> layers,
                               std::span<const int32_t> pages,
                               std::optional<KvComponent> component = std::nullopt) {
    std::vector<iovec> out;
    const auto add = [&](std::byte* at, int64_t bytes) {
      if (!out.empty() && static_cast<std::byte*>(out.back().iov_base) + out.back().iov_len == at)
        out.back().iov_len += size_t(bytes);
      else
        out.push_back({at, size_t(bytes)});
    };
    const auto& layout = pool.layout();
    for (const int32_t l : layers) {
      const LogicalLayer layer(l);
      if (component != KvComponent::kIndex)
        for (const int32_t p : pages) add(pool.Latent(layer, PageId(p)), layout.latent_page_bytes());
      if (component == KvComponent::kLatent || !layout.IndexSlot(layer).valid()) continue;
      for (const int32_t p : pages) add(pool.Index(layer, PageId(p)), layout.index_page_bytes());
    }
    return out;
  }
};

}  // namespace sluice::transfer
