// KV pages over the connection that carries the control frames (see peer_net.h): the receiver places them, so
// a closed connection is a fence, and a frame sent after a write arrives after its bytes.
//
// Figures of one host's loopback, 256 MB in a run, 2 cores: this transport 1.8 GB/s, a plain socket of the
// same bytes 1.6 GB/s (`sluice bench transfer --paths p-d`), UCX 1.13 over tcp 1.9 GB/s (its own
// ucx_perftest, active messages of 16 MiB with rendezvous). So UCX gains nothing where there is no RDMA;
// where there is, it belongs behind the same interface.
#pragma once

#include <memory>

#include "transfer/peer_net.h"
#include "transfer/transport.h"

namespace sluice::transfer {

// Both outlive the transport. Thread: that of the net.
std::unique_ptr<Transport> MakeTcpTransport(const DevicePool& pool, PeerNet* net,
                                            const TransportOptions& options);

}  // namespace sluice::transfer
