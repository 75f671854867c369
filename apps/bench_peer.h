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
  static StatusOr<std::unique_ptr<PeerBench>> Make(const KvLayout& layout, int64_t pages,
                                                   const std::string& transport);
  virtual ~PeerBench() = default;
  virtual Status Move() = 0;
};

// The same bytes over a plain loopback connection: one thread writes 1 MiB blocks, one reads them.
class SocketBench {
 public:
  static StatusOr<std::unique_ptr<SocketBench>> Make();
  virtual ~SocketBench() = default;
  virtual void Move(int64_t bytes) = 0;
};

}  // namespace sluice
