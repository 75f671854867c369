#include "disagg/node.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <random>

#include "base/log.h"
#include "tensor/dtype.h"

namespace sluice::disagg {
namespace {

constexpr Nanos kBusyTurn = 20'000'000;  // deadlines are looked at that often while rooms are open
constexpr Nanos kIdleTurn = 200'000'000;
constexpr Nanos kRecordsPace = 100'000'000;
constexpr size_t kRoomsShown = 32;
constexpr Nanos kHandshakeTime = 10'000'000'000;

uint64_t RandomBits() {
  std::random_device device;
  return uint64_t(device()) << 32 | device();
}

}  // namespace

std::string HostId() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat ns {};
  stat("/proc/self/ns/pid", &ns);
  return fmt::format("{}:{}:{}", boot, ns.st_ino, getuid());
}

Nanos Node::Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Node::Node(const NodeOptions& options, const KvLayout& layout, const DevicePool& pool, transfer::Role role,
           std::function<void()> wake)
    : options_([&] {
        NodeOptions o = options;
        o.rooms.epoch = RandomBits() | 1;
        o.rooms.lanes = pool.lanes();
        o.rooms.record = o.record != nullptr;
        return o;
      }()),
      layout_(layout),
      pool_(pool),
      net_(this),
      wake_(std::move(wake)) {
  const bool prefill = role == transfer::Role::kPrefill;
  self_.instance_id = fmt::format("{}-{:08x}", prefill ? "prefill" : "decode", uint32_t(RandomBits()));
  self_.epoch = options_.rooms.epoch;
  self_.role = role;
  self_.model_name = options.model_name;
  self_.content_fingerprint = layout.content_fingerprint();
  self_.numerics_class = layout.options().numerics_class;
  self_.page_tokens = uint32_t(kPageTokens);
  self_.latent_dtype = std::string(Name(layout.latent_dtype()));
  self_.index_dtype = std::string(Name(layout.index_dtype()));
  self_.latent_page_bytes = uint64_t(layout.latent_page_bytes());
  self_.index_page_bytes = uint64_t(layout.index_page_bytes());
  for (const LogicalLayer l : layout.latent_layers()) self_.latent_layers.push_back(l.value);
  for (const LogicalLayer l : layout.index_layers()) self_.index_layers.push_back(l.value);
  self_.lanes = uint32_t(pool.lanes());
  self_.pages_per_lane = uint64_t(pool.pages_per_lane());
  self_.max_tokens = options.max_tokens;
  self_.max_rooms = uint32_t(options.rooms.max_rooms);
  self_.host_id = HostId();
  // Memory of a device is not another process's to map.
  if (pool.memory() == nullptr && (options.backend == "auto" || options.backend == "shm")) {
    self_.transports.push_back("shm");
    self_.regions.assign(size_t(pool.lanes()), pool.ShareHandle());
  }
  if (options.backend == "ucx") self_.transports.push_back("ucx");
  if (options.backend == "auto" || options.backend == "tcp") self_.transports.push_back("tcp");
  if (options.backend == "fake") self_.transports.push_back("fake");
}

Node::~Node() { StopThread(); }

void Node::NameSelf(NodeStats* stats) const {
  stats->role = self_.role == transfer::Role::kPrefill ? "prefill" : "decode";
  stats->instance_id = self_.instance_id;
  stats->epoch = options_.rooms.epoch;
  stats->transport = options_.backend;
}

void Node::Keep(std::shared_ptr<RoomTimeline> timeline, Nanos now, const Status& end) {
  timeline->ended = now;
  timeline->failed = !end.ok();
  if (timelines_.size() == kTimelinesMax) timelines_.erase(timelines_.begin());
  timelines_.push_back(std::move(timeline));
}

void Node::StartThread() {
  NameSelf(&stats_);
  thread_ = std::thread([this] { Run(); });
}

void Node::StopThread() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  net_.Wake();
  thread_.join();
}

NodeStats Node::Stats() const {
  std::lock_guard lock(mutex_);
  NodeStats stats = stats_;
  stats.rooms = shown_;
  stats.ended = shown_ended_;
  return stats;
}

bool Node::TakeEvents(std::vector<RoomEvent>* out) {
  std::lock_guard lock(mutex_);
  if (events_.empty()) return false;
  for (RoomEvent& e : events_) out->push_back(std::move(e));
  events_.clear();
  return true;
}

