#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/log.h"
#include "comm/communicator.h"

namespace sluice {
namespace {

// A sense-counting barrier. The last to arrive opens the next generation; the others wait for the generation
// to move.
class Barrier {
 public:
  Barrier(int32_t parties, const ThreadGroupOptions& options)
      : parties_(parties), options_(options), reached_(size_t(parties)) {}

  void Arrive(Rank rank) {
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    reached_[size_t(rank.value)].store(generation + 1, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
      arrived_.store(0, std::memory_order_relaxed);
      // Sequentially consistent: a waiter that this load does not count must see the new generation before it
      // sleeps.
      generation_.store(generation + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0)
        syscall(SYS_futex, &generation_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    if (WaitAwake(options_.wait, [&] { return generation_.load(std::memory_order_acquire) != generation; }))
      return;
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const auto ms = options_.patience.count();
    const timespec patience{ms / 1000, ms % 1000 * 1'000'000};
    while (generation_.load(std::memory_order_seq_cst) == generation) {
      const long r = syscall(SYS_futex, &generation_, FUTEX_WAIT_PRIVATE, generation, &patience, nullptr, 0);
      if (r != 0 && errno == ETIMEDOUT) SayWhoIsMissing(rank, generation);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  void SayWhoIsMissing(Rank rank, uint32_t generation) {
    if (generation_.load(std::memory_order_acquire) != generation) return;
    std::string missing;
    for (int32_t r = 0; r < parties_; ++r)
      if (reached_[size_t(r)].load(std::memory_order_relaxed) != generation + 1)
        missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    spdlog::warn("rank {} has waited {} ms at fence {} for rank {}", rank.value, options_.patience.count(),
                 generation, missing);
  }

  const int32_t parties_;
  const ThreadGroupOptions options_;
  std::vector<std::atomic<uint32_t>>
      reached_;  // [ranks] the generation that the rank has arrived for, plus one
  std::atomic<int32_t> arrived_{0};
  std::atomic<uint32_t> generation_{0};
  std::atomic<int32_t> sleepers_{0};
};

struct Group {
  Group(int32_t ranks, const ThreadGroupOptions& options) : barrier(ranks, options), send(size_t(ranks)) {}
  Barrier barrier;
  std::vector<const void*> send;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, Rank rank) : group_(std::move(group)), rank_(rank) {}

  Rank rank() const override { return rank_; }
  int32_t size() const override { return int32_t(group_->send.size()); }

  void Fence() override {
    ++stats_.fences;
    group_->barrier.Arrive(rank_);
  }
  void AllGather(const void* send, size_t bytes, void* recv) override {
    group_->send[size_t(rank_.value)] = send;
    group_->barrier.Arrive(rank_);
    for (int32_t r = 0; r < size(); ++r)
      std::memcpy(static_cast<std::byte*>(recv) + size_t(r) * bytes, group_->send[size_t(r)], bytes);
    stats_.bytes_gathered += int64_t(bytes) * (size() - 1);
    group_->barrier.Arrive(rank_);  // nobody may change its send buffer, or the slot, before all have read
  }
  void Put(Rank peer, const void* src, size_t bytes, void* peer_dst) override {
    std::memcpy(peer_dst, src, bytes);
    if (peer != rank_) stats_.bytes_put += int64_t(bytes);
  }
  void Get(Rank peer, const void* peer_src, size_t bytes, void* dst) override {
    std::memcpy(dst, peer_src, bytes);
    if (peer != rank_) stats_.bytes_got += int64_t(bytes);
  }
  void CountDirect(int64_t bytes_got, int64_t bytes_put) override {
    stats_.bytes_got += bytes_got;
    stats_.bytes_put += bytes_put;
  }
  const CommStats& stats() const override { return stats_; }

 private:
  std::shared_ptr<Group> group_;
  Rank rank_;
  CommStats stats_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeThreadCommunicators(int32_t ranks,
                                                                   const ThreadGroupOptions& options) {
  SLUICE_CHECK(ranks >= 1, "ranks {}", ranks);
  auto group = std::make_shared<Group>(ranks, options);
  std::vector<std::unique_ptr<Communicator>> all;
  for (int32_t r = 0; r < ranks; ++r) all.push_back(std::make_unique<ThreadCommunicator>(group, Rank(r)));
  return all;
}

WaitMode WaitModeFor(int32_t ranks, int32_t compute_threads_per_rank, int32_t cores) {
  const int32_t threads = ranks * compute_threads_per_rank;
  return threads + 1 <= cores ? WaitMode::kSpin : threads <= cores ? WaitMode::kYield : WaitMode::kBlock;
}

}  // namespace sluice
