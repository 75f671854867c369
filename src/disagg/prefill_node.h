// The sending half: follows the forward layer by layer and moves final pages into decode's pool.
#pragma once

#include <deque>
#include <map>

#include "disagg/node.h"
#include "transfer/prefill_rooms.h"

namespace sluice::disagg {

class PrefillNode final : public Node {
 public:
  // Listens at once. Unavailable names the port.
  static StatusOr<std::unique_ptr<PrefillNode>> Start(const NodeOptions& options, const KvLayout& layout,
                                                      const DevicePool& pool, std::function<void()> wake);
  ~PrefillNode() override;
  int port() const { return net_.port(); }

  // Engine thread.
  void Add(RoomId room, int64_t prompt_tokens, const Digest256& prompt_digest);
  void Cancel(RoomId room, Status why);
  void BeginForward(int64_t step, RoomId room, const transfer::Chunk& chunk, std::vector<PageId> source);
  void SetAux(RoomId room, Aux aux);

  // Executor thread. LayerFinal never waits: a hook that finds no place is left out, and its layer goes when
  // the forward ends. ForwardDone waits for a place, which takes no longer than the progress thread's turn.
  void LayerFinal(int64_t step, LogicalLayer layer);
  // Final once a device has passed `event`, or, with null, that of a later layer of the step. An event is
  // worth recording for layers that end a group while a room follows the forward.
  bool EndsGroup(LogicalLayer layer) const;
  void LayerQueued(int64_t step, LogicalLayer layer, std::shared_ptr<DeviceEvent> event);
  void ForwardDone(int64_t step, Status status);

 private:
  PrefillNode(const NodeOptions& options, const KvLayout& layout, const DevicePool& pool,
              std::function<void()> wake);
  Status MakeTransports();
  void OnConnected(PeerId peer, bool incoming) override;
  void OnFrame(PeerId peer, const transfer::ControlMessage& message) override;
  void OnClosed(PeerId peer, const Status& why) override;
  StatusOr<std::vector<iovec>> Place(PeerId peer, const transfer::BulkHeader& header) override;
  void OnBulkDone(PeerId, RoomId, uint64_t) override {}
  void Turn(Nanos now) override;
  Nanos MaySleep(Nanos now) override;
  void Beat(Nanos now) override;
  void OnSilent(PeerId peer, const Status& why) override;
  NodeStats MakeStats() const override;
  void Greet(PeerId peer, const transfer::Hello& theirs);
  void Perform(Nanos now);
  void DrainLayers(Nanos now);
  size_t Note(const transfer::PostWrite& write, const std::string& via, Nanos now,
              RoomTimeline* timeline) const;
  transfer::Transport* Over(const std::string& via) const;
  // For good, or, with may_return, until decode comes back on another connection.
  void Lost(PeerId peer, const Status& why, bool may_return);
  std::vector<Digest256> Digests(RoomId room) const;
  std::vector<transfer::RoomRecord> Records(size_t most) const override { return rooms_.Records(most); }
  std::vector<transfer::RoomRecord> TakeEndedRecords() override;

  transfer::PrefillRooms rooms_;
  std::unique_ptr<transfer::Transport> shm_, ucx_, tcp_, fake_;
  struct Timing {                    // of an active room
    std::map<int32_t, PageId> sent;  // by ordinal, for the self-check
    std::shared_ptr<RoomTimeline> timeline = std::make_shared<RoomTimeline>();
  };
  std::unordered_map<RoomId, Timing> timing_;
  using SaidDigests = std::pair<RoomId, std::vector<Digest256>>;
  std::deque<SaidDigests> digests_;  // of rooms that ended last, for the self-check
  struct Write {
    RoomId room = 0;
    size_t move = 0;  // of the room's timeline; kMovesMax: left out
  };
  std::unordered_map<transfer::WriteId, Write> writes_;
  struct Forward {
    RoomId room = 0;
    size_t index = 0;  // of the room's timeline
  };
  std::unordered_map<int64_t, std::vector<Forward>> forwards_;  // by step
  NodeStats totals_;
  std::vector<transfer::WriteDone> done_;
  Nanos next_warning_ = 0;
  int64_t fallbacks_ = 0;  // not told yet

  // From the executor, one writer and one reader: the forward thread takes no lock and makes nothing.
  struct LayerEvent {
    int64_t step = 0;
    LogicalLayer layer;   // not valid(): the forward is over
    bool queued = false;  // final behind `event`; null: behind that of a later layer
    std::shared_ptr<DeviceEvent> event;
  };
  bool PushEvent(LayerEvent event);
  void TellLayer(LayerEvent event);
  static constexpr uint64_t kEvents = 8192;
  std::unique_ptr<LayerEvent[]> events_ = std::make_unique<LayerEvent[]>(kEvents);
  std::atomic<uint64_t> events_written_{0}, events_read_{0};
  std::atomic<int64_t> watched_forwards_{0};
  int32_t since_wake_ = 0;            // executor thread
  std::vector<LogicalLayer> behind_;  // progress thread: queued layers that wait for an event
  std::mutex failure_mutex_;
  std::unordered_map<int64_t, Status> failures_;  // forwards that ended badly
};

}  // namespace sluice::disagg
