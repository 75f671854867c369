// Which bulk frames of which writes have not been reported as arrived, a sequence a peer. Thread: the
// transport's progress thread.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

#include "base/status.h"
#include "transfer/rooms.h"

namespace sluice::transfer {

class SentFrames {
 public:
  // The token of the peer's next frame: BulkHeader::token. ends_layer: with it a layer of the write is whole.
  uint64_t Add(PeerId peer, WriteId write, bool ends_layer) {
    Peer& p = peers_[peer];
    p.waiting.push_back({++p.last, write, ends_layer});
    return p.last;
  }
  // Frames arrive in the order of their tokens: all up to this one are there, those left out aside. Calls
  // each(write, ends_layer).
  template <typename F>
  Status Arrived(PeerId peer, uint64_t token, const F& each) {
    const auto it = peers_.find(peer);
    if (it == peers_.end() || token > it->second.last || token <= it->second.arrived)
      return Invalid("bulk frame {} has arrived, which is none that is awaited", token);
    Peer& p = it->second;
    p.arrived = token;
    while (!p.waiting.empty() && p.waiting.front().token <= token) {
      const Frame frame = p.waiting.front();
      p.waiting.pop_front();
      each(frame.write, frame.ends_layer);
    }
    return OkStatus();
  }
  void Forget(PeerId peer) { peers_.erase(peer); }

 private:
  struct Frame {
    uint64_t token = 0;
    WriteId write = 0;
    bool ends_layer = false;
  };
  struct Peer {
    uint64_t last = 0, arrived = 0;
    std::deque<Frame> waiting;
  };
  std::unordered_map<PeerId, Peer> peers_;
};

}  // namespace sluice::transfer
