#include "transfer/ucx_transport.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

namespace sluice::transfer {
namespace {

constexpr Nanos kMs = 1'000'000;

KvLayout Layout(int32_t rank) {
  ModelConfig m;
  m.num_layers = 4;
  m.num_heads = 1;
  m.kv_lora_rank = rank;
  m.qk_rope = 32;
  m.index.num_heads = 1;
  m.index.head_dim = 32;
  m.index.topk = 16;
  m.index.computes = {true, false, true, false};
  m.layer_is_moe.assign(4, false);
  return *KvLayout::Make(m, {});
}
std::byte Byte(uint8_t value, const KvPiece& piece, int64_t at) {
  return std::byte(value + piece.layer.value * 10 + int(piece.component) * 3 + at % 7);
}
void Fill(const DevicePool& pool, PageId page, uint8_t value) {
  for (const KvPiece& piece : pool.layout().pieces())
    for (int64_t i = 0; i < piece.bytes; ++i) pool.Piece(piece, page)[i] = Byte(value, piece, i);
}
bool Holds(const DevicePool& pool, PageId page, uint8_t value) {
  for (const KvPiece& piece : pool.layout().pieces())
    for (int64_t i = 0; i < piece.bytes; ++i)
      if (pool.Piece(piece, page)[i] != Byte(value, piece, i)) return false;
  return true;
}
const std::vector<LogicalLayer> kAll = {LogicalLayer(0), LogicalLayer(1), LogicalLayer(2), LogicalLayer(3)};

class Target final : public PeerEvents {
 public:
  explicit Target(const DevicePool& pool) : pool_(pool) {}
  void OnConnected(PeerId, bool) override {}
  void OnFrame(PeerId, const ControlMessage&) override {}
  void OnClosed(PeerId, const Status&) override {}
  StatusOr<std::vector<iovec>> Place(PeerId, const BulkHeader& header) override {
    if (header.room == refused) return Invalid("room {} is none of mine", header.room);
    if (over.contains(header.room)) return std::vector<iovec>();
    return PagePieces::Of(pool_, header.layers, header.pages, header.component);
  }
  void OnBulkDone(PeerId, RoomId room, uint64_t bytes) override { arrived[room] += int64_t(bytes); }

  RoomId refused = 0;
  std::set<RoomId> over;
  std::map<RoomId, int64_t> arrived;

