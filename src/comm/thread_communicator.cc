#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstring>

#include "base/check.h"
#include "comm/communicator.h"

namespace sluice {
namespace {

// A sense-counting barrier. The last to arrive opens the next generation; the others wait for the generation
// to move.
class Barrier {
 public:
  Barrier(int32_t parties, bool spin) : parties_(parties), spin_(spin) {}

  void Arrive() {
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == parties_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      if (sleepers_.load(std::memory_order_seq_cst) > 0)
        syscall(SYS_futex, &generation_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    if (spin_) {
      for (int i = 0; i < kSpins; ++i) {
        if (generation_.load(std::memory_order_acquire) != generation) return;
        __builtin_ia32_pause();
      }
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (generation_.load(std::memory_order_seq_cst) == generation)
      syscall(SYS_futex, &generation_, FUTEX_WAIT_PRIVATE, generation, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr int kSpins =
      20000;  // about 100 us: longer than a layer's imbalance, shorter than a scheduler slice
  const int32_t parties_;
  const bool spin_;
  std::atomic<int32_t> arrived_{0};
  std::atomic<uint32_t> generation_{0};
  std::atomic<int32_t> sleepers_{0};
};

struct Group {
  Group(int32_t ranks, bool spin) : barrier(ranks, spin), send(size_t(ranks)) {}
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
    group_->barrier.Arrive();
  }
  void AllGather(const void* send, size_t bytes, void* recv) override {
    group_->send[size_t(rank_.value)] = send;
    group_->barrier.Arrive();
    for (int32_t r = 0; r < size(); ++r)
      std::memcpy(static_cast<std::byte*>(recv) + size_t(r) * bytes, group_->send[size_t(r)], bytes);
    stats_.bytes_gathered += int64_t(bytes) * (size() - 1);
    group_->barrier.Arrive();  // nobody may change its send buffer, or the slot, before all have read
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
  auto group = std::make_shared<Group>(ranks, options.spin);
  std::vector<std::unique_ptr<Communicator>> all;
  for (int32_t r = 0; r < ranks; ++r) all.push_back(std::make_unique<ThreadCommunicator>(group, Rank(r)));
  return all;
}

bool MaySpin(int32_t ranks, int32_t compute_threads_per_rank, int32_t cores) {
  return ranks * compute_threads_per_rank + 1 <= cores;
}

}  // namespace sluice