void Node::Emit(RoomEvent event) {
  std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  emitted_ = true;
}

void Node::Refuse(PeerId peer, const Status& why) {
  spdlog::warn("refused a peer: {}", Message(why));
  net_.Send(peer, transfer::HelloAck{options_.rooms.epoch, std::string(Message(why)), ""});
  peers_.erase(peer);
  net_.CloseAfterFlush(peer);
}

void Node::RunCommands() {
  {
    std::lock_guard lock(mutex_);
    sleeping_.store(false, std::memory_order_relaxed);
    running_.swap(commands_);
  }
  for (const auto& f : running_) f();
  running_.clear();
}

// Records name every room, so they are made at a pace, and once more when all is quiet.
void Node::Publish(Nanos now) {
  NodeStats stats = MakeStats();
  NameSelf(&stats);
  stats.timelines = timelines_;
  for (const auto& [id, peer] : peers_)
    if (peer.ready)
      stats.peers.push_back(fmt::format("{} ({}{}{})", peer.hello.instance_id, peer.via,
                                        peer.one_sided ? ", one-sided" : "", peer.silent ? ", silent" : ""));
  if (now >= next_records_ || (stats.active_rooms == 0 && active_shown_)) {
    next_records_ = now + kRecordsPace;
    std::vector<transfer::RoomRecord> rooms = Records(kRoomsShown), ended = TakeEndedRecords();
    active_shown_ = !rooms.empty();
    std::lock_guard lock(mutex_);
    shown_.swap(rooms);
    for (transfer::RoomRecord& r : ended) shown_ended_.push_back(std::move(r));
    if (shown_ended_.size() > kRoomsShown)
      shown_ended_.erase(shown_ended_.begin(), shown_ended_.end() - kRoomsShown);
  }
  std::lock_guard lock(mutex_);
  stats_ = std::move(stats);
}

void Node::Run() {
  pthread_setname_np(pthread_self(), "sluice-pd");
  Nanos next_beat = Now() + options_.heartbeat_interval;
  bool busy = false;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (stop_) return;
      sleeping_.store(commands_.empty(), std::memory_order_release);
    }
    const Nanos before = Now();
    const Nanos wait = std::max<Nanos>(0, std::min(next_beat - before, busy ? kBusyTurn : kIdleTurn));
    net_.Poll(sleeping_ ? std::min(wait, MaySleep(before)) : 0);
    RunCommands();
    const Nanos now = Now();
    Turn(now);
    if (now >= next_beat) {
      // A turn that came late says nothing about the peers: their bytes may lie in the sockets still.
      const bool late = now > next_beat + options_.heartbeat_interval;
      next_beat = now + options_.heartbeat_interval;
      ++beats_;
      Beat(now);
      const Nanos limit =
          options_.heartbeat_interval * options_.heartbeat_max_failure + options_.heartbeat_interval / 2;
      std::vector<PeerId> silent, unborn;
      for (auto& [id, peer] : peers_) {
        if (!peer.ready) {
          if (now - peer.since > kHandshakeTime) unborn.push_back(id);
        } else if (!peer.silent && !late && now - net_.LastHeard(id) > limit) {
          peer.silent = true;
          silent.push_back(id);
        } else if (peer.silent && now - net_.LastHeard(id) <= limit) {
          peer.silent = false;
        }
      }
      for (const PeerId id : silent)
        OnSilent(
            id, Unavailable("{}: no heartbeat for {:.1f} s (--disaggregation-heartbeat-interval {:.1f} x {})",
                            peers_.at(id).hello.instance_id, double(limit) * 1e-9,
                            double(options_.heartbeat_interval) * 1e-9, options_.heartbeat_max_failure));
      for (const PeerId id : unborn) {
        const bool ucx = peers_.at(id).via == "ucx";
        net_.Close(id);
        OnClosed(id, DeadlineExceeded("no handshake within {} s{}", kHandshakeTime / 1'000'000'000,
                                      ucx ? "; pages go by UCX: its ports must be reachable "
                                            "(UCX_TCP_PORT_RANGE, UCX_NET_DEVICES)"
                                          : ""));
      }
      Turn(now);
    }
    Publish(now);
    busy = stats_.active_rooms > 0 || stats_.outstanding_writes > 0;  // written by this thread alone
    if (std::exchange(emitted_, false) && wake_) wake_();
  }
}

}  // namespace sluice::disagg
