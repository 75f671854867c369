#include "transfer/staged_tcp_transport.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "kv/layout_fixture.h"
#include "tensor/fake_device.h"

namespace sluice::transfer {
namespace {

// Takes every payload, in pieces of the receiver's choice.
class Receiver final : public PeerEvents {
 public:
  explicit Receiver(const KvLayout& layout) : pool(*DevicePool::Make(layout, 1, 64)) {}
  void OnConnected(PeerId, bool) override {}
  void OnFrame(PeerId, const ControlMessage&) override {}
  void OnClosed(PeerId, const Status&) override {}
  StatusOr<std::vector<iovec>> Place(PeerId, const BulkHeader& header) override {
    ++frames;
    largest = std::max(largest, header.payload_bytes);
    return PagePieces::Of(*pool, header.layers, header.pages);
  }
  void OnBulkDone(PeerId, RoomId, uint64_t n) override { bytes += n; }
  std::unique_ptr<DevicePool> pool;
  uint64_t bytes = 0, largest = 0;
  int frames = 0;
};

struct World {
  World() : layout(testing::MakeLayout(testing::Small())), receiver(layout), sender(layout) {
    pool = *DevicePool::Make(layout, 1, 64, &device);
    for (int32_t p = 1; p < 64; ++p)
      for (const KvPiece& piece : layout.pieces())
        device.Fill(pool->Piece(piece, PageId(p)), uint8_t(p * 3 + piece.layer.value * 50), piece.bytes);
    EXPECT_TRUE(there.Listen("127.0.0.1", 0).ok());
    peer = here.Connect("127.0.0.1", there.port());
  }
  std::vector<PageMove> Pages(int32_t n) {
    std::vector<PageMove> moves;
    for (int32_t i = 0; i < n; ++i) moves.push_back({i, PageId(1 + i), PageId(63 - i)});
    return moves;
  }
  bool Turn(const std::function<bool()>& until) {
    for (int i = 0; i < 5000; ++i) {
      here.Poll(500'000);
      there.Poll(500'000);
      for (const PeerNet::Received& r : there.TakeReceived())
        EXPECT_TRUE(transport->OnTaken(peer, {r.token}).ok());
      transport->Poll(&done);
      if (until()) return true;
    }
    return false;
  }
  const KvLayout layout;
  testing::FakeDevice device;
  std::unique_ptr<DevicePool> pool;
  Receiver receiver, sender;
  PeerNet here{&sender}, there{&receiver};
  std::unique_ptr<Transport> transport;
  PeerId peer;
  std::vector<WriteDone> done;
};
const std::vector<LogicalLayer> kLayers = {LogicalLayer(0), LogicalLayer(1), LogicalLayer(2)};

TEST(StagedTcp, AWriteLargerThanAllStagingArrivesWhole) {
  World s;
  StagingOptions staging;
  staging.buffers = 2;
  staging.buffer_bytes = 3 * (s.layout.latent_page_bytes() + s.layout.index_page_bytes());
  s.transport = *MakeStagedTcpTransport(*s.pool, &s.here, {}, staging);
  s.transport->Post({7, 1, s.peer, kLayers, s.Pages(50)});
  ASSERT_TRUE(s.Turn([&] {
    return s.done.size() == 1 && s.receiver.bytes > 0 &&
           int64_t(s.receiver.bytes) == 50 * s.layout.page_bytes();
  }));
  EXPECT_EQ(s.done[0].id, 7);
  EXPECT_TRUE(s.done[0].status.ok());
  EXPECT_LE(int64_t(s.receiver.largest), staging.buffer_bytes);
  EXPECT_LE(s.device.copies(), s.receiver.frames) << "never a call a page";
  for (int32_t i = 0; i < 50; ++i)
    for (const KvPiece& piece : s.layout.pieces())
      for (int64_t b = 0; b < piece.bytes; ++b)
        ASSERT_EQ(s.receiver.pool->Piece(piece, PageId(63 - i))[b],
                  std::byte(uint8_t((1 + i) * 3 + piece.layer.value * 50)));
}

TEST(StagedTcp, SmallLayersOfAWriteGoInOneCopy) {
  World s;
  s.transport = *MakeStagedTcpTransport(*s.pool, &s.here, {});
  s.transport->Post({1, 1, s.peer, kLayers, s.Pages(5)});
  ASSERT_TRUE(s.Turn([&] { return s.done.size() == 1; }));
  EXPECT_EQ(s.device.copies(), 1);
}

TEST(StagedTcp, EachWriteEndsOnceWhenItsRoomOrItsPeerIsGone) {
  World s;
  s.transport = *MakeStagedTcpTransport(*s.pool, &s.here, {});
  const auto held = std::make_shared<testing::FakeEvent>();
  s.transport->SetGate(held);
  for (WriteId id = 1; id <= 6; ++id)
    s.transport->Post({id, RoomId(id <= 3 ? 1 : 2), s.peer, kLayers, s.Pages(5)});
  while (held->waits() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  s.transport->DropRoom(1);
  s.transport->Poll(&s.done);
  EXPECT_EQ(s.done.size(), 2) << "the first is the thread's until the device is there";
  s.transport->RemovePeer(s.peer);
  s.transport->Poll(&s.done);
  EXPECT_EQ(s.done.size(), 5);
  held->Pass();
  ASSERT_TRUE(s.Turn([&] { return s.done.size() == 6; }));
  for (const WriteDone& d : s.done) EXPECT_FALSE(d.status.ok()) << d.id;
  EXPECT_EQ(s.device.copies(), 0);
  EXPECT_EQ(s.receiver.bytes, 0u);
  s.transport->Poll(&s.done);
  EXPECT_EQ(s.done.size(), 6);
}

// Its connection is not read: what was sent fills the sockets and then stays.
TEST(StagedTcp, APeerThatDoesNotReadDelaysNoOther) {
  World s;
  Receiver stuck(s.layout);
  PeerNet nowhere{&stuck};
  ASSERT_TRUE(nowhere.Listen("127.0.0.1", 0).ok());
  const PeerId slow = s.here.Connect("127.0.0.1", nowhere.port());
  StagingOptions staging;
  staging.buffers = 4;
  staging.buffer_bytes = 8 * (s.layout.latent_page_bytes() + s.layout.index_page_bytes());
  s.transport = *MakeStagedTcpTransport(*s.pool, &s.here, {}, staging);
  for (const PeerId peer : {slow, s.peer}) ASSERT_TRUE(s.transport->AddPeer(peer, {}).ok());
  for (int i = 0; i < 2000 && !(s.here.Has(slow) && nowhere.Has(PeerId(1))); ++i) {
    s.here.Poll(500'000);
    nowhere.Poll(500'000);
  }
  // Far more than sockets hold, and room after room of it.
  const int64_t bytes = 50 * s.layout.page_bytes();
  const int many = int((64 << 20) / bytes) + 1;
  for (WriteId id = 1; id <= many; ++id) s.transport->Post({id, RoomId(id), slow, kLayers, s.Pages(50)});
  const int before = s.device.copies();
  ASSERT_TRUE(s.Turn([&] { return s.device.copies() > before + 3; }));
  // Until nothing more goes to it.
  for (int quiet = 0, last = -1; quiet < 50;) {
    s.here.Poll(1'000'000);
    s.transport->Poll(&s.done);
    quiet = s.device.copies() == last ? quiet + 1 : 0;
    last = s.device.copies();
  }
  const auto mine = [&] {
    int n = 0;
    for (const WriteDone& d : s.done) n += d.id > many && d.status.ok();
    return n;
  };
  for (WriteId id = many + 1; id <= many + 3; ++id)
    s.transport->Post({id, RoomId(id), s.peer, kLayers, s.Pages(50)});
  ASSERT_TRUE(s.Turn([&] { return mine() == 3; })) << "they waited for the peer that does not read";
  EXPECT_EQ(int64_t(s.receiver.bytes), 3 * bytes);
  EXPECT_EQ(s.done.size(), 3u);
  // In their order.
  for (size_t i = 0; i < s.done.size(); ++i) EXPECT_EQ(s.done[i].id, many + 1 + int64_t(i));
  s.transport->RemovePeer(slow);
  ASSERT_TRUE(s.Turn([&] { return int(s.done.size()) == many + 3; }));
}

TEST(StagedTcp, AWriteIsOverWhenTheReceiverHasSaidThatItIsThere) {
  World s;
  s.transport = *MakeStagedTcpTransport(*s.pool, &s.here, {});
  s.transport->Post({1, 1, s.peer, kLayers, s.Pages(5)});
  const uint64_t bytes = uint64_t(5 * s.layout.page_bytes());
  for (int i = 0; i < 5000 && s.receiver.bytes < bytes; ++i) {
    s.here.Poll(500'000);
    s.there.Poll(500'000);
    s.transport->Poll(&s.done);
  }
  ASSERT_EQ(s.receiver.bytes, bytes);
  for (int i = 0; i < 20; ++i) {
    s.here.Poll(500'000);
    s.transport->Poll(&s.done);
  }
  EXPECT_TRUE(s.done.empty());
  EXPECT_FALSE(s.transport->OnTaken(s.peer, {4}).ok()) << "three frames were sent";
  EXPECT_FALSE(s.transport->OnTaken(PeerId(77), {1}).ok());
  ASSERT_TRUE(s.transport->OnTaken(s.peer, {2}).ok());
  EXPECT_FALSE(s.transport->OnTaken(s.peer, {2}).ok()) << "once";
  s.transport->Poll(&s.done);
  EXPECT_TRUE(s.done.empty());
  s.transport->RemovePeer(s.peer);
  s.transport->Poll(&s.done);
  ASSERT_EQ(s.done.size(), 1u);
  EXPECT_FALSE(s.done[0].status.ok());
  EXPECT_EQ(s.done[0].layers, 2) << "these need not go again";
}

}  // namespace
}  // namespace sluice::transfer
