#include "storage/uring_worker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace sluice {
namespace {
constexpr uint64_t kWakeTag = ~uint64_t{0}, kCancelTag = ~uint64_t{1};
}

StatusOr<std::unique_ptr<FileStorage::UringWorker>> FileStorage::UringWorker::Make(FileStorage* storage,
                                                                                   int32_t depth) {
  auto w = std::unique_ptr<UringWorker>(new UringWorker(storage, depth));
  // Entries: one I/O and one cancellation per slot, and the wake-up.
  if (const int e = io_uring_queue_init(unsigned(2 * depth + 2), &w->ring_, 0); e != 0)
    return Unavailable("io_uring: {}", std::strerror(-e));
  w->ring_made_ = true;
  io_uring_probe* probe = io_uring_get_probe_ring(&w->ring_);
  const bool able = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READV) &&
                    io_uring_opcode_supported(probe, IORING_OP_WRITEV) &&
                    io_uring_opcode_supported(probe, IORING_OP_READ) &&
                    io_uring_opcode_supported(probe, IORING_OP_ASYNC_CANCEL);
  io_uring_free_probe(probe);
  if (!able) return Unavailable("io_uring: this kernel lacks an operation we need");
  w->wake_fd_ = ::eventfd(0, EFD_CLOEXEC);
  if (w->wake_fd_ < 0) return Unavailable("eventfd: {}", std::strerror(errno));
  return w;
}

FileStorage::UringWorker::~UringWorker() {
  if (ring_made_) io_uring_queue_exit(&ring_);
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

void FileStorage::UringWorker::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_fd_, &one, sizeof(one));
}

io_uring_sqe* FileStorage::UringWorker::Sqe() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  SLUICE_CHECK(sqe != nullptr, "submission queue of the storage ring is full");
  return sqe;
}

void FileStorage::UringWorker::ListenForWake() {
  if (listening_) return;
  io_uring_sqe* sqe = Sqe();
  io_uring_prep_read(sqe, wake_fd_, &wake_count_, sizeof(wake_count_), 0);
  io_uring_sqe_set_data64(sqe, kWakeTag);
  io_uring_submit(&ring_);
  listening_ = true;
}

void FileStorage::UringWorker::Run() {
  for (;;) {
    ListenForWake();
    TakeTasks();
    Reap();
    if (storage_->stop_ && busy_ == 0) {
      bool empty;
      {
        std::lock_guard lock(storage_->mutex_);
        empty = storage_->queue_.empty();
      }
      if (empty) return;
      continue;
    }
    CancelStopped();
    if (!listening_) continue;  // a wake-up came meanwhile: look at the queue first
    io_uring_cqe* cqe = nullptr;
    const Nanos deadline = NearestDeadline();
    if (deadline == 0) {
      io_uring_wait_cqe(&ring_, &cqe);
    } else {
      const Nanos left = std::max<Nanos>(deadline - storage_->clock_->Now(), 100'000);
      __kernel_timespec ts{left / 1'000'000'000, left % 1'000'000'000};
      io_uring_wait_cqe_timeout(&ring_, &cqe, &ts);
    }
    Reap();
  }
}

void FileStorage::UringWorker::TakeTasks() {
  while (busy_ < slots_.size()) {
    std::optional<Task> task = storage_->TryPop();
    if (!task) return;
    if (!storage_->NeedsTransfer(*task)) continue;
    size_t i = 0;
    while (slots_[i].busy) ++i;
    Slot& slot = slots_[i];
    if (slot.transfer == nullptr) slot.transfer = std::make_unique<FileTransfer>(storage_->context_);
    slot.task = *std::move(task);
    const StorageBatch& batch = slot.task.batch->batch;
    if (!slot.transfer->Start(batch.op, batch.items[slot.task.item])) {
      storage_->EndTransfer(slot.task, *slot.transfer);
      slot.task = {};
      continue;
    }
    slot.busy = true;
    slot.cancelling = false;
    ++busy_;
    SubmitIo(i);
    Reap();  // what the page cache holds is done by now: hash it while it is warm, before the next object
  }
}

void FileStorage::UringWorker::SubmitIo(size_t i) {
  const FileIo& io = slots_[i].transfer->io();
  int fd = io.fd;
  if (FileFaults* f = storage_->options_.faults; f != nullptr && !io.write)
    if (const int hung = f->ReadFd(); hung >= 0) fd = hung;
  io_uring_sqe* sqe = Sqe();
  if (io.write) {
    io_uring_prep_writev(sqe, fd, io.iov, unsigned(io.iov_count), uint64_t(io.offset));
  } else {
    io_uring_prep_readv(sqe, fd, io.iov, unsigned(io.iov_count), fd == io.fd ? uint64_t(io.offset) : 0);
  }
  io_uring_sqe_set_data64(sqe, i);
  io_uring_submit(&ring_);
}

void FileStorage::UringWorker::Reap() {
  io_uring_cqe* cqe = nullptr;
  while (io_uring_peek_cqe(&ring_, &cqe) == 0 && cqe != nullptr) {
    const uint64_t tag = io_uring_cqe_get_data64(cqe);
    const int64_t result = cqe->res;
    io_uring_cqe_seen(&ring_, cqe);
    if (tag == kWakeTag) listening_ = false;
    if (tag == kWakeTag || tag == kCancelTag) continue;
    Slot& slot = slots_[tag];
    bool more;
    if (result == -EINTR || result == -EAGAIN) {
      more = true;
    } else if (result == -ECANCELED) {
      more = false;
      const StorageOutcome why = slot.task.batch->StopReason(storage_->clock_->Now());
      slot.transfer->Abandon(why == StorageOutcome::kOk ? StorageOutcome::kError : why);
    } else {
      more = slot.transfer->Advance(result);
    }
    if (more) {
      const StorageOutcome stop = slot.task.batch->StopReason(storage_->clock_->Now());
      if (stop == StorageOutcome::kOk) {
        SubmitIo(tag);
        continue;
      }
      slot.transfer->Abandon(stop);
    }
    storage_->EndTransfer(slot.task, *slot.transfer);
    slot.task = {};
    slot.busy = false;
    --busy_;
  }
}

void FileStorage::UringWorker::CancelStopped() {
  const Nanos now = storage_->clock_->Now();
  bool any = false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.busy || slot.cancelling || slot.task.batch->StopReason(now) == StorageOutcome::kOk) continue;
    io_uring_sqe* sqe = Sqe();
    io_uring_prep_cancel64(sqe, i, 0);
    io_uring_sqe_set_data64(sqe, kCancelTag);
    slot.cancelling = any = true;
  }
  if (any) io_uring_submit(&ring_);
}

Nanos FileStorage::UringWorker::NearestDeadline() const {
  Nanos nearest = 0;
  for (const Slot& slot : slots_) {
    if (!slot.busy || slot.cancelling) continue;
    const Nanos d = slot.task.batch->batch.deadline;
    if (d != 0 && (nearest == 0 || d < nearest)) nearest = d;
  }
  return nearest;
}

}  // namespace sluice
