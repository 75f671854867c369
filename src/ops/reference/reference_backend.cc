#include "ops/reference/reference_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/reference/reference_impl.h"
#include "ops/reference/reference_kv.h"

namespace sluice::ops {
namespace reference {
namespace {

class ReferenceLinear final : public Linear {
 public:
  std::vector<float> w;  // [groups, out, in], dequantised and rounded to Act
  const float* Group(int64_t g) const { return w.data() + g * out * in; }
};

float Element(const WeightView& v, int64_t r, int64_t c) {
  const int64_t i = r * v.in + c;
  switch (v.dtype) {
    case DType::kF32:
      return static_cast<const float*>(v.data)[i];
    case DType::kBF16:
      return BF16ToF32(static_cast<const uint16_t*>(v.data)[i]);
    case DType::kF16: {
      const uint16_t h = static_cast<const uint16_t*>(v.data)[i];
      const int e = (h >> 10) & 31, m = h & 1023;
      const float f = e == 0    ? std::ldexp(float(m), -24)
                      : e == 31 ? (m ? NAN : INFINITY)
                                : std::ldexp(float(1024 + m), e - 25);
      return h & 0x8000 ? -f : f;
    }
    case DType::kF8E4M3: {
      const int64_t blocks = CeilDiv(v.in, v.scale_block_k);
      return E4M3ToF32(static_cast<const uint8_t*>(v.data)[i]) *
             v.scale[r / v.scale_block_n * blocks + c / v.scale_block_k];
    }
    default:
      return NAN;
  }
}

double Dot(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double(a[i]) * double(b[i]);
  return sum;
}

float SiluMulOne(float gate, float up) {
  const double g = gate;
  return float(g / (1.0 + std::exp(-g)) * double(up));
}

class ReferenceBackend final : public Backend {
 public:
  explicit ReferenceBackend(DType act) : act_{act} {
    info_.device = "cpu";
    info_.isa = "reference";
    info_.act = act;
    info_.numerics_class = "reference";
  }
  const BackendInfo& info() const override { return info_; }
  std::unique_ptr<Queue> MakeQueue(int threads, int) override {
    return std::make_unique<ReferenceQueue>(std::max(threads, 1));
  }
  int64_t RowCapacity(int64_t rows) const override { return rows; }
  Status Plan(const Limits&) override { return OkStatus(); }

  StatusOr<std::unique_ptr<Linear>> Pack(std::span<const WeightView> parts) override {
    const std::vector<WeightView> group(parts.begin(), parts.end());
    return PackGroups(std::span(&group, 1));
  }

  StatusOr<std::unique_ptr<Linear>> PackGroups(std::span<const std::vector<WeightView>> groups) override {
    if (groups.empty() || groups[0].empty()) return Internal("pack: no weight given");
    auto l = std::make_unique<ReferenceLinear>();
    l->groups = int64_t(groups.size());
    l->in = groups[0][0].in;
    for (const WeightView& v : groups[0]) l->out += v.out;
    for (const auto& group : groups) {
      int64_t out = 0;
      for (const WeightView& v : group) {
        if (v.in != l->in) return Internal("pack: parts of {} and {} inputs", v.in, l->in);
        out += v.out;
        for (int64_t r = 0; r < v.out; ++r) {
          for (int64_t c = 0; c < v.in; ++c) l->w.push_back(act_.Round(Element(v, r, c)));
        }
      }
      if (out != l->out) return Internal("pack: groups of {} and {} outputs", out, l->out);
    }
    l->packed_bytes = int64_t(l->w.size() * 4);
    l->kernel = "reference (double sums)";
    return std::unique_ptr<Linear>(std::move(l));
  }

  void Embed(Queue& queue, const EmbedArgs& a) override {
    ForRows(queue, a.rows, [&](int64_t r) {
      for (int64_t i = 0; i < a.hidden; ++i) a.x[r * a.hidden + i] = Element(a.table, a.tokens[r], i);
    });
  }

  void Apply(Queue& queue, const LinearArgs& a) override {
    const auto& w = *static_cast<const ReferenceLinear*>(a.weight);
    const int64_t x_ld = a.x_ld ? a.x_ld : w.in, y_ld = a.y_ld ? a.y_ld : w.out;
    ForRows(queue, a.rows, [&](int64_t r) {
      const std::vector<float> x = Row(a.x, r * x_ld, w.in);
      for (int64_t o = 0; o < w.out; ++o) {
        const float v = float(Dot(x.data(), w.w.data() + o * w.in, w.in));
        if (a.mode == OutMode::kAct) {
          act_.Set(a.y, r * y_ld + o, v);
        } else if (a.mode == OutMode::kF32Add) {
          static_cast<float*>(a.y)[r * y_ld + o] += v;
        } else {
          static_cast<float*>(a.y)[r * y_ld + o] = v;
        }
      }
    });
  }

