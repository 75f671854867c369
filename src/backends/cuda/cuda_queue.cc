#include "backends/cuda/cuda_queue.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cuda/device_calls.h"
#include "base/log.h"

namespace sluice::cuda {

CudaQueue::CudaQueue(CudaMemory& memory, cudaStream_t stream, const QueueOptions& options)
    : memory_(memory), stream_(stream), options_(options), ops_(size_t(kMostOps)) {
  memory.Register(this);
  Note(cudaEventCreate(&begin_), "event");
  Note(cudaEventCreate(&end_), "event");
  const auto take = [&](StatusOr<std::shared_ptr<std::byte>> made, std::shared_ptr<std::byte>* to) {
    if (made.ok()) *to = std::move(*made);
    if (!made.ok() && status_.ok()) status_ = made.status();
  };
  ring_bytes_ = AlignUp(options.upload_bytes, 4096) + 4096;
  take(memory.AllocateShared(ring_bytes_, "batch tables"), &ring_);
  take(memory.AllocateShared(64, "progress"), &passed_memory_);
  passed_ = reinterpret_cast<uint32_t*>(passed_memory_.get());
  if (passed_ != nullptr) *passed_ = 0;
  for (int slot = 0; slot < kScratchSlots; ++slot) {
    const int64_t bytes = options.scratch[size_t(slot)];
    if (bytes == 0) continue;
    take(memory.Allocate(bytes, "scratch; lower --chunked-prefill-size or --mem-fraction-static"),
         &scratch_[size_t(slot)].first);
    scratch_[size_t(slot)].second = bytes;
  }
}

CudaQueue::~CudaQueue() {
  memory_.Forget(this);
  cudaStreamSynchronize(stream_);
  Forget();
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
  cudaStreamDestroy(stream_);
}

void CudaQueue::Drop(const Recording& recording) {
  for (cudaGraphExec_t piece : recording.pieces) cudaGraphExecDestroy(piece);
}

void CudaQueue::Forget() {
  for (const auto& [key, recording] : recordings_) Drop(recording);
  recordings_.clear();
  policy_.Clear();
}

void CudaQueue::Synchronize() {
  Note(cudaStreamSynchronize(stream_), "waiting for the device");
  ring_at_ = 0;
  if (!status_.ok()) return;  // Where still says what it was at
  num_ops_.store(0, std::memory_order_release);
  *passed_ = 0;
}

void CudaQueue::Upload(void* dst, const void* src, int64_t bytes) {
  SLUICE_CHECK(recording_ == nullptr, "an upload of {} bytes is not part of a recorded step", bytes);
  if (bytes > ring_bytes_ ||
      ring_ == nullptr) {  // beyond the plan: from the caller's memory, which is waited for
    Note(cudaMemcpyAsync(dst, src, size_t(bytes), cudaMemcpyHostToDevice, stream_), "upload");
    Note(cudaStreamSynchronize(stream_), "upload");
    return;
  }
  if (ring_at_ + bytes > ring_bytes_) {
    Note(cudaStreamSynchronize(stream_), "upload");
    ring_at_ = 0;
  }
  std::byte* staged = ring_.get() + ring_at_;
  std::memcpy(staged, src, size_t(bytes));
  ring_at_ = AlignUp(ring_at_ + bytes, 64);
  Note(cudaMemcpyAsync(dst, staged, size_t(bytes), cudaMemcpyHostToDevice, stream_), "upload");
}

void CudaQueue::CopyRuns(std::span<const MemoryRun> runs) {
  for (const MemoryRun& r : runs)
    Note(cudaMemcpyAsync(r.dst, r.src, size_t(r.bytes), cudaMemcpyDeviceToDevice, stream_), "page copy");
}

bool CudaQueue::Replay(const ops::ReplayKey& key) {
  const auto found = recordings_.find(key);
  if (found == recordings_.end()) return false;
  policy_.Replayed(key);
  const std::vector<const char*>& names = found->second.ops;
  // The marks of a recorded step count from its own first op.
  const auto n = int32_t(std::min<size_t>(names.size(), size_t(kMostOps)));
  for (int32_t i = 0; i < n; ++i) ops_[size_t(i)].store(names[size_t(i)], std::memory_order_relaxed);
  num_ops_.store(n, std::memory_order_release);
  for (cudaGraphExec_t piece : found->second.pieces)
    Note(cudaGraphLaunch(piece, stream_), "replay of a step");
  return true;
}

bool CudaQueue::Record(const ops::ReplayKey& key, int64_t rows) {
  if (rows > options_.graph_rows || !status_.ok()) return false;
  const UncountedDeviceCalls uncounted;
  std::optional<ops::ReplayKey> evict;
  if (!policy_.Comes(key, &evict)) return false;
  if (evict.has_value()) {
    Drop(recordings_[*evict]);  // replays of it that are enqueued go on
    recordings_.erase(*evict);
  }
  num_ops_.store(0, std::memory_order_release);
  cut_ = 1;
  if (!BeginPiece()) {
    policy_.Failed(key);
    return false;
  }
  recording_ = &recordings_[key];
  return true;
}

bool CudaQueue::BeginPiece() {
  borders_ = 0;
  const cudaError_t error = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
  Note(error, "recording a step");
  return error == cudaSuccess;
}

// Ends the piece in progress and enqueues it.
bool CudaQueue::EndPiece() {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t piece = nullptr;
  cudaError_t error = cudaStreamEndCapture(stream_, &graph);
  if (error == cudaSuccess) error = cudaGraphInstantiate(&piece, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (error == cudaSuccess) {
    recording_->pieces.push_back(piece);
    error = cudaGraphLaunch(piece, stream_);
  }
  Note(error, "recording a step");
  return error == cudaSuccess;
}

void CudaQueue::Border() {
  if (recording_ == nullptr || ++borders_ < cut_) return;
  const UncountedDeviceCalls uncounted;
  cut_ = std::min(2 * cut_, kMostBorders);
  // After an error the queue's results are lost, and its status says so.
  if (!EndPiece() || !BeginPiece()) recording_ = nullptr;
}

void CudaQueue::EndRecord() {
  if (recording_ == nullptr) return;
  const UncountedDeviceCalls uncounted;
  if (EndPiece()) {
    for (int32_t i = 0; i < num_ops_.load(std::memory_order_relaxed); ++i)
      recording_->ops.push_back(ops_[size_t(i)].load(std::memory_order_relaxed));
  }
  recording_ = nullptr;
}

double CudaQueue::MarkedSeconds() {
  float ms = 0;
  Note(cudaEventSynchronize(end_), "mark");
  Note(cudaEventElapsedTime(&ms, begin_, end_), "mark");
  return double(ms) * 1e-3;
}

std::shared_ptr<DeviceEvent> CudaQueue::RecordEvent() {
  auto free = std::find_if(events_.begin(), events_.end(), [](const auto& e) { return e.use_count() == 1; });
  if (free == events_.end()) {
    events_.push_back(std::make_shared<CudaEvent>());
    free = events_.end() - 1;
  }
  // The count alone does not order what the last other holder did with the event before what follows.
  std::atomic_thread_fence(std::memory_order_acquire);
  (*free)->Record(stream_);
  return *free;
}

void CudaQueue::Passed(const char* op) {
  const int32_t n = num_ops_.load(std::memory_order_relaxed);
  if (n == kMostOps) return;
  ops_[size_t(n)].store(op, std::memory_order_relaxed);
  num_ops_.store(n + 1, std::memory_order_release);
  if (passed_ != nullptr && options_.mark_every > 0 && (n + 1) % options_.mark_every == 0)
    LaunchProgress(stream_, passed_, uint32_t(n + 1));
}

std::string CudaQueue::Where() const {
  const int32_t n = num_ops_.load(std::memory_order_acquire);
  if (n == 0 || passed_ == nullptr) return "";
  const auto passed = int32_t(*static_cast<volatile const uint32_t*>(passed_));
  if (passed >= n) return fmt::format("all {} ops of the step have ended", n);
  const int32_t end = std::min(n, passed + std::max(1, options_.mark_every));
  std::string names;
  for (int32_t i = passed; i < end; ++i) {
    const char* name = ops_[size_t(i)].load(std::memory_order_relaxed);
    if (name != nullptr) names += fmt::format("{}{}", names.empty() ? "" : ", ", name);
  }
  return fmt::format(
      "{} of {} ops have ended; {}{}", passed, n,
      end - passed > 1 ? "the one that has not is among the next, in order: " : "running: ", names);
}

void CudaQueue::BeginStep() { BeginDeviceCalls(); }

Status CudaQueue::EndStep(int64_t waits) {
  const DeviceCalls calls = EndDeviceCalls();
  if (!options_.check_steps || !warm_) return OkStatus();
  if (calls.allocations > 0)
    return Internal("--debug-device: the step called {} ({} such calls); its memory was not planned",
                    calls.allocation, calls.allocations);
  if (calls.queries > 0)
    return Internal("--debug-device: the step asked for memory with {} ({} such calls)", calls.query,
                    calls.queries);
  if (calls.waits > waits)
    return Internal("--debug-device: the step waited for the device {} times, last with {}; {} allowed",
                    calls.waits, calls.wait, waits);
  return OkStatus();
}

int64_t CudaQueue::Planned(ScratchSlot slot) const {
  const bool planned = std::ranges::any_of(options_.scratch, [](int64_t bytes) { return bytes > 0; });
  return planned ? options_.scratch[size_t(slot)] : std::numeric_limits<int64_t>::max();
}

std::byte* CudaQueue::ScratchBytes(ScratchSlot slot, int64_t need) {
  auto& [buffer, bytes] = scratch_[size_t(slot)];
  if (need > bytes) {
    SLUICE_CHECK(recording_ == nullptr, "scratch {} grows from {} to {} bytes while a step is recorded",
                 int(slot), bytes, need);
    if (warm_)
      spdlog::warn("device scratch {} grows from {} to {} bytes: it was not planned", int(slot), bytes, need);
    Note(cudaStreamSynchronize(stream_), "waiting for the device");
    Forget();
    buffer.reset();
    bytes = 0;
    auto made = memory_.Allocate(need, "scratch; lower --chunked-prefill-size");
    SLUICE_CHECK(made.ok(), "{}", Message(made.status()));
    buffer = *made;
    bytes = need;
  }
  return buffer.get();
}

}  // namespace sluice::cuda
