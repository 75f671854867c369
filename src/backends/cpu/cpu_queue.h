// The CPU's execution queue: a thread group that runs each op inline, and the scratch that ops share.
#pragma once

#include "backends/cpu/thread_group.h"
#include "ops/backend.h"

namespace sluice::cpu {

class CpuQueue final : public ops::Queue {
 public:
  CpuQueue(int threads, int first_core) : group_(threads, first_core) {}
  int threads() const override { return group_.threads(); }
  void Synchronize() override {}
  ThreadGroup& group() { return group_; }
  // One op's arrays that all its threads see; valid until the op returns.
  Scratch& shared() { return shared_; }
  Scratch& input() { return input_; }  // activations widened for kernels that take f32
  std::vector<int32_t>& ints() { return ints_; }

 private:
  ThreadGroup group_;
  Scratch shared_, input_;
  std::vector<int32_t> ints_;
};

inline CpuQueue& Cpu(ops::Queue& q) { return static_cast<CpuQueue&>(q); }

}  // namespace sluice::cpu
