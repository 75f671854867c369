// The receiving half: reserves pages with a prefill instance, and says when they are filled or free of
// writers.
#pragma once

#include <unordered_set>

#include "disagg/node.h"
#include "transfer/decode_rooms.h"
#include "transfer/ucx_transport.h"

namespace sluice::disagg {

class DecodeNode final : public Node {
 public:
  static StatusOr<std::unique_ptr<DecodeNode>> Start(const NodeOptions& options, const KvLayout& layout,
                                                     const DevicePool& pool, std::function<void()> wake);
  ~DecodeNode() override;

  // Engine thread. Announce: the request is queued here; connects, and keeps the room alive on prefill's
  // side.
  void Announce(RoomId room, std::string host, int port);
  // pages: destinations of [first_page, ceil(prompt_tokens / 64)), leased until kEnded.
  void Open(RoomId room, int64_t prompt_tokens, const Digest256& prompt_digest, int32_t first_page,
            std::vector<PageId> pages);
  void Cancel(RoomId room, Status why);

 private:
  DecodeNode(const NodeOptions& options, const KvLayout& layout, const DevicePool& pool,
             std::function<void()> wake);
  void OnConnected(PeerId peer, bool incoming) override;
  void OnFrame(PeerId peer, const transfer::ControlMessage& message) override;
  void OnClosed(PeerId peer, const Status& why) override;
  StatusOr<std::vector<iovec>> Place(PeerId peer, const transfer::BulkHeader& header) override;
  void OnBulkDone(PeerId peer, RoomId room, uint64_t bytes) override;
  void Turn(Nanos now) override;
  Nanos MaySleep(Nanos) override {
    return ucx_ == nullptr ? std::numeric_limits<Nanos>::max() : ucx_->MaySleep();
  }
  void Beat(Nanos now) override;
  void OnSilent(PeerId peer, const Status& why) override;
  NodeStats MakeStats() const override;
  std::vector<transfer::RoomRecord> Records(size_t most) const override { return rooms_.Records(most); }
  std::vector<transfer::RoomRecord> TakeEndedRecords() override { return rooms_.TakeEndedRecords(); }

  struct Room {
    std::string address;
    PeerId peer;          // the connection it waits for or runs on
    bool opened = false;  // known to rooms_
    bool wants_open = false;
    int64_t prompt_tokens = 0;
    Digest256 digest{};
    int32_t first_page = 0;
    std::vector<PageId> pages;
    std::unordered_set<int32_t> page_set;  // of them
    Nanos since = 0, abort_since = 0, opened_at = 0;
    Nanos reach_at = 0;  // when the next attempt to reach the address again is due; 0: none is
  };
  // Where a payload for pages of a device arrives before it is copied there: one is under way a connection.
  struct Landing {
    std::shared_ptr<std::byte> memory;
    uint64_t bytes = 0;
    transfer::BulkHeader header;
  };
  StatusOr<std::vector<iovec>> PlaceInLanding(PeerId peer, const transfer::BulkHeader& header);
  Status CopyLanded(const Landing& landing);
  PeerId Reach(const std::string& address);
  void OnReady(PeerId peer);
  // may_return: its rooms wait for the same instance to be reached again.
  void Closed(PeerId peer, const Status& why, bool may_return);
  void ReachAgain(Nanos now);
  void Forget(PeerId peer, const std::string& address);
  void TryOpen(RoomId id, Room& room);
  void FailUnopened(RoomId id, const Status& why);  // erases the room
  void Perform(Nanos now);
  void KeepTimeline(RoomId id, const Room& room, Nanos now, const Status& end);
  Status CheckDigests(const Room& room, const transfer::Complete& complete);
  const transfer::Hello* PeerHello(PeerId peer) const;

  transfer::DecodeRooms rooms_;
  std::unordered_map<RoomId, Room> open_;
  std::unordered_map<std::string, PeerId> by_address_;
  std::unordered_map<PeerId, Landing> landings_;
  std::vector<RoomId> reached_;
  std::unique_ptr<DeviceCopier> copier_;  // null until a payload needs it
  std::vector<MemoryRun> runs_;
  NodeStats totals_;
  bool fake_ = false;
  std::unique_ptr<transfer::UcxReceiver> ucx_;
  transfer::UcxReceiver::Report ucx_report_;
};

}  // namespace sluice::disagg
