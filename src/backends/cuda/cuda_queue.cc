#include "backends/cuda/cuda_queue.h"

#include <algorithm>

namespace sluice::cuda {

CudaQueue::CudaQueue(CudaMemory& memory, cudaStream_t stream, int64_t graph_rows)
    : memory_(memory), stream_(stream), graph_rows_(graph_rows) {
  Note(cudaEventCreate(&begin_), "event");
  Note(cudaEventCreate(&end_), "event");
}

CudaQueue::~CudaQueue() {
  cudaStreamSynchronize(stream_);
  Forget();
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
  cudaStreamDestroy(stream_);
}

void CudaQueue::Forget() {
  for (auto& [key, graph] : recordings_)
    if (graph != nullptr) cudaGraphExecDestroy(graph);
  recordings_.clear();
}

bool CudaQueue::Replay(const ops::ReplayKey& key) {
  const auto found = recordings_.find(key);
  if (found == recordings_.end() || found->second == nullptr) return false;
  Note(cudaGraphLaunch(found->second, stream_), "replay of a step");
  return true;
}

bool CudaQueue::Record(const ops::ReplayKey& key, int64_t rows) {
  if (rows > graph_rows_ || !status_.ok()) return false;
  if (recordings_.size() >= kMostRecordings && !recordings_.contains(key)) Forget();
  const auto [place, first] = recordings_.try_emplace(key, nullptr);
  if (first) return false;
  const cudaError_t error = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
  Note(error, "recording a step");
  if (error != cudaSuccess) return false;
  recording_ = &place->second;
  return true;
}

void CudaQueue::EndRecord() {
  cudaGraph_t graph = nullptr;
  cudaError_t error = cudaStreamEndCapture(stream_, &graph);
  if (error == cudaSuccess) error = cudaGraphInstantiate(recording_, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  if (error == cudaSuccess) {
    error = cudaGraphLaunch(*recording_, stream_);
  } else {
    *recording_ = nullptr;
  }
  Note(error, "recording a step");
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
  (*free)->Record(stream_);
  return *free;
}

std::byte* CudaQueue::ScratchBytes(Slot slot, int64_t need) {
  auto& [buffer, bytes] = scratch_[slot];
  if (need > bytes) {
    SLUICE_CHECK(recording_ == nullptr, "scratch {} grows from {} to {} bytes while a step is recorded",
                 int(slot), bytes, need);
    Synchronize();
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