 private:
  const DevicePool& pool_;
};

// A sender and a receiver, each turned by hand on this thread; peer 1 of both is the other.
class OverUcx : public ::testing::Test {
 protected:
  void Start(int32_t rank = 64, TransportOptions options = {}, int64_t pages = 40) {
    source = *DevicePool::Make(Layout(rank), 2, pages);
    target = *DevicePool::Make(Layout(rank), 3, pages);
    events = std::make_unique<Target>(*target);
    auto t = MakeUcxTransport(*source, &source_net, options);
    ASSERT_TRUE(t.ok()) << t.status();
    transport = std::move(*t);
    auto r = UcxReceiver::Make(*target, &target_net, events.get());
    ASSERT_TRUE(r.ok()) << r.status();
    receiver = std::move(*r);
    if (!source_net.Has(kPeer)) {
      ASSERT_TRUE(source_net.Listen("127.0.0.1", 0).ok());
      ASSERT_EQ(target_net.Connect("127.0.0.1", source_net.port()), kPeer);
      const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(2);
      while (!source_net.Has(kPeer) && std::chrono::steady_clock::now() < limit) {
        target_net.Poll(kMs);
        source_net.Poll(kMs);
      }
      ASSERT_TRUE(source_net.Has(kPeer));
      target_net.Poll(kMs);
    }
    Join();
  }
  // Both sides meet, as far as this thread brings it.
  void Meet() {
    Hello hello;
    hello.lanes = uint32_t(target->lanes());
    hello.pages_per_lane = uint64_t(target->pages_per_lane());
    const Status added = transport->AddPeer(kPeer, hello);
    ASSERT_TRUE(added.ok()) << added;
    const auto address = receiver->Add(kPeer);
    ASSERT_TRUE(address.ok()) << address.status();
    const Status connected = transport->Connect(kPeer, *address);
    ASSERT_TRUE(connected.ok()) << connected;
  }
  void Join() {
    ASSERT_NO_FATAL_FAILURE(Meet());
    report = {};
    broken_sender.clear();
    ASSERT_TRUE(Until([&] { return report.reached == std::vector<PeerId>{kPeer}; })) << State();
  }
  void Turn() {
    if (transport) transport->Poll(&done);
    for (auto& [peer, why] : transport ? transport->TakeBroken() : decltype(broken_sender)())
      broken_sender.emplace_back(peer, why);
    if (receiver) receiver->Poll(&report);
    for (const auto& [peer, messages] : std::exchange(report.taken, {}))
      if (transport) (void)transport->OnTaken(peer, messages);
  }
  // However long it takes a busy machine; the limit is for what never comes.
  template <typename F>
  bool Until(const F& f) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    for (int i = 0; !f(); ++i) {
      if (std::chrono::steady_clock::now() > limit) return false;
      Turn();
      if (i % 64 == 63) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  std::string State() const {
    std::string text = fmt::format("{} reached, {} writes done", report.reached.size(), done.size());
    for (const auto& [peer, why] : broken_sender) text += fmt::format("; sender: {}", Message(why));
    for (const auto& [peer, why] : report.broken) text += fmt::format("; receiver: {}", Message(why));
    return text;
  }
  std::optional<Status> Done(WriteId id) const {
    for (const WriteDone& d : done)
      if (d.id == id) return d.status;
    return std::nullopt;
  }
  Status WaitFor(WriteId id) {
    if (!Until([&] { return Done(id).has_value(); }))
      return DeadlineExceeded("write {} never ended: {}", id, State());
    return *Done(id);
  }
  static constexpr PeerId kPeer{1};
  std::unique_ptr<DevicePool> source, target;
  std::unique_ptr<Target> events;
  std::unique_ptr<DevicePool> none = *DevicePool::Make(Layout(64), 1, 4);
  Target nobody{*none};
  PeerNet source_net{&nobody}, target_net{&nobody};
  std::unique_ptr<Transport> transport;
  std::unique_ptr<UcxReceiver> receiver;
  std::vector<WriteDone> done;
  std::vector<std::pair<PeerId, Status>> broken_sender;
  UcxReceiver::Report report;
};

TEST_F(OverUcx, EveryPieceArrivesWhetherPagesLieInARowOrNot) {
  for (const int32_t rank : {64, 480}) {  // pages many and few to a message
    ASSERT_NO_FATAL_FAILURE(Start(rank));
    std::vector<PageMove> row, scattered;
    for (int32_t i = 0; i < 16; ++i) {  // lane 0 there and here
      Fill(*source, PageId(4 + 2 * i), uint8_t(i));
      row.push_back({i, PageId(4 + 2 * i), PageId(6 + 3 * i)});
      Fill(*source, PageId(5 + 2 * i), uint8_t(100 + i));
      scattered.push_back({i, PageId(5 + 2 * i), PageId(7 + 3 * ((i * 7) % 16))});
    }
    transport->Post({1, 7, kPeer, kAll, row});
    transport->Post({2, 8, kPeer, kAll, scattered});
    transport->Post({3, 9, kPeer, {LogicalLayer(1)}, {{0, PageId(5), PageId(8)}}});
    for (const WriteId id : {1, 2, 3}) ASSERT_TRUE(WaitFor(id).ok()) << WaitFor(id);
    for (int32_t i = 0; i < 16; ++i) {
      EXPECT_TRUE(Holds(*target, row[size_t(i)].to, uint8_t(i))) << i;
      EXPECT_TRUE(Holds(*target, scattered[size_t(i)].to, uint8_t(100 + i))) << i;
    }
    EXPECT_EQ(events->arrived[7], 16 * source->layout().page_bytes());
    EXPECT_TRUE(broken_sender.empty() && report.broken.empty());
    done.clear();
    receiver.reset();
    transport.reset();
  }
}

TEST_F(OverUcx, ADroppedRoomEndsWithWhatIsUnderWayAndOthersGoOn) {
  ASSERT_NO_FATAL_FAILURE(Start(64, {.bytes_per_second_max = 4e6}));
  std::vector<PageMove> moves;
  for (int32_t i = 0; i < 30; ++i) moves.push_back({i, PageId(4 + i), PageId(6 + i)});
  transport->Post({1, 7, kPeer, kAll, moves});
  transport->Post({2, 7, kPeer, kAll, moves});
  ASSERT_TRUE(Until([&] { return events->arrived[7] > 0; }));
  transport->DropRoom(7);
  Fill(*source, PageId(4), 9);
  transport->Post({3, 8, kPeer, kAll, {{0, PageId(4), PageId(90)}}});
  EXPECT_TRUE(absl::IsAborted(WaitFor(1)));
  EXPECT_TRUE(absl::IsAborted(WaitFor(2)));
  ASSERT_TRUE(WaitFor(3).ok());
  EXPECT_TRUE(Holds(*target, PageId(90), 9));
  EXPECT_LT(events->arrived[7], 30 * source->layout().page_bytes()) << "it went on";
}

TEST_F(OverUcx, WhatComesForARoomThatIsOverIsThrownAwayAndAnswered) {
  ASSERT_NO_FATAL_FAILURE(Start(480));
  events->over = {7};
  std::vector<PageMove> moves;
  for (int32_t i = 0; i < 30; ++i) {
    target->Poison(PageId(6 + i));
    moves.push_back({i, PageId(4 + i), PageId(6 + i)});
  }
  transport->Post({1, 7, kPeer, kAll, moves});
  ASSERT_TRUE(WaitFor(1).ok());
  EXPECT_EQ(events->arrived[7], 0);
  for (int32_t i = 0; i < 30; ++i)
    for (const KvPiece& piece : target->layout().pieces())
      ASSERT_EQ(target->Piece(piece, PageId(6 + i))[0], std::byte(0xff));
  EXPECT_TRUE(broken_sender.empty() && report.broken.empty());
}

TEST_F(OverUcx, AWriteThatTheReceiverRefusesEndsTheConnectionAndNotTheProcess) {
  ASSERT_NO_FATAL_FAILURE(Start());
  events->refused = 7;
  transport->Post({1, 7, kPeer, kAll, {{0, PageId(4), PageId(6)}}});
  ASSERT_TRUE(Until([&] { return !report.broken.empty(); }));
  EXPECT_NE(Message(report.broken[0].second).find("none of mine"), std::string_view::npos);
  receiver->Remove(kPeer);
  ASSERT_TRUE(Until([&] { return !broken_sender.empty(); })) << "the sender is told by the transport";
  transport->RemovePeer(kPeer);
  EXPECT_FALSE(WaitFor(1).ok());
  // The same two sides meet again on another connection.
  events->refused = 0;
  ASSERT_NO_FATAL_FAILURE(Join());
  Fill(*source, PageId(4), 5);
  transport->Post({2, 8, kPeer, kAll, {{0, PageId(4), PageId(6)}}});
  ASSERT_TRUE(WaitFor(2).ok());
  EXPECT_TRUE(Holds(*target, PageId(6), 5));
}

TEST_F(OverUcx, AfterTheFenceNothingOfThePeerLands) {
  ASSERT_NO_FATAL_FAILURE(Start(480, {}, 64));
  std::vector<PageMove> moves;
  for (int32_t i = 0; i < 100; ++i) {
    Fill(*source, PageId(4 + i), 3);
    moves.push_back({i, PageId(4 + i), PageId(6 + i)});
  }
  for (WriteId id = 1; id <= 8; ++id) transport->Post({id, 7, kPeer, kAll, moves});
  ASSERT_TRUE(Until([&] { return events->arrived[7] > 0; }));
  for (int i = 0; i < 3; ++i) transport->Poll(&done);  // more is on its way
  receiver->Remove(kPeer);
  for (const PageMove& m : moves) target->Poison(m.to);
  ASSERT_TRUE(Until([&] { return !broken_sender.empty(); }));
  transport->RemovePeer(kPeer);
  EXPECT_FALSE(WaitFor(8).ok());
  for (const PageMove& m : moves)
    for (const KvPiece& piece : target->layout().pieces())
      ASSERT_EQ(target->Piece(piece, m.to)[0], std::byte(0xff)) << "written after the connection was cut";
}

TEST_F(OverUcx, ASenderThatIsGoneInTheMiddleCostsTheReceiverItsConnectionAlone) {
  ASSERT_NO_FATAL_FAILURE(Start(480, {}, 64));
  std::vector<PageMove> moves;
  for (int32_t i = 0; i < 100; ++i) moves.push_back({i, PageId(4 + i), PageId(6 + i)});
  for (WriteId id = 1; id <= 8; ++id) transport->Post({id, 7, kPeer, kAll, moves});
  ASSERT_TRUE(Until([&] { return events->arrived[7] > 0; }));
  transport.reset();
  ASSERT_TRUE(Until([&] { return !report.broken.empty(); })) << State();
  receiver->Remove(kPeer);
  transport = *MakeUcxTransport(*source, &source_net, {});
  ASSERT_NO_FATAL_FAILURE(Join());
  Fill(*source, PageId(4), 5);
  transport->Post({9, 8, kPeer, kAll, {{0, PageId(4), PageId(6)}}});
  ASSERT_TRUE(WaitFor(9).ok());
  EXPECT_TRUE(Holds(*target, PageId(6), 5));
}

TEST_F(OverUcx, ADestinationOutsideThePoolFailsTheWriteAlone) {
  ASSERT_NO_FATAL_FAILURE(Start());
  transport->Post({1, 7, kPeer, kAll, {{0, PageId(4), PageId(800)}}});
  EXPECT_FALSE(WaitFor(1).ok());
  Fill(*source, PageId(4), 5);
  transport->Post({2, 7, kPeer, kAll, {{0, PageId(4), PageId(6)}}});
  ASSERT_TRUE(WaitFor(2).ok());
  EXPECT_TRUE(Holds(*target, PageId(6), 5));
}

TEST_F(OverUcx, BytesThatAreNoPortAreRefusedAndASecondConnectionToo) {
  ASSERT_NO_FATAL_FAILURE(Start());
  transport->RemovePeer(kPeer);
  receiver->Remove(kPeer);
  ASSERT_TRUE(transport->AddPeer(kPeer, Hello{}).ok());
  EXPECT_FALSE(transport->OnTaken(kPeer, {0}).ok()) << "nothing can have come before there is a way";
  const std::string right = *receiver->Add(kPeer);
  for (const std::string& wrong :
       {std::string(), std::string(100, 'x'), right.substr(0, 1), right + "x", std::string(2, '\0')})
    EXPECT_FALSE(transport->Connect(kPeer, wrong).ok());
  EXPECT_TRUE(transport->Connect(kPeer, right).ok());
  EXPECT_FALSE(transport->Connect(kPeer, right).ok());
}

TEST_F(OverUcx, AMessageThatNobodySentOrThatWasTakenBeforeIsAnError) {
  ASSERT_NO_FATAL_FAILURE(Start());
  EXPECT_FALSE(transport->OnTaken(kPeer, {1}).ok());
  transport->Post({1, 7, kPeer, {LogicalLayer(1)}, {{0, PageId(4), PageId(6)}}});
  ASSERT_TRUE(transport->OnTaken(kPeer, {1}).ok());
  EXPECT_FALSE(transport->OnTaken(kPeer, {1}).ok());
}

TEST_F(OverUcx, SleepingSidesAreWokenByTheirDescriptors) {
  constexpr Nanos kLong = 240'000 * kMs;  // longer than any machine takes for the writes themselves
  ASSERT_NO_FATAL_FAILURE(Start(480));
  std::vector<PageMove> moves;
  for (int32_t i = 0; i < 30; ++i) {
    Fill(*source, PageId(4 + i), 3);
    moves.push_back({i, PageId(4 + i), PageId(6 + i)});
  }
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::vector<uint64_t> taken;
  std::thread far([&] {
    UcxReceiver::Report far_report;
    while (!stop) {
      target_net.Poll(std::min<Nanos>(kLong, receiver->MaySleep()));
      receiver->Poll(&far_report);
      std::lock_guard lock(mutex);
      for (const auto& [peer, messages] : std::exchange(far_report.taken, {}))
        taken.insert(taken.end(), messages.begin(), messages.end());
      source_net.Wake();
    }
  });
  const auto now = [] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  const Nanos began = now();
  for (WriteId id = 1; id <= 20; ++id) {
    transport->Post({id, 7, kPeer, kAll, moves});
    while (!Done(id).has_value()) {
      source_net.Poll(std::min<Nanos>(kLong, transport->MaySleep(now())));
      std::unique_lock lock(mutex);
      const std::vector<uint64_t> messages = std::exchange(taken, {});
      lock.unlock();
      EXPECT_TRUE(transport->OnTaken(kPeer, messages).ok());
      transport->Poll(&done);
    }
    EXPECT_TRUE(Done(id)->ok());
  }
  EXPECT_LT(now() - began, kLong) << "somebody slept through it";
  stop = true;
  target_net.Wake();
  far.join();
  EXPECT_TRUE(Holds(*target, PageId(6), 3));
}

TEST_F(OverUcx, NoPageGoesBeforeTheFirstMessageIsAnswered) {
  ASSERT_NO_FATAL_FAILURE(Start());
  transport->RemovePeer(kPeer);
  receiver->Remove(kPeer);
  report = {};
  ASSERT_NO_FATAL_FAILURE(Meet());
  Fill(*source, PageId(4), 5);
  transport->Post({1, 7, kPeer, kAll, {{0, PageId(4), PageId(6)}}});
  const auto unanswered = [&] {
    transport->Poll(&done);
    receiver->Poll(&report);
  };
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (report.reached.empty() && std::chrono::steady_clock::now() < limit) {
    unanswered();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ASSERT_FALSE(report.reached.empty()) << State();
  for (int i = 0; i < 1000; ++i) unanswered();
  EXPECT_EQ(events->arrived[7], 0);
  ASSERT_TRUE(WaitFor(1).ok());
  EXPECT_TRUE(Holds(*target, PageId(6), 5));
}

TEST_F(OverUcx, AConnectionMayBeCutBeforeItIsUp) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (int i = 0; i < 50; ++i) {
    transport->RemovePeer(kPeer);
    receiver->Remove(kPeer);
    ASSERT_NO_FATAL_FAILURE(Meet()) << i;
    transport->Post({WriteId(i + 1), 7, kPeer, kAll, {{0, PageId(4), PageId(6)}}});
    if (i % 3 == 0) receiver->Remove(kPeer);
    for (int turn = 0; turn < i; ++turn) Turn();  // no further than that
  }
  transport->RemovePeer(kPeer);
  receiver->Remove(kPeer);
  ASSERT_NO_FATAL_FAILURE(Join());
  Fill(*source, PageId(4), 5);
  transport->Post({100, 8, kPeer, kAll, {{0, PageId(4), PageId(6)}}});
  const Status written = WaitFor(100);
  ASSERT_TRUE(written.ok()) << written;
  EXPECT_TRUE(Holds(*target, PageId(6), 5));
}

TEST(OverUcxLibrary, TheFirstCallDecides) {
  ASSERT_TRUE(UcxSupport().ok()) << UcxSupport();
  EXPECT_TRUE(UcxSupport("/nowhere/libucp.so.0").ok());
}

// In a process of its own each, where no library is open yet.
void ExpectRefused(const std::string& library, const char* message) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const Status status = UcxSupport(library);
        std::fprintf(stderr, "%s\n", std::string(Message(status)).c_str());
        _exit(status.ok() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), message);
}
TEST(UcxLibrary, ThatIsNotThereIsRefusedWithTheRemedy) {
  ExpectRefused("/nowhere/libucp.so.0",
                "required UCX 1.22 or newer, found none.*/nowhere/libucp.so.0.*pip install libucx-cu12");
}
TEST(UcxLibrary, ThatIsTooOldIsRefusedWithItsReleaseAndPlace) {
  ExpectRefused(SLUICE_OLD_UCX,
                "required UCX 1.22 or a newer 1.x, found 1.13.1 at .*old_ucp.*pip install libucx-cu12");
}

}  // namespace
}  // namespace sluice::transfer
