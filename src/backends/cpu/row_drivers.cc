#include "backends/cpu/row_drivers.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cpu/pool_pages.h"
#include "backends/cpu/rope.h"
#include "base/check.h"
#include "base/ids.h"

namespace sluice::cpu {
namespace {

// Values a task handles: some 10 us of simple row work.
constexpr int64_t kTaskValues = 32 << 10;
// The smallest amax that sets an fp8 scale, so that a row of zeros gives zeros and not 0 / 0.
constexpr float kAmaxFloor = 1e-12f;

// fn(thread, first, last) over runs of rows.
template <typename Fn>
void ForRows(CpuQueue& q, int64_t rows, int64_t values_per_row, Fn fn) {
  if (rows <= 0) return;
  const int64_t step = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, values_per_row));
  q.group().ParallelFor(CeilDiv(rows, step),
                        [&](int thread, int64_t i) { fn(thread, i * step, std::min(rows, (i + 1) * step)); });
}

float* FloatScratch(CpuQueue& q, int thread, int64_t n) {
  return reinterpret_cast<float*>(q.group().scratch(thread).Get(n * 4));
}

void StoreAct(const KernelTable& t, DType act, const float* x, int64_t n, void* y, int64_t offset) {
  if (act == DType::kBF16) {
    t.f32_to_bf16(x, n, static_cast<uint16_t*>(y) + offset);
  } else {
    std::memcpy(static_cast<float*>(y) + offset, x, size_t(n) * 4);
  }
}

// A NaN among the values makes the scale NaN, and with it the whole tile when it is read.
float Fp8Scale(const KernelTable& t, const float* x, int64_t n) {
  const float amax = t.abs_max(x, n);
  return (amax < kAmaxFloor ? kAmaxFloor : amax) / 448.0f;
}

void WriteLatentRow(const KernelTable& t, const KvLayout& layout, const float* row, std::byte* out) {
  const int64_t kv = layout.kv_lora(), dim = kv + layout.rope();
  if (layout.latent_dtype() == DType::kF32) {
    std::memcpy(out, row, size_t(dim) * 4);
    return;
  }
  if (layout.latent_dtype() == DType::kBF16) {
    t.f32_to_bf16(row, dim, reinterpret_cast<uint16_t*>(out));
    return;
  }
  const int64_t tiles = CeilDiv(kv, 128);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t n = std::min<int64_t>(128, kv - i * 128);
    const float scale = Fp8Scale(t, row + i * 128, n);
    t.quant_e4m3(row + i * 128, n, scale, reinterpret_cast<uint8_t*>(out) + i * 128);
    std::memcpy(out + kv + i * 4, &scale, 4);
  }
  t.f32_to_bf16(row + kv, layout.rope(), reinterpret_cast<uint16_t*>(out + kv + tiles * 4));
}

// Ids of the k largest, by (value descending, id ascending); values of chosen ids become -inf.
void TakeLargest(float* v, int64_t n, int64_t k, int32_t* out) {
  for (int64_t s = 0; s < k; ++s) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i) {
      if (v[i] > v[best]) best = i;
    }
    out[s] = int32_t(best);
    v[best] = -std::numeric_limits<float>::infinity();
  }
}

void GateRow(const KernelTable& t, const ops::GateArgs& a, int64_t row, float* score, float* choice,
             float* group) {
  if (a.softmax) {
    const float top = *std::max_element(score, score + a.experts);
    for (int64_t e = 0; e < a.experts; ++e) score[e] -= top;
    t.exp(score, a.experts, score);
    float sum = 0;
    for (int64_t e = 0; e < a.experts; ++e) sum += score[e];
    for (int64_t e = 0; e < a.experts; ++e) score[e] /= sum;
  } else {
    t.sigmoid(score, a.experts, score);
  }
  for (int64_t e = 0; e < a.experts; ++e) {
    choice[e] = a.bias != nullptr ? score[e] + a.bias[e] : score[e];
    if (choice[e] != choice[e])
      choice[e] = -std::numeric_limits<float>::max();  // NaN never wins, and is never -inf
  }
  if (a.groups > 1 && a.groups_kept < a.groups) {
    const int64_t size = a.experts / a.groups;
    for (int64_t g = 0; g < a.groups; ++g) {
      float first = -std::numeric_limits<float>::infinity(), second = first;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        if (choice[e] > first) {
          second = first;
          first = choice[e];
        } else if (choice[e] > second) {
          second = choice[e];
        }
      }
      group[g] = a.group_sum_top2 && size > 1 ? first + second : first;
    }
    int32_t kept[256];
    TakeLargest(group, a.groups, a.groups_kept, kept);  // leaves -inf exactly at the kept groups
    for (int64_t g = 0; g < a.groups; ++g) {
      if (std::find(kept, kept + a.groups_kept, int32_t(g)) != kept + a.groups_kept) continue;
      std::fill(choice + g * size, choice + (g + 1) * size, -std::numeric_limits<float>::infinity());
    }
  }
  int32_t* out = a.expert + row * a.topk;
  float* weight = a.expert_weight + row * a.topk;
  TakeLargest(choice, a.experts, a.topk, out);
  float sum = 0;
  for (int64_t s = 0; s < a.topk; ++s) sum += weight[s] = score[out[s]];
  for (int64_t s = 0; s < a.topk; ++s) {
    if (a.normalize) weight[s] /= sum + 1e-20f;
    weight[s] *= a.scaling;
  }
}

}  // namespace

