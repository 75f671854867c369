// One I/O thread of FileStorage over its own io_uring: up to `depth` objects at once, one chunk of each in
// flight.
#pragma once

#include <liburing.h>

#include "storage/file_storage.h"

namespace sluice {

class FileStorage::UringWorker {
 public:
  static StatusOr<std::unique_ptr<UringWorker>> Make(FileStorage* storage, int32_t depth);
  ~UringWorker();

  void Run();   // until the storage stops and nothing is in flight
  void Wake();  // any thread: there may be tasks, cancellations or the end

 private:
  struct Slot {
    std::unique_ptr<FileTransfer> transfer;
    Task task;
    bool busy = false;
    bool cancelling = false;
  };
  UringWorker(FileStorage* storage, int32_t depth) : storage_(storage), slots_(size_t(depth)) {}
  io_uring_sqe* Sqe();
  void ListenForWake();
  void TakeTasks();
  void SubmitIo(size_t slot);
  void Reap();  // all completions that are there
  void CancelStopped();
  Nanos NearestDeadline() const;

  FileStorage* storage_;
  std::vector<Slot> slots_;
  size_t busy_ = 0;
  io_uring ring_{};
  bool ring_made_ = false;
  int wake_fd_ = -1;
  uint64_t wake_count_ = 0;  // target of the read of wake_fd_
  bool listening_ = false;
};

}  // namespace sluice
