// KV pages over the connection that carries the control frames (see peer_net.h): the receiver places them, so
// a closed connection is a fence, and a frame sent after a write arrives after its bytes.
//
// Figures of one run of `sluice bench transfer` stand in docs/disaggregation.md.
#pragma once

#include <memory>

#include "transfer/peer_net.h"
#include "transfer/transport.h"

namespace sluice::transfer {

// Both outlive the transport. Thread: that of the net.
std::unique_ptr<Transport> MakeTcpTransport(const DevicePool& pool, PeerNet* net,
                                            const TransportOptions& options);

}  // namespace sluice::transfer
