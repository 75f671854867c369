#include "backends/cpu/attention.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cpu/pool_pages.h"
#include "base/check.h"
#include "base/ids.h"

namespace sluice::cpu {
namespace {

constexpr int64_t kBlock = 64;
// (row, head) pairs that share a loaded block: their queries, sums and outputs stay in a core's L2 beside the
// block.
constexpr int64_t kPairsPerTask = 128;
constexpr int64_t kHeadsPerPart = 4;  // at least, where the heads of a row are shared out

RowFormat FormatOf(DType t) {
  return t == DType::kF32 ? RowFormat::kF32 : (t == DType::kBF16 ? RowFormat::kBF16 : RowFormat::kFp8);
}

struct Context {
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

bool SeesAll(const ops::AttentionArgs& a, int64_t row) {
  return a.selected == nullptr || a.selected_count[row] > a.seqs.positions[row];
}

const std::byte* RowAddress(const Context& c, int64_t page_begin, int64_t position) {
  if (c.full != nullptr) return c.full + position * c.full_row_bytes;
  const int64_t slot = position + c.a.seqs.slot_shift;
  return c.pages(c.a.seqs.pages[page_begin + slot / kPageTokens]) + slot % kPageTokens * c.row_bytes;
}

// What one task computes: rows [row, row + rows) of sequence seq, heads [head, head + heads). Either all rows
// see every position up to their own, or rows == 1 and the row has a selection.
struct Task {
  int32_t seq, row, rows, head, heads;
};

struct Arrays {
  std::byte* q;  // [m, dim] tile type
  float* s;      // [m, 64]
  std::byte* p;  // [m, 64] tile type
  float* o;      // [m, kv_lora]
  float *run_max, *run_sum, *alpha, *beta;
  int32_t* valid;
  std::byte *keys, *values, *row;
};

Arrays Carve(Carver& c, int64_t m, const ops::AttentionArgs& a, int64_t nr, int64_t element) {
  const int64_t dim = a.kv_lora + a.rope;
  Arrays x;
  x.q = c.Take<std::byte>(m * dim * element);
  x.s = c.Take<float>(m * kBlock);
  x.p = c.Take<std::byte>(m * kBlock * element);
  x.o = c.Take<float>(m * a.kv_lora);
  x.run_max = c.Take<float>(m);
  x.run_sum = c.Take<float>(m);
  x.alpha = c.Take<float>(m);
  x.beta = c.Take<float>(m);
  x.valid = c.Take<int32_t>(m);
  x.keys = c.Take<std::byte>(AlignUp(kBlock, nr) * AlignUp(dim, 2) * element);
  x.values = c.Take<std::byte>(AlignUp(a.kv_lora, nr) * kBlock * element);
  x.row = c.Take<std::byte>(kBlock * dim * element);
  return x;
}

void BlockSoftmax(const Context& c, const Arrays& x, int64_t m0, int64_t m) {
  c.t.softmax({.s = x.s + m0 * kBlock,
               .m = m - m0,
               .scale = c.a.scale,
               .valid = x.valid + m0,
               .p = x.p + m0 * kBlock * (c.t.bf16_pairs ? 2 : 4),
               .run_max = x.run_max + m0,
               .run_sum = x.run_sum + m0,
               .alpha = x.alpha + m0,
               .beta = x.beta + m0});
}

// Scores, softmax and merge of one loaded block for the pairs [m0, m), of which none sees more than `count`
// of its rows. Columns past a pair's own count have weight 0, and adding 0 * value changes no bit, so `count`
// may be anything from there to 64.
void Block(const Context& c, const Arrays& x, int64_t m0, int64_t m, int64_t count, RowPrefetch* next) {
  if (next->count > 0) {
    const int64_t tiles = CeilDiv(m - m0, 12) * (CeilDiv(count, c.t.nr) + CeilDiv(c.a.kv_lora, c.t.nr));
    next->lines_per_step = CeilDiv(next->count * CeilDiv(next->bytes, 64), tiles);
  }
  const ops::AttentionArgs& a = c.a;
  const int64_t element = c.t.bf16_pairs ? 2 : 4;
  const GemmFn gemm = c.t.bf16_pairs ? c.t.gemm_pairs : c.t.gemm_f32;
  GemmArgs qk;
  qk.a = x.q + m0 * c.dim * element;
  qk.lda = c.dim;
  qk.rows = m - m0;
  qk.k = c.dim;
  qk.b = x.keys;
  qk.panel_bytes = c.t.nr * AlignUp(c.dim, c.t.bf16_pairs ? 2 : 1) * element;
  qk.cols = count;
  qk.c = x.s + m0 * kBlock;
  qk.ldc = kBlock;
  qk.prefetch = next;
  gemm(qk);
  BlockSoftmax(c, x, m0, m);
  GemmArgs pv;
  pv.a = x.p + m0 * kBlock * element;
  pv.lda = kBlock;
  pv.rows = m - m0;
  pv.k = AlignUp(count, 2);
  pv.b = x.values;
  pv.panel_bytes = c.t.nr * kBlock * element;
  pv.cols = a.kv_lora;
  pv.c = x.o + m0 * a.kv_lora;
  pv.ldc = a.kv_lora;
  pv.store = Store::kMerge;
  pv.alpha = x.alpha + m0;
  pv.beta = x.beta + m0;
  pv.prefetch = next;
  gemm(pv);
}

// The same for pairs that are few, over rows as they lie.
void FewBlock(const Context& c, const Arrays& x, int64_t m0, int64_t m, const std::byte* const* rows,
              int64_t count, RowPrefetch* next) {
  const ops::AttentionArgs& a = c.a;
  const int64_t element = c.t.bf16_pairs ? 2 : 4;
  if (next->count > 0) {
    const int64_t steps = CeilDiv(count, 16) * CeilDiv(c.dim, 32) + CeilDiv(a.kv_lora, c.t.nr);
    next->lines_per_step = CeilDiv(next->count * CeilDiv(next->bytes, 64), steps);
  }
  const FewPairsArgs few = {.rows = rows,
                            .count = count,
                            .m = m - m0,
                            .kv_lora = a.kv_lora,
                            .rope = a.rope,
                            .q = x.q + m0 * c.dim * element,
                            .s = x.s + m0 * kBlock,
                            .p = x.p + m0 * kBlock * element,
                            .o = x.o + m0 * a.kv_lora,
                            .alpha = x.alpha + m0,
                            .beta = x.beta + m0,
                            .prefetch = next};
  c.t.score_few(few);
  BlockSoftmax(c, x, m0, m);
  c.t.merge_few(few);
}

void RunTask(const Context& c, const Task& task, Scratch& scratch) {
  const ops::AttentionArgs& a = c.a;
  const KernelTable& t = c.t;
  const int64_t element = t.bf16_pairs ? 2 : 4, m = int64_t(task.rows) * task.heads;
  Carver size(nullptr);
  Carve(size, m, a, t.nr, element);
  Carver carver(scratch.Get(size.used()));
  const Arrays x = Carve(carver, m, a, t.nr, element);

  const int64_t act_bytes = SizeOf(c.act);
  for (int64_t r = 0; r < task.rows; ++r) {
    const std::byte* from =
        static_cast<const std::byte*>(a.q) + ((task.row + r) * a.heads + task.head) * c.dim * act_bytes;
    std::byte* to = x.q + r * task.heads * c.dim * element;
    if (act_bytes == element) {
      std::memcpy(to, from, size_t(task.heads * c.dim * element));
    } else {
      t.bf16_to_f32(reinterpret_cast<const uint16_t*>(from), task.heads * c.dim,
                    reinterpret_cast<float*>(to));
    }
  }
  std::fill(x.o, x.o + m * a.kv_lora, 0.0f);
  std::fill(x.run_max, x.run_max + m, -3.0e38f);
  std::fill(x.run_sum, x.run_sum + m, 0.0f);

  const int64_t page_begin = a.seqs.page_begin[task.seq];
  const bool sees_all = SeesAll(a, task.row);
  const int32_t* selected = sees_all ? nullptr : a.selected + int64_t(task.row) * a.topk;
  int64_t keys = 0;  // of the row that sees most
  if (sees_all) {
    for (int64_t r = 0; r < task.rows; ++r)
      keys = std::max<int64_t>(keys, a.seqs.positions[task.row + r] + 1);
  } else {
    keys = a.selected_count[task.row];
  }
  const RowFormat tile = t.bf16_pairs ? RowFormat::kBF16 : RowFormat::kF32;
  const RowFormat format = c.full == nullptr ? c.format : tile;
  const std::byte* rows[2][kBlock];
  auto gather = [&](int64_t first, const std::byte** out) {
    const int64_t n = std::min(kBlock, keys - first);
    for (int64_t j = 0; j < n; ++j) {
      out[j] = RowAddress(c, page_begin, selected != nullptr ? selected[first + j] : first + j);
    }
  };
  if (keys > 0) gather(0, rows[0]);
  const bool few = t.score_few != nullptr && m <= KernelTable::kFewPairs;
  int64_t m0 = 0;
  for (int64_t first = 0, b = 0; first < keys; first += kBlock, ++b) {
    const int64_t count = std::min(kBlock, keys - first);
    const std::byte** here = rows[b & 1];
    if (!few) {
      t.load_latent({.rows = here,
                     .count = count,
                     .format = format,
                     .kv_lora = a.kv_lora,
                     .rope = a.rope,
                     .keys = x.keys,
                     .values = x.values,
                     .row = x.row});
    } else if (format != tile) {
      for (int64_t j = 0; j < count; ++j) {
        std::byte* row = x.row + j * c.dim * element;
        t.decode_latent(here[j], format, a.kv_lora, a.rope, row);
        here[j] = row;
      }
    }
    RowPrefetch prefetch;
    if (first + kBlock < keys) {
      gather(first + kBlock, rows[(b + 1) & 1]);
      prefetch = {.rows = rows[(b + 1) & 1],
                  .count = std::min(kBlock, keys - first - kBlock),
                  .bytes = c.full == nullptr ? c.row_bytes : c.full_row_bytes};
    }
    bool leading = true;
    int64_t most = 0;
    for (int64_t r = 0; r < task.rows; ++r) {
      const int64_t seen =
          sees_all ? std::min<int64_t>(count, a.seqs.positions[task.row + r] + 1 - first) : count;
      std::fill(x.valid + r * task.heads, x.valid + (r + 1) * task.heads,
                int32_t(std::max<int64_t>(seen, 0)));
      most = std::max(most, seen);
      leading = leading && seen <= 0;
      if (leading) m0 = (r + 1) * task.heads;  // rows whose positions end before this block
    }
    if (m0 < m && few) {
      FewBlock(c, x, m0, m, here, most, &prefetch);
    } else if (m0 < m) {
      Block(c, x, m0, m, most, &prefetch);
    }
    m0 = 0;
  }
  for (int64_t r = 0; r < task.rows; ++r) {
    for (int64_t h = 0; h < task.heads; ++h) {
      const int64_t i = r * task.heads + h;
      std::byte* out = c.out + ((task.row + r) * a.heads + task.head + h) * a.kv_lora * act_bytes;
      t.finish(x.o + i * a.kv_lora, x.run_sum[i], a.kv_lora, out, c.act == DType::kBF16);
    }
  }
}

// Cuts the rows [row_begin, row_end) of one sequence into groups that may share blocks.
template <typename Fn>
void ForGroups(const ops::AttentionArgs& a, int64_t row_begin, int64_t row_end, int64_t group_rows, Fn fn) {
  for (int64_t row = row_begin; row < row_end;) {
    int64_t rows = 1;
    if (SeesAll(a, row)) {
      while (rows < group_rows && row + rows < row_end && SeesAll(a, row + rows)) ++rows;
    }
    fn(row, rows);
    row += rows;
  }
}

void RunRows(const Context& c, int64_t seq_begin, int64_t seq_end) {
  const ops::AttentionArgs& a = c.a;
  const int64_t group_rows = std::max<int64_t>(1, kPairsPerTask / a.heads);
  int64_t groups = 0;
  for (int64_t s = seq_begin; s < seq_end; ++s) {
    const int64_t begin = a.seqs.row_begin[s];
    ForGroups(a, begin, begin + a.seqs.num_rows[s], group_rows, [&](int64_t, int64_t) { ++groups; });
  }
  // Groups that would leave threads idle at the end share out their heads too, at the price of loading blocks
  // once a part. Among many groups nobody waits long.
  const int64_t threads = c.q.threads(), cut = groups < 4 * threads ? groups % threads : 0;
  const int64_t parts =
      cut == 0 ? 1 : std::min<int64_t>(CeilDiv(threads, cut), CeilDiv(a.heads, kHeadsPerPart));
  std::vector<int32_t>& flat = c.q.ints();
  flat.clear();
  int64_t group = 0;
  for (int64_t s = seq_begin; s < seq_end; ++s) {
    const int64_t begin = a.seqs.row_begin[s];
    ForGroups(a, begin, begin + a.seqs.num_rows[s], group_rows, [&](int64_t row, int64_t rows) {
      const int64_t heads = group++ < cut ? CeilDiv(a.heads, parts) : a.heads;
      for (int64_t h = 0; h < a.heads; h += heads) {
        const int32_t task[] = {int32_t(s), int32_t(row), int32_t(rows), int32_t(h),
                                int32_t(std::min(heads, a.heads - h))};
        flat.insert(flat.end(), std::begin(task), std::end(task));
      }
    });
  }
  const int64_t n = int64_t(flat.size()) / 5;
  c.q.group().ParallelFor(n, [&](int thread, int64_t i) {
    const int32_t* f = flat.data() + (n - 1 - i) * 5;  // last rows see most, parts are short: longest first
    RunTask(c, Task{f[0], f[1], f[2], f[3], f[4]}, c.q.group().scratch(thread));
  });
}

// Every row of a sequence in tile type, as LoadLatent would make it, then attention from that.
void RunFromFullCopy(Context& c) {
  const ops::AttentionArgs& a = c.a;
  const int64_t element = c.t.bf16_pairs ? 2 : 4;
  for (int64_t s = 0; s < a.seqs.seqs; ++s) {
    int64_t keys = 0;
    for (int64_t r = 0; r < a.seqs.num_rows[s]; ++r) {
      keys = std::max<int64_t>(keys, a.seqs.positions[a.seqs.row_begin[s] + r] + 1);
    }
    c.full = nullptr;
    c.full_row_bytes = c.dim * element;
    std::byte* copy = c.q.shared().Get(std::max<int64_t>(1, keys) * c.full_row_bytes);
    c.q.group().ParallelFor(CeilDiv(keys, kBlock), [&](int, int64_t b) {
      for (int64_t p = b * kBlock; p < std::min(keys, (b + 1) * kBlock); ++p) {
        c.t.decode_latent(RowAddress(c, a.seqs.page_begin[s], p), c.format, a.kv_lora, a.rope,
                          copy + p * c.full_row_bytes);
      }
    });
    c.full = copy;
    RunRows(c, s, s + 1);
  }
  c.full = nullptr;
}

}  // namespace

void RunAttention(CpuQueue& q, const KernelTable& t, DType act, const ops::AttentionArgs& a) {
  if (a.verify_failed_row != nullptr) *a.verify_failed_row = -1;
  if (a.seqs.rows <= 0) return;
  const KvLayout& layout = a.pool->layout();
  SLUICE_CHECK(layout.kv_lora() == a.kv_lora && layout.rope() == a.rope,
               "pool rows are {} + {}, attention wants {} + {}", layout.kv_lora(), layout.rope(), a.kv_lora,
               a.rope);
  SLUICE_CHECK((a.kv_lora + a.rope) % 2 == 0 && a.kv_lora <= 64 * 128, "latent rows of {} + {}", a.kv_lora,
               a.rope);
  Context c{.q = q,
            .t = t,
            .act = act,
            .a = a,
            .pages = PoolPages::Latent(*a.pool, a.layer, a.own),
            .format = FormatOf(layout.latent_dtype()),
            .row_bytes = layout.latent_row_bytes(),
            .dim = a.kv_lora + a.rope,
            .out = static_cast<std::byte*>(a.out)};
  const int64_t row_bytes = a.heads * a.kv_lora * SizeOf(act);
  for (int64_t r = 0; r < a.seqs.rows; ++r) {  // padding: zeros, so that nothing after it sees garbage
    if (a.seqs.seq_of_row[r] < 0) std::memset(c.out + r * row_bytes, 0, size_t(row_bytes));
  }
  if (a.dequant_only_topk) {
    RunRows(c, 0, a.seqs.seqs);
  } else {
    RunFromFullCopy(c);
  }
  if (!a.dequant_verify) return;
  c.out = q.input().Get(a.seqs.rows * row_bytes);
  if (a.dequant_only_topk) {
    RunFromFullCopy(c);
  } else {
    RunRows(c, 0, a.seqs.seqs);
  }
  for (int64_t s = 0; s < a.seqs.seqs; ++s) {
    for (int64_t r = a.seqs.row_begin[s]; r < a.seqs.row_begin[s] + a.seqs.num_rows[s]; ++r) {
      if (std::memcmp(c.out + r * row_bytes, static_cast<std::byte*>(a.out) + r * row_bytes,
                      size_t(row_bytes)) == 0)
        continue;
      if (a.verify_failed_row != nullptr && (*a.verify_failed_row < 0 || r < *a.verify_failed_row)) {
        *a.verify_failed_row = int32_t(r);
      }
    }
  }
}

}  // namespace sluice::cpu