void RunEmbed(CpuQueue& q, const KernelTable& t, const ops::EmbedArgs& a) {
  const int64_t bytes = a.hidden * SizeOf(a.table.dtype);
  ForRows(q, a.rows, a.hidden, [&](int, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      SLUICE_CHECK(a.tokens[r] >= 0 && a.tokens[r] < a.vocab, "token {} of a vocabulary of {}", a.tokens[r],
                   a.vocab);
      const std::byte* src = static_cast<const std::byte*>(a.table.data) + a.tokens[r] * bytes;
      float* x = a.x + r * a.hidden;
      if (a.table.dtype == DType::kBF16) {
        t.bf16_to_f32(reinterpret_cast<const uint16_t*>(src), a.hidden, x);
      } else {
        SLUICE_CHECK(a.table.dtype == DType::kF32, "embedding of type {}", Name(a.table.dtype));
        std::memcpy(x, src, size_t(bytes));
      }
    }
  });
}

void RunRmsNorm(CpuQueue& q, const KernelTable& t, DType act, const ops::RmsNormArgs& a) {
  const int64_t x_ld = a.x_ld != 0 ? a.x_ld : a.dim, y_ld = a.y_ld != 0 ? a.y_ld : a.dim;
  ForRows(q, a.rows, a.dim, [&](int thread, int64_t first, int64_t last) {
    float* f = FloatScratch(q, thread, a.dim);
    for (int64_t r = first; r < last; ++r) {
      float* y = a.y_f32 != nullptr ? a.y_f32 + r * a.dim : f;
      t.rms_norm(a.x + r * x_ld, a.weight, a.eps, a.dim, y);
      if (a.y_act != nullptr) StoreAct(t, act, y, a.dim, a.y_act, r * y_ld);
    }
  });
}

void RunSplitQuery(CpuQueue& q, const KernelTable& t, DType act, const ops::SplitQueryArgs& a) {
  const int64_t width = a.nope + a.rope, full = a.kv_lora + a.rope;
  ForRows(q, a.rows, a.heads * width * 2, [&](int thread, int64_t first, int64_t last) {
    float* f = FloatScratch(q, thread, a.rope);
    for (int64_t r = first; r < last; ++r) {
      for (int64_t h = 0; h < a.heads; ++h) {
        const float* x = a.q + (r * a.heads + h) * width;
        StoreAct(t, act, x, a.nope, a.q_nope, (r * a.heads + h) * a.nope);
        Rope(x + a.nope, std::max(a.positions[r], 0), a.table, a.interleave, f);
        StoreAct(t, act, f, a.rope, a.q_full, (r * a.heads + h) * full + a.kv_lora);
      }
    }
  });
}

