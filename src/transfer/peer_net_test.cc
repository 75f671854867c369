#include "transfer/peer_net.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <map>

#include "transfer/tcp_transport.h"

namespace sluice::transfer {
namespace {

constexpr Nanos kMs = 1'000'000;

class Events final : public PeerEvents {
 public:
  void OnConnected(PeerId peer, bool) override { connected.push_back(peer); }
  void OnFrame(PeerId, const ControlMessage& message) override { frames.push_back(message); }
  void OnClosed(PeerId peer, const Status& why) override {
    EXPECT_TRUE(polling) << "the end of a peer is told from within Poll alone";
    closed[peer.value] = why;
    if (meanwhile) meanwhile();
  }
  StatusOr<std::vector<iovec>> Place(PeerId, const BulkHeader& header) override {
    headers.push_back(header);
    return std::vector<iovec>{{memory.data(), size_t(header.payload_bytes)}};
  }
  void OnBulkDone(PeerId, RoomId room, uint64_t bytes) override { arrived[room] += bytes; }

  bool polling = false;
  std::function<void()> meanwhile;  // while the end of a peer is told
  std::vector<PeerId> connected;
  std::vector<ControlMessage> frames;
  std::map<int32_t, Status> closed;
  std::vector<BulkHeader> headers;
  std::map<RoomId, uint64_t> arrived;
  std::vector<char> memory = std::vector<char>(1 << 20);
};

struct End {
  Events events;
  PeerNet net{&events};
  void Poll(int times = 1) {
    for (int i = 0; i < times; ++i) {
      events.polling = true;
      net.Poll(2 * kMs);
      events.polling = false;
    }
  }
};

// Two ends of one connection.
class PagesAndFrames : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(from_.net.Listen("127.0.0.1", 0).ok());
    (void)to_.net.Connect("127.0.0.1", from_.net.port());
    for (int i = 0; i < 500 && (from_.events.connected.empty() || to_.events.connected.empty()); ++i) Both();
    ASSERT_EQ(from_.events.connected.size(), 1u);
    to_peer_ = from_.events.connected[0];
  }
  void Both() {
    from_.Poll();
    to_.Poll();
  }
  void SendPages(WriteId id, RoomId room, bool last, std::vector<char>* bytes) {
    BulkHeader h;
    h.room = room;
    h.layers = {0};
    h.pages = {1};
    from_.net.SendBulk(to_peer_, id, h, {{bytes->data(), bytes->size()}}, last);
  }
  End from_, to_;
  PeerId to_peer_;
};

TEST_F(PagesAndFrames, APeerThatBreaksWhileWeSendIsReportedByTheNextPoll) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  const PeerId peer = from_.net.Connect("127.0.0.1", ntohs(address.sin_port));
  const int far = accept(listener, nullptr, nullptr);
  for (int i = 0; i < 500 && from_.events.connected.size() < 2; ++i) from_.Poll();
  const linger reset{1, 0};
  setsockopt(far, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  close(far);
  for (int i = 0; i < 100; ++i) from_.net.Send(peer, AbortAck{1});  // Events checks that nothing is told here
  EXPECT_TRUE(from_.events.closed.empty());
  from_.Poll(2);
  EXPECT_EQ(from_.events.closed.count(peer.value), 1u);
  EXPECT_FALSE(from_.net.Has(peer));
  close(listener);
}

TEST_F(PagesAndFrames, APeerSeesTheEndOnlyWhenWhatWritesHereHasBeenToldOfIt) {
  const PeerId from_peer = to_.events.connected[0];
  bool seen_early = false;
  from_.events.meanwhile = [&] {
    to_.Poll(5);
    seen_early = to_.events.closed.contains(from_peer.value);
  };
  to_.net.HalfClose(from_peer);
  for (int i = 0; i < 500 && from_.events.closed.empty(); ++i) from_.Poll();
  ASSERT_TRUE(from_.events.closed.contains(to_peer_.value));
  EXPECT_FALSE(seen_early);
  for (int i = 0; i < 500 && to_.events.closed.empty(); ++i) to_.Poll();
  EXPECT_TRUE(to_.events.closed.contains(from_peer.value));
}

