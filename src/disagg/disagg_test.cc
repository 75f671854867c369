// The two nodes over real sockets and shared memory, without an engine: what moves, what is refused, and what
// is let go when a side fails.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "disagg/decode_node.h"
#include "disagg/prefill_node.h"
#include "kv/layout_fixture.h"

namespace sluice::disagg {
namespace {

using Kind = RoomEvent::Kind;
using transfer::Chunk;

const KvLayout& Layout(DType dtype = DType::kBF16) {
  static const KvLayout bf16 = testing::MakeLayout(testing::Small(), DType::kBF16, DType::kBF16);
  static const KvLayout fp8 = testing::MakeLayout(testing::Small(), DType::kF8E4M3, DType::kF8E4M3);
  return dtype == DType::kBF16 ? bf16 : fp8;
}

std::byte Value(PageId page, const KvPiece& piece, int64_t i) {
  return std::byte(page.value * 31 + piece.layer.value * 7 + int(piece.component) * 3 + i * 5);
}

struct Side {
  std::unique_ptr<DevicePool> pool;
  std::vector<RoomEvent> events;
};

class Pair : public ::testing::TestWithParam<const char*> {
 protected:
  NodeOptions Options() {
    NodeOptions o;
    o.bootstrap_port = 0;
    o.backend = GetParam();
    o.heartbeat_interval = 100'000'000;
    o.heartbeat_max_failure = 5;
    o.self_check = true;
    o.rooms.layer_group = 2;
    o.rooms.bootstrap_timeout = o.rooms.waiting_timeout = 1'000'000'000;
    o.rooms.abort_fence = 500'000'000;
    o.rooms.abort_repeat = 100'000'000;
    return o;
  }
  void Start(NodeOptions prefill, NodeOptions decode, const KvLayout& layout = Layout(),
             const KvLayout& other = Layout()) {
    p_.pool = *DevicePool::MakeShared(layout, 2, 32);
    d_.pool = *DevicePool::MakeShared(other, 3, 24);
    for (int32_t page = 2; page < 64; ++page)
      for (const KvPiece& piece : layout.pieces())
        for (int64_t i = 0; i < piece.bytes; ++i)
          p_.pool->Piece(piece, PageId(page))[i] = Value(PageId(page), piece, i);
    prefill_ = *PrefillNode::Start(prefill, layout, *p_.pool, [] {});
    decode_ = *DecodeNode::Start(decode, other, *d_.pool, [] {});
  }
  void Open(RoomId room, int64_t tokens, int32_t first_page, std::vector<PageId> pages) {
    prefill_->Add(room, tokens, Digest256{1});
    decode_->Announce(room, "127.0.0.1", prefill_->port());
    decode_->Open(room, tokens, Digest256{1}, first_page, std::move(pages));
  }
  // The first event of that kind and room within 5 s.
  std::optional<RoomEvent> Wait(Side& side, Kind kind, RoomId room) {
    for (int i = 0; i < 5000; ++i) {
      if (prefill_) prefill_->TakeEvents(&p_.events);
      if (decode_) decode_->TakeEvents(&d_.events);
      for (const RoomEvent& e : side.events)
        if (e.kind == kind && e.room == room) return e;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return std::nullopt;
  }
  // What both sides publish once nothing is open any more.
  void Settle() {
    for (int i = 0; i < 5000; ++i) {
      const NodeStats sent = prefill_->Stats(), got = decode_->Stats();
      if (sent.rooms_completed > 0 && sent.rooms_completed == got.rooms_completed &&
          sent.active_rooms + got.active_rooms + got.leased_pages + sent.outstanding_writes == 0)
        return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "rooms, pages or writes stay";
  }
  void Forward(int64_t step, RoomId room, Chunk chunk, const std::vector<PageId>& source) {
    prefill_->BeginForward(step, room, chunk, source);
    for (int l = 0; l < 3; ++l) prefill_->LayerFinal(step, LogicalLayer(l));
    prefill_->ForwardDone(step, OkStatus());
  }
  void ExpectHolds(const std::vector<PageId>& source, int32_t first, const std::vector<PageId>& pages) {
    for (size_t i = 0; i < pages.size(); ++i)
      for (const KvPiece& piece : Layout().pieces())
        for (int64_t b = 0; b < piece.bytes; ++b)
          ASSERT_EQ(d_.pool->Piece(piece, pages[i])[b], Value(source[size_t(first) + i], piece, b))
              << "page " << i << " layer " << piece.layer.value << " byte " << b;
  }
  Side p_, d_;
  std::unique_ptr<PrefillNode> prefill_;
  std::unique_ptr<DecodeNode> decode_;
};
INSTANTIATE_TEST_SUITE_P(Transports, Pair, ::testing::Values("shm", "tcp", "auto"));
INSTANTIATE_TEST_SUITE_P(OverUcx, Pair, ::testing::Values("ucx"));

TEST_P(Pair, MovesEveryPageOfEveryLayerOnceChunkByChunk) {
  Start(Options(), Options());
  const std::vector<PageId> source = {PageId(9), PageId(4), PageId(17), PageId(30)};
  const std::vector<PageId> pages = {PageId(50), PageId(7), PageId(21)};
  Open(5, 200, 1, pages);
  ASSERT_TRUE(Wait(p_, Kind::kReady, 5));
  Forward(1, 5, {64, 150, true, false}, source);
  Forward(2, 5, {150, 200, false, true}, source);
  Aux aux;
  aux.first_token = 77;
  prefill_->SetAux(5, aux);
  const auto ready = Wait(d_, Kind::kReady, 5);
  ASSERT_TRUE(ready);
  EXPECT_EQ(ready->aux, aux);
  ASSERT_TRUE(Wait(d_, Kind::kEnded, 5));
  ASSERT_TRUE(Wait(p_, Kind::kEnded, 5));
  ExpectHolds(source, 1, pages);
  Settle();
  const NodeStats sent = prefill_->Stats(), got = decode_->Stats();
  EXPECT_EQ(sent.bytes_sent, 3 * Layout().page_bytes());
  EXPECT_EQ(got.bytes_received, sent.bytes_sent);
  EXPECT_EQ(got.digests_checked, 3);
  EXPECT_EQ(sent.writes, 6) << "ceil(3 layers / 2) submits a chunk and rank: one rank's pages, then two's";
}

TEST_P(Pair, APromptThatDecodeHoldsMovesNothing) {
  Start(Options(), Options());
  Open(6, 128, 2, {});
  ASSERT_TRUE(Wait(p_, Kind::kReady, 6));
  Forward(1, 6, {64, 128, true, true}, {PageId(9), PageId(4)});
  prefill_->SetAux(6, {});
  ASSERT_TRUE(Wait(d_, Kind::kReady, 6));
  EXPECT_EQ(prefill_->Stats().bytes_sent, 0);
}

TEST_P(Pair, AnAbortInTheMiddleEndsBothSidesAndThePagesHaveNoWriter) {
  NodeOptions slow = Options();
  slow.bytes_per_second_max = 200e3;
  Start(slow, Options());
  std::vector<PageId> source, pages;
  for (int32_t i = 0; i < 20; ++i) {
    source.push_back(PageId(2 + i));
    pages.push_back(PageId(3 + i));
  }
  Open(7, 20 * 64, 0, pages);
  ASSERT_TRUE(Wait(p_, Kind::kReady, 7));
  Forward(1, 7, {0, 20 * 64, true, true}, source);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  decode_->Cancel(7, Aborted("the client is gone"));
  ASSERT_TRUE(Wait(d_, Kind::kFailed, 7));
  ASSERT_TRUE(Wait(d_, Kind::kEnded, 7));
  for (const PageId page : pages) d_.pool->Poison(page);
  ASSERT_TRUE(Wait(p_, Kind::kEnded, 7));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (const PageId page : pages)
    for (const KvPiece& piece : Layout().pieces())
      ASSERT_EQ(d_.pool->Piece(piece, page)[0], std::byte(0xff)) << "written after the end of the room";
}

// Between decode and prefill: carries bytes both ways until it is told to drop what it carries.
class Middle {
 public:
  explicit Middle(int port) : port_(port) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = At(0);
    socklen_t length = sizeof address;
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    own_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~Middle() {
    stop_ = true;
    thread_.join();
    close(listener_);
  }
  int port() const { return own_; }
  void LeadTo(int port) { port_ = port; }
  // Resets every connection; those that come later are carried again.
  void Cut() {
    cut_ = true;
    while (cut_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  int connections() const { return connections_; }

 private:
  static sockaddr_in At(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(uint16_t(port));
    return address;
  }
  void Run() {
    std::vector<std::pair<int, int>> ways;  // from, to
    std::vector<char> bytes(64 << 10);
    const auto drop = [&](size_t way) {
      const linger reset{1, 0};
      for (const int fd : {ways[way].first, ways[way].second}) {
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        close(fd);
      }
      const size_t pair = way & ~size_t(1);
      ways.erase(ways.begin() + long(pair), ways.begin() + long(pair) + 2);
    };
    while (!stop_) {
      if (cut_) {
        while (!ways.empty()) drop(0);
        cut_ = false;
      }
      std::vector<pollfd> ready = {{listener_, POLLIN, 0}};
      for (const auto& way : ways) ready.push_back({way.first, POLLIN, 0});
      if (poll(ready.data(), ready.size(), 5) <= 0) continue;
      for (size_t i = ready.size(); i-- > 1;) {
        if (ready[i].revents == 0) continue;
        const ssize_t got = read(ways[i - 1].first, bytes.data(), bytes.size());
        for (ssize_t at = 0; at < got;) {
          const ssize_t sent = send(ways[i - 1].second, bytes.data() + at, size_t(got - at), MSG_NOSIGNAL);
          if (sent <= 0) break;
          at += sent;
        }
        if (got > 0) continue;
        drop(i - 1);
        break;  // the others are at other places now
      }
      if ((ready[0].revents & POLLIN) == 0) continue;
      const int in = accept(listener_, nullptr, nullptr), out = socket(AF_INET, SOCK_STREAM, 0);
      const sockaddr_in to = At(port_);
      if (connect(out, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
        close(in);
        close(out);
        continue;
      }
      ways.emplace_back(in, out);
      ways.emplace_back(out, in);
      ++connections_;
    }
    while (!ways.empty()) drop(0);
  }
  int listener_ = -1, own_ = 0;
  std::atomic<int> port_;
  std::atomic<bool> stop_{false}, cut_{false};
  std::atomic<int> connections_{0};
  std::thread thread_;
};

class Cut : public Pair {
 protected:
  // A room of twenty pages whose transfer takes a second; returns when a part of it has arrived.
  void StartARoom(RoomId room, NodeOptions options) {
    NodeOptions slow = options;
    slow.bytes_per_second_max = 400e3;
    Start(slow, options);
    middle_ = std::make_unique<Middle>(prefill_->port());
    for (int32_t i = 0; i < 20; ++i) {
      source_.push_back(PageId(2 + i));
      pages_.push_back(PageId(3 + i));
    }
    prefill_->Add(room, 20 * 64, Digest256{1});
    decode_->Announce(room, "127.0.0.1", middle_->port());
    decode_->Open(room, 20 * 64, Digest256{1}, 0, pages_);
    ASSERT_TRUE(Wait(p_, Kind::kReady, room));
    prefill_->BeginForward(1, room, {0, 10 * 64, true, false}, source_);
    for (int l = 0; l < 3; ++l) prefill_->LayerFinal(1, LogicalLayer(l));
    prefill_->ForwardDone(1, OkStatus());
    for (int i = 0; i < 5000 && prefill_->Stats().bytes_sent == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_GT(prefill_->Stats().bytes_sent, 0);
    ASSERT_LT(prefill_->Stats().bytes_sent, 20 * Layout().page_bytes());
  }
  void SecondChunk(RoomId room) {
    prefill_->BeginForward(2, room, {10 * 64, 20 * 64, false, true}, source_);
    for (int l = 0; l < 3; ++l) prefill_->LayerFinal(2, LogicalLayer(l));
    prefill_->ForwardDone(2, OkStatus());
    prefill_->SetAux(room, {});
  }
  std::unique_ptr<Middle> middle_;
  std::vector<PageId> source_, pages_;
};
INSTANTIATE_TEST_SUITE_P(Transports, Cut, ::testing::Values("tcp"));
INSTANTIATE_TEST_SUITE_P(OverUcx, Cut, ::testing::Values("ucx"));

TEST_P(Cut, ARoomOutlivesItsConnectionAndGetsWhatHadNotArrived) {
  NodeOptions options = Options();
  options.rooms.layer_group = 1;
  StartARoom(5, options);
  middle_->Cut();
  SecondChunk(5);  // the forward goes on meanwhile
  const auto ready = Wait(d_, Kind::kReady, 5);
  ASSERT_TRUE(ready) << decode_->Stats().last_error << "; " << prefill_->Stats().last_error;
  ASSERT_TRUE(Wait(d_, Kind::kEnded, 5));
  ASSERT_TRUE(Wait(p_, Kind::kEnded, 5));
  ExpectHolds(source_, 0, pages_);
  EXPECT_EQ(middle_->connections(), 2);
  for (const Side* side : {&p_, &d_})
    for (const RoomEvent& e : side->events) EXPECT_NE(e.kind, Kind::kFailed) << e.status;
  Settle();
  const NodeStats sent = prefill_->Stats(), got = decode_->Stats();
  EXPECT_EQ(sent.resumes, 1);
  EXPECT_EQ(got.resumes, 1);
  EXPECT_EQ(sent.bytes_sent, 20 * Layout().page_bytes()) << "no layer counts twice";
  EXPECT_EQ(got.bytes_received, sent.bytes_sent);
  EXPECT_EQ(got.digests_checked, 20);
}

TEST_P(Cut, AgainAndAgainARoomGetsThere) {
  NodeOptions options = Options();
  options.rooms.layer_group = 1;
  StartARoom(5, options);
  for (int cut = 1; cut <= 3; ++cut) {
    middle_->Cut();
    for (int i = 0; i < 5000 && prefill_->Stats().resumes < cut; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_EQ(prefill_->Stats().resumes, cut) << decode_->Stats().last_error;
  }
  SecondChunk(5);
  ASSERT_TRUE(Wait(d_, Kind::kReady, 5)) << decode_->Stats().last_error;
  ExpectHolds(source_, 0, pages_);
  EXPECT_EQ(prefill_->Stats().rooms_failed + decode_->Stats().rooms_failed, 0);
}

TEST_P(Cut, AnotherInstanceBehindTheAddressEndsTheRoom) {
  StartARoom(5, Options());
  Side other;
  other.pool = *DevicePool::MakeShared(Layout(), 2, 32);
  auto another = *PrefillNode::Start(Options(), Layout(), *other.pool, [] {});
  middle_->LeadTo(another->port());
  middle_->Cut();
  const auto failed = Wait(d_, Kind::kFailed, 5);
  ASSERT_TRUE(failed);
  EXPECT_NE(Message(failed->status).find("restarted"), std::string_view::npos) << failed->status;
  ASSERT_TRUE(Wait(d_, Kind::kEnded, 5));
  ASSERT_TRUE(Wait(p_, Kind::kEnded, 5)) << "nobody came back";
}

TEST_P(Pair, HeartbeatsBeforeTheWayOfThePagesIsOpenAreNoFault) {
  NodeOptions often = Options();
  often.heartbeat_interval = 1'000'000;
  often.heartbeat_max_failure = 5000;
  Start(often, often);
  Open(17, 100, 0, {PageId(5), PageId(6)});
  EXPECT_TRUE(Wait(p_, Kind::kReady, 17));
}

TEST_P(Pair, ThePrefillSideGoesAwayAndItsRoomsEndAtOnce) {
  Start(Options(), Options());
  Open(8, 100, 0, {PageId(5), PageId(6)});
  ASSERT_TRUE(Wait(p_, Kind::kReady, 8));
  const auto began = std::chrono::steady_clock::now();
  prefill_.reset();
  const auto failed = Wait(d_, Kind::kFailed, 8);
  ASSERT_TRUE(failed);
  EXPECT_TRUE(absl::IsUnavailable(failed->status)) << failed->status;
  ASSERT_TRUE(Wait(d_, Kind::kEnded, 8));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(900));
}

TEST_P(Pair, TheDecodeSideGoesAwayAndPrefillLetsItsPagesGo) {
  Start(Options(), Options());
  Open(9, 100, 0, {PageId(5), PageId(6)});
  ASSERT_TRUE(Wait(p_, Kind::kReady, 9));
  decode_.reset();
  ASSERT_TRUE(Wait(p_, Kind::kFailed, 9));
  ASSERT_TRUE(Wait(p_, Kind::kEnded, 9));
}

TEST_P(Pair, NobodyListensOrComesEndsWithinTheDeadline) {
  Start(Options(), Options());
  decode_->Announce(10, "127.0.0.1", 1);
  decode_->Open(10, 64, {}, 0, {PageId(5)});
  const auto refused = Wait(d_, Kind::kFailed, 10);
  ASSERT_TRUE(refused);
  EXPECT_NE(Message(refused->status).find("127.0.0.1:1"), std::string_view::npos) << refused->status;
  prefill_->Add(11, 64, {});
  const auto late = Wait(p_, Kind::kFailed, 11);
  ASSERT_TRUE(late);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late->status));
}

TEST_P(Pair, AnotherLayoutIsRefusedWithBothValues) {
  Start(Options(), Options(), Layout(), Layout(DType::kF8E4M3));
  Open(12, 64, 0, {PageId(5)});
  const auto failed = Wait(d_, Kind::kFailed, 12);
  ASSERT_TRUE(failed);
  for (const char* text : {"kv_cache_dtype", "bf16", "fp8_e4m3"})
    EXPECT_NE(Message(failed->status).find(text), std::string_view::npos) << failed->status;
}

TEST_P(Pair, AnotherPromptIsRefused) {
  Start(Options(), Options());
  prefill_->Add(13, 64, Digest256{1});
  decode_->Announce(13, "127.0.0.1", prefill_->port());
  decode_->Open(13, 64, Digest256{2}, 0, {PageId(5)});
  const auto failed = Wait(d_, Kind::kFailed, 13);
  ASSERT_TRUE(failed);
  EXPECT_NE(Message(failed->status).find("digest"), std::string_view::npos);
  ASSERT_TRUE(Wait(d_, Kind::kEnded, 13));
}

TEST(Nodes, TransportsThatDoNotMeetAreNamed) {
  NodeOptions o;
  o.bootstrap_port = 0;
  auto pool = *DevicePool::MakeShared(Layout(), 1, 8);
  o.backend = "shm";
  auto prefill = *PrefillNode::Start(o, Layout(), *pool, [] {});
  o.backend = "tcp";
  auto decode = *DecodeNode::Start(o, Layout(), *pool, [] {});
  decode->Announce(1, "127.0.0.1", prefill->port());
  std::vector<RoomEvent> events;
  for (int i = 0; i < 3000 && events.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    decode->TakeEvents(&events);
  }
  ASSERT_FALSE(events.empty());
  EXPECT_NE(Message(events[0].status).find("shm here, tcp there"), std::string_view::npos)
      << events[0].status;
}

TEST(Nodes, SharedMemoryIsNotTakenThroughAProxy) {
  NodeOptions o;
  o.bootstrap_port = 0;
  auto pool = *DevicePool::MakeShared(Layout(), 1, 8);
  const auto join = [&](const char* backend, auto&& then) {
    o.backend = backend;
    auto prefill = *PrefillNode::Start(o, Layout(), *pool, [] {});
    auto decode = *DecodeNode::Start(o, Layout(), *pool, [] {});
    Middle middle(prefill->port());
    decode->Announce(1, "127.0.0.1", middle.port());
    std::vector<RoomEvent> events;
    for (int i = 0; i < 3000 && events.empty() && decode->Stats().peers.empty(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      decode->TakeEvents(&events);
    }
    then(*decode, events);
  };
  join("shm", [](DecodeNode&, const std::vector<RoomEvent>& events) {
    ASSERT_FALSE(events.empty());
    EXPECT_NE(Message(events[0].status).find("shm: the connection goes through a proxy"),
              std::string_view::npos)
        << events[0].status;
  });
  join("auto", [](DecodeNode& decode, const std::vector<RoomEvent>&) {
    ASSERT_EQ(decode.Stats().peers.size(), 1u);
    EXPECT_NE(decode.Stats().peers[0].find("(tcp"), std::string::npos) << decode.Stats().peers[0];
  });
}

TEST(Nodes, FakeMovesNothingAndNeedsNoPeer) {
  NodeOptions o;
  o.backend = "fake";
  auto pool = *DevicePool::Make(Layout(), 1, 8);
  auto prefill = *PrefillNode::Start(o, Layout(), *pool, [] {});
  prefill->Add(1, 64, {});
  std::vector<RoomEvent> events;
  const auto wait = [&](Kind kind) {
    for (int i = 0; i < 3000; ++i) {
      prefill->TakeEvents(&events);
      for (const RoomEvent& e : events)
        if (e.kind == kind) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  };
  ASSERT_TRUE(wait(Kind::kReady));
  prefill->BeginForward(1, 1, {0, 64, true, true}, {PageId(2)});
  prefill->ForwardDone(1, OkStatus());
  prefill->SetAux(1, {});
  ASSERT_TRUE(wait(Kind::kEnded));
  EXPECT_EQ(prefill->Stats().bytes_sent, 0);
}

// What the process holds, of mmap and of the heap.
int64_t BytesHeld() {
  const struct mallinfo2 m = mallinfo2();
  return int64_t(m.uordblks + m.hblkhd);
}

// Ten at a time of 79 layers; what is held after the last thousand is what was held after the first.
TEST(Nodes, TenThousandRequestsOfManyLayersLeaveNothingBehind) {
  ModelConfig deep = testing::Small();
  deep.num_layers = 79;
  deep.index.computes.assign(79, true);
  const KvLayout layout = testing::MakeLayout(deep);
  NodeOptions o;
  o.backend = "fake";
  o.rooms.resume_timeout = o.rooms.tombstone = 1;  // they end with time, which is not what is looked for here
  auto pool = *DevicePool::Make(layout, 1, 8);
  auto prefill = *PrefillNode::Start(o, layout, *pool, [] {});
  std::vector<RoomEvent> events;
  int64_t ended = 0, held = 0;
  const auto wait = [&](int64_t count, Kind kind) {
    for (int i = 0; i < 20000 && count > 0; ++i) {
      events.clear();
      prefill->TakeEvents(&events);
      for (const RoomEvent& e : events) {
        count -= e.kind == kind;
        ended += e.kind == Kind::kEnded;
      }
      if (count > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return count == 0;
  };
  for (int64_t batch = 0; batch < 1000; ++batch) {
    for (RoomId i = 1; i <= 10; ++i) prefill->Add(RoomId(batch) * 10 + i, 64, {});
    ASSERT_TRUE(wait(10, Kind::kReady));
    for (RoomId i = 1; i <= 10; ++i)
      prefill->BeginForward(batch, RoomId(batch) * 10 + i, {0, 64, true, true}, {PageId(2)});
    for (int32_t l = 0; l < 79; ++l) prefill->LayerFinal(batch, LogicalLayer(l));
    prefill->ForwardDone(batch, OkStatus());
    for (RoomId i = 1; i <= 10; ++i) prefill->SetAux(RoomId(batch) * 10 + i, {});
    ASSERT_TRUE(wait(10, Kind::kEnded)) << "batch " << batch;
    if (batch == 99) {
      std::this_thread::sleep_for(std::chrono::milliseconds(150));  // the records of the last ones are shown
      (void)prefill->Stats();
      held = BytesHeld();
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  const NodeStats s = prefill->Stats();
  EXPECT_LT(BytesHeld() - held, 64 << 10);
  EXPECT_EQ(ended, 10000);
  EXPECT_EQ(s.rooms_completed, 10000);
  EXPECT_EQ(s.writes, 100000) << "ceil(79 / 8) submits a chunk";
  EXPECT_LE(s.ended.size(), 32u);
  EXPECT_EQ(s.active_rooms, 0);
  EXPECT_EQ(s.outstanding_writes, 0);
  EXPECT_EQ(s.bytes_sent, 0);
}

// The way the product goes: both nodes, real pages, until every room is read on the other side.
TEST_P(Pair, RoomsOneAfterAnotherLeaveNothingBehind) {
  NodeOptions o = Options();
  o.rooms.resume_timeout = o.rooms.tombstone = 1;
  Start(o, o);
  const std::vector<PageId> source = {PageId(9), PageId(4)}, pages = {PageId(50), PageId(7)};
  int64_t held = 0;
  for (RoomId room = 1; room <= 300; ++room) {
    Open(room, 128, 0, pages);
    ASSERT_TRUE(Wait(p_, Kind::kReady, room));
    Forward(int64_t(room), room, {0, 128, true, true}, source);
    prefill_->SetAux(room, {});
    ASSERT_TRUE(Wait(d_, Kind::kEnded, room));
    ASSERT_TRUE(Wait(p_, Kind::kEnded, room));
    p_.events.clear();
    d_.events.clear();
    if (room == 100) held = BytesHeld();
  }
  EXPECT_LT(BytesHeld() - held, 128 << 10);
}

TEST_P(Pair, RoomsSayHowTheyWent) {
  Start(Options(), Options());
  const std::vector<PageId> source = {PageId(9), PageId(4)}, pages = {PageId(50), PageId(7)};
  Open(5, 128, 0, pages);
  ASSERT_TRUE(Wait(p_, Kind::kReady, 5));
  Forward(1, 5, {0, 128, true, true}, source);
  prefill_->SetAux(5, {});
  ASSERT_TRUE(Wait(p_, Kind::kEnded, 5));
  NodeStats s;
  for (int i = 0; i < 500 && s.ended.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    s = prefill_->Stats();
  }
  ASSERT_EQ(s.ended.size(), 1u);
  const transfer::RoomRecord& r = s.ended[0];
  EXPECT_EQ(r.room, 5u);
  EXPECT_STREQ(r.result, "ok");
  EXPECT_STREQ(r.mode, "per_layer");
  EXPECT_EQ(r.layers_done, r.layers);
  EXPECT_EQ(r.bytes_done, 2 * Layout().page_bytes());
  EXPECT_EQ(r.latent_bytes + r.index_bytes, r.bytes_done);
  EXPECT_EQ(r.layers_at_end, 0);
  EXPECT_GT(r.aux_bytes, 0);
  for (const double seconds :
       {r.bootstrap_s, r.queue_s, r.wait_layers_s, r.wait_completions_s, r.transfer_s}) {
    EXPECT_GE(seconds, 0);
    EXPECT_LT(seconds, 60);
  }
}

}  // namespace
}  // namespace sluice::disagg
