// One thread's connections to a Redis server or to the nodes of a cluster; the only user of hiredis.
#pragma once

#include <hiredis/hiredis.h>

#include <atomic>
#include <map>
#include <mutex>

#include "storage/redis_storage.h"

namespace sluice {

struct RedisReplyFree {
  void operator()(redisReply* r) const { freeReplyObject(r); }
};
using RedisReply = std::unique_ptr<redisReply, RedisReplyFree>;

class RedisStorage::Connections {
 public:
  Connections(const RedisStorageOptions& options, const Clock* clock);

  // One command on one key (arguments[1], or none). Null: no connection, or no whole reply before the
  // deadline.
  RedisReply Command(std::vector<std::string_view> arguments, Nanos deadline);
  // The generation of the place; 0 when it cannot be had.
  uint64_t Generation(Nanos deadline);
  void ForgetGeneration() { generation_at_ = 0; }
  // UNLINKs every key PREFIX:{*, on every node heard of.
  Status DeleteAll(Nanos deadline);
  const std::string& last_error() const { return last_error_; }
  // From any thread: the call that waits for a reply and all later ones fail at once.
  void Interrupt();

 private:
  // The socket that a call waits on, for Interrupt.
  class Waiting {
   public:
    Waiting(Connections* owner, int fd);
    ~Waiting();

   private:
    Connections* const owner_;
  };
  struct ContextFree {
    void operator()(redisContext* c) const { redisFree(c); }
  };
  struct Node {
    std::unique_ptr<redisContext, ContextFree> context;
    Nanos failed_at = 0;
  };
  redisContext* Connect(const std::string& node, Nanos deadline);
  RedisReply Call(const std::string& node, const std::vector<std::string_view>& arguments, Nanos deadline);
  static uint32_t SlotOf(std::string_view key);

  const RedisStorageOptions& options_;
  const Clock* clock_;
  std::map<std::string, Node> nodes_;          // "" is the configured one, else "host:port"
  std::map<uint32_t, std::string> slot_node_;  // cluster slots that MOVED told us of
  uint64_t generation_ = 0;
  Nanos generation_at_ = 0;
  std::string last_error_;
  std::mutex interrupt_mutex_;
  std::atomic<bool> interrupted_ = false;
  int waiting_fd_ = -1;  // under the mutex
};

}  // namespace sluice
