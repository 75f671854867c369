// Packed weights and the matrix products over them: one matrix, one per head, one per expert.
//
// Work is cut at panels (columns) and row blocks; neither changes a bit of any element (kernel_table.h).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backends/cpu/cpu_queue.h"
#include "backends/cpu/kernel_table.h"
#include "backends/cpu/weight_memory.h"
#include "ops/backend.h"
#include "ops/slot_sum.h"

namespace sluice::cpu {

enum class PanelKind : uint8_t {
  kF32,
  kBF16,
  kPairs,
  kPairsFp8,  // e4m3 and its block scales as in the checkpoint, half the bytes of kPairs and the same bits
};

class PackedLinear final : public ops::Linear {
 public:
  PackedLinear() = default;
  const std::byte* group(int64_t g) const { return data_.get() + g * group_bytes_; }
  PanelKind kind() const { return kind_; }
  int64_t panel_bytes() const { return panel_bytes_; }
  int64_t scale_block() const { return scale_block_; }

 private:
  friend StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const KernelTable&, DType,
                                                            std::span<const std::vector<ops::WeightView>>,
                                                            WeightMemory&);
  PanelKind kind_ = PanelKind::kF32;
  std::shared_ptr<std::byte> data_;
  int64_t group_bytes_ = 0, panel_bytes_ = 0, scale_block_ = 0;
};

// Each group is the concatenation (along out) of its views. Fails when views disagree in shape or have an
// unknown type.
StatusOr<std::unique_ptr<PackedLinear>> PackLinear(const KernelTable& t, DType act,
                                                   std::span<const std::vector<ops::WeightView>> groups,
                                                   WeightMemory& memory);

void RunLinear(CpuQueue& q, const KernelTable& t, DType act, const ops::LinearArgs& a);
void RunHeads(CpuQueue& q, const KernelTable& t, DType act, const ops::HeadLinearArgs& a);
// Adds rows to y in the order of slots, as RunMoe does with its own.
void RunSumSlots(CpuQueue& q, const KernelTable& t, const ops::SumSlotsArgs& a);
void RunMoe(CpuQueue& q, const KernelTable& t, DType act, const ops::MoeArgs& a);

}  // namespace sluice::cpu
