// The CPU's execution queue: a thread group that runs each op inline, and the scratch that ops share.
#pragma once

#include <memory>
#include <vector>

#include "backends/cpu/thread_group.h"
#include "ops/backend.h"

namespace sluice::cpu {

class CpuQueue final : public ops::Queue {
 public:
  CpuQueue(int threads, int first_core) : group_(threads, first_core) {
    for (int t = 0; t < threads; ++t) panels_.push_back(std::make_unique<Scratch>());
  }
  int threads() const override { return group_.threads(); }
  void Synchronize() override {}
  ThreadGroup& group() { return group_; }
  // One op's arrays that all its threads see; valid until the op returns.
  Scratch& shared() { return shared_; }
  Scratch& input() { return input_; }  // activations widened for kernels that take f32
  // A thread's decoded weight panel, beside its scratch.
  Scratch& panel(int thread) { return *panels_[size_t(thread)]; }
  std::vector<int32_t>& ints() { return ints_; }

 private:
  ThreadGroup group_;
  Scratch shared_, input_;
  std::vector<std::unique_ptr<Scratch>> panels_;
  std::vector<int32_t> ints_;
};

inline CpuQueue& Cpu(ops::Queue& q) { return static_cast<CpuQueue&>(q); }

}  // namespace sluice::cpu
