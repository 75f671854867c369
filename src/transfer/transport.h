// Moves KV pages into a peer's pool. Room tables decide what moves and when.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kv/device_pool.h"
#include "transfer/rooms.h"

namespace sluice::transfer {

struct TransportCapabilities {
  std::string name;
  bool same_host_only = false;
  bool one_sided = false;   // writes into the peer's memory by itself: the peer alone cannot end its writes
  bool moves_bytes = true;  // false: `fake`, for warm-up and measuring one side alone; counts no bytes
  std::string reason;       // why this one was chosen, for /server_info
};

// OK: the receiver has every byte. Otherwise it has whole at least the first `layers` of the write's.
struct WriteDone {
  WriteId id = 0;
  Status status;
  int32_t layers = 0;
};

// One progress thread calls everything; a transport may have threads of its own behind it.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const TransportCapabilities& capabilities() const = 0;
  // What the peer needs to reach the local pool, a string a lane for Hello::regions.
  virtual std::vector<std::string> Regions() const = 0;
  // A connection to write to. Errors name what the peer lacks.
  virtual Status AddPeer(PeerId peer, const Hello& theirs) = 0;
  // Pages of writes posted from now on are final once a device has passed the event; null: now. Nothing to a
  // transport of host memory.
  virtual void SetGate(std::shared_ptr<DeviceEvent>) {}
  // Moves write.pages of write.layers, in order and behind earlier writes to the same peer. Each ends in one
  // WriteDone.
  virtual void Post(const PostWrite& write) = 0;
  virtual void Poll(std::vector<WriteDone>* done) = 0;
  // After it returned no byte of ours reaches the peer; outstanding writes have failed and come out of Poll.
  virtual void RemovePeer(PeerId peer) = 0;
  // The room is over: writes of it that have not begun fail now, one that has begun may end.
  virtual void DropRoom(RoomId room) = 0;

  // For transports with connections of their own: the DataPath of a peer that was added, before any write to
  // it. For those that the receiver takes part in: what it has Taken. After an error RemovePeer is next.
  virtual Status Connect(PeerId, const std::string&) { return Invalid("this transport has no address"); }
  virtual Status OnTaken(PeerId, const std::vector<uint64_t>&) {
    return Invalid("this transport has no messages");
  }
  // Connections that broke since the last call: RemovePeer is next.
  virtual std::vector<std::pair<PeerId, Status>> TakeBroken() { return {}; }
  // How long the caller may sleep before the next Poll, a wake-up by on_done or by a watched descriptor
  // aside.
  virtual Nanos MaySleep(Nanos /*now*/) { return std::numeric_limits<Nanos>::max(); }
};

struct TransportOptions {
  double bytes_per_second_max = 0;  // 0: none; slows a transport down to study overlap
  std::function<void()> on_done;    // after each completion, on a thread of the transport; must not block
};

// Same host: the peer's pool is mapped and written by a copying thread. `pool` (made by MakeShared) outlives
// the transport.
std::unique_ptr<Transport> MakeShmTransport(const DevicePool& pool, const TransportOptions& options);
// Moves nothing and completes at once.
std::unique_ptr<Transport> MakeFakeTransport();

}  // namespace sluice::transfer
