// The CPU backend in the shape of a device's: memory of its own, rows of logits that stay there. What the
// engine does for devices runs by it where there is none, with the CPU's arithmetic.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backends/cpu/cpu_backend.h"
#include "sampling/reduced_reference.h"
#include "tensor/fake_device.h"

namespace sluice::testing {

class DeviceShapedBackend final : public ops::Backend {
 public:
  explicit DeviceShapedBackend(std::unique_ptr<ops::Backend> inner) : inner_(std::move(inner)) {
    info_ = inner_->info();
    info_.own_blocks = false;
  }
  int64_t reduced_rows = 0;

  const ops::BackendInfo& info() const override { return info_; }
  DeviceMemory* memory() override { return &memory_; }
  std::unique_ptr<ops::Queue> MakeQueue(int threads, int first_core) override {
    return inner_->MakeQueue(threads, first_core);
  }
  int64_t RowCapacity(int64_t rows) const override { return inner_->RowCapacity(rows); }
  Status Plan(const ops::Limits& limits) override { return inner_->Plan(limits); }
  StatusOr<std::unique_ptr<ops::Linear>> Pack(std::span<const ops::WeightView> views) override {
    return inner_->Pack(views);
  }
  StatusOr<std::unique_ptr<ops::Linear>> PackGroups(
      std::span<const std::vector<ops::WeightView>> groups) override {
    return inner_->PackGroups(groups);
  }
  void Embed(ops::Queue& q, const ops::EmbedArgs& a) override { inner_->Embed(q, a); }
  void Apply(ops::Queue& q, const ops::LinearArgs& a) override { inner_->Apply(q, a); }
  void ApplyHeads(ops::Queue& q, const ops::HeadLinearArgs& a) override { inner_->ApplyHeads(q, a); }
  void RmsNorm(ops::Queue& q, const ops::RmsNormArgs& a) override { inner_->RmsNorm(q, a); }
  void SplitQuery(ops::Queue& q, const ops::SplitQueryArgs& a) override { inner_->SplitQuery(q, a); }
  void WriteLatent(ops::Queue& q, const ops::WriteLatentArgs& a) override { inner_->WriteLatent(q, a); }
  void WriteIndex(ops::Queue& q, const ops::WriteIndexArgs& a) override { inner_->WriteIndex(q, a); }
  void IndexSelect(ops::Queue& q, const ops::IndexSelectArgs& a) override { inner_->IndexSelect(q, a); }
  void Attention(ops::Queue& q, const ops::AttentionArgs& a) override { inner_->Attention(q, a); }
  void Gate(ops::Queue& q, const ops::GateArgs& a) override { inner_->Gate(q, a); }
  void Moe(ops::Queue& q, const ops::MoeArgs& a) override { inner_->Moe(q, a); }
  void SiluMul(ops::Queue& q, const ops::SiluMulArgs& a) override { inner_->SiluMul(q, a); }
  void GatherRows(ops::Queue& q, const void* src, const int32_t* index, int64_t rows, int64_t bytes,
                  void* dst) override {
    inner_->GatherRows(q, src, index, rows, bytes, dst);
  }
  void FiniteRows(ops::Queue&, const float* x, int64_t rows, int64_t dim, int32_t* finite) override {
    for (int64_t r = 0; r < rows; ++r) finite[r] = AllFinite(x + r * dim, dim) ? 1 : 0;
  }
  // Every third list of candidates ends too early to settle much, so that whole rows are fetched, too.
  void ReduceRows(ops::Queue&, const ops::ReduceRowsArgs& a) override {
    for (int64_t i = 0; i < a.requests; ++i) {
      const RowRequest& r = a.request[i];
      const float end = r.top_k == 0 && r.top_p >= 1 ? r.min_p : reduced_rows % 3 == 0 ? 1.0f : 1e-4f;
      a.out[i] = Reduce(a.logits + r.place * a.vocab, int32_t(a.vocab), r, end, &list_);
      std::copy(list_.begin(), list_.end(), a.candidates + i * kMostCandidates);
      ++reduced_rows;
    }
  }

 private:
  const std::unique_ptr<ops::Backend> inner_;
  ops::BackendInfo info_;
  FakeDevice memory_;
  std::vector<RowCandidate> list_;
};

}  // namespace sluice::testing
