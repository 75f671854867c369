// Prefill-to-decode rows of `bench transfer`: both nodes in this process, over real shared memory and real
// sockets.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "kv/kv_layout.h"

namespace sluice {

// Moves `pages` pages once from a prefill node to a decode node each time `move` is called.
class PeerBench {
 public:
  // shuffled: page pairs in random order, so that no two can go in one copy.
  static StatusOr<std::unique_ptr<PeerBench>> Make(const KvLayout& layout, int64_t pages,
                                                   const std::string& transport, bool shuffled);
  virtual ~PeerBench() = default;
  virtual Status Move() = 0;
};

// What reporting one layer costs the thread that runs the forward, in microseconds: the median over forwards
// of 10 rooms, and the 99th percentile of single calls.
struct HookCost {
  double us_per_layer = 0, us_p99 = 0;
};
StatusOr<HookCost> MeasureHook(const KvLayout& layout);

// The same bytes over a plain loopback connection: one thread writes 1 MiB blocks, one reads them.
class SocketBench {
 public:
  static StatusOr<std::unique_ptr<SocketBench>> Make();
  virtual ~SocketBench() = default;
  virtual void Move(int64_t bytes) = 0;
};

}  // namespace sluice
