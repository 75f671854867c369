// A stream of one device with what belongs to it: its first error, scratch that ops use in turn, recorded
// launches, and how far the device has come. Private to backends/cuda. Used by one thread at a time, but for
// Where.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backends/cuda/cuda_copier.h"
#include "backends/cuda/cuda_memory.h"
#include "backends/cuda/scratch_plan.h"
#include "base/check.h"
#include "ops/backend.h"
#include "ops/replay_policy.h"

namespace sluice::cuda {

struct QueueOptions {
  int64_t graph_rows = 0;          // rows of the largest forward that is recorded
  ScratchPlan scratch{};           // taken at once; all 0: scratch grows
  int64_t score_bytes = 0;         // of the indexer's scores at once
  int64_t upload_bytes = 1 << 20;  // what a step sends ahead of its ops
  int32_t mark_every = 8;          // ops between two marks of how far the device has come
  bool check_steps = false;        // EndStep refuses steps that allocate or wait too often
};

class CudaQueue final : public ops::Queue {
 public:
  using enum ScratchSlot;
  // status() says why when memory is short.
  CudaQueue(CudaMemory& memory, cudaStream_t stream, const QueueOptions& options);
  ~CudaQueue() override;
  int threads() const override { return 1; }
  void Synchronize() override;
  // Through a pinned ring, so that the caller waits for nothing: it is empty again after Synchronize.
  void Upload(void* dst, const void* src, int64_t bytes) override;
  void UploadShared(void* dst, const void* src, int64_t bytes) override {
    SLUICE_CHECK(recording_ == nullptr, "an upload of {} bytes is not part of a recorded step", bytes);
    Note(cudaMemcpyAsync(dst, src, size_t(bytes), cudaMemcpyHostToDevice, stream_), "upload");
  }
  void Download(void* dst, const void* src, int64_t bytes) override {
    Note(cudaMemcpyAsync(dst, src, size_t(bytes), cudaMemcpyDeviceToHost, stream_), "download");
  }
  void CopyRuns(std::span<const MemoryRun> runs) override;
  bool Replay(const ops::ReplayKey& key) override;
  // When the policy says so: at a key's second coming in the warm-up (the first makes scratch large enough),
  // later for keys that come often.
  bool Record(const ops::ReplayKey& key, int64_t rows) override;
  void EndRecord() override;
  // Recorded launches are cut after 1, 2, 4, 8, 8, ... borders: to hand one over takes the host about a
  // microsecond an op, in which a device that waits for its end would do nothing.
  void Border() override;
  void Mark(bool end) override { Note(cudaEventRecord(end ? end_ : begin_, stream_), "mark"); }
  double MarkedSeconds() override;
  std::shared_ptr<DeviceEvent> RecordEvent() override;
  Status status() const override { return status_; }
  void BeginStep() override;
  Status EndStep(int64_t waits) override;
  void WarmedUp() override {
    warm_ = true;
    policy_.WarmedUp();
  }
  std::string Where() const override;

  cudaStream_t stream() const { return stream_; }
  int64_t score_bytes() const { return options_.score_bytes; }
  // Bytes that a slot holds without growing; the largest number where nothing was planned.
  int64_t Planned(ScratchSlot slot) const;
  void Launched(const char* op) { Launched(op, cudaSuccess); }
  void Launched(const char* op, cudaError_t error) {
    Note(error != cudaSuccess ? error : cudaGetLastError(), op);
    Passed(op);
  }

  // Within the plan it is there; else it grows at the first forward of a larger shape and stays, and what was
  // recorded before is forgotten then.
  template <typename T>
  T* Scratch(ScratchSlot slot, int64_t count) {
    return reinterpret_cast<T*>(ScratchBytes(slot, count * int64_t(sizeof(T))));
  }

 private:
  static constexpr int64_t kMostRecordings = 256, kComings = 8;
  static constexpr int32_t kMostOps = 1 << 14;  // of a step that Where can name
  static constexpr int32_t kMostBorders = 8;    // of a piece
  struct Recording {
    std::vector<cudaGraphExec_t> pieces;
    std::vector<const char*> ops;
  };
  static void Drop(const Recording& recording);
  bool BeginPiece();
  bool EndPiece();
  void Note(cudaError_t error, const char* what) {
    if (error != cudaSuccess && status_.ok()) status_ = FromCuda(error, what);
  }
  void Passed(const char* op);
  std::byte* ScratchBytes(ScratchSlot slot, int64_t bytes);
  void Forget();

  CudaMemory& memory_;
  const cudaStream_t stream_;
  const QueueOptions options_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  Status status_;
  std::vector<std::shared_ptr<CudaEvent>> events_;  // one that nobody else holds is free
  std::array<std::pair<std::shared_ptr<std::byte>, int64_t>, kScratchSlots> scratch_;
  std::map<ops::ReplayKey, Recording> recordings_;
  ops::ReplayPolicy policy_{kMostRecordings, kComings};
  Recording* recording_ = nullptr;  // the one in progress
  int32_t borders_ = 0, cut_ = 0;   // of the piece in progress; at how many it ends
  std::shared_ptr<std::byte> ring_;
  int64_t ring_bytes_ = 0, ring_at_ = 0;
  bool warm_ = false;

  // Ops enqueued since the last wait, by name, and how many of them the device has passed: it writes the
  // number into pinned memory after every mark_every ops.
  std::shared_ptr<std::byte> passed_memory_;
  uint32_t* passed_ = nullptr;  // host address of it, also the device's
  std::vector<std::atomic<const char*>> ops_;
  std::atomic<int32_t> num_ops_{0};
};

}  // namespace sluice::cuda
