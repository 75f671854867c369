#include "transfer/staged_tcp_transport.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/check.h"
#include "transfer/sent_frames.h"

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
  Status AddPeer(PeerId peer, const Hello&) override {
    std::lock_guard lock(mutex_);
    peers_.try_emplace(peer);
    return OkStatus();
  }
  void SetGate(std::shared_ptr<DeviceEvent> event) override {
    gate_ = std::move(event);
    ++gates_;
  }

  void Post(const PostWrite& write) override {
    {
      std::lock_guard lock(mutex_);
      open_[write.id] = {.room = write.room, .peer = write.peer};
      peers_[write.peer].todo.push_back({.write = write, .gate = gate_, .gate_number = gates_});
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
      Open& open = open_.at(wire.write);
      Release(open.peer, wire.buffer);
      --open.on_wire;
      if (!w.status.ok() && open.status.ok()) open.status = std::move(w.status);
    }
    std::lock_guard lock(mutex_);
    for (auto it = open_.begin(); it != open_.end();) {
      const Open& open = it->second;
      if (!open.staged || open.on_wire > 0 || open.filled > 0 || (open.status.ok() && open.waiting > 0)) {
        ++it;
        continue;
      }
      done->push_back({it->first, open.status, open.layers});
      it = open_.erase(it);
    }
  }
  Status OnTaken(PeerId peer, const std::vector<uint64_t>& tokens) override {
    std::lock_guard lock(mutex_);
    for (const uint64_t token : tokens)
      RETURN_IF_ERROR(sent_.Arrived(peer, token, [&](WriteId id, bool ends_layer) {
        const auto it = open_.find(id);
        if (it == open_.end()) return;  // its room has ended
        --it->second.waiting;
        it->second.layers += ends_layer;
      }));
    return OkStatus();
  }

  void RemovePeer(PeerId peer) override {
    End([&](const Open& o) { return o.peer == peer; }, Unavailable("the connection was cut"));
    net_->Close(peer);
    sent_.Forget(peer);
    {
      std::lock_guard lock(mutex_);
      peers_.erase(peer);
    }
    work_.notify_all();
  }
  void DropRoom(RoomId room) override {
    End([&](const Open& o) { return o.room == room; }, Aborted("the room ended before the write"));
    net_->DropBulk(room);
  }

 private:
  struct Job {
    PostWrite write;
    std::shared_ptr<DeviceEvent> gate;
    uint64_t gate_number = 0;    // they pass in that order
    size_t layer = 0, page = 0;  // what is staged next
  };
  struct Peer {
    std::deque<Job> todo;
    size_t held = 0;      // buffers that are filled or on the wire
    uint64_t served = 0;  // when a buffer was filled for it last
  };
  struct Open {  // a write that has not been reported
    RoomId room = 0;
    PeerId peer;
    bool staged = false;  // the thread is done with it
    int filled = 0;       // buffers that wait to be sent
    int on_wire = 0;
    int32_t waiting = 0;  // frames that have not arrived
    int32_t layers = 0;   // that have arrived whole
    Status status;        // of its end; an error stops it
  };
  struct Frame {
    BulkHeader header;
    int64_t at = 0, bytes = 0;
    bool ends_layer = false;
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
      for (auto& [id, peer] : peers_)
        std::erase_if(peer.todo, [&](const Job& job) {
          Open& open = open_.at(job.write.id);
          if (!which(open)) return false;
          open.staged = true;
          return true;
        });
    }
    work_.notify_all();
  }

  // REQUIRES mutex_.
  void Release(PeerId peer, size_t buffer) {
    free_.push_back(buffer);
    if (const auto it = peers_.find(peer); it != peers_.end()) --it->second.held;
    work_.notify_all();
  }

  void Send(Filled& f) {
    {
      std::lock_guard lock(mutex_);
      Open& open = open_.at(f.write);
      --open.filled;
      if (!open.status.ok()) return Release(f.peer, f.buffer);
      ++open.on_wire;
      open.waiting += int32_t(f.frames.size());
    }
    const WriteId wire = next_wire_++;
    on_wire_[wire] = {f.write, f.buffer};
    for (Frame& frame : f.frames) {
      frame.header.token = sent_.Add(f.peer, f.write, frame.ends_layer);
      net_->SendBulk(f.peer, wire, frame.header, {{buffers_[f.buffer].get() + frame.at, size_t(frame.bytes)}},
                     &frame == &f.frames.back());
    }
  }

  // Every peer finds a buffer as long as there are as many as peers, whatever the others do: one that does
  // not read keeps what it holds. REQUIRES mutex_.
  bool MayTake(const Peer& peer) const {
    if (peer.held == 0 || free_.empty()) return !free_.empty();
    size_t without = 0;
    for (const auto& [id, other] : peers_) without += other.held == 0;
    return free_.size() > without;
  }
  // The peer that is staged for next; null: nobody can be. Of those whose pages are final the one that has
  // waited longest, else the one whose pages are final first. REQUIRES mutex_.
  Peer* Next() {
    Peer* next = nullptr;
    bool next_ready = false;
    for (auto& [id, peer] : peers_) {
      if (peer.todo.empty() || !MayTake(peer)) continue;
      const bool ready = Ready(peer.todo.front());
      const bool before = next == nullptr       ? true
                          : ready != next_ready ? ready
                          : ready               ? peer.served < next->served
                                  : peer.todo.front().gate_number < next->todo.front().gate_number;
      if (!before) continue;
      next = &peer;
      next_ready = ready;
    }
    return next;
  }
  bool Ready(const Job& job) const { return job.gate == nullptr || job.gate_number <= gates_passed_; }

  void Loop() {
    pthread_setname_np(pthread_self(), "sluice-stage");
    const Status bound = copier_->Bind();
    std::unique_lock lock(mutex_);
    for (;;) {
      Peer* peer = nullptr;
      work_.wait(lock, [&] { return stop_ || (peer = Next()) != nullptr; });
      if (stop_) return;
      Job job = std::move(peer->todo.front());
      peer->todo.pop_front();
      Status status = bound;
      if (status.ok() && !Ready(job)) {
        lock.unlock();
        status = job.gate->Wait();
        lock.lock();
        if (status.ok()) gates_passed_ = std::max(gates_passed_, job.gate_number);
      }
      Open& open = open_.at(job.write.id);  // stays until it is staged
      if (job.write.pages.empty()) job.layer = job.write.layers.size();
      if (status.ok() && open.status.ok() && job.layer < job.write.layers.size()) {
        Filled f{.write = job.write.id, .peer = job.write.peer};
        f.buffer = free_.back();  // only this thread takes them
        free_.pop_back();
        Peer& taker = peers_.at(job.write.peer);  // there while the write has not ended
        ++taker.held;
        taker.served = ++served_;
        lock.unlock();
        status = Fill(&job, &f);
        lock.lock();
        if (status.ok()) {
          ++open.filled;
          filled_.push_back(std::move(f));
        } else {
          Release(f.peer, f.buffer);
        }
      }
      if (!status.ok() && open.status.ok()) open.status = status;
      if (!open.status.ok() || job.layer == job.write.layers.size()) {
        open.staged = true;
      } else {
        peers_.at(job.write.peer).todo.push_front(std::move(job));
      }
      if (options_.on_done) options_.on_done();
    }
  }

  // One buffer full of what comes next in the write.
  Status Fill(Job* job, Filled* f) {
    const KvLayout& layout = pool_.layout();
    const PostWrite& write = job->write;
    const size_t pages = write.pages.size();
    runs_.clear();
    int64_t at = 0;
    while (job->layer < write.layers.size()) {
      const LogicalLayer l = write.layers[job->layer];
      const bool index = layout.IndexSlot(l).valid();
      const int64_t page_bytes =
          layout.latent_page_bytes() + (index ? layout.index_page_bytes() : int64_t(0));
      const size_t page = job->page;
      const size_t n =
          std::min(pages - page, size_t(std::max<int64_t>(0, (staging_.buffer_bytes - at) / page_bytes)));
      if (n == 0) break;
      Frame& frame = f->frames.emplace_back();
      frame.at = at;
      frame.bytes = int64_t(n) * page_bytes;
      frame.header.room = write.room;
      frame.header.layers = {l.value};
      std::byte* to = buffers_[f->buffer].get() + at;
      for (size_t i = page; i < page + n; ++i) {
        frame.header.pages.push_back(write.pages[i].to.value);
        to = AddRun(pool_.Latent(l, write.pages[i].from), to, layout.latent_page_bytes());
      }
      for (size_t i = page; index && i < page + n; ++i)
        to = AddRun(pool_.Index(l, write.pages[i].from), to, layout.index_page_bytes());
      at += frame.bytes;
      job->page += n;
      if (job->page < pages) break;
      frame.ends_layer = true;
      job->page = 0;
      ++job->layer;
    }
    return copier_->CopyRuns(runs_);
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
  const TransportCapabilities capabilities_{.name = "tcp", .reason = "pages lie in device memory"};
  std::vector<std::shared_ptr<std::byte>> buffers_;
  std::unique_ptr<DeviceCopier> copier_;  // of the thread
  std::vector<MemoryRun> runs_;           // likewise
  // Progress thread.
  std::shared_ptr<DeviceEvent> gate_;
  uint64_t gates_ = 0;
  SentFrames sent_;
  std::unordered_map<WriteId, Wire> on_wire_;
  WriteId next_wire_ = 1;

  std::mutex mutex_;
  std::condition_variable work_;
  std::unordered_map<PeerId, Peer> peers_;
  uint64_t served_ = 0, gates_passed_ = 0;
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
