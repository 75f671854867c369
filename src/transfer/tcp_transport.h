// KV pages over the connection that carries the control frames (see peer_net.h): the receiver places them, so
// a closed connection is a fence, and a frame sent after a write arrives after its bytes.
//
// Why this is the transport between hosts and not UCX. Figures of one host's loopback, 126 MB in a run, 2
// cores, GB/s and share of a plain socket of the same bytes in the same run (`sluice bench transfer --paths
// p-d`):
//
// - this transport 1.96 (0.81) and 3.26 (1.32) in two runs, pages in random order 2.56 (1.01) and 2.12 (1.02)
// - UCX 1.13.1 over tcp, messages of 240 KiB sent whole: 1.76 (0.83), pages in random order 1.86 (0.89)
// - the same, rendezvous of 1 MiB: 2.1 to 3.1 of 2.8; 1.7 with UCX's own 64 KiB receive buffers
// - the same, puts, which it emulates by messages: 0.5 of 2.2; 1.5 with segments of 256 KiB
//
// UCX is fast enough, and it ends the process where a transport may end rooms at most: a sender whose
// receiver closes in the middle of a rendezvous (assertion at uct_iface.h:884, every time); a receiver whose
// sender closes in the middle of puts (ucp_request.inl:346, "Fatal: unexpected error: Endpoint timeout");
// whoever closes a connection that is not up yet (assertion at ucp_request.c:684), and on a busy machine some
// were not up after 5 s. So `ucx` is refused by name. Where there is RDMA, a later release of UCX belongs
// behind the same interface.
#pragma once

#include <memory>

#include "transfer/peer_net.h"
#include "transfer/transport.h"

namespace sluice::transfer {

// Both outlive the transport. Thread: that of the net.
std::unique_ptr<Transport> MakeTcpTransport(const DevicePool& pool, PeerNet* net,
                                            const TransportOptions& options);

}  // namespace sluice::transfer
