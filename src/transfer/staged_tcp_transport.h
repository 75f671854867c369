// Pages of a device with memory of its own, over the connection that carries the control frames.
//
// A thread of the transport waits for the device's event behind which a write's pages are final, copies whole
// pages, many in one call, into one of a few pinned buffers, and the progress thread sends them from there; a
// buffer is used again once its frames are out. Peers take turns, buffer by buffer, and one that does not
// read leaves each other peer a buffer at least, as long as there are as many of them. A peer's writes keep
// their order. What the device refuses ends the write, with the device's words.
#pragma once

#include <memory>

#include "transfer/peer_net.h"
#include "transfer/transport.h"

namespace sluice::transfer {

struct StagingOptions {
  int64_t buffer_bytes = 4 << 20;  // of one; at least a page of one layer
  int buffers = 8;
};

// pool (with memory of its own) and net outlive the transport. Thread: that of the net.
StatusOr<std::unique_ptr<Transport>> MakeStagedTcpTransport(const DevicePool& pool, PeerNet* net,
                                                            const TransportOptions& options,
                                                            const StagingOptions& staging = {});

}  // namespace sluice::transfer
