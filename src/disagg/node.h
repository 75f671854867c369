// One instance's half of prefill/decode disaggregation: a progress thread that owns the room table, the
// connections and the transports. The engine talks to it by commands and takes events from it; neither waits
// for the other.
//
// This file is what both roles share; prefill_node.h and decode_node.h are what an engine uses.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "disagg/node_stats.h"
#include "kv/device_pool.h"
#include "transfer/peer_net.h"
#include "transfer/rooms.h"
#include "transfer/transport.h"

namespace sluice::disagg {

using transfer::Aux;
using transfer::PeerId;
using transfer::RoomId;

struct NodeOptions {
  std::string host = "127.0.0.1";  // prefill: where decode instances connect
  int bootstrap_port = 8998;
  std::string backend = "auto";  // auto, shm, ucx, tcp, fake
  Nanos heartbeat_interval = 2'000'000'000;
  int heartbeat_max_failure = 2;
  double bytes_per_second_max = 0;
  bool self_check = false;
  bool allow_mixed_numerics = false;
  std::string model_name;
  uint64_t max_tokens = 0;
  // For --debug-kv; progress thread. Prefill: a chunk's pages, those that one rank owns, and where they go.
  // Decode (`chunk` null): pages reserved for a room.
  struct Record {
    RoomId room = 0;
    const transfer::Chunk* chunk = nullptr;
    transfer::PageSpan registered;
    int32_t lane = 0;
    std::vector<int32_t> kept, destination;
  };
  std::function<void(const Record&)> record;  // null: nothing is recorded
  transfer::RoomOptions rooms;                // its epoch and lanes are set by the node
};

struct RoomEvent {
  enum class Kind : uint8_t {
    kReady,   // prefill: the forward may run. decode: the pages and `aux` are there, nothing writes them any
              // more
    kFailed,  // tell the client; the pages stay leased
    kEnded,   // nothing reads or writes the room's pages any more; exactly once a room, last
  } kind{};
  RoomId room = 0;
  Status status;
  Aux aux;
};

class Node : protected transfer::PeerEvents {
 public:
  ~Node() override;
  // Any thread.
  NodeStats Stats() const;
  // Ends the progress thread; rooms stay as they are. Also in the most derived class's destructor.
  void StopThread();
  // Engine thread: events since the last call, appended in order.
  bool TakeEvents(std::vector<RoomEvent>* out);

 protected:
  // `wake` is called on the progress thread when there are events. layout is copied; pool outlives the node.
  Node(const NodeOptions& options, const KvLayout& layout, const DevicePool& pool, transfer::Role role,
       std::function<void()> wake);
  void StartThread();
  // Runs f on the progress thread, in the order of the calls.
  template <typename F>
  void Post(F&& f) {
    {
      std::lock_guard lock(mutex_);
      commands_.emplace_back(std::forward<F>(f));
    }
    if (sleeping_.load(std::memory_order_acquire)) net_.Wake();
  }
  void Keep(std::shared_ptr<RoomTimeline> timeline, Nanos now, const Status& end);  // progress thread
  void NameSelf(NodeStats* stats) const;
  void RunCommands();  // progress thread
  void Emit(RoomEvent event);
  void Refuse(PeerId peer, const Status& why);
  static Nanos Now();
  bool stopping() const { return stop_.load(std::memory_order_relaxed); }

  // Progress thread.
  virtual void Turn(Nanos now) = 0;         // after every wake-up: completions, deadlines, actions
  virtual Nanos MaySleep(Nanos now) = 0;    // of the transports
  virtual NodeStats MakeStats() const = 0;  // but rooms
  virtual std::vector<transfer::RoomRecord> Records(size_t most) const = 0;
  virtual std::vector<transfer::RoomRecord> TakeEndedRecords() = 0;
  virtual void Beat(Nanos now) = 0;                           // every heartbeat interval
  virtual void OnSilent(PeerId peer, const Status& why) = 0;  // no byte of it for too long

  const NodeOptions options_;
  const KvLayout layout_;
  const DevicePool& pool_;
  transfer::Hello self_;
  transfer::PeerNet net_;
  struct Peer {
    transfer::Hello hello;
    std::string address;
    std::string via;  // transport
    bool one_sided = false;
    bool ready = false, silent = false;
    Nanos since = 0;
  };
  std::unordered_map<PeerId, Peer> peers_;
  uint64_t beats_ = 0;
  RoomTimelines timelines_;  // progress thread

 private:
  void Run();
  void Publish(Nanos now);

  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::vector<std::function<void()>> commands_, running_;
  std::vector<RoomEvent> events_;
  NodeStats stats_;
  std::vector<transfer::RoomRecord> shown_, shown_ended_;
  Nanos next_records_ = 0;  // progress thread
  bool active_shown_ = false;
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stop_{false};
  bool emitted_ = false;  // progress thread
  std::thread thread_;
};

// Equal on two processes that can map each other's shared memory through /proc.
std::string HostId();

}  // namespace sluice::disagg