void RunWriteLatent(CpuQueue& q, const KernelTable& t, const ops::WriteLatentArgs& a) {
  const KvLayout& layout = a.pool->layout();
  const int64_t kv = layout.kv_lora(), dim = kv + layout.rope(), ld = a.ckv_ld != 0 ? a.ckv_ld : dim;
  const PoolPages pages = PoolPages::Latent(*a.pool, a.layer, a.own);
  ForRows(q, a.rows, dim * 2, [&](int thread, int64_t first, int64_t last) {
    float* f = FloatScratch(q, thread, dim);
    for (int64_t r = first; r < last; ++r) {
      if (!a.slots.page[r].valid()) continue;
      const float* x = a.ckv + r * ld;
      t.rms_norm(x, a.norm_weight, a.eps, kv, f);
      Rope(x + kv, a.positions[r], a.table, a.interleave, f + kv);
      WriteLatentRow(t, layout, f, pages(a.slots.page[r]) + a.slots.offset[r] * layout.latent_row_bytes());
    }
  });
}

void RunWriteIndex(CpuQueue& q, const KernelTable& t, const ops::WriteIndexArgs& a) {
  const KvLayout& layout = a.pool->layout();
  const int64_t ld = a.k_ld != 0 ? a.k_ld : a.dim;
  const PoolPages pages = PoolPages::Index(*a.pool, a.layer, a.own);
  ForRows(q, a.rows, a.dim * 2, [&](int thread, int64_t first, int64_t last) {
    float* f = FloatScratch(q, thread, a.dim);
    for (int64_t r = first; r < last; ++r) {
      if (!a.slots.page[r].valid()) continue;
      t.layer_norm(a.k + r * ld, a.norm_weight, a.norm_bias, a.eps, a.dim, f);
      Rope(f, a.positions[r], a.table, a.interleave, f);
      std::byte* page = pages(a.slots.page[r]);
      const int64_t at = a.slots.offset[r];
      if (layout.index_dtype() == DType::kF32) {
        std::memcpy(page + at * a.dim * 4, f, size_t(a.dim) * 4);
      } else if (layout.index_dtype() == DType::kBF16) {
        t.f32_to_bf16(f, a.dim, reinterpret_cast<uint16_t*>(page) + at * a.dim);
      } else {
        const float scale = Fp8Scale(t, f, a.dim);
        t.quant_e4m3(f, a.dim, scale, reinterpret_cast<uint8_t*>(page) + at * a.dim);
        std::memcpy(page + kPageTokens * a.dim + at * 4, &scale, 4);
      }
    }
  });
}

void RunGate(CpuQueue& q, const KernelTable& t, const ops::GateArgs& a) {
  SLUICE_CHECK(a.groups <= 256 && a.experts % a.groups == 0 && a.topk <= a.experts,
               "experts {} groups {} topk {}", a.experts, a.groups, a.topk);
  constexpr int64_t kRows = 4;  // dots works on four rows at once
  if (a.rows <= 0) return;
  const int64_t step = std::max(kRows, AlignDown(kTaskValues * 4 / (a.hidden * a.experts), kRows));
  q.group().ParallelFor(CeilDiv(a.rows, step), [&](int thread, int64_t i) {
    Carver size(nullptr);
    size.Take<float>((kRows + 1) * a.experts + a.groups);
    float* score = reinterpret_cast<float*>(q.group().scratch(thread).Get(size.used()));
    float* choice = score + kRows * a.experts;
    for (int64_t r = i * step; r < std::min(a.rows, (i + 1) * step); r += kRows) {
      const int64_t n = std::min(kRows, a.rows - r);
      t.dots(a.x + r * a.hidden, n, a.weight, a.experts, a.hidden, score);
      for (int64_t j = 0; j < n; ++j) GateRow(t, a, r + j, score + j * a.experts, choice, choice + a.experts);
    }
  });
}

void RunSiluMul(CpuQueue& q, const KernelTable& t, DType act, const ops::SiluMulArgs& a) {
  ForRows(q, a.rows, a.dim * 4, [&](int thread, int64_t first, int64_t last) {
    float* f = FloatScratch(q, thread, a.dim);
    for (int64_t r = first; r < last; ++r) {
      const float* g = a.gate_up + r * 2 * a.dim;
      t.silu_mul(g, g + a.dim, a.dim, f);
      StoreAct(t, act, f, a.dim, a.act, r * a.dim);
    }
  });
}

void RunGatherRows(CpuQueue& q, const void* src, const int32_t* index, int64_t rows, int64_t bytes,
                   void* dst) {
  ForRows(q, rows, bytes / 4, [&](int, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      std::memcpy(static_cast<std::byte*>(dst) + r * bytes,
                  static_cast<const std::byte*>(src) + index[r] * bytes, size_t(bytes));
    }
  });
}

}  // namespace sluice::cpu
