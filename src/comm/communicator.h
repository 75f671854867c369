// How context-parallel ranks talk to each other: the only way from one rank's arena to another's.
//
// One object per rank, used by that rank's executor thread alone. Calls are collective where said: every rank
// of the group makes the same calls in the same order with the same sizes. One-sided Put and Get reach memory
// that the peer has exposed and need a Fence of all ranks between a write and a peer's read of it. Every byte
// that crosses ranks is counted here.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/ids.h"

namespace sluice {

struct CommStats {
  int64_t bytes_put = 0, bytes_got = 0,
          bytes_gathered = 0;  // to or from other ranks; a rank's own bytes do not count
  int64_t fences = 0;
  int64_t bytes_moved() const { return bytes_put + bytes_got + bytes_gathered; }
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual Rank rank() const = 0;
  virtual int32_t size() const = 0;

  // Collective. After it, what any rank wrote before its own call is visible to all.
  virtual void Fence() = 0;
  // Collective. recv [size, bytes]; rank r's part at r * bytes.
  virtual void AllGather(const void* send, size_t bytes, void* recv) = 0;
  // One-sided; src and dst must not overlap. peer == rank() is a plain copy.
  virtual void Put(Rank peer, const void* src, size_t bytes, void* peer_dst) = 0;
  virtual void Get(Rank peer, const void* peer_src, size_t bytes, void* dst) = 0;
  // A kernel has read or written `bytes` of a peer's exposed memory in place (one address space).
  virtual void CountDirect(int64_t bytes_got, int64_t bytes_put) = 0;
  virtual const CommStats& stats() const = 0;
};

// How a rank waits for the others. Spinning pays only while every rank and the engine have a core of their
// own (a spin barrier of 8 ranks on 2 cores costs scheduler slices of milliseconds). With a core for each
// rank but none for the engine, which sleeps through a forward, a waiter gives its core to whoever wants it
// for a while and only then blocks: waking a blocked thread takes 30 to 50 us on a virtual machine, as long
// as a small layer. With fewer cores it blocks at once.
enum class WaitMode : uint8_t { kBlock, kYield, kSpin };

struct ThreadGroupOptions {
  WaitMode wait = WaitMode::kBlock;
  // A rank that has waited so long says for whom, and goes on waiting. A layer takes milliseconds.
  std::chrono::milliseconds patience{10'000};
};

// Ranks as threads of one process: n communicators that share one group. They may be destroyed in any order.
std::vector<std::unique_ptr<Communicator>> MakeThreadCommunicators(int32_t ranks,
                                                                   const ThreadGroupOptions& options);

// The rule above as a function of the machine.
WaitMode WaitModeFor(int32_t ranks, int32_t compute_threads_per_rank, int32_t cores);

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits until `ready()` in the given mode without blocking; false: it is time to block.
template <typename F>
bool WaitAwake(WaitMode mode, F ready) {
  if (mode == WaitMode::kBlock) return ready();
  constexpr int kPauses = 300;  // about 4 us
  for (int i = 0; i < kPauses; ++i) {
    if (ready()) return true;
    CpuRelax();
  }
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::microseconds(200);  // a layer's imbalance
  do {
    if (ready()) return true;
    if (mode == WaitMode::kYield) {
      std::this_thread::yield();
    } else {
      CpuRelax();
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

}  // namespace sluice
