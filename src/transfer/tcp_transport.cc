#include "transfer/tcp_transport.h"

#include <set>

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
    for (const LogicalLayer& layer : write.layers) {
      header.layers = {layer.value};
      net_->SendBulk(write.peer, write.id, header, PagePieces::Of(pool_, header.layers, from),
                     &layer == &write.layers.back());
    }
  }
  void Poll(std::vector<WriteDone>* done) override {
    for (PeerNet::Written& w : net_->TakeWritten()) done->push_back({w.id, std::move(w.status)});
  }
  void RemovePeer(PeerId peer) override { net_->Close(peer); }
  void DropRoom(RoomId room) override { net_->DropBulk(room); }

 private:
  const DevicePool& pool_;
  PeerNet* const net_;
  const TransportCapabilities capabilities_{"tcp", false, true, "works between hosts"};
};

}  // namespace

std::unique_ptr<Transport> MakeTcpTransport(const DevicePool& pool, PeerNet* net,
                                            const TransportOptions& options) {
  net->SetRateLimit(options.bytes_per_second_max);
  return std::make_unique<TcpTransport>(pool, net);
}

}  // namespace sluice::transfer
