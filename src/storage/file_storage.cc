#include "storage/file_storage.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "storage/uring_worker.h"

namespace sluice {

FileStorage::FileStorage(StorageFormat format, const FileStorageOptions& options,
                         std::unique_ptr<FilePlace> place)
    : object_(std::move(format), kFileAlign),
      options_(options),
      clock_(options.clock != nullptr ? options.clock : &steady_),
      place_(std::move(place)),
      ledger_(options.max_batches, object_.payload_bytes()) {}

StatusOr<std::unique_ptr<FileStorage>> FileStorage::Open(StorageFormat format,
                                                         const FileStorageOptions& options) {
  if (format.piece_bytes.empty() || format.object_bytes() <= 0)
    return Invalid("storage format: {} pieces, {} bytes; an object needs at least one byte",
                   format.piece_bytes.size(), format.object_bytes());
  FilePlace::Options place;
  place.directory = options.directory;
  place.capacity_bytes = options.capacity_bytes;
  place.touch_interval_s = options.touch_interval_s;
  place.faults = options.faults;
  auto opened = FilePlace::Open(place);
  if (!opened.ok()) return opened.status();
  auto s = std::unique_ptr<FileStorage>(new FileStorage(std::move(format), options, *std::move(opened)));
  if (Status st = s->Start(); !st.ok()) return st;
  return s;
}

Status FileStorage::Start() {
  context_ = {&object_, place_.get(), false};
  if (options_.direct_io) {
    const std::string probe = place_->NewTempPath();
    const int fd = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0644);
    context_.direct = fd >= 0;
    if (fd >= 0) ::close(fd);
    ::unlink(probe.c_str());
    engine_note_ = context_.direct ? ", direct I/O" : ", buffered (this file system refuses direct I/O)";
  }
  if (options_.engine != FileEngine::kThreads) {
    const int n = options_.threads > 0 ? options_.threads : 2;
    for (int i = 0; i < n; ++i) {
      auto worker = UringWorker::Make(this, options_.depth);
      if (!worker.ok()) {
        uring_workers_.clear();
        if (options_.engine == FileEngine::kUring) return worker.status();
        engine_note_ += fmt::format(" ({})", Message(worker.status()));
        break;
      }
      uring_workers_.push_back(*std::move(worker));
    }
    uring_ = !uring_workers_.empty();
  }
  if (uring_) {
    for (auto& w : uring_workers_) threads_.emplace_back([worker = w.get()] { worker->Run(); });
  } else {
    const int n = options_.threads > 0 ? options_.threads : 4;
    for (int i = 0; i < n; ++i) threads_.emplace_back([this] { RunBlocking(); });
  }
  return OkStatus();
}

FileStorage::~FileStorage() {
  ledger_.CancelAll();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  Wake();
  for (auto& t : threads_) t.join();
}

std::string FileStorage::Describe() const {
  return fmt::format("file {} {} ({} threads){}, capacity {} bytes, {} objects of {} bytes found",
                     place_->directory(), uring_ ? "io_uring" : "blocking", threads_.size(), engine_note_,
                     place_->capacity_bytes(), place_->scanned_objects(), object_.payload_bytes());
}

StatusOr<StorageTicket> FileStorage::Submit(StorageBatch batch) {
  if (Status s = CheckBatch(format(), batch); !s.ok()) return s;
  const Nanos limit = clock_->Now() + options_.io_timeout;
  batch.deadline = batch.deadline == 0 ? limit : std::min(batch.deadline, limit);
  auto accepted = ledger_.Accept(std::move(batch));
  if (!accepted.ok()) return accepted.status();
  const StorageTicket ticket = (*accepted)->ticket;
  const size_t n = (*accepted)->batch.items.size();
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < n; ++i) queue_.push_back({*accepted, i});
  }
  Wake();
  return ticket;
}

void FileStorage::Cancel(StorageTicket ticket) {
  ledger_.Cancel(ticket);
  Wake();
}

void FileStorage::Wake() {
  queued_.notify_all();
  for (auto& w : uring_workers_) w->Wake();
}

StorageStats FileStorage::Stats() const {
  StorageStats s = ledger_.Stats();
  s.objects = place_->objects();
  s.bytes = place_->used_bytes();
  s.capacity_bytes = place_->capacity_bytes();
  s.writes_suspended = clock_->Now() < full_until_.load();
  return s;
}

std::optional<FileStorage::Task> FileStorage::TryPop() {
  std::lock_guard lock(mutex_);
  if (queue_.empty()) return std::nullopt;
  Task t = std::move(queue_.front());
  queue_.pop_front();
  return t;
}

bool FileStorage::NeedsTransfer(const Task& task) {
  InFlightBatch& b = *task.batch;
  const Digest256& key = b.batch.items[task.item].key;
  StorageOutcome outcome = b.StopReason(clock_->Now());
  if (outcome == StorageOutcome::kOk) {
    switch (b.batch.op) {
      case StorageOp::kGet:
        return true;
      case StorageOp::kPut:
        if (clock_->Now() >= full_until_.load()) return true;
        outcome = StorageOutcome::kFull;
        break;
      case StorageOp::kExists:
        outcome = FileTransfer::Probe(context_, key);
        break;
      case StorageOp::kDelete:
        place_->Remove(FileTransfer::NameOf(context_, key));
        break;
    }
  }
  ledger_.Finish(&b, task.item, outcome);
  return false;
}

void FileStorage::EndTransfer(const Task& task, const FileTransfer& transfer) {
  if (transfer.found_present()) ledger_.CountPresent();
  if (transfer.evicted_objects() != 0)
    ledger_.CountEvicted(transfer.evicted_objects(), transfer.evicted_bytes());
  if (transfer.hit_full_disk()) full_until_ = clock_->Now() + options_.full_pause;
  ledger_.Finish(task.batch.get(), task.item, transfer.outcome());
}

void FileStorage::RunBlocking() {
  FileTransfer transfer(context_);
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    if (!NeedsTransfer(task)) continue;
    const StorageBatch& batch = task.batch->batch;
    bool more = transfer.Start(batch.op, batch.items[task.item]);
    while (more) {
      if (const StorageOutcome stop = task.batch->StopReason(clock_->Now()); stop != StorageOutcome::kOk) {
        transfer.Abandon(stop);
        break;
      }
      const FileIo& io = transfer.io();
      const ssize_t n = io.write ? ::pwritev(io.fd, io.iov, io.iov_count, io.offset)
                                 : ::preadv(io.fd, io.iov, io.iov_count, io.offset);
      if (n < 0 && errno == EINTR) continue;
      more = transfer.Advance(n < 0 ? -errno : n);
    }
    EndTransfer(task, transfer);
  }
}

}  // namespace sluice