  void ApplyHeads(Queue& queue, const HeadLinearArgs& a) override {
    const auto& w = *static_cast<const ReferenceLinear*>(a.weight);
    ForRows(queue, a.rows, [&](int64_t r) {
      for (int64_t h = 0; h < w.groups; ++h) {
        const std::vector<float> x = Row(a.x, r * a.x_row + h * a.x_head, w.in);
        for (int64_t o = 0; o < w.out; ++o) {
          act_.Set(a.y, r * a.y_row + h * a.y_head + o, float(Dot(x.data(), w.Group(h) + o * w.in, w.in)));
        }
      }
    });
  }

  void RmsNorm(Queue& queue, const RmsNormArgs& a) override {
    const int64_t x_ld = a.x_ld ? a.x_ld : a.dim, y_ld = a.y_ld ? a.y_ld : a.dim;
    ForRows(queue, a.rows, [&](int64_t r) {
      const float* x = a.x + r * x_ld;
      const double scale = 1.0 / std::sqrt(Dot(x, x, a.dim) / double(a.dim) + double(a.eps));
      for (int64_t i = 0; i < a.dim; ++i) {
        const float v = float(double(x[i]) * scale * double(a.weight[i]));
        if (a.y_act != nullptr) act_.Set(a.y_act, r * y_ld + i, v);
        if (a.y_f32 != nullptr) a.y_f32[r * a.dim + i] = v;
      }
    });
  }

  void SplitQuery(Queue& queue, const SplitQueryArgs& a) override {
    const int64_t dim = a.nope + a.rope, full = a.kv_lora + a.rope;
    ForRows(queue, a.rows, [&](int64_t r) {
      std::vector<float> rotated(size_t(a.rope), 0.0f);
      for (int64_t h = 0; h < a.heads; ++h) {
        const float* q = a.q + (r * a.heads + h) * dim;
        for (int64_t i = 0; i < a.nope; ++i) act_.Set(a.q_nope, (r * a.heads + h) * a.nope + i, q[i]);
        Rotate(q + a.nope, a.table, a.positions[r], a.interleave, rotated.data());
        for (int64_t i = 0; i < a.rope; ++i) {
          act_.Set(a.q_full, (r * a.heads + h) * full + a.kv_lora + i, rotated[size_t(i)]);
        }
      }
    });
  }

  void WriteLatent(Queue& queue, const WriteLatentArgs& a) override {
    const int64_t lora = a.pool->layout().kv_lora(), rope = a.pool->layout().rope();
    const int64_t ld = a.ckv_ld ? a.ckv_ld : lora + rope;
    ForRows(queue, a.rows, [&](int64_t r) {
      if (a.slots.page[r].value < 0) return;
      const float* x = a.ckv + r * ld;
      std::vector<float> row(size_t(lora + rope), 0.0f);
      const double scale = 1.0 / std::sqrt(Dot(x, x, lora) / double(lora) + double(a.eps));
      for (int64_t i = 0; i < lora; ++i)
        row[size_t(i)] = float(double(x[i]) * scale * double(a.norm_weight[i]));
      Rotate(x + lora, a.table, a.positions[r], a.interleave, row.data() + lora);
      StoreLatentRow(*a.pool, a.layer, a.slots.page[r], a.slots.offset[r], row.data());
    });
  }

  void WriteIndex(Queue& queue, const WriteIndexArgs& a) override {
    const int64_t ld = a.k_ld ? a.k_ld : a.dim;
    ForRows(queue, a.rows, [&](int64_t r) {
      if (a.slots.page[r].value < 0) return;
      const float* x = a.k + r * ld;
      double mean = 0, var = 0;
      for (int64_t i = 0; i < a.dim; ++i) mean += double(x[i]);
      mean /= double(a.dim);
      for (int64_t i = 0; i < a.dim; ++i) var += (double(x[i]) - mean) * (double(x[i]) - mean);
      const double scale = 1.0 / std::sqrt(var / double(a.dim) + double(a.eps));
      std::vector<float> normed(size_t(a.dim), 0.0f);
      for (int64_t i = 0; i < a.dim; ++i) {
        normed[size_t(i)] =
            float((double(x[i]) - mean) * scale * double(a.norm_weight[i]) + double(a.norm_bias[i]));
      }
      std::vector<float> row = normed;
      Rotate(normed.data(), a.table, a.positions[r], a.interleave, row.data());
      StoreIndexRow(*a.pool, a.layer, a.slots.page[r], a.slots.offset[r], row.data());
    });
  }

  void IndexSelect(Queue& queue, const IndexSelectArgs& a) override {
    reference::IndexSelect(queue, a, act_);
  }
  void Attention(Queue& queue, const AttentionArgs& a) override { reference::Attention(queue, a, act_); }

