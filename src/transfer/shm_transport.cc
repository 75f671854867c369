#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/stream_copy.h"
#include "transfer/transport.h"

namespace sluice::transfer {
namespace {

constexpr int64_t kStreamBytes =
    256 << 10;  // of one layer: a write of at least that does not stay in a cache

class ShmTransport final : public Transport {
 public:
  ShmTransport(const DevicePool& pool, const TransportOptions& options)
      : pool_(pool),
        options_(options),
        capabilities_{.name = "shm", .same_host_only = true, .one_sided = true, .reason = "same host"},
        thread_([this] { Loop(); }) {}

  ~ShmTransport() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    thread_.join();
  }

  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::vector<std::string> Regions() const override {
    return std::vector<std::string>(size_t(pool_.lanes()), pool_.ShareHandle());
  }

  Status AddPeer(PeerId peer, const Hello& theirs) override {
    if (theirs.regions.empty() || theirs.regions[0].empty())
      return Unavailable(
          "transport shm: peer {} exposes no shared memory; start it with the same transport on this host",
          theirs.instance_id);
    ASSIGN_OR_RETURN(std::unique_ptr<DevicePool> remote,
                     DevicePool::Attach(pool_.layout(), int32_t(theirs.lanes), int64_t(theirs.pages_per_lane),
                                        theirs.regions[0]));
    std::lock_guard lock(mutex_);
    peers_[peer] = std::move(remote);
    return OkStatus();
  }

  void Post(const PostWrite& write) override {
    {
      std::lock_guard lock(mutex_);
      todo_.push_back(write);
    }
    work_.notify_one();
  }

  void Poll(std::vector<WriteDone>* done) override {
    std::lock_guard lock(mutex_);
    for (WriteDone& d : done_) done->push_back(std::move(d));
    done_.clear();
  }

  void DropRoom(RoomId room) override {
    std::lock_guard lock(mutex_);
    std::erase_if(todo_, [&](const PostWrite& w) {
      if (w.room != room) return false;
      done_.push_back({w.id, Aborted("the room ended before the write")});
      return true;
    });
  }

  void RemovePeer(PeerId peer) override {
    std::unique_lock lock(mutex_);
    removed_.push_back(peer);
    std::erase_if(todo_, [&](const PostWrite& w) {
      if (w.peer != peer) return false;
      done_.push_back({w.id, Unavailable("the connection was cut before the write")});
      return true;
    });
    idle_.wait(lock, [&] { return current_ != peer; });
    peers_.erase(peer);
    std::erase(removed_, peer);
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stop_ || !todo_.empty(); });
      if (stop_) return;
      const PostWrite write = std::move(todo_.front());
      todo_.pop_front();
      const auto it = peers_.find(write.peer);
      if (it == peers_.end()) {
        done_.push_back({write.id, Unavailable("the peer is not connected")});
        if (options_.on_done) options_.on_done();
        continue;
      }
      const DevicePool& remote = *it->second;
      current_ = write.peer;
      lock.unlock();
      const Status status = Copy(write, remote);
      lock.lock();
      current_ = PeerId();
      done_.push_back({write.id, status});
      idle_.notify_all();
      if (options_.on_done) options_.on_done();
    }
  }

  bool Removed(PeerId peer) {
    std::lock_guard lock(mutex_);
    for (const PeerId p : removed_)
      if (p == peer) return true;
    return stop_;
  }

  Status Copy(const PostWrite& write, const DevicePool& remote) {
    const KvLayout& layout = pool_.layout();
    const int64_t remote_pages = remote.pages_per_lane() * remote.lanes();
    for (const PageMove& m : write.pages) {
      if (m.to.value < 0 || m.to.value >= remote_pages)
        return Internal("destination page {} of a pool of {}", m.to.value, remote_pages);
    }
    const bool stream = int64_t(write.pages.size()) * layout.latent_page_bytes() >= kStreamBytes;
    for (const LogicalLayer layer : write.layers) {
      if (Removed(write.peer)) return Unavailable("the connection was cut during the write");
      const bool index = layout.IndexSlot(layer).valid();
      int64_t bytes = CopyPieces(
          write.pages, layout.latent_page_bytes(), stream,
          [&](PageId page) { return pool_.Latent(layer, page); },
          [&](PageId page) { return remote.Latent(layer, page); });
      if (index)
        bytes += CopyPieces(
            write.pages, layout.index_page_bytes(), stream,
            [&](PageId page) { return pool_.Index(layer, page); },
            [&](PageId page) { return remote.Index(layer, page); });
      Throttle(bytes);
    }
    return OkStatus();
  }

  // One component of one layer: pages that lie in a row on both sides go in one copy. A large write passes by
  // the caches, which neither side would find it in when it reads it.
  template <typename From, typename To>
  static int64_t CopyPieces(const std::vector<PageMove>& pages, int64_t bytes, bool stream, const From& from,
                            const To& to) {
    const auto copy = [&](std::byte* t, const std::byte* f, size_t n) {
      if (stream)
        StreamCopy(t, f, n);
      else
        std::memcpy(t, f, n);
    };
    const std::byte* from_run = nullptr;
    std::byte* to_run = nullptr;
    int64_t run = 0;
    for (const PageMove& m : pages) {
      const std::byte* f = from(m.from);
      std::byte* t = to(m.to);
      if (run > 0 && from_run + run == f && to_run + run == t) {
        run += bytes;
        continue;
      }
      if (run > 0) copy(to_run, from_run, size_t(run));
      from_run = f;
      to_run = t;
      run = bytes;
    }
    if (run > 0) copy(to_run, from_run, size_t(run));
    return int64_t(pages.size()) * bytes;
  }

  void Throttle(int64_t bytes) {
    if (options_.bytes_per_second_max <= 0) return;
    const auto now = std::chrono::steady_clock::now();
    next_ = std::max(next_, now) +
            std::chrono::nanoseconds(int64_t(double(bytes) / options_.bytes_per_second_max * 1e9));
    std::this_thread::sleep_until(next_);
  }

  const DevicePool& pool_;
  const TransportOptions options_;
  const TransportCapabilities capabilities_;
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<PostWrite> todo_;
  std::vector<WriteDone> done_;
  std::unordered_map<PeerId, std::unique_ptr<DevicePool>> peers_;
  std::vector<PeerId> removed_;
  PeerId current_;
  bool stop_ = false;
  std::chrono::steady_clock::time_point next_{};
  std::thread thread_;
};

class FakeTransport final : public Transport {
 public:
  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::vector<std::string> Regions() const override { return {}; }
  Status AddPeer(PeerId, const Hello&) override { return OkStatus(); }
  void Post(const PostWrite& write) override { done_.push_back({write.id, OkStatus()}); }
  void Poll(std::vector<WriteDone>* done) override {
    done->insert(done->end(), done_.begin(), done_.end());
    done_.clear();
  }
  void RemovePeer(PeerId) override {}
  void DropRoom(RoomId) override {}

 private:
  const TransportCapabilities capabilities_{
      .name = "fake", .moves_bytes = false, .reason = "asked for; moves nothing"};
  std::vector<WriteDone> done_;
};

}  // namespace

std::unique_ptr<Transport> MakeShmTransport(const DevicePool& pool, const TransportOptions& options) {
  return std::make_unique<ShmTransport>(pool, options);
}
std::unique_ptr<Transport> MakeFakeTransport() { return std::make_unique<FakeTransport>(); }

}  // namespace sluice::transfer
