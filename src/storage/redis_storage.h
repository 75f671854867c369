// The storage tier in a Redis server or cluster, over hiredis.
//
//   PREFIX:{KEY}:FFFFFFFFFFFFFFFF   string: object header + payload. Every command names one key, so any
//   cluster layout works;
//                                   MOVED and ASK are followed
//   PREFIX:generation               random on first use, incremented by Clear; read again when older than 50
//   ms
//
// Each I/O thread has its own connections; a lost one is made anew, at most once in `reconnect_pause`, and
// what is asked meanwhile is an error (a miss) at once. Capacity and eviction are the server's (maxmemory, an
// LRU policy); its OOM reply suspends puts. Values pass through a buffer of the connection, so spans are
// touched only when a whole reply is there.
#pragma once

#include <condition_variable>
#include <thread>

#include "storage/batch_ledger.h"
#include "storage/object_format.h"

namespace sluice {

struct RedisStorageOptions {
  std::string host = "127.0.0.1";
  int32_t port = 6379;
  std::string unix_socket;  // instead of host and port
  std::string username, password;
  int32_t database = 0;
  std::string prefix = "sluice";
  int64_t ttl_s = 0;  // 0: objects do not expire
  int32_t threads = 4;
  size_t max_batches = 256;
  Nanos connect_timeout = 1'000'000'000;
  Nanos io_timeout = 5'000'000'000;  // of one command, if the batch's deadline is not nearer
  Nanos reconnect_pause = 1'000'000'000;
  Nanos full_pause = 5'000'000'000;
  const Clock* clock = nullptr;  // null: the steady clock
};

class RedisStorage final : public StorageBackend {
 public:
  // Connects once; Unavailable with the server's answer when that fails.
  static StatusOr<std::unique_ptr<RedisStorage>> Open(StorageFormat format,
                                                      const RedisStorageOptions& options);
  ~RedisStorage() override;

  const StorageFormat& format() const override { return object_.format(); }
  std::string Describe() const override;
  StatusOr<StorageTicket> Submit(StorageBatch batch) override;
  void Cancel(StorageTicket ticket) override { ledger_.Cancel(ticket); }
  size_t Poll(std::vector<StorageCompletion>* out, size_t max) override { return ledger_.Poll(out, max); }
  void SetWakeup(std::function<void()> wakeup) override { ledger_.SetWakeup(std::move(wakeup)); }
  Status Clear() override;
  StorageStats Stats() const override;

  std::string KeyOf(const Digest256& key) const;

 private:
  class Connections;
  struct Task {
    std::shared_ptr<InFlightBatch> batch;
    size_t item = 0;
  };
  RedisStorage(StorageFormat format, const RedisStorageOptions& options);
  void Run(Connections* connections);
  StorageOutcome Perform(Connections* connections, const Task& task);
  StorageOutcome Put(Connections* connections, const StorageItem& item, Nanos deadline, bool* present);
  StorageOutcome Get(Connections* connections, const StorageItem& item, Nanos deadline);
  StorageOutcome Exists(Connections* connections, const Digest256& key, Nanos deadline);

  ObjectFormat object_;
  RedisStorageOptions options_;
  SteadyClock steady_;
  const Clock* clock_;
  std::string fingerprint_hex_;
  BatchLedger ledger_;
  std::atomic<Nanos> full_until_{0};
  std::mutex mutex_;  // queue_, stop_
  std::condition_variable queued_;
  std::deque<Task> queue_;
  bool stop_ = false;
  std::vector<std::unique_ptr<Connections>> connections_;
  std::vector<std::thread> threads_;
};

}  // namespace sluice