  void Gate(Queue& queue, const GateArgs& a) override {
    ForRows(queue, a.rows, [&](int64_t r) { GateRow(a, r); });
  }

  void Moe(Queue& queue, const MoeArgs& a) override {
    const auto& up = *static_cast<const ReferenceLinear*>(a.gate_up);
    const auto& down = *static_cast<const ReferenceLinear*>(a.down);
    const int64_t hidden = up.in, dim = down.in;
    ForRows(queue, a.rows, [&](int64_t r) {
      const std::vector<float> x = Row(a.x, r * hidden, hidden);
      std::vector<float> h(size_t(dim), 0.0f);
      for (int64_t k = 0; k < a.topk; ++k) {
        const int32_t e = a.expert[r * a.topk + k];
        if (e < 0) continue;
        const float* w = up.Group(e);
        for (int64_t i = 0; i < dim; ++i) {
          const float g = float(Dot(x.data(), w + i * hidden, hidden)),
                      u = float(Dot(x.data(), w + (dim + i) * hidden, hidden));
          h[size_t(i)] = act_.Round(SiluMulOne(g, u));
        }
        for (int64_t o = 0; o < hidden; ++o) {
          a.y[r * hidden + o] +=
              a.expert_weight[r * a.topk + k] * float(Dot(h.data(), down.Group(e) + o * dim, dim));
        }
      }
    });
  }

  void SiluMul(Queue& queue, const SiluMulArgs& a) override {
    ForRows(queue, a.rows, [&](int64_t r) {
      const float* x = a.gate_up + r * 2 * a.dim;
      for (int64_t i = 0; i < a.dim; ++i) act_.Set(a.act, r * a.dim + i, SiluMulOne(x[i], x[a.dim + i]));
    });
  }

  void GatherRows(Queue&, const void* src, const int32_t* index, int64_t rows, int64_t bytes,
                  void* dst) override {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(static_cast<std::byte*>(dst) + r * bytes,
                  static_cast<const std::byte*>(src) + index[r] * bytes, size_t(bytes));
    }
  }

 private:
  std::vector<float> Row(const void* p, int64_t at, int64_t n) const {
    std::vector<float> x(size_t(n), 0.0f);
    for (int64_t i = 0; i < n; ++i) x[size_t(i)] = act_.Get(p, at + i);
    return x;
  }

  static void GateRow(const GateArgs& a, int64_t r) {
    const size_t n = size_t(a.experts);
    std::vector<double> score(n, 0.0), choice(n, 0.0);
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t e = 0; e < n; ++e) {
      score[e] = Dot(a.x + r * a.hidden, a.weight + int64_t(e) * a.hidden, a.hidden);
      max = std::max(max, score[e]);
    }
    for (size_t e = 0; e < n; ++e) {
      score[e] = a.softmax ? std::exp(score[e] - max) : 1.0 / (1.0 + std::exp(-score[e]));
      sum += score[e];
    }
    for (size_t e = 0; e < n; ++e) {
      if (a.softmax) score[e] /= sum;
      choice[e] = score[e] + (a.bias != nullptr ? double(a.bias[e]) : 0.0);
    }
    if (a.groups > 1) KeepBestGroups(a, choice);
    std::vector<int32_t> order(n, 0);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t x, int32_t y) { return choice[size_t(x)] > choice[size_t(y)]; });
    double total = 0;
    for (int64_t k = 0; k < a.topk; ++k) total += score[size_t(order[size_t(k)])];
    for (int64_t k = 0; k < a.topk; ++k) {
      const double w = score[size_t(order[size_t(k)])];
      a.expert[r * a.topk + k] = order[size_t(k)];
      a.expert_weight[r * a.topk + k] = float((a.normalize ? w / (total + 1e-20) : w) * double(a.scaling));
    }
  }

  // Experts outside the best groups get -inf.
  static void KeepBestGroups(const GateArgs& a, std::vector<double>& choice) {
    const int64_t size = a.experts / a.groups;
    std::vector<double> group_score;
    for (int64_t g = 0; g < a.groups; ++g) {
      std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(members.rbegin(), members.rend());
      group_score.push_back(a.group_sum_top2 ? members[0] + members[1] : members[0]);
    }
    std::vector<int64_t> order(size_t(a.groups), 0);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t x, int64_t y) { return group_score[size_t(x)] > group_score[size_t(y)]; });
    for (int64_t i = a.groups_kept; i < a.groups; ++i) {
      const int64_t g = order[size_t(i)];
      std::fill(choice.begin() + g * size, choice.begin() + (g + 1) * size,
                -std::numeric_limits<double>::infinity());
    }
  }

  ActView act_;
  BackendInfo info_;
};

}  // namespace
}  // namespace reference

std::unique_ptr<Backend> MakeReferenceBackend(DType act) {
  return std::make_unique<reference::ReferenceBackend>(act);
}

}  // namespace sluice::ops
