#include "backends/cpu/index_select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/pool_pages.h"
#include "backends/cpu/rope.h"
#include "base/check.h"
#include "base/ids.h"

namespace sluice::cpu {
namespace {

// Scores held at once; rows go in batches so that they fit. A batch shares loaded key pages between rows of a
// sequence.
constexpr int64_t kScoreFloats = 8 << 20;
constexpr int64_t kPagesPerTask = 8;
// Under this much work a page more for a thread costs less than a thread more.
constexpr int64_t kTaskMacs = 1 << 19;

// Unsigned order = score order; -0 becomes +0, NaN the lowest.
uint32_t OrderKey(float f) {
  if (f != f) return 0;
  const uint32_t u = std::bit_cast<uint32_t>(f + 0.0f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
float OrderValue(uint32_t key) {
  if (key == 0) return -std::numeric_limits<float>::infinity();
  return std::bit_cast<float>((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

// The k-th largest of n keys (1 <= k <= n), by 11, 11 and 10 bits from the top.
uint32_t KthLargest(const uint32_t* keys, int64_t n, int64_t k) {
  constexpr int kShift[] = {21, 10, 0};
  constexpr uint32_t kBins[] = {2048, 2048, 1024};
  uint32_t prefix = 0, mask = 0;
  int32_t counts[2048];
  for (int pass = 0; pass < 3; ++pass) {
    std::fill(counts, counts + kBins[pass], 0);
    for (int64_t i = 0; i < n; ++i) {
      if ((keys[i] & mask) == prefix) ++counts[keys[i] >> kShift[pass] & (kBins[pass] - 1)];
    }
    uint32_t bin = kBins[pass] - 1;
    while (k > counts[bin]) k -= counts[bin--];
    prefix |= bin << kShift[pass];
    mask |= (kBins[pass] - 1) << kShift[pass];
  }
  return prefix;
}

// The first n <= topk positions.
void SelectFirst(const ops::IndexSelectArgs& a, int64_t row, int64_t n) {
  int32_t* out = a.selected + row * a.topk;
  for (int64_t i = 0; i < a.topk; ++i) out[i] = i < n ? int32_t(i) : -1;
  a.selected_count[row] = int32_t(n);
  if (a.gap != nullptr) a.gap[row] = std::numeric_limits<float>::infinity();
}

}  // namespace

float SelectTopK(const KernelTable& t, const float* scores, int64_t n, int64_t k, int32_t* out,
                 int32_t* found, uint32_t* keys) {
  if (k == n) {
    for (int64_t i = 0; i < n; ++i) out[i] = int32_t(i);
    return std::numeric_limits<float>::infinity();
  }
  // A sample guesses a bound that more than k scores reach, mostly not by much; whoever is under it is never
  // looked at again. A wrong guess costs a pass and changes no result.
  constexpr int64_t kSample = 1024;
  int64_t count = 0;
  if (n >= 4 * kSample && k < n / 3) {
    float sample[kSample];
    for (int64_t i = 0; i < kSample; ++i) sample[i] = scores[i * (n / kSample)];
    const double expected = double(k) * kSample / double(n);
    const int64_t rank = int64_t(expected + 3 * std::sqrt(expected) + 8);
    std::nth_element(sample, sample + rank, sample + kSample,
                     [](float x, float y) { return OrderKey(x) > OrderKey(y); });
    count = t.collect(scores, n, sample[rank], found);
  }
  const bool all = count <= k;
  if (all) {
    count = n;
    for (int64_t i = 0; i < n; ++i) keys[i] = OrderKey(scores[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) keys[i] = OrderKey(scores[found[i]]);
  }
  const uint32_t least = KthLargest(keys, count, k);
  int64_t ties = k;
  for (int64_t i = 0; i < count; ++i) ties -= keys[i] > least;
  uint32_t left_out = 0;
  int64_t w = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (keys[i] > least || (keys[i] == least && ties > 0)) {
      ties -= keys[i] == least;
      out[w++] = all ? int32_t(i) : found[i];
    } else {
      left_out = std::max(left_out, keys[i]);
    }
  }
  const float gap = OrderValue(least) - OrderValue(left_out);
  return gap != gap ? 0.0f : gap;
}

void RunIndexSelect(CpuQueue& q, const KernelTable& t, DType act, const ops::IndexSelectArgs& a) {
  const ops::SeqTables& seqs = a.seqs;
  if (seqs.rows <= 0) return;
  const int64_t element = t.bf16_pairs ? 2 : 4, q_row = a.heads * a.dim;
  // The longest context among rows that need scores sets how many rows a batch may hold.
  std::vector<int32_t>& scored = q.ints();  // (sequence, row) pairs in order
  scored.clear();
  int64_t longest = 0;
  for (int64_t r = 0; r < seqs.rows; ++r) {
    if (seqs.seq_of_row[r] < 0) SelectFirst(a, r, 0);  // padding
  }
  for (int64_t s = 0; s < seqs.seqs; ++s) {
    for (int64_t r = seqs.row_begin[s]; r < seqs.row_begin[s] + seqs.num_rows[s]; ++r) {
      if (seqs.positions[r] + 1 <= a.topk) {
        SelectFirst(a, r, std::max<int64_t>(0, seqs.positions[r] + 1));
        continue;
      }
      scored.push_back(int32_t(s));
      scored.push_back(int32_t(r));
      longest = std::max<int64_t>(longest, seqs.positions[r] + 1);
    }
  }
  const int64_t total = int64_t(scored.size()) / 2;
  if (total == 0) return;
  const int64_t shift = seqs.slot_shift;  // scores lie by slot; the first `shift` of them are not looked at
  const int64_t width = AlignUp(longest + shift, kPageTokens);
  const int64_t batch = std::min(total, std::max<int64_t>(1, kScoreFloats / width));

  Carver size(nullptr);
  auto carve = [&](Carver& c, float** scores, std::byte** query, float** weight, int32_t** tasks,
                   uint32_t** keys) {
    *scores = c.Take<float>(batch * width);
    *query = c.Take<std::byte>(batch * q_row * element);
    *weight = c.Take<float>(batch * a.heads);
    *tasks = c.Take<int32_t>(4 * batch * CeilDiv(width, kPageTokens));
    *keys = c.Take<uint32_t>(2 * (width + kPageTokens) * q.threads());
  };
  float *scores, *weight;
  std::byte* query;
  int32_t* tasks;
  uint32_t* order;
  carve(size, &scores, &query, &weight, &tasks, &order);
  Carver arrays(q.shared().Get(size.used()));
  carve(arrays, &scores, &query, &weight, &tasks, &order);

  const PoolPages pages = PoolPages::Index(*a.pool, a.layer, a.own);
  const DType stored = a.pool->layout().index_dtype();
  const RowFormat format =
      stored == DType::kF32 ? RowFormat::kF32 : (stored == DType::kBF16 ? RowFormat::kBF16 : RowFormat::kFp8);
  SLUICE_CHECK(a.pool->layout().index_dim() == a.dim, "pool index rows have {} values, the op {}",
               a.pool->layout().index_dim(), a.dim);

  SLUICE_CHECK(a.dim % 2 == 0 && a.dim <= 512, "index rows of {} values", a.dim);

  for (int64_t first = 0; first < total; first += batch) {
    const int64_t n = std::min(batch, total - first);
    const int32_t* row_of = scored.data() + 2 * first;  // row_of[2 * i + 1]
    q.group().ParallelFor(n, [&](int thread, int64_t i) {
      const int64_t row = row_of[2 * i + 1];
      float* f = reinterpret_cast<float*>(q.group().scratch(thread).Get(q_row * 6));
      std::memcpy(f, a.q + row * q_row, size_t(q_row) * 4);
      for (int64_t h = 0; h < a.heads; ++h) {
        Rope(f + h * a.dim, seqs.positions[row], a.table, a.interleave, f + h * a.dim);
        weight[i * a.heads + h] = a.head_weight[row * a.heads + h] * a.scale;
      }
      std::byte* to = query + i * q_row * element;
      if (act == DType::kF32) {
        std::memcpy(to, f, size_t(q_row) * 4);
        return;
      }
      uint16_t* half =
          t.bf16_pairs ? reinterpret_cast<uint16_t*>(to) : reinterpret_cast<uint16_t*>(f + q_row);
      t.f32_to_bf16(f, q_row, half);
      if (!t.bf16_pairs) t.bf16_to_f32(half, q_row, reinterpret_cast<float*>(to));
    });
    // A task: some pages of one sequence against all its rows in the batch.
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < n;) {
      int64_t end = i;
      int64_t seen = 0;
      while (end < n && row_of[2 * end] == row_of[2 * i]) {
        seen = std::max<int64_t>(seen, seqs.positions[row_of[2 * end + 1]] + 1 + shift);
        ++end;
      }
      const int64_t page_macs = (end - i) * kPageTokens * q_row;
      const int64_t step = std::clamp(CeilDiv(kTaskMacs, page_macs), int64_t(1), kPagesPerTask);
      for (int64_t p = 0; p < CeilDiv(seen, kPageTokens); p += step) {
        int32_t* task = tasks + 4 * num_tasks++;
        task[0] = int32_t(i);
        task[1] = int32_t(end);
        task[2] = int32_t(p);
        task[3] = int32_t(p + step);
      }
      i = end;
    }
    q.group().ParallelFor(num_tasks, [&](int thread, int64_t task) {
      const int64_t begin = tasks[4 * task], end = tasks[4 * task + 1];
      const int64_t seq = row_of[2 * begin];
      const int64_t key_bytes = AlignUp(kPageTokens, t.nr) * AlignUp(a.dim, 2) * element;
      std::byte* keys = q.group().scratch(thread).Get(key_bytes);
      float key_scale[kPageTokens];
      std::fill(key_scale, key_scale + kPageTokens, 1.0f);
      int64_t seen = 0;
      for (int64_t i = begin; i < end; ++i)
        seen = std::max<int64_t>(seen, seqs.positions[row_of[2 * i + 1]] + 1 + shift);
      const int64_t last = std::min<int64_t>(CeilDiv(seen, kPageTokens), tasks[4 * task + 3]);
      for (int64_t p = tasks[4 * task + 2]; p < last; ++p) {
        const std::byte* page = pages(seqs.pages[seqs.page_begin[seq] + p]);
        const int64_t count = std::min(kPageTokens, seen - p * kPageTokens);
        t.load_index(page, count, format, a.dim, keys);
        if (format == RowFormat::kFp8) {
          std::memcpy(key_scale, page + kPageTokens * a.dim, size_t(count) * 4);
          std::fill(key_scale + count, key_scale + kPageTokens, 0.0f);
        }
        for (int64_t i = begin; i < end; ++i) {
          if (seqs.positions[row_of[2 * i + 1]] + shift < p * kPageTokens) continue;
          t.index_scores({.q = query + i * q_row * element,
                          .w = weight + i * a.heads,
                          .heads = a.heads,
                          .dim = a.dim,
                          .keys = keys,
                          .key_scale = key_scale,
                          .out = scores + i * width + p * kPageTokens});
        }
      }
    });
    q.group().ParallelFor(n, [&](int thread, int64_t i) {
      const int64_t row = row_of[2 * i + 1];
      uint32_t* mine = order + 2 * (width + kPageTokens) * thread;
      const float gap =
          SelectTopK(t, scores + i * width + shift, seqs.positions[row] + 1, a.topk,
                     a.selected + row * a.topk, reinterpret_cast<int32_t*>(mine + width + kPageTokens), mine);
      a.selected_count[row] = int32_t(a.topk);
      if (a.gap != nullptr) a.gap[row] = gap;
    });
  }
}

}  // namespace sluice::cpu
