// The storage tier in a directory: one file per object (file_place.h), read and written by I/O threads.
//
// The engine under the threads is io_uring where the kernel allows it (several objects in flight a thread,
// hung reads are cancelled in the kernel), else blocking calls on more threads; chosen at start, named in
// Describe().
#pragma once

#include <condition_variable>
#include <optional>
#include <thread>

#include "storage/batch_ledger.h"
#include "storage/file_transfer.h"

namespace sluice {

enum class FileEngine : uint8_t { kAuto, kUring, kThreads };

struct FileStorageOptions {
  std::string directory;
  int64_t capacity_bytes = 0;             // 0: unbounded
  FileEngine engine = FileEngine::kAuto;  // kUring: refused where it is not allowed
  int32_t threads = 0;                    // 0: 2 with io_uring, 4 without
  int32_t depth = 16;                     // objects in flight per io_uring thread
  bool direct_io = false;                 // O_DIRECT; falls back to buffered where the file system refuses it
  size_t max_batches = 256;
  Nanos io_timeout = 30'000'000'000;  // of a batch without a nearer deadline
  Nanos full_pause = 5'000'000'000;   // how long puts are refused after the medium said it is full
  int64_t touch_interval_s = 60;
  FileFaults* faults = nullptr;  // tests
  const Clock* clock = nullptr;  // null: the steady clock; must be the clock of the batches' deadlines
};

class FileStorage final : public StorageBackend {
 public:
  static StatusOr<std::unique_ptr<FileStorage>> Open(StorageFormat format, const FileStorageOptions& options);
  ~FileStorage() override;

  const StorageFormat& format() const override { return object_.format(); }
  std::string Describe() const override;
  StatusOr<StorageTicket> Submit(StorageBatch batch) override;
  void Cancel(StorageTicket ticket) override;
  size_t Poll(std::vector<StorageCompletion>* out, size_t max) override { return ledger_.Poll(out, max); }
  void SetWakeup(std::function<void()> wakeup) override { ledger_.SetWakeup(std::move(wakeup)); }
  Status Clear() override { return place_->Clear(); }
  StorageStats Stats() const override;

  bool uses_uring() const { return uring_; }

 private:
  struct Task {
    std::shared_ptr<InFlightBatch> batch;
    size_t item = 0;
  };
  class UringWorker;

  FileStorage(StorageFormat format, const FileStorageOptions& options, std::unique_ptr<FilePlace> place);
  Status Start();
  void RunBlocking();
  std::optional<Task> TryPop();
  // Handles the task unless it is a get or a put that may go on; then true.
  bool NeedsTransfer(const Task& task);
  void EndTransfer(const Task& task, const FileTransfer& transfer);
  void Wake();

  ObjectFormat object_;
  FileStorageOptions options_;
  SteadyClock steady_;
  const Clock* clock_;
  std::unique_ptr<FilePlace> place_;
  FileTransfer::Context context_;
  BatchLedger ledger_;
  bool uring_ = false;
  std::string engine_note_;
  std::atomic<Nanos> full_until_{0};
  std::mutex mutex_;  // queue_
  std::condition_variable queued_;
  std::deque<Task> queue_;
  std::atomic<bool> stop_{false};
  std::vector<std::unique_ptr<UringWorker>> uring_workers_;
  std::vector<std::thread> threads_;
};

}  // namespace sluice
