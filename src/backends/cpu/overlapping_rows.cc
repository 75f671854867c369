#include "backends/cpu/overlapping_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sluice::cpu {
namespace {

constexpr int64_t kBlock = kAttentionBlock;
constexpr int64_t kRowsMax = 8;  // of a group
constexpr int64_t kHeader = 3;
// Scores and decoded rows of the groups that run together.
constexpr int64_t kScratchBytes = 16 << 20;

}  // namespace

struct OverlappingRows::Group {
  int64_t seq = 0, row = 0, rows = 0, keys = 0;  // keys: of the union
  const int32_t* position = nullptr;             // [keys]
  const int32_t* place = nullptr;                // [rows, topk]
  float* scores = nullptr;                       // [rows, heads, keys rounded up to blocks]
  std::byte* decoded = nullptr;                  // [keys, dim] tile type; null: the pool's rows are of it
  int64_t blocks() const { return CeilDiv(keys, kBlock); }
};

OverlappingRows::OverlappingRows(const AttentionContext& c, int64_t seq_begin, int64_t seq_end)
    : c_(c), seq_begin_(seq_begin), seq_end_(seq_end), lists_(c.q.lists()) {
  lists_.assign(size_t(seq_end - seq_begin), -1);
  if (c.a.selected == nullptr || c.full != nullptr) return;
  for (int64_t s = seq_begin; s < seq_end; ++s) Offer(s);
}

void OverlappingRows::Offer(int64_t seq) {
  const ops::AttentionArgs& a = c_.a;
  const int64_t end = a.seqs.row_begin[seq] + a.seqs.num_rows[seq];
  if (a.seqs.num_rows[seq] < 2 || a.seqs.num_rows[seq] > kRowsMax) return;
  int64_t row = a.seqs.row_begin[seq];
  while (row < end && SeesAll(a, row)) ++row;
  const int64_t rows = end - row;
  if (rows < 2) return;
  const size_t at = lists_.size();
  int64_t all = 0;
  for (int64_t r = row; r < end; ++r) {
    if (SeesAll(a, r)) return;
    all += a.selected_count[r];
  }
  lists_.resize(at + size_t(kHeader + all + rows * a.topk));
  int32_t* position = &lists_[at + kHeader];
  int32_t* place = position + all;
  int64_t next[kRowsMax] = {}, keys = 0;
  for (;; ++keys) {
    int32_t least = std::numeric_limits<int32_t>::max();
    for (int64_t r = 0; r < rows; ++r)
      if (next[r] < a.selected_count[row + r])
        least = std::min(least, a.selected[(row + r) * a.topk + next[r]]);
    if (least == std::numeric_limits<int32_t>::max()) break;
    position[keys] = least;
    for (int64_t r = 0; r < rows; ++r) {
      if (next[r] == a.selected_count[row + r] || a.selected[(row + r) * a.topk + next[r]] != least) continue;
      place[r * a.topk + next[r]++] = int32_t(keys);
    }
  }
  if (keys * 4 > all * 3) {  // too little in common
    lists_.resize(at);
    return;
  }
  const int32_t header[kHeader] = {int32_t(row), int32_t(rows), int32_t(keys)};
  std::copy_n(header, kHeader, lists_.begin() + long(at));
  // The union is shorter than what was kept for it: its tail is left unused.
  std::memmove(position + keys, place, size_t(rows * a.topk) * sizeof(int32_t));
  lists_.resize(at + size_t(kHeader + keys + rows * a.topk));
  lists_[size_t(seq - seq_begin_)] = int32_t(at);
  any_ = true;
}

OverlappingRows::Group OverlappingRows::GroupAt(int64_t seq) const {
  const int32_t* header = &lists_[size_t(lists_[size_t(seq - seq_begin_)])];
  Group g;
  g.seq = seq;
  g.row = header[0];
  g.rows = header[1];
  g.keys = header[2];
  g.position = header + kHeader;
  g.place = g.position + g.keys;
  return g;
}

