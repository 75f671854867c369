#include "bench_peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/random.h"
#include "disagg/decode_node.h"
#include "disagg/prefill_node.h"

namespace sluice {
namespace {

using disagg::RoomEvent;

class Nodes final : public PeerBench {
 public:
  Status Start(const KvLayout& layout, int64_t pages, const std::string& transport, bool shuffled) {
    pages_ = pages;
    for (auto* list : {&source_, &target_}) {
      for (int64_t p = 1; p <= pages; ++p) list->push_back(PageId(int32_t(p)));
      SeededStream random(list == &source_ ? 1 : 2);
      if (shuffled)
        for (size_t i = list->size(); i > 1; --i) std::swap((*list)[i - 1], (*list)[random.Below(i)]);
    }
    ASSIGN_OR_RETURN(from_, DevicePool::Make(layout, 1, pages + 1));  // as a prefill instance does
    ASSIGN_OR_RETURN(to_, DevicePool::MakeShared(layout, 1, pages + 1));
    for (const DevicePool* pool : {from_.get(), to_.get()})
      for (int64_t p = 1; p <= pages; ++p)
        for (const KvPiece& piece : layout.pieces())
          std::memset(pool->Piece(piece, PageId(int32_t(p))), int(p), size_t(piece.bytes));
    disagg::NodeOptions o;
    o.bootstrap_port = 0;
    o.backend = transport;
    const auto wake = [this] {
      std::lock_guard lock(mutex_);
      woken_ = true;
      signal_.notify_all();
    };
    ASSIGN_OR_RETURN(prefill_, disagg::PrefillNode::Start(o, layout, *from_, wake));
    ASSIGN_OR_RETURN(decode_, disagg::DecodeNode::Start(o, layout, *to_, wake));
    return OkStatus();
  }

  Status Move() override {
    const disagg::RoomId room = ++room_;
    const int64_t tokens = pages_ * kPageTokens;
    prefill_->Add(room, tokens, {});
    decode_->Announce(room, "127.0.0.1", prefill_->port());
    decode_->Open(room, tokens, {}, 0, target_);
    RETURN_IF_ERROR(Wait(true, room));
    prefill_->BeginForward(int64_t(room), room, {0, tokens, true, true}, source_);
    prefill_->ForwardDone(int64_t(room), OkStatus());
    prefill_->SetAux(room, {});
    return Wait(false, room);
  }

 private:
  Status Wait(bool on_prefill, disagg::RoomId room) {
    std::vector<RoomEvent> events;
    for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
         std::chrono::steady_clock::now() < until;) {
      events.clear();
      if (on_prefill) {
        prefill_->TakeEvents(&events);
      } else {
        decode_->TakeEvents(&events);
      }
      for (const RoomEvent& e : events) {
        if (e.room != room) continue;
        if (e.kind == RoomEvent::Kind::kReady) return OkStatus();
        if (e.kind == RoomEvent::Kind::kFailed) return e.status;
      }
      std::unique_lock lock(mutex_);
      signal_.wait_for(lock, std::chrono::milliseconds(50), [this] { return std::exchange(woken_, false); });
    }
    return DeadlineExceeded("the transfer did not end within 60 s");
  }

  int64_t pages_ = 0;
  std::vector<PageId> source_, target_;
  disagg::RoomId room_ = 0;
  std::unique_ptr<DevicePool> from_, to_;
  std::mutex mutex_;
  std::condition_variable signal_;
  bool woken_ = false;
  std::unique_ptr<disagg::PrefillNode> prefill_;
  std::unique_ptr<disagg::DecodeNode> decode_;
};

class Plain final : public SocketBench {
 public:
  Status Start() {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    out_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool ok = bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                    listen(listener, 1) == 0 &&
                    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
                    connect(out_, reinterpret_cast<sockaddr*>(&address), length) == 0;
    in_ = ok ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
    close(listener);
    if (in_ < 0) return Unavailable("a loopback connection cannot be made: {}", std::strerror(errno));
    const int one = 1;
    setsockopt(out_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    block_.resize(1 << 20, 1);
    sink_.resize(1 << 20);
    return OkStatus();
  }
  ~Plain() override {
    if (out_ >= 0) close(out_);
    if (in_ >= 0) close(in_);
  }
  void Move(int64_t bytes) override {
    std::thread writer([&] {
      for (int64_t left = bytes; left > 0;) {
        const ssize_t n =
            send(out_, block_.data(), size_t(std::min<int64_t>(left, int64_t(block_.size()))), MSG_NOSIGNAL);
        if (n <= 0) return;
        left -= n;
      }
    });
    for (int64_t left = bytes; left > 0;) {
      const ssize_t n = recv(in_, sink_.data(), size_t(std::min<int64_t>(left, int64_t(sink_.size()))), 0);
      if (n <= 0) break;
      left -= n;
    }
    writer.join();
  }

 private:
  int out_ = -1, in_ = -1;
  std::vector<char> block_, sink_;
};

}  // namespace

StatusOr<HookCost> MeasureHook(const KvLayout& layout) {
  using Clock = std::chrono::steady_clock;
  constexpr int kForwards = 300, kRooms = 10;
  disagg::NodeOptions o;
  o.backend = "fake";  // the cost of moving is not the forward's
  o.rooms.tombstone = 1'000'000;
  ASSIGN_OR_RETURN(const auto pool, DevicePool::Make(layout, 1, 4));
  ASSIGN_OR_RETURN(const auto node, disagg::PrefillNode::Start(o, layout, *pool, [] {}));
  std::vector<double> forwards, calls;
  std::vector<RoomEvent> events;
  for (int step = 1; step <= kForwards; ++step) {
    for (int i = 0; i < kRooms; ++i) node->Add(disagg::RoomId(step * kRooms + i), kPageTokens, {});
    for (int ready = 0; ready < kRooms;) {
      events.clear();
      node->TakeEvents(&events);
      for (const RoomEvent& e : events) ready += e.kind == RoomEvent::Kind::kReady;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    for (int i = 0; i < kRooms; ++i)
      node->BeginForward(step, disagg::RoomId(step * kRooms + i), {0, kPageTokens, true, true}, {PageId(1)});
    double all = 0;
    for (const LogicalLayer layer : layout.latent_layers()) {
      const auto start = Clock::now();
      node->LayerFinal(step, layer);
      const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      all += us;
      calls.push_back(us);
      // A layer's work, so that the other side sees layers come one by one as it does in a forward.
      for (const auto until = Clock::now() + std::chrono::microseconds(20); Clock::now() < until;) {
      }
    }
    forwards.push_back(all / double(layout.latent_layers().size()));
    node->ForwardDone(step, OkStatus());
    for (int i = 0; i < kRooms; ++i) node->SetAux(disagg::RoomId(step * kRooms + i), {});
  }
  std::sort(forwards.begin(), forwards.end());
  std::sort(calls.begin(), calls.end());
  return HookCost{forwards[forwards.size() / 2], calls[calls.size() * 99 / 100]};
}

StatusOr<std::unique_ptr<PeerBench>> PeerBench::Make(const KvLayout& layout, int64_t pages,
                                                     const std::string& transport, bool shuffled) {
  auto nodes = std::make_unique<Nodes>();
  RETURN_IF_ERROR(nodes->Start(layout, pages, transport, shuffled));
  return nodes;
}

StatusOr<std::unique_ptr<SocketBench>> SocketBench::Make() {
  auto plain = std::make_unique<Plain>();
  RETURN_IF_ERROR(plain->Start());
  return plain;
}

}  // namespace sluice
