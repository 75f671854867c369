// What the files of the attention op share: how a row of the pool is found, and which rows see everything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/cpu_queue.h"
#include "backends/cpu/kernel_table.h"
#include "backends/cpu/pool_pages.h"
#include "base/ids.h"
#include "ops/backend.h"

namespace sluice::cpu {

constexpr int64_t kAttentionBlock = 64;  // keys whose softmax and sum are made at once

struct AttentionContext {
  CpuQueue& q;
  const KernelTable& t;
  DType act;
  const ops::AttentionArgs& a;
  PoolPages pages;
  RowFormat format;
  int64_t row_bytes;  // of a row in the pool
  int64_t dim;
  // Reference path: all rows of one sequence already in tile type, else null.
  const std::byte* full = nullptr;
  int64_t full_row_bytes = 0;
  std::byte* out;
};

inline bool SeesAll(const ops::AttentionArgs& a, int64_t row) {
  return a.selected == nullptr || a.selected_count[row] > a.seqs.positions[row];
}

inline const std::byte* RowAddress(const AttentionContext& c, int64_t page_begin, int64_t position) {
  if (c.full != nullptr) return c.full + position * c.full_row_bytes;
  const int64_t slot = position + c.a.seqs.slot_shift;
  return c.pages(c.a.seqs.pages[page_begin + slot / kPageTokens]) + slot % kPageTokens * c.row_bytes;
}

}  // namespace sluice::cpu
