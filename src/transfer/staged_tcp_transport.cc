#include "transfer/staged_tcp_transport.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/check.h"

namespace sluice::transfer {
namespace {

class StagedTcpTransport final : public Transport {
 public:
  StagedTcpTransport(const DevicePool& pool, PeerNet* net, const TransportOptions& options,
                     const StagingOptions& staging)
      : pool_(pool), net_(net), options_(options), staging_(staging) {}

  ~StagedTcpTransport() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  Status Start() {
    SLUICE_CHECK(
        staging_.buffer_bytes >= pool_.layout().latent_page_bytes() + pool_.layout().index_page_bytes(),
        "staging of {} bytes", staging_.buffer_bytes);
    for (int i = 0; i < staging_.buffers; ++i) {
      ASSIGN_OR_RETURN(auto buffer,
                       pool_.memory()->AllocateShared(staging_.buffer_bytes, "staging of a transfer"));
      buffers_.push_back(std::move(buffer));
      free_.push_back(i);
    }
    ASSIGN_OR_RETURN(copier_, pool_.memory()->MakeCopier());
    thread_ = std::thread([this] { Loop(); });
    return OkStatus();
  }

  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::vector<std::string> Regions() const override { return {}; }
  Status AddPeer(PeerId, const Hello&) override { return OkStatus(); }
  void SetGate(std::shared_ptr<DeviceEvent> event) override { gate_ = std::move(event); }

  void Post(const PostWrite& write) override {
    {
      std::lock_guard lock(mutex_);
      open_[write.id] = {.room = write.room, .peer = write.peer};
      todo_.push_back({write, gate_});
    }
    work_.notify_all();
  }

  void Poll(std::vector<WriteDone>* done) override {
    std::vector<Filled> filled;
    {
      std::lock_guard lock(mutex_);
      filled.swap(filled_);
    }
    for (Filled& f : filled) Send(f);
    for (PeerNet::Written& w : net_->TakeWritten()) {
      const auto it = on_wire_.find(w.id);
      if (it == on_wire_.end()) continue;
      const Wire wire = it->second;
      on_wire_.erase(it);
      std::lock_guard lock(mutex_);
      Release(wire.buffer);
      Open& open = open_.at(wire.write);
      --open.on_wire;
      if (!w.status.ok() && open.status.ok()) open.status = std::move(w.status);
    }
    std::lock_guard lock(mutex_);
    for (auto it = open_.begin(); it != open_.end();) {
      const Open& open = it->second;
      if (!open.staged || open.on_wire > 0 || open.filled > 0) {
        ++it;
        continue;
      }
      done->push_back({it->first, open.status});
      it = open_.erase(it);
    }
  }

  void RemovePeer(PeerId peer) override {
    End([&](const Open& o) { return o.peer == peer; }, Unavailable("the connection was cut"));
    net_->Close(peer);
  }
  void DropRoom(RoomId room) override {
    End([&](const Open& o) { return o.room == room; }, Aborted("the room ended before the write"));
    net_->DropBulk(room);
  }

 private:
  struct Job {
    PostWrite write;
    std::shared_ptr<DeviceEvent> gate;
  };
  struct Open {  // a write that has not been reported
    RoomId room = 0;
    PeerId peer;
    bool staged = false;  // the thread is done with it
    int filled = 0;       // buffers that wait to be sent
    int on_wire = 0;
    Status status;  // of its end; an error stops it
  };
  struct Frame {
    BulkHeader header;
    int64_t at = 0, bytes = 0;
  };
  struct Filled {
    WriteId write = 0;
    PeerId peer;
    size_t buffer = 0;
    std::vector<Frame> frames;
  };
  struct Wire {
    WriteId write = 0;
    size_t buffer = 0;
  };

  // Whatever of them has not reached the wire stays here. The one that the thread works at stops at its next
  // buffer.
  template <typename F>
  void End(const F& which, const Status& why) {
    {
      std::lock_guard lock(mutex_);
      for (auto& [id, open] : open_)
        if (which(open) && open.status.ok()) open.status = why;
      std::erase_if(todo_, [&](const Job& job) {
        Open& open = open_.at(job.write.id);
        if (!which(open)) return false;
        open.staged = true;
        return true;
      });
    }
    work_.notify_all();
  }

  // REQUIRES mutex_.
  void Release(size_t buffer) {
    free_.push_back(buffer);
    work_.notify_all();
  }

  void Send(Filled& f) {
    {
      std::lock_guard lock(mutex_);
      Open& open = open_.at(f.write);
      --open.filled;
      if (!open.status.ok()) return Release(f.buffer);
      ++open.on_wire;
    }
    const WriteId wire = next_wire_++;
    on_wire_[wire] = {f.write, f.buffer};
    for (const Frame& frame : f.frames)
      net_->SendBulk(f.peer, wire, frame.header, {{buffers_[f.buffer].get() + frame.at, size_t(frame.bytes)}},
                     &frame == &f.frames.back());
  }

