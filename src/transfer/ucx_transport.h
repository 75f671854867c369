// KV pages over UCX: TCP here, RDMA where there is a device for it (UCX_TLS and UCX_NET_DEVICES choose).
//
// Pages go as active messages of up to 240 KiB of one component of one layer. The receiver places them as it
// places bulk frames (PeerEvents::Place), so that nothing of a peer lands outside its rooms, and names those
// whose bytes are there on the control connection (Taken): a write is done when all of its messages are.
//
// Messages are sent whole and one way alone, over a connection that both sides have made (UCX's listener),
// and the first one is answered before another goes: so nothing of UCX's own is under way when a peer ends,
// which is where it ends the process with it. Tried on TCP with peers killed (-9) and connections closed at
// random moments while they came up and while messages went, on a busy machine; survivors of both sides that
// UCX ended:
//
// - this way, UCX 1.22.0: none of 1230
// - connected by worker addresses, before the connection is up: 1.13.1 20 of 80 (assertion at
//   ucp_request.c:684), 1.22.0 13 of 1330 (stubs.c:107, in uct_tcp_ep_pending_purge)
// - puts, which UCX emulates over TCP and answers: 20 of 60 in both ("unexpected error: Endpoint timeout",
//   ucp_request.inl:346 and :356)
// - rendezvous: 1.13.1 23 of 40 (ucp_ep.c:437, uct_iface.h:884); 1.22.0 crashes when the memory is
//   unregistered behind them
//
// Puts need a fence, too: nothing may land in pages that decode has given to others. What became of 60
// receivers each (1.22.0) that closed their endpoint by force while a sender put, and unmapped the memory:
//
// - over TCP (emulated: the receiver's own worker writes): 35 crashed there, in 5 more bytes had landed
// - over CMA, which is one-sided (process_vm_writev), but which UCX takes only for connections without error
//   handling: in 25 bytes had landed after the close
// - over posix memory that UCX allocated, with UCX_MM_ERROR_HANDLING: in 49
//
// What a host's memory offers is thus no better than the shm transport, which waits for the writer's word.
// On verbs the end of the queue pair would be the fence; that takes a device to try.
//
// So 1.22 is required. Figures of one host's loopback, 126 MB in a run, 2 cores (`sluice bench transfer
// --paths p-d`), GB/s and share of a plain socket of the same bytes in the same run: 3.79 (0.78), pages in
// random order 3.81 (0.76); the tcp transport 1.69 (0.74) and 3.86 (0.95) in that run.
//
// Every connection has a worker of its own on both sides. Ending it is the fence: no byte of the peer lands
// afterwards. A connection that breaks ends the control connection with it; rooms go on over the next two.
// Decode listens at the address of the control connection and names the port there (DataPath); prefill
// connects.
//
// Thread: the progress thread of a node calls everything and runs all callbacks; the sockets of UCX wake it
// up through PeerNet.
//
// Trust: UCX listens on the addresses of its devices and believes who connects. Use it inside a trusted
// network.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transfer/peer_net.h"
#include "transfer/transport.h"

namespace sluice::transfer {

// Whether this build and this host have it. Unavailable: what is required, what was found, and the remedy.
// The first call decides which library is taken ("": see LoadUcx) and comes before other threads run.
Status UcxSupport(const std::string& library = "");

// The sending side. Both outlive the transport.
StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const DevicePool& pool, PeerNet* net,
                                                      const TransportOptions& options);

// The receiving side: a connection for each peer that sends by this transport.
class UcxReceiver {
 public:
  virtual ~UcxReceiver() = default;
  // All three outlive it. Of `events`, Place and OnBulkDone are called from within Poll.
  static StatusOr<std::unique_ptr<UcxReceiver>> Make(const DevicePool& pool, PeerNet* net,
                                                     PeerEvents* events);
  // The address for the peer's DataPath.
  virtual StatusOr<std::string> Add(PeerId peer) = 0;
  struct Report {
    std::vector<PeerId> reached;  // the peer's first message is here: the way is open
    std::vector<std::pair<PeerId, std::vector<uint64_t>>> taken;  // to be told to the peer
    std::vector<std::pair<PeerId, Status>> broken;                // Remove is next
  };
  virtual void Poll(Report* report) = 0;  // appends
  virtual Nanos MaySleep() = 0;           // as Transport's
  // The fence. Nothing for a peer that was not added.
  virtual void Remove(PeerId peer) = 0;
};

}  // namespace sluice::transfer
