// Shared by the files of the reference backend.
#pragma once

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "ops/backend.h"

namespace sluice::ops::reference {

class ReferenceQueue final : public Queue {
 public:
  explicit ReferenceQueue(int threads) : threads_(threads) {}
  int threads() const override { return threads_; }
  void Synchronize() override {}

 private:
  int threads_;
};

// fn(i) for i in [0, n), cut into contiguous runs over the queue's threads.
inline void ForRows(Queue& queue, int64_t n, const std::function<void(int64_t)>& fn) {
  const int64_t threads = n >= 16 ? queue.threads() : 1;
  const auto run = [&](int64_t t) {
    for (int64_t i = n * t / threads; i < n * (t + 1) / threads; ++i) fn(i);
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(run, t);
  run(0);
  for (std::thread& t : others) t.join();
}

struct ActView {  // element access of a buffer of the activation type
  DType act;
  float Get(const void* p, int64_t i) const {
    return act == DType::kF32 ? static_cast<const float*>(p)[i]
                              : BF16ToF32(static_cast<const uint16_t*>(p)[i]);
  }
  void Set(void* p, int64_t i, float v) const {
    if (act == DType::kF32) {
      static_cast<float*>(p)[i] = v;
    } else {
      static_cast<uint16_t*>(p)[i] = F32ToBF16(v);
    }
  }
  float Round(float v) const { return act == DType::kF32 ? v : BF16ToF32(F32ToBF16(v)); }
};

// Rotates 2 * half values: pairs (2i, 2i + 1), or (i, i + half).
inline void Rotate(const float* x, const RopeTable& table, int64_t position, bool interleave, float* y) {
  for (int64_t i = 0; i < table.half; ++i) {
    const double c = table.cos[position * table.half + i], s = table.sin[position * table.half + i];
    const int64_t a = interleave ? 2 * i : i, b = interleave ? 2 * i + 1 : i + table.half;
    const double xa = x[a], xb = x[b];
    y[a] = float(xa * c - xb * s);
    y[b] = float(xb * c + xa * s);
  }
}

void IndexSelect(Queue& queue, const IndexSelectArgs& a, ActView act);
void Attention(Queue& queue, const AttentionArgs& a, ActView act);

}  // namespace sluice::ops::reference
