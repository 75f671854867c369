// Ops that go row by row: embedding, norms, splits, cache writes, router, activations. Tasks are runs of
// rows.
#pragma once

#include "backends/cpu/cpu_queue.h"
#include "backends/cpu/kernel_table.h"
#include "ops/backend.h"

namespace sluice::cpu {

void RunEmbed(CpuQueue& q, const KernelTable& t, const ops::EmbedArgs& a);
void RunRmsNorm(CpuQueue& q, const KernelTable& t, DType act, const ops::RmsNormArgs& a);
void RunSplitQuery(CpuQueue& q, const KernelTable& t, DType act, const ops::SplitQueryArgs& a);
void RunWriteLatent(CpuQueue& q, const KernelTable& t, const ops::WriteLatentArgs& a);
void RunWriteIndex(CpuQueue& q, const KernelTable& t, const ops::WriteIndexArgs& a);
void RunGate(CpuQueue& q, const KernelTable& t, const ops::GateArgs& a);
void RunSiluMul(CpuQueue& q, const KernelTable& t, DType act, const ops::SiluMulArgs& a);
void RunGatherRows(CpuQueue& q, const void* src, const int32_t* index, int64_t rows, int64_t bytes,
                   void* dst);

}  // namespace sluice::cpu