void OverlappingRows::Run() {
  if (!any_) return;
  const ops::AttentionArgs& a = c_.a;
  const KernelTable& t = c_.t;
  const int64_t element = t.bf16_pairs ? 2 : 4, act_bytes = SizeOf(c_.act), nr = t.nr;
  const RowFormat tile = t.bf16_pairs ? RowFormat::kBF16 : RowFormat::kF32;
  const GemmFn gemm = t.bf16_pairs ? t.gemm_pairs : t.gemm_f32;
  const bool decodes = c_.format != tile;
  for (int64_t seq = seq_begin_; seq < seq_end_;) {
    // As many groups as the scratch holds, one at least.
    int64_t last = seq, groups = 0, blocks = 0, rows = 0, bytes = 0;
    for (; last < seq_end_; ++last) {
      if (lists_[size_t(last - seq_begin_)] < 0) continue;
      const Group g = GroupAt(last);
      const int64_t need = g.rows * a.heads * g.blocks() * kBlock * 4 +
                           (decodes ? g.keys * c_.dim * element : 0) + int64_t(sizeof(Group)) + 128;
      if (groups > 0 && bytes + need > kScratchBytes) break;
      bytes += need;
      ++groups;
      blocks += g.blocks();
      rows += g.rows;
    }
    if (groups == 0) return;
    Carver carver(c_.q.shared().Get(bytes + 128 * (groups + 2)));
    Group* group = carver.Take<Group>(groups);
    for (int64_t i = 0; seq < last; ++seq) {
      if (lists_[size_t(seq - seq_begin_)] < 0) continue;
      Group g = GroupAt(seq);
      g.scores = carver.Take<float>(g.rows * a.heads * g.blocks() * kBlock);
      if (decodes) g.decoded = carver.Take<std::byte>(g.keys * c_.dim * element);
      group[i++] = g;
    }

    // Scores of one block of the union for all rows and heads of the group.
    c_.q.group().ParallelFor(blocks, [&](int thread, int64_t i) {
      const Group* g = group;
      for (; i >= g->blocks(); ++g) i -= g->blocks();
      const int64_t m = g->rows * a.heads, first = i * kBlock, n = std::min(kBlock, g->keys - first);
      const bool widen = act_bytes != element;
      Carver scratch(nullptr);
      const auto carve = [&](Carver& c, std::byte** keys, std::byte** row, std::byte** q) {
        *keys = c.Take<std::byte>(AlignUp(kBlock, nr) * AlignUp(c_.dim, 2) * element);
        *row = c.Take<std::byte>(kBlock * c_.dim * element);
        *q = c.Take<std::byte>(widen ? m * c_.dim * element : 0);
      };
      std::byte *keys, *row, *q;
      carve(scratch, &keys, &row, &q);
      Carver arrays(c_.q.group().scratch(thread).Get(scratch.used()));
      carve(arrays, &keys, &row, &q);
      const std::byte* rows_of[kBlock];
      const int64_t pages = a.seqs.page_begin[g->seq];
      for (int64_t j = 0; j < n; ++j) {
        rows_of[j] = RowAddress(c_, pages, g->position[first + j]);
        if (!decodes) continue;
        std::byte* to = g->decoded + (first + j) * c_.dim * element;
        t.decode_latent(rows_of[j], c_.format, a.kv_lora, a.rope, to);
        rows_of[j] = to;
      }
      t.load_latent({.rows = rows_of,
                     .count = n,
                     .format = tile,
                     .kv_lora = a.kv_lora,
                     .rope = a.rope,
                     .keys = keys,
                     .values = nullptr,
                     .row = row});
      const std::byte* queries = static_cast<const std::byte*>(a.q) + g->row * a.heads * c_.dim * act_bytes;
      if (widen) {
        t.bf16_to_f32(reinterpret_cast<const uint16_t*>(queries), m * c_.dim, reinterpret_cast<float*>(q));
        queries = q;
      }
      GemmArgs qk;
      qk.a = queries;
      qk.lda = c_.dim;
      qk.rows = m;
      qk.k = c_.dim;
      qk.b = keys;
      qk.panel_bytes = nr * AlignUp(c_.dim, t.bf16_pairs ? 2 : 1) * element;
      qk.cols = n;
      qk.c = g->scores + first;
      qk.ldc = g->blocks() * kBlock;
      gemm(qk);
    });

    // One row's blocks in order, for some of the values' columns.
    const int64_t parts = std::clamp<int64_t>(CeilDiv(2 * c_.q.threads(), rows), 1, CeilDiv(a.kv_lora, 128));
    const int64_t width = AlignUp(CeilDiv(a.kv_lora, parts), nr);
    c_.q.group().ParallelFor(rows * parts, [&](int thread, int64_t i) {
      const int64_t column = i % parts * width, n = std::min(width, a.kv_lora - column);
      if (n <= 0) return;
      i /= parts;
      const Group* g = group;
      for (; i >= g->rows; ++g) i -= g->rows;
      const int64_t row = g->row + i, m = a.heads, keys = a.selected_count[row];
      const int32_t* place = g->place + i * a.topk;
      const float* scores = g->scores + i * m * g->blocks() * kBlock;
      struct Arrays {
        float *s, *o, *run_max, *run_sum, *alpha, *beta;
        int32_t* valid;
        std::byte *p, *values, *row;
      } x;
      const auto carve = [&](Carver c) {
        x.s = c.Take<float>(m * kBlock);
        x.o = c.Take<float>(m * n);
        x.run_max = c.Take<float>(m);
        x.run_sum = c.Take<float>(m);
        x.alpha = c.Take<float>(m);
        x.beta = c.Take<float>(m);
        x.valid = c.Take<int32_t>(m);
        x.p = c.Take<std::byte>(m * kBlock * element);
        x.values = c.Take<std::byte>(AlignUp(n, nr) * kBlock * element);
        x.row = c.Take<std::byte>(kBlock * n * element);
        return c.used();
      };
      carve(Carver(c_.q.group().scratch(thread).Get(carve(Carver(nullptr)))));
      std::fill(x.o, x.o + m * n, 0.0f);
      std::fill(x.run_max, x.run_max + m, -3.0e38f);
      std::fill(x.run_sum, x.run_sum + m, 0.0f);
      const int64_t pages = a.seqs.page_begin[g->seq];
      for (int64_t first = 0; first < keys; first += kBlock) {
        const int64_t count = std::min(kBlock, keys - first);
        const std::byte* rows_of[kBlock];
        for (int64_t j = 0; j < count; ++j) {
          const int32_t at = place[first + j];
          rows_of[j] =
              (decodes ? g->decoded + at * c_.dim * element : RowAddress(c_, pages, g->position[at])) +
              column * element;
        }
        for (int64_t h = 0; h < m; ++h) {
          const float* from = scores + h * g->blocks() * kBlock;
          for (int64_t j = 0; j < count; ++j) x.s[h * kBlock + j] = from[place[first + j]];
        }
        std::fill(x.valid, x.valid + m, int32_t(count));
        t.softmax({.s = x.s,
                   .m = m,
                   .scale = a.scale,
                   .valid = x.valid,
                   .p = x.p,
                   .run_max = x.run_max,
                   .run_sum = x.run_sum,
                   .alpha = x.alpha,
                   .beta = x.beta});
        t.load_latent({.rows = rows_of,
                       .count = count,
                       .format = tile,
                       .kv_lora = n,
                       .rope = 0,
                       .keys = nullptr,
                       .values = x.values,
                       .row = x.row});
        GemmArgs pv;
        pv.a = x.p;
        pv.lda = kBlock;
        pv.rows = m;
        pv.k = AlignUp(count, 2);
        pv.b = x.values;
        pv.panel_bytes = nr * kBlock * element;
        pv.cols = n;
        pv.c = x.o;
        pv.ldc = n;
        pv.store = Store::kMerge;
        pv.alpha = x.alpha;
        pv.beta = x.beta;
        gemm(pv);
      }
      for (int64_t h = 0; h < m; ++h)
        t.finish(x.o + h * n, x.run_sum[h], n,
                 c_.out + ((row * a.heads + h) * a.kv_lora + column) * act_bytes, c_.act == DType::kBF16);
    });
  }
}

}  // namespace sluice::cpu
