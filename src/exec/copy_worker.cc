#include "exec/copy_worker.h"

#include <pthread.h>

#include <algorithm>

#include "base/check.h"

namespace sluice {

namespace {
std::unique_ptr<PlanCopier> MakeCopier(const DevicePool& device, const HostPool& host, IoBackend backend) {
  auto made = PlanCopier::Make(backend, device, host);
  SLUICE_CHECK(made.ok(), "{}", Message(made.status()));
  return std::move(*made);
}
}  // namespace

CopyWorker::CopyWorker(const DevicePool& device, const HostPool& host, IoBackend backend)
    : copier_(MakeCopier(device, host, backend)),
      layers_(device.layout().layers()),
      thread_([this] { Loop(); }) {
  SLUICE_CHECK(std::is_sorted(layers_.begin(), layers_.end()), "layers are not in order");
}

CopyWorker::~CopyWorker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  thread_.join();
}

void CopyWorker::Start(std::span<const CopyPlan> loads, std::span<const CopyPlan> backups) {
  {
    std::lock_guard lock(mutex_);
    SLUICE_CHECK(started_ == finished_, "a step's copies are still running");
    loads_ = loads;
    backups_ = backups;
    // Without loads every layer is readable at once.
    loaded_layers_.store(loads.empty() ? int32_t(layers_.size()) : 0, std::memory_order_release);
    if (loads.empty() && backups.empty()) return;
    ++started_;
  }
  work_.notify_one();
}

bool CopyWorker::Loaded(LogicalLayer layer) const {
  const auto at = std::lower_bound(layers_.begin(), layers_.end(), layer);
  return loaded_layers_.load(std::memory_order_acquire) > int32_t(at - layers_.begin()) ||
         loaded_layers_.load(std::memory_order_acquire) == int32_t(layers_.size());
}

void CopyWorker::WaitLoaded(LogicalLayer layer) {
  if (Loaded(layer)) return;
  waits_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return Loaded(layer); });
}

void CopyWorker::Finish() {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [this] { return started_ == finished_; });
}

void CopyWorker::Advance(int32_t layers) {
  {
    std::lock_guard lock(mutex_);  // so that no waiter misses it
    loaded_layers_.store(layers, std::memory_order_release);
  }
  progress_.notify_all();
}

void CopyWorker::Loop() {
  pthread_setname_np(pthread_self(), "sluice-copy");
  for (;;) {
    std::span<const CopyPlan> loads, backups;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return stop_ || started_ != finished_; });
      if (started_ == finished_) return;
      loads = loads_;
      backups = backups_;
    }
    CopyCount loaded, backed_up;
    if (!loads.empty()) {
      copier_->Begin(loads);
      for (size_t i = 0; i < layers_.size(); ++i) {
        loaded += copier_->Layer(layers_[i]);
        Advance(int32_t(i) + 1);
      }
    }
    if (!backups.empty()) {
      copier_->Begin(backups);
      backed_up = copier_->All();
    }
    bytes_loaded_.fetch_add(loaded.bytes, std::memory_order_relaxed);
    bytes_backed_up_.fetch_add(backed_up.bytes, std::memory_order_relaxed);
    {
      std::lock_guard lock(mutex_);
      finished_ = started_;
    }
    progress_.notify_all();
  }
}

}  // namespace sluice
