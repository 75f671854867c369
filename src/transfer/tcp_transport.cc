#include "transfer/tcp_transport.h"

#include <unordered_map>

#include "transfer/sent_frames.h"

namespace sluice::transfer {
namespace {

class TcpTransport final : public Transport {
 public:
  TcpTransport(const DevicePool& pool, PeerNet* net) : pool_(pool), net_(net) {}
  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::vector<std::string> Regions() const override { return {}; }
  Status AddPeer(PeerId, const Hello&) override { return OkStatus(); }
  void Post(const PostWrite& write) override {
    // A frame a layer: what an abort waits for, and what a heartbeat waits behind, is one of them.
    std::vector<int32_t> from;
    from.reserve(write.pages.size());
    BulkHeader header;
    header.room = write.room;
    header.pages.reserve(write.pages.size());
    for (const PageMove& move : write.pages) {
      from.push_back(move.from.value);
      header.pages.push_back(move.to.value);
    }
    writes_[write.id] = {.peer = write.peer, .waiting = int32_t(write.layers.size())};
    for (const LogicalLayer& layer : write.layers) {
      header.layers = {layer.value};
      header.token = sent_.Add(write.peer, write.id, true);
      net_->SendBulk(write.peer, write.id, header, PagePieces::Of(pool_, header.layers, from),
                     &layer == &write.layers.back());
    }
  }
  void Poll(std::vector<WriteDone>* done) override {
    for (PeerNet::Written& w : net_->TakeWritten()) {
      const auto it = writes_.find(w.id);
      if (it == writes_.end()) continue;
      it->second.out = true;
      if (!w.status.ok() || it->second.waiting == 0) End(it, std::move(w.status));
    }
    for (WriteDone& d : std::exchange(done_, {})) done->push_back(std::move(d));
  }
  Status OnTaken(PeerId peer, const std::vector<uint64_t>& tokens) override {
    for (const uint64_t token : tokens)
      RETURN_IF_ERROR(sent_.Arrived(peer, token, [&](WriteId id, bool) {
        const auto it = writes_.find(id);
        if (it == writes_.end()) return;  // its room has ended
        ++it->second.layers;
        if (--it->second.waiting == 0 && it->second.out) End(it, OkStatus());
      }));
    return OkStatus();
  }
  void RemovePeer(PeerId peer) override {
    net_->Close(peer);
    sent_.Forget(peer);
    for (auto it = writes_.begin(); it != writes_.end();) {
      const auto at = it++;  // the net reads none any more, whatever it has told of them or will
      if (at->second.peer == peer)
        End(at, at->second.waiting == 0 ? OkStatus() : Unavailable("the connection was cut"));
    }
  }
  void DropRoom(RoomId room) override { net_->DropBulk(room); }

 private:
  struct Write {
    PeerId peer;
    int32_t waiting = 0;  // frames that have not arrived
    int32_t layers = 0;   // that have
    bool out = false;     // its memory is not read any more
  };
  using Writes = std::unordered_map<WriteId, Write>;
  void End(Writes::iterator it, Status status) {
    done_.push_back({it->first, std::move(status), it->second.layers});
    writes_.erase(it);
  }

  const DevicePool& pool_;
  PeerNet* const net_;
  const TransportCapabilities capabilities_{.name = "tcp", .reason = "works between hosts"};
  SentFrames sent_;
  Writes writes_;
  std::vector<WriteDone> done_;
};

}  // namespace

std::unique_ptr<Transport> MakeTcpTransport(const DevicePool& pool, PeerNet* net,
                                            const TransportOptions& options) {
  net->SetRateLimit(options.bytes_per_second_max);
  return std::make_unique<TcpTransport>(pool, net);
}

}  // namespace sluice::transfer