  void Loop() {
    pthread_setname_np(pthread_self(), "sluice-stage");
    const Status bound = copier_->Bind();
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stop_ || !todo_.empty(); });
      if (stop_) return;
      const Job job = std::move(todo_.front());
      todo_.pop_front();
      lock.unlock();
      Status status = bound;
      if (status.ok() && job.gate != nullptr) status = job.gate->Wait();
      if (status.ok()) status = Stage(job.write);
      lock.lock();
      Open& open = open_.at(job.write.id);
      open.staged = true;
      if (!status.ok() && open.status.ok()) open.status = status;
      if (options_.on_done) options_.on_done();
    }
  }

  // A free buffer; none when the write or the transport has ended.
  bool Take(WriteId write, size_t* buffer) {
    std::unique_lock lock(mutex_);
    const auto ended = [&] { return stop_ || !open_.at(write).status.ok(); };
    work_.wait(lock, [&] { return ended() || !free_.empty(); });
    if (ended()) return false;
    *buffer = free_.back();
    free_.pop_back();
    return true;
  }

  Status Stage(const PostWrite& write) {
    const KvLayout& layout = pool_.layout();
    const size_t pages = write.pages.size();
    size_t layer = 0, page = 0;
    while (layer < write.layers.size() && pages > 0) {
      Filled f{.write = write.id, .peer = write.peer};
      if (!Take(write.id, &f.buffer)) return OkStatus();
      runs_.clear();
      int64_t at = 0;
      while (layer < write.layers.size()) {
        const LogicalLayer l = write.layers[layer];
        const bool index = layout.IndexSlot(l).valid();
        const int64_t page_bytes =
            layout.latent_page_bytes() + (index ? layout.index_page_bytes() : int64_t(0));
        const size_t n =
            std::min(pages - page, size_t(std::max<int64_t>(0, (staging_.buffer_bytes - at) / page_bytes)));
        if (n == 0) break;
        Frame& frame = f.frames.emplace_back();
        frame.at = at;
        frame.bytes = int64_t(n) * page_bytes;
        frame.header.room = write.room;
        frame.header.layers = {l.value};
        std::byte* to = buffers_[f.buffer].get() + at;
        for (size_t i = page; i < page + n; ++i) {
          frame.header.pages.push_back(write.pages[i].to.value);
          to = AddRun(pool_.Latent(l, write.pages[i].from), to, layout.latent_page_bytes());
        }
        for (size_t i = page; index && i < page + n; ++i)
          to = AddRun(pool_.Index(l, write.pages[i].from), to, layout.index_page_bytes());
        at += frame.bytes;
        page += n;
        if (page < pages) break;
        page = 0;
        ++layer;
      }
      const Status copied = copier_->CopyRuns(runs_);
      std::lock_guard lock(mutex_);
      if (!copied.ok()) {
        Release(f.buffer);
        return copied;
      }
      ++open_.at(write.id).filled;
      filled_.push_back(std::move(f));
      if (options_.on_done) options_.on_done();
    }
    return OkStatus();
  }

  // Pages that lie in a row are one run.
  std::byte* AddRun(const std::byte* from, std::byte* to, int64_t bytes) {
    if (!runs_.empty() && runs_.back().src + runs_.back().bytes == from &&
        runs_.back().dst + runs_.back().bytes == to) {
      runs_.back().bytes += bytes;
    } else {
      runs_.push_back({.src = from, .dst = to, .bytes = bytes});
    }
    return to + bytes;
  }

  const DevicePool& pool_;
  PeerNet* const net_;
  const TransportOptions options_;
  const StagingOptions staging_;
  const TransportCapabilities capabilities_{"tcp", false, true, "pages lie in device memory"};
  std::vector<std::shared_ptr<std::byte>> buffers_;
  std::unique_ptr<DeviceCopier> copier_;  // of the thread
  std::vector<MemoryRun> runs_;           // likewise
  // Progress thread.
  std::shared_ptr<DeviceEvent> gate_;
  std::unordered_map<WriteId, Wire> on_wire_;
  WriteId next_wire_ = 1;

  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<Job> todo_;
  std::unordered_map<WriteId, Open> open_;
  std::vector<Filled> filled_;
  std::vector<size_t> free_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace

StatusOr<std::unique_ptr<Transport>> MakeStagedTcpTransport(const DevicePool& pool, PeerNet* net,
                                                            const TransportOptions& options,
                                                            const StagingOptions& staging) {
  net->SetRateLimit(options.bytes_per_second_max);
  auto transport = std::make_unique<StagedTcpTransport>(pool, net, options, staging);
  RETURN_IF_ERROR(transport->Start());
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace sluice::transfer
