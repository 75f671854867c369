// MLA attention over latent rows, dense or selected, in prefill and decode alike.
//
// One arithmetic form: blocks of 64 rows in position order; per (query row, head) a block gives (max, sum,
// out) and blocks merge in order. Query rows of a sequence that see whole blocks (dense, or everything
// selected) share the loaded block; rows with their own selection load theirs. Which rows and heads are
// grouped changes no bit.
#pragma once

#include "backends/cpu/cpu_queue.h"
#include "backends/cpu/kernel_table.h"
#include "ops/backend.h"

namespace sluice::cpu {

void RunAttention(CpuQueue& q, const KernelTable& t, DType act, const ops::AttentionArgs& a);

}  // namespace sluice::cpu
