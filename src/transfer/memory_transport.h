// A transport inside one process for tests: pools are reached by pointer, nothing moves until the test says
// so, and writes fail, hang or stop halfway on request.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "transfer/transport.h"

namespace sluice::transfer::testing {

class MemoryTransport final : public Transport {
 public:
  explicit MemoryTransport(const DevicePool& pool) : pool_(pool) {}
  void Reach(PeerId peer, const DevicePool& remote) { peers_[peer.value] = &remote; }

  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::vector<std::string> Regions() const override { return {}; }
  Status AddPeer(PeerId, const Hello&) override { return OkStatus(); }
  void Post(const PostWrite& write) override { todo_.push_back(write); }
  void Poll(std::vector<WriteDone>* done) override {
    done->insert(done->end(), done_.begin(), done_.end());
    done_.clear();
  }
  void RemovePeer(PeerId peer) override {
    peers_.erase(peer.value);
    Discard([&](const PostWrite& w) { return w.peer == peer; }, Unavailable("the connection was cut"));
  }
  void DropRoom(RoomId room) override {
    Discard([&](const PostWrite& w) { return w.room == room && !begun_; }, Aborted("dropped"));
  }

  // Moves one layer of the oldest write; false: there is none. Its end comes with its last layer.
  bool Step() {
    if (todo_.empty()) return false;
    PostWrite& w = todo_.front();
    if (!fail_next_.ok()) {
      done_.push_back({w.id, std::exchange(fail_next_, OkStatus())});
      todo_.pop_front();
      begun_ = false;
      return true;
    }
    const LogicalLayer layer = w.layers.front();
    const DevicePool& remote = *peers_.at(w.peer.value);
    for (const PageMove& m : w.pages)
      for (const KvPiece& piece : pool_.layout().pieces()) {
        if (piece.layer != layer) continue;
        std::memcpy(remote.Piece(piece, m.to), pool_.Piece(piece, m.from), size_t(piece.bytes));
        bytes_ += piece.bytes;
      }
    w.layers.erase(w.layers.begin());
    begun_ = !w.layers.empty();
    if (begun_) return true;
    done_.push_back({w.id, OkStatus()});
    todo_.pop_front();
    return true;
  }
  void FailNext(Status why) { fail_next_ = std::move(why); }
  size_t waiting() const { return todo_.size(); }
  int64_t bytes() const { return bytes_; }

 private:
  template <typename F>
  void Discard(const F& which, const Status& why) {
    std::deque<PostWrite> kept;
    for (PostWrite& w : todo_) {
      if (which(w))
        done_.push_back({w.id, why});
      else
        kept.push_back(std::move(w));
    }
    if (kept.size() != todo_.size() && (kept.empty() || kept.front().id != todo_.front().id)) begun_ = false;
    todo_ = std::move(kept);
  }
  const DevicePool& pool_;
  const TransportCapabilities capabilities_{
      .name = "memory", .same_host_only = true, .one_sided = true, .reason = "a test"};
  std::map<int32_t, const DevicePool*> peers_;
  std::deque<PostWrite> todo_;
  std::vector<WriteDone> done_;
  Status fail_next_;
  bool begun_ = false;  // the oldest write
  int64_t bytes_ = 0;
};

}  // namespace sluice::transfer::testing
