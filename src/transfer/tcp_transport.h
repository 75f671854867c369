// KV pages over the connection that carries the control frames (see peer_net.h): the receiver places them, so
// a closed connection is a fence, and a frame sent after a write arrives after its bytes.
//
// Figures of one host's loopback, 126 MB in a run, 2 cores, GB/s and share of a plain socket of the same
// bytes in the same run (`sluice bench transfer --paths p-d`): 1.96 (0.81) and 3.26 (1.32) in two runs, pages
// in random order 2.56 (1.01) and 2.12 (1.02). It is the transport between hosts unless `ucx` is asked for,
// whose figures are in ucx_transport.h.
#pragma once

#include <memory>

#include "transfer/peer_net.h"
#include "transfer/transport.h"

namespace sluice::transfer {

// Both outlive the transport. Thread: that of the net.
std::unique_ptr<Transport> MakeTcpTransport(const DevicePool& pool, PeerNet* net,
                                            const TransportOptions& options);

}  // namespace sluice::transfer
