// Index selection and MLA of the reference backend, one row at a time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "ops/reference/reference_impl.h"
#include "ops/reference/reference_kv.h"

namespace sluice::ops::reference {
namespace {

struct Place {
  PageId page;
  int32_t offset;
};
Place PlaceOf(const SeqTables& t, int32_t seq, int64_t position) {
  const int64_t slot = position + t.slot_shift;
  return {t.pages[t.page_begin[seq] + slot / kPageTokens], int32_t(slot % kPageTokens)};
}

}  // namespace

void IndexSelect(Queue& queue, const IndexSelectArgs& a, ActView act) {
  ForRows(queue, a.seqs.rows, [&](int64_t r) {
    int32_t* selected = a.selected + r * a.topk;
    std::fill(selected, selected + a.topk, -1);
    const int32_t seq = a.seqs.seq_of_row[r];
    if (a.gap != nullptr) a.gap[r] = std::numeric_limits<float>::infinity();
    a.selected_count[r] = 0;
    if (seq < 0) return;  // padding
    const int64_t n = a.seqs.positions[r] + 1;
    if (n <= a.topk) {
      std::iota(selected, selected + n, 0);
      a.selected_count[r] = int32_t(n);
      return;
    }
    std::vector<float> q(size_t(a.heads * a.dim)), key(size_t(a.dim));
    for (int64_t h = 0; h < a.heads; ++h) {
      const float* in = a.q + (r * a.heads + h) * a.dim;
      float* out = q.data() + h * a.dim;
      Rotate(in, a.table, n - 1, a.interleave, out);
      std::copy(in + a.rope, in + a.dim, out + a.rope);
      for (int64_t i = 0; i < a.dim; ++i) out[i] = act.Round(out[i]);
    }
    std::vector<double> score(size_t(n), 0.0);
    for (int64_t s = 0; s < n; ++s) {
      const Place at = PlaceOf(a.seqs, seq, s);
      LoadIndexRow(*a.pool, a.layer, at.page, at.offset, key.data());
      for (int64_t h = 0; h < a.heads; ++h) {
        double dot = 0;
        for (int64_t i = 0; i < a.dim; ++i) dot += double(q[size_t(h * a.dim + i)]) * double(key[size_t(i)]);
        score[size_t(s)] += std::max(dot, 0.0) * (double(a.head_weight[r * a.heads + h]) * double(a.scale));
      }
    }
    std::vector<int32_t> order(size_t(n), 0);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t x, int32_t y) { return score[size_t(x)] > score[size_t(y)]; });
    if (a.gap != nullptr) {
      a.gap[r] = float(score[size_t(order[size_t(a.topk - 1)])] - score[size_t(order[size_t(a.topk)])]);
    }
    std::copy(order.begin(), order.begin() + a.topk, selected);
    std::sort(selected, selected + a.topk);
    a.selected_count[r] = int32_t(a.topk);
  });
}

void Attention(Queue& queue, const AttentionArgs& a, ActView act) {
  const int64_t dim = a.kv_lora + a.rope;
  if (a.verify_failed_row != nullptr) *a.verify_failed_row = -1;
  ForRows(queue, a.seqs.rows, [&](int64_t r) {
    const int32_t seq = a.seqs.seq_of_row[r];
    const auto set_out = [&](int64_t h, int64_t i, double v) {
      act.Set(a.out, (r * a.heads + h) * a.kv_lora + i, float(v));
    };
    const int64_t n = seq < 0 ? 0 : a.selected != nullptr ? a.selected_count[r] : a.seqs.positions[r] + 1;
    if (n == 0) {  // padding: zeros, so that nothing after it sees garbage
      SLUICE_CHECK(seq < 0, "row {} of sequence {} attends to nothing", r, seq);
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t i = 0; i < a.kv_lora; ++i) set_out(h, i, 0);
      }
      return;
    }
    std::vector<float> rows(size_t(n * dim));
    for (int64_t j = 0; j < n; ++j) {
      const int64_t position = a.selected != nullptr ? a.selected[r * a.topk + j] : j;
      const Place at = PlaceOf(a.seqs, seq, position);
      LoadLatentRow(*a.pool, a.layer, at.page, at.offset, rows.data() + j * dim);
    }
    std::vector<double> p(size_t(n), 0.0), out(size_t(a.kv_lora), 0.0);
    std::vector<float> q(size_t(dim), 0.0f);
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t i = 0; i < dim; ++i) q[size_t(i)] = act.Get(a.q, (r * a.heads + h) * dim + i);
      double max = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int64_t j = 0; j < n; ++j) {
        double dot = 0;
        for (int64_t i = 0; i < dim; ++i) dot += double(q[size_t(i)]) * double(rows[size_t(j * dim + i)]);
        p[size_t(j)] = dot * double(a.scale);
        max = std::max(max, p[size_t(j)]);
      }
      std::fill(out.begin(), out.end(), 0.0);
      for (int64_t j = 0; j < n; ++j) {
        const double e = std::exp(p[size_t(j)] - max);
        sum += e;
        for (int64_t i = 0; i < a.kv_lora; ++i) out[size_t(i)] += e * double(rows[size_t(j * dim + i)]);
      }
      for (int64_t i = 0; i < a.kv_lora; ++i) set_out(h, i, out[size_t(i)] / sum);
    }
  });
}

}  // namespace sluice::ops::reference