TEST_F(PagesAndFrames, AWriteThatHasJustLeftWhenItsPeerIsRemovedEndsOnceAndUnfinished) {
  ModelConfig m;
  m.num_layers = 2;
  m.num_heads = 1;
  m.kv_lora_rank = 64;
  m.qk_rope = 32;
  m.index.num_heads = 1;
  m.index.head_dim = 32;
  m.index.topk = 16;
  m.index.computes = {true, false};
  m.layer_is_moe.assign(2, false);
  const auto pool = *DevicePool::Make(*KvLayout::Make(m, {}), 1, 8);
  const auto transport = MakeTcpTransport(*pool, &from_.net, {});
  ASSERT_TRUE(transport->AddPeer(to_peer_, Hello{}).ok());
  transport->Post({.id = 1,
                   .room = 7,
                   .peer = to_peer_,
                   .layers = {LogicalLayer(0), LogicalLayer(1)},
                   .pages = {{.from = PageId(2), .to = PageId(3)}}});
  transport->RemovePeer(to_peer_);  // what has left may have arrived or not: decode has said nothing
  std::vector<WriteDone> done;
  for (int i = 0; i < 5; ++i) {
    from_.Poll();
    transport->Poll(&done);
  }
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].id, 1u);
  EXPECT_FALSE(done[0].status.ok());
  EXPECT_EQ(done[0].layers, 0);
}

TEST_F(PagesAndFrames, FramesPassPagesThatHaveNotBegunAndKeepTheirOrder) {
  from_.net.SetRateLimit(1e6);
  std::vector<char> pages(64 << 10);
  for (WriteId id = 1; id <= 4; ++id) SendPages(id, 7, true, &pages);
  from_.net.Send(to_peer_, AbortAck{9});
  from_.net.Send(to_peer_, Heartbeat{1, 2, {7}, {}});
  from_.net.Send(to_peer_, AbortAck{8});
  for (int i = 0; i < 3000 && to_.events.frames.size() < 3; ++i) Both();
  ASSERT_EQ(to_.events.frames.size(), 3u);
  EXPECT_EQ(std::get<AbortAck>(to_.events.frames[0]).room, 9u);
  EXPECT_TRUE(std::holds_alternative<Heartbeat>(to_.events.frames[1]));
  EXPECT_EQ(std::get<AbortAck>(to_.events.frames[2]).room, 8u);
  EXPECT_LT(to_.events.arrived[7], 4 * pages.size());
}

// As a room's end does: what has begun is out before, what has not is dropped.
TEST_F(PagesAndFrames, AFrameThatIsSentWhenPagesAreWrittenOrDroppedComesBehindThem) {
  from_.net.SetRateLimit(4e6);
  std::vector<char> pages(300 << 10);
  for (WriteId id = 1; id <= 3; ++id) SendPages(id, 7, true, &pages);
  for (int i = 0; i < 3; ++i) from_.Poll();
  from_.net.DropBulk(7);
  size_t written = from_.net.TakeWritten().size();
  for (int i = 0; i < 3000 && written < 3; ++i) {
    Both();
    written += from_.net.TakeWritten().size();
  }
  ASSERT_EQ(written, 3u);
  from_.net.Send(to_peer_, AbortAck{7});
  for (int i = 0; i < 3000 && to_.events.frames.empty(); ++i) Both();
  ASSERT_EQ(to_.events.frames.size(), 1u);
  const uint64_t before = to_.events.arrived[7];
  for (int i = 0; i < 50; ++i) Both();
  EXPECT_EQ(to_.events.arrived[7], before) << "pages came behind the answer";
}

TEST_F(PagesAndFrames, AWriteOfSeveralFramesIsReportedOnceWithItsLast) {
  std::vector<char> pages(1000);
  SendPages(5, 7, false, &pages);
  SendPages(5, 7, false, &pages);
  SendPages(5, 7, true, &pages);
  std::vector<PeerNet::Written> written;
  for (int i = 0; i < 500 && to_.events.arrived[7] < 3000; ++i) {
    Both();
    for (auto& w : from_.net.TakeWritten()) written.push_back(w);
  }
  ASSERT_EQ(written.size(), 1u);
  EXPECT_EQ(written[0].id, 5);
  EXPECT_TRUE(written[0].status.ok());
}

TEST_F(PagesAndFrames, ADroppedRoomIsReportedOnceTheFrameUnderWayIsOut) {
  from_.net.SetRateLimit(1e6);
  std::vector<char> pages(300 << 10);
  SendPages(1, 7, false, &pages);
  SendPages(1, 7, true, &pages);
  SendPages(2, 7, true, &pages);
  SendPages(3, 8, true, &pages);
  from_.net.DropBulk(7);
  std::vector<PeerNet::Written> written = from_.net.TakeWritten();
  ASSERT_EQ(written.size(), 1u) << "what has not begun has failed; what has is still read";
  EXPECT_EQ(written[0].id, 2);
  for (int i = 0; i < 3000 && to_.events.arrived[8] == 0; ++i) {
    Both();
    for (auto& w : from_.net.TakeWritten()) written.push_back(w);
  }
  ASSERT_EQ(written.size(), 3u);
  EXPECT_EQ(written[1].id, 1);
  EXPECT_FALSE(written[1].status.ok());
  EXPECT_EQ(written[2].id, 3);
  EXPECT_TRUE(written[2].status.ok());
  EXPECT_EQ(to_.events.arrived[7], pages.size());
}

}  // namespace
}  // namespace sluice::transfer
