// A stream of one device with what belongs to it: its first error, scratch that ops use in turn, recorded
// launches. Private to backends/cuda. Used by one thread at a time.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backends/cuda/cuda_copier.h"
#include "backends/cuda/cuda_memory.h"
#include "base/check.h"
#include "ops/backend.h"

namespace sluice::cuda {

class CudaQueue final : public ops::Queue {
 public:
  // graph_rows: rows of the largest forward that is recorded.
  CudaQueue(CudaMemory& memory, cudaStream_t stream, int64_t graph_rows);
  ~CudaQueue() override;
  int threads() const override { return 1; }
  void Synchronize() override { Note(cudaStreamSynchronize(stream_), "waiting for the device"); }
  void Upload(void* dst, const void* src, int64_t bytes) override {
    Note(cudaMemcpyAsync(dst, src, size_t(bytes), cudaMemcpyHostToDevice, stream_), "upload");
  }
  void Download(void* dst, const void* src, int64_t bytes) override {
    Note(cudaMemcpyAsync(dst, src, size_t(bytes), cudaMemcpyDeviceToHost, stream_), "download");
  }
  bool Replay(const ops::ReplayKey& key) override;
  // At a key's second coming: the first run makes scratch large enough, and a step that comes once is not
  // worth it.
  bool Record(const ops::ReplayKey& key, int64_t rows) override;
  void EndRecord() override;
  void Mark(bool end) override { Note(cudaEventRecord(end ? end_ : begin_, stream_), "mark"); }
  double MarkedSeconds() override;
  std::shared_ptr<DeviceEvent> RecordEvent() override;
  Status status() const override { return status_; }

  cudaStream_t stream() const { return stream_; }
  void Launched(const char* op) { Note(cudaGetLastError(), op); }
  void Launched(const char* op, cudaError_t error) {
    Note(error != cudaSuccess ? error : cudaGetLastError(), op);
  }

  enum Slot {
    kIndexQuery,
    kIndexWeight,
    kScores,
    kSorted,
    kTileGroup,
    kBegins,
    kGateUp,
    kExpertAct,
    kExpertOut,
    kGateScores,
    kGatePlanes,
    kInput8,
    kInputScale,
    kExpert8,
    kExpertScale,
    kFullRows,
    kFullPlaces,
    kSlots
  };
  // Grows at the first forward of a larger shape and stays; what was recorded before is forgotten then.
  template <typename T>
  T* Scratch(Slot slot, int64_t count) {
    return reinterpret_cast<T*>(ScratchBytes(slot, count * int64_t(sizeof(T))));
  }

 private:
  static constexpr size_t kMostRecordings = 256;
  void Note(cudaError_t error, const char* what) {
    if (error != cudaSuccess && status_.ok()) status_ = FromCuda(error, what);
  }
  std::byte* ScratchBytes(Slot slot, int64_t bytes);
  void Forget();

  CudaMemory& memory_;
  const cudaStream_t stream_;
  const int64_t graph_rows_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  Status status_;
  std::vector<std::shared_ptr<CudaEvent>> events_;  // one that nobody else holds is free
  std::array<std::pair<std::shared_ptr<std::byte>, int64_t>, kSlots> scratch_;
  std::map<ops::ReplayKey, cudaGraphExec_t> recordings_;  // null: came once
  cudaGraphExec_t* recording_ = nullptr;                  // where the one in progress goes
};

}  // namespace sluice::cuda
