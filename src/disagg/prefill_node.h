// The sending half: follows the forward layer by layer and moves final pages into decode's pool.
#pragma once

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

  // Executor thread; neither waits.
  void LayerFinal(int64_t step, LogicalLayer layer);
  void ForwardDone(int64_t step, Status status);

 private:
  PrefillNode(const NodeOptions& options, const KvLayout& layout, const DevicePool& pool,
              std::function<void()> wake);
  void OnConnected(PeerId peer, bool incoming) override;
  void OnFrame(PeerId peer, const transfer::ControlMessage& message) override;
  void OnClosed(PeerId peer, const Status& why) override;
  StatusOr<std::vector<iovec>> Place(PeerId peer, const transfer::BulkHeader& header) override;
  void OnBulkDone(PeerId, RoomId, uint64_t) override {}
  void Turn(Nanos now) override;
  void Beat(Nanos now) override;
  void OnSilent(PeerId peer, const Status& why) override;
  NodeStats MakeStats() const override;
  void Greet(PeerId peer, const transfer::Hello& theirs);
  void Perform(Nanos now);
  void DrainLayers(Nanos now);
  size_t Note(const transfer::PostWrite& write, bool shm, Nanos now, RoomTimeline* timeline) const;
  void Lost(PeerId peer, const Status& why);
  std::vector<Digest256> Digests(RoomId room) const;

  transfer::PrefillRooms rooms_;
  std::unique_ptr<transfer::Transport> shm_, tcp_, fake_;
  struct Timing {           // of an active room
    Nanos forward_end = 0;  // of its last chunk
    Nanos first_write = 0, last_done = 0;
    int64_t bytes = 0;
    std::map<int32_t, PageId> sent;  // by ordinal, for the self-check
    std::shared_ptr<RoomTimeline> timeline = std::make_shared<RoomTimeline>();
  };
  std::unordered_map<RoomId, Timing> timing_;
  struct Write {
    RoomId room = 0;
    size_t move = 0;  // of the room's timeline; kMovesMax: left out
  };
  std::unordered_map<transfer::WriteId, Write> writes_;
  struct Forward {
    RoomId room = 0;
    size_t index = 0;  // of the room's timeline
    bool last = false;
  };
  std::unordered_map<int64_t, std::vector<Forward>> forwards_;  // by step
  NodeStats totals_;
  std::vector<transfer::WriteDone> done_;

  // From the executor: kept apart from the commands so that the forward thread makes no closure per layer.
  struct LayerEvent {
    int64_t step = 0;
    LogicalLayer layer;  // not valid(): the forward is over
    Status status;
  };
  std::mutex layer_mutex_;
  std::vector<LayerEvent> layer_events_, layer_scratch_;
  std::atomic<int64_t> watched_forwards_{0};
  int32_t since_wake_ = 0;  // executor thread
};

}  // namespace sluice::disagg
