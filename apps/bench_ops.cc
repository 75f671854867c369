#include "bench_ops.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>

#include "backends/cpu/cpu_backend.h"
#include "base/check.h"
#include "config/model_config.h"
#include "fmt/format.h"
#include "kv/device_pool.h"
#include "ops/backend.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;
constexpr LogicalLayer kLayer{0};

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// Cheap noise: a table of normal values read from a random place.
class Noise {
 public:
  Noise() {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> d;
    for (float& x : table_) x = d(rng);
  }
  std::vector<float> Floats(int64_t n, float scale = 1.0f) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = scale * Next();
    return v;
  }
  std::vector<uint16_t> BF16(int64_t n, float scale = 1.0f) {
    std::vector<uint16_t> v(static_cast<size_t>(n));
    for (uint16_t& x : v) x = F32ToBF16(scale * Next());
    return v;
  }
  float Next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return table_[state_ >> 48];
  }
  uint64_t Bits() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return state_ >> 20;
  }

 private:
  std::vector<float> table_ = std::vector<float>(65536);
  uint64_t state_ = 7;
};

struct Case {
  std::string op, shape;
  double bytes = 0, flops = 0;
  bool memory = false;  // which ceiling applies
  std::function<void()> run;
  std::function<double()> error;  // after a run
  double error_bound = 0;
  std::shared_ptr<void> keep;  // what run works on
};

class Bench {
 public:
  Bench(const OpsBenchOptions& o, std::unique_ptr<ops::Backend> backend, void (*progress)(const std::string&))
      : o_(o), backend_(std::move(backend)), progress_(progress) {
    int threads = o.threads;
    if (threads == 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      threads = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    }
    queue_ = backend_->MakeQueue(threads, -1);
    memory_.resize(size_t(o.quick ? 64 : 256) << 20, std::byte(1));
  }

  ops::Backend& backend() { return *backend_; }
  ops::Queue& queue() { return *queue_; }
  Noise& noise() { return noise_; }
  bool quick() const { return o_.quick; }
  bool Wanted(const std::string& op, const std::string& shape) const {
    return o_.only.empty() || op.find(o_.only) != std::string::npos ||
           shape.find(o_.only) != std::string::npos;
  }

  // Alternates the ceiling and the case, round by round.
  void Measure(const Case& c) {
    if (progress_ != nullptr) progress_(c.op + " " + c.shape);
    c.run();
    OpsBenchRow row{.op = c.op, .shape = c.shape};
    row.error = c.error ? c.error() : 0;
    row.error_bound = c.error_bound;
    const auto once = Clock::now();
    c.run();
    const double first = std::chrono::duration<double>(Clock::now() - once).count();
    const int repeat = std::clamp(int((o_.quick ? 0.002 : 0.03) / std::max(first, 1e-7)), 1, 2000);
    std::vector<double> us, share, ceiling;
    for (int r = 0; r < o_.rounds; ++r) {
      const double limit = c.memory ? cpu::MeasureReadBytesPerSecond(*queue_, memory_)
                                    : cpu::MeasurePeakFlops(*backend_, *queue_);
      const auto start = Clock::now();
      for (int i = 0; i < repeat; ++i) c.run();
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count() / repeat;
      us.push_back(seconds * 1e6);
      ceiling.push_back(limit);
      share.push_back((c.memory ? c.bytes : c.flops) / seconds / limit);
    }
    row.us = Median(us);
    row.us_min = *std::min_element(us.begin(), us.end());
    row.us_max = *std::max_element(us.begin(), us.end());
    row.gb_s = c.bytes / row.us * 1e-3;
    row.tflop_s = c.flops / row.us * 1e-6;
    row.limit = c.memory ? "memory" : "flops";
    row.limit_value = Median(ceiling) * (c.memory ? 1e-9 : 1e-12);
    row.share_of_limit = Median(share);
    result_.correct = result_.correct && row.error <= row.error_bound;
    result_.rows.push_back(row);
  }

  OpsBenchResult Result() {
    result_.device = backend_->info().device;
    result_.isa = backend_->info().isa;
    result_.threads = queue_->threads();
    return result_;
  }

 private:
  OpsBenchOptions o_;
  std::unique_ptr<ops::Backend> backend_;
  std::unique_ptr<ops::Queue> queue_;
  void (*progress_)(const std::string&);
  Noise noise_;
  std::vector<std::byte> memory_;
  OpsBenchResult result_;
};

double At(const std::vector<uint16_t>& v, int64_t i) { return BF16ToF32(v[size_t(i)]); }

// --- matrix products ---

void BenchLinear(Bench& b, int64_t rows, int64_t out, int64_t in) {
  const bool decode = rows <= 16;
  const std::string op = decode ? "linear_decode" : "linear_prefill",
                    shape = fmt::format("{} x {} x {} bf16", rows, out, in);
  if (!b.Wanted(op, shape)) return;
  struct Data {
    std::vector<std::unique_ptr<ops::Linear>> weights;
    std::vector<uint16_t> w, x;
    std::vector<float> y;
    size_t next = 0;
  };
  auto d = std::make_shared<Data>();
  d->w = b.noise().BF16(out * in, 0.05f);
  d->x = b.noise().BF16(rows * in);
  d->y.resize(size_t(rows * out));
  const ops::WeightView view{.dtype = DType::kBF16, .out = out, .in = in, .data = d->w.data()};
  // Decode reads weights from memory: rotate over enough copies that no cache holds the next one.
  const int64_t copies =
      decode ? std::clamp<int64_t>((int64_t(b.quick() ? 16 : 256) << 20) / (out * in * 2), 1, 64) : 1;
  for (int64_t i = 0; i < copies; ++i) d->weights.push_back(b.backend().Pack({&view, 1}).value());
  Case c{.op = op,
         .shape = shape,
         .bytes = double(out * in * 2 + rows * (in * 2 + out * 4)),
         .flops = 2.0 * double(rows * out * in),
         .memory = decode,
         .error_bound = 0x1p-24 * double(in),
         .keep = d};
  c.run = [&b, d, rows] {
    b.backend().Apply(
        b.queue(), {.weight = d->weights[d->next].get(), .rows = rows, .x = d->x.data(), .y = d->y.data()});
    d->next = (d->next + 1) % d->weights.size();
  };
  c.error = [d, rows, out, in] {
    double worst = 0;
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t r = i * 7919 % rows, n = i * 104729 % out;
      double sum = 0, size = 0;
      for (int64_t k = 0; k < in; ++k) {
        const double p = At(d->x, r * in + k) * At(d->w, n * in + k);
        sum += p;
        size += std::fabs(p);
      }
      worst = std::max(worst, std::fabs(d->y[size_t(r * out + n)] - sum) / size);
    }
    return worst;
  };
  b.Measure(c);
}

void BenchMoe(Bench& b, int64_t rows, int64_t experts, int64_t topk, int64_t hidden, int64_t inner) {
  const bool decode = rows <= 16;
  const std::string op = decode ? "moe_decode" : "moe_prefill";
  const std::string shape =
      fmt::format("{} rows, {} of {} experts, {} / {}", rows, topk, experts, hidden, inner);
  if (!b.Wanted(op, shape)) return;
  struct Data {
    std::vector<uint16_t> up, down, x;
    std::unique_ptr<ops::Linear> packed_up, packed_down;
    std::vector<int32_t> expert;
    std::vector<float> weight, y;
  };
  auto d = std::make_shared<Data>();
  d->up = b.noise().BF16(experts * 2 * inner * hidden, 0.03f);
  d->down = b.noise().BF16(experts * hidden * inner, 0.03f);
  d->x = b.noise().BF16(rows * hidden);
  d->y.resize(size_t(rows * hidden));
  std::vector<std::vector<ops::WeightView>> up, down;
  for (int64_t e = 0; e < experts; ++e) {
    up.push_back({{.dtype = DType::kBF16,
                   .out = 2 * inner,
                   .in = hidden,
                   .data = d->up.data() + e * 2 * inner * hidden}});
    down.push_back(
        {{.dtype = DType::kBF16, .out = hidden, .in = inner, .data = d->down.data() + e * hidden * inner}});
  }
  d->packed_up = b.backend().PackGroups(up).value();
  d->packed_down = b.backend().PackGroups(down).value();
  std::vector<bool> used(size_t(experts), false);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t first = int64_t(b.noise().Bits() % uint64_t(experts));
    for (int64_t s = 0; s < topk; ++s) {
      const int64_t e = (first + s * 7) % experts;
      used[size_t(e)] = true;
      d->expert.push_back(int32_t(e));
      d->weight.push_back(1.0f / float(topk));
    }
  }
  const double pairs = double(rows * topk), active = double(std::count(used.begin(), used.end(), true));
  Case c{.op = op,
         .shape = shape,
         .bytes = active * double(3 * hidden * inner * 2),
         .flops = pairs * 6.0 * double(hidden * inner),
         .memory = decode,
         .error_bound = 0x1p-7,
         .keep = d};
  c.run = [&b, d, rows, topk] {
    std::fill(d->y.begin(), d->y.end(), 0.0f);
    b.backend().Moe(b.queue(), {.rows = rows,
                                .topk = topk,
                                .gate_up = d->packed_up.get(),
                                .down = d->packed_down.get(),
                                .x = d->x.data(),
                                .expert = d->expert.data(),
                                .expert_weight = d->weight.data(),
                                .y = d->y.data()});
  };
  c.error = [d, rows, topk, hidden, inner] {  // one row, all its outputs; relative to the row's largest
    const int64_t r = rows / 2;
    std::vector<double> y(size_t(hidden), 0.0);
    for (int64_t s = 0; s < topk; ++s) {
      const int64_t e = d->expert[size_t(r * topk + s)];
      std::vector<double> h;
      for (int64_t i = 0; i < inner; ++i) {
        double g = 0, u = 0;
        for (int64_t k = 0; k < hidden; ++k) {
          g += At(d->x, r * hidden + k) * At(d->up, (e * 2 * inner + i) * hidden + k);
          u += At(d->x, r * hidden + k) * At(d->up, (e * 2 * inner + inner + i) * hidden + k);
        }
        h.push_back(g / (1 + std::exp(-g)) * u);
      }
      for (int64_t o = 0; o < hidden; ++o) {
        double sum = 0;
        for (int64_t i = 0; i < inner; ++i) sum += h[size_t(i)] * At(d->down, (e * hidden + o) * inner + i);
        y[size_t(o)] += d->weight[size_t(r * topk + s)] * sum;
      }
    }
    double worst = 0, size = 0;
    for (int64_t o = 0; o < hidden; ++o) {
      worst = std::max(worst, std::fabs(y[size_t(o)] - d->y[size_t(r * hidden + o)]));
      size = std::max(size, std::fabs(y[size_t(o)]));
    }
    return worst / size;
  };
  b.Measure(c);
}

void BenchHeads(Bench& b, int64_t rows, int64_t heads, int64_t out, int64_t in) {
  const std::string op = "head_linear",
                    shape = fmt::format("{} rows, {} heads, {} x {}", rows, heads, out, in);
  if (!b.Wanted(op, shape)) return;
  struct Data {
    std::vector<uint16_t> w, x, y;
    std::unique_ptr<ops::Linear> packed;
  };
  auto d = std::make_shared<Data>();
  d->w = b.noise().BF16(heads * out * in, 0.05f);
  d->x = b.noise().BF16(rows * heads * in);
  d->y.resize(size_t(rows * heads * out));
  std::vector<std::vector<ops::WeightView>> groups;
  for (int64_t h = 0; h < heads; ++h) {
    groups.push_back({{.dtype = DType::kBF16, .out = out, .in = in, .data = d->w.data() + h * out * in}});
  }
  d->packed = b.backend().PackGroups(groups).value();
  Case c{.op = op,
         .shape = shape,
         .bytes = double(heads * out * in * 2),
         .flops = 2.0 * double(rows * heads * out * in),
         .error_bound = 0x1p-8,
         .keep = d};
  c.run = [&b, d, rows, heads, out, in] {
    b.backend().ApplyHeads(b.queue(), {.weight = d->packed.get(),
                                       .rows = rows,
                                       .x = d->x.data(),
                                       .x_row = heads * in,
                                       .x_head = in,
                                       .y = d->y.data(),
                                       .y_row = heads * out,
                                       .y_head = out});
  };
  c.error = [d, rows, heads, out, in] {
    double worst = 0;
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t r = i * 7919 % rows, h = i * 31 % heads, n = i * 104729 % out;
      double sum = 0, size = 0;
      for (int64_t k = 0; k < in; ++k) {
        const double p = At(d->x, (r * heads + h) * in + k) * At(d->w, (h * out + n) * in + k);
        sum += p;
        size += std::fabs(p);
      }
      worst = std::max(worst, std::fabs(At(d->y, (r * heads + h) * out + n) - sum) / size);
    }
    return worst;
  };
  b.Measure(c);
}

// --- attention and index ---

// One sequence of `context` positions in shuffled pages, filled with noise in the pool's own formats.
struct Sequence {
  int64_t context;
  std::unique_ptr<DevicePool> pool;
  std::vector<PageId> pages;
  std::vector<float> cos, sin;

  static std::shared_ptr<Sequence> Make(Bench& b, int64_t context, DType dtype) {
    auto s = std::make_shared<Sequence>();
    s->context = context;
    ModelConfig m;
    m.num_layers = 1;
    m.kv_lora_rank = 512;
    m.qk_rope = 64;
    m.index.num_heads = 32;
    m.index.head_dim = 128;
    m.index.topk = 2048;
    m.index.computes = {true};
    KvLayoutOptions o;
    o.latent_dtype = o.index_dtype = dtype;
    const int64_t pages = CeilDiv(context, kPageTokens);
    s->pool = DevicePool::Make(KvLayout::Make(m, o).value(), 1, pages + 1).value();
    for (int64_t p = 1; p <= pages; ++p) s->pages.push_back(PageId(int32_t(p)));
    std::mt19937_64 rng(3);
    std::shuffle(s->pages.begin(), s->pages.end(), rng);
    s->cos.assign(size_t((context + 1) * 32), 1.0f);
    s->sin.assign(size_t((context + 1) * 32), 0.0f);
    const std::vector<float> ones(512, 1.0f), zeros(512, 0.0f);
    std::vector<PageId> page;
    std::vector<int32_t> offset, position;
    constexpr int64_t kStep = 4096;
    for (int64_t first = 0; first < context; first += kStep) {
      const int64_t n = std::min(kStep, context - first);
      page.clear(), offset.clear(), position.clear();
      for (int64_t p = first; p < first + n; ++p) {
        page.push_back(s->pages[size_t(p / kPageTokens)]);
        offset.push_back(int32_t(p % kPageTokens));
        position.push_back(int32_t(p));
      }
      const std::vector<float> ckv = b.noise().Floats(n * 576), k = b.noise().Floats(n * 128);
      b.backend().WriteLatent(b.queue(), {.rows = n,
                                          .ckv = ckv.data(),
                                          .norm_weight = ones.data(),
                                          .eps = 1e-6f,
                                          .positions = position.data(),
                                          .table = s->rope(),
                                          .pool = s->pool.get(),
                                          .layer = kLayer,
                                          .slots = {page.data(), offset.data()}});
      b.backend().WriteIndex(b.queue(), {.rows = n,
                                         .dim = 128,
                                         .rope = 64,
                                         .k = k.data(),
                                         .norm_weight = ones.data(),
                                         .norm_bias = zeros.data(),
                                         .eps = 1e-6f,
                                         .positions = position.data(),
                                         .table = s->rope(),
                                         .pool = s->pool.get(),
                                         .layer = kLayer,
                                         .slots = {page.data(), offset.data()}});
    }
    return s;
  }
  ops::RopeTable rope() const { return {cos.data(), sin.data(), 32}; }

  // Latent row of a position as values.
  std::vector<double> Latent(int64_t p) const {
    const KvLayout& l = pool->layout();
    const std::byte* row =
        pool->Latent(kLayer, pages[size_t(p / kPageTokens)]) + p % kPageTokens * l.latent_row_bytes();
    std::vector<double> v;
    const bool fp8 = l.latent_dtype() == DType::kF8E4M3;
    for (int64_t i = 0; i < 576; ++i) {
      if (fp8 && i < 512) {
        float scale;
        std::memcpy(&scale, row + 512 + i / 128 * 4, 4);
        v.push_back(E4M3ToF32(uint8_t(row[i])) * scale);
        continue;
      }
      uint16_t h;
      std::memcpy(&h, fp8 ? row + 528 + (i - 512) * 2 : row + i * 2, 2);
      v.push_back(BF16ToF32(h));
    }
    return v;
  }
};

struct AttentionData {
  std::shared_ptr<Sequence> seq;
  int64_t rows, heads, topk;
  std::vector<int32_t> seq_of_row, positions, row_begin{0}, num_rows, page_begin{0}, selected, count;
  std::vector<uint16_t> q, out;
  ops::SeqTables tables() const {
    return {.rows = rows,
            .seqs = 1,
            .seq_of_row = seq_of_row.data(),
            .positions = positions.data(),
            .row_begin = row_begin.data(),
            .num_rows = num_rows.data(),
            .page_begin = page_begin.data(),
            .pages = seq->pages.data()};
  }
};

// topk 0: dense.
void BenchAttention(Bench& b, const std::string& op, std::shared_ptr<Sequence> seq, const std::string& kv,
                    int64_t first, int64_t rows, int64_t heads, int64_t topk, bool full_dequant) {
  const std::string shape =
      topk > 0 ? fmt::format("{} rows, {} heads, top {} of {}, {}", rows, heads, topk, seq->context, kv)
               : fmt::format("rows {}..{}, {} heads, {}", first, first + rows, heads, kv);
  if (!b.Wanted(op, shape)) return;
  auto d = std::make_shared<AttentionData>();
  d->seq = seq;
  d->rows = rows;
  d->heads = heads;
  d->topk = topk;
  d->num_rows = {int32_t(rows)};
  double keys = 0;
  for (int64_t r = 0; r < rows; ++r) {
    d->seq_of_row.push_back(0);
    d->positions.push_back(int32_t(first + r));
    if (topk == 0) {
      keys += double(first + r + 1);
      continue;
    }
    keys += double(topk);
    // A random subset: the worst case for caches.
    std::vector<int32_t> all(size_t(first + r + 1));
    for (size_t i = 0; i < all.size(); ++i) all[i] = int32_t(i);
    for (int64_t i = 0; i < topk; ++i)
      std::swap(all[size_t(i)], all[size_t(i) + b.noise().Bits() % (all.size() - size_t(i))]);
    std::sort(all.begin(), all.begin() + topk);
    d->selected.insert(d->selected.end(), all.begin(), all.begin() + topk);
    d->count.push_back(int32_t(topk));
  }
  d->q = b.noise().BF16(rows * heads * 576);
  d->out.resize(size_t(rows * heads * 512));
  const double row_bytes = double(seq->pool->layout().latent_row_bytes());
  Case c{.op = op,
         .shape = shape,
         .bytes = topk > 0 ? keys * row_bytes : double(first + rows) * row_bytes,
         .flops = keys * double(heads) * 2 * (576 + 512),
         .error_bound = 0x1p-7,
         .keep = d};
  c.run = [&b, d, full_dequant] {
    b.backend().Attention(b.queue(), {.seqs = d->tables(),
                                      .heads = d->heads,
                                      .kv_lora = 512,
                                      .rope = 64,
                                      .topk = d->topk,
                                      .q = d->q.data(),
                                      .scale = 0.0417f,
                                      .pool = d->seq->pool.get(),
                                      .layer = kLayer,
                                      .selected = d->topk > 0 ? d->selected.data() : nullptr,
                                      .selected_count = d->topk > 0 ? d->count.data() : nullptr,
                                      .out = d->out.data(),
                                      .dequant_only_topk = !full_dequant});
  };
  c.error = [d] {  // two (row, head) pairs, relative to the weighted magnitudes
    double worst = 0;
    for (const int64_t r : {int64_t(0), d->rows - 1}) {
      const int64_t h = r % d->heads, n = d->topk > 0 ? d->topk : d->positions[size_t(r)] + 1;
      std::vector<double> score, out(512, 0.0), size(512, 0.0);
      double max = -1e300, sum = 0;
      std::vector<std::vector<double>> rows;
      for (int64_t j = 0; j < n; ++j) {
        rows.push_back(d->seq->Latent(d->topk > 0 ? d->selected[size_t(r * d->topk + j)] : j));
        double s = 0;
        for (int64_t i = 0; i < 576; ++i)
          s += At(d->q, (r * d->heads + h) * 576 + i) * rows.back()[size_t(i)];
        score.push_back(s * 0.0417f);
        max = std::max(max, score.back());
      }
      for (int64_t j = 0; j < n; ++j) {
        const double p = std::exp(score[size_t(j)] - max);
        sum += p;
        for (int64_t i = 0; i < 512; ++i) {
          out[size_t(i)] += p * rows[size_t(j)][size_t(i)];
          size[size_t(i)] += p * std::fabs(rows[size_t(j)][size_t(i)]);
        }
      }
      for (int64_t i = 0; i < 512; ++i) {
        const double got = At(d->out, (r * d->heads + h) * 512 + i);
        worst = std::max(worst, std::fabs(got - out[size_t(i)] / sum) / (size[size_t(i)] / sum));
      }
    }
    return worst;
  };
  b.Measure(c);
}

void BenchIndex(Bench& b, std::shared_ptr<Sequence> seq, const std::string& kv, int64_t rows, int64_t heads,
                int64_t topk) {
  const std::string op = "index_select", shape = fmt::format("{} rows, {} heads, top {} of {}, {}", rows,
                                                             heads, topk, seq->context, kv);
  if (!b.Wanted(op, shape)) return;
  struct Data {
    AttentionData batch;
    std::vector<float> q, w, gap;
    std::vector<int32_t> selected, count;
  };
  auto d = std::make_shared<Data>();
  d->batch.seq = seq;
  d->batch.rows = rows;
  d->batch.num_rows = {int32_t(rows)};
  double keys = 0;
  for (int64_t r = 0; r < rows; ++r) {
    d->batch.seq_of_row.push_back(0);
    d->batch.positions.push_back(int32_t(seq->context - rows + r));
    keys += double(d->batch.positions.back() + 1);
  }
  d->q = b.noise().Floats(rows * heads * 128);
  d->w = b.noise().Floats(rows * heads);
  d->gap.resize(size_t(rows));
  d->selected.resize(size_t(rows * topk));
  d->count.resize(size_t(rows));
  Case c{.op = op,
         .shape = shape,
         .bytes = double(seq->pool->layout().index_page_bytes() / kPageTokens * seq->context),
         .flops = keys * double(heads * 128) * 2,
         .error_bound = 0,
         .keep = d};
  c.run = [&b, d, heads, topk] {
    b.backend().IndexSelect(b.queue(), {.seqs = d->batch.tables(),
                                        .heads = heads,
                                        .dim = 128,
                                        .rope = 64,
                                        .topk = topk,
                                        .q = d->q.data(),
                                        .head_weight = d->w.data(),
                                        .scale = 0.0156f,
                                        .table = d->batch.seq->rope(),
                                        .pool = d->batch.seq->pool.get(),
                                        .layer = kLayer,
                                        .selected = d->selected.data(),
                                        .selected_count = d->count.data(),
                                        .gap = d->gap.data()});
  };
  c.error = [d, rows, topk] {  // the sets are ascending and full; values are the catalogue test's business
    double wrong = 0;
    for (int64_t r = 0; r < rows; ++r) {
      wrong += d->count[size_t(r)] != topk;
      for (int64_t i = 1; i < topk; ++i)
        wrong += d->selected[size_t(r * topk + i)] <= d->selected[size_t(r * topk + i - 1)];
      wrong += d->selected[size_t(r * topk + topk - 1)] > d->batch.positions[size_t(r)];
    }
    return wrong;
  };
  b.Measure(c);
}

void BenchTopK(Bench& b, int64_t n, int64_t k) {
  const std::string op = "top_k", shape = fmt::format("{} rows of {}, k {}", b.queue().threads(), n, k);
  if (!b.Wanted(op, shape)) return;
  struct Data {
    std::vector<float> scores;
    std::vector<int32_t> out;
  };
  auto d = std::make_shared<Data>();
  const int64_t rows = b.queue().threads();
  d->scores = b.noise().Floats(rows * n);
  d->out.resize(size_t(rows * k));
  Case c{
      .op = op, .shape = shape, .bytes = double(rows * n * 4), .memory = true, .error_bound = 0, .keep = d};
  c.run = [&b, d, rows, n, k] {
    cpu::SelectTopKRows(b.backend(), b.queue(), d->scores.data(), rows, n, k, d->out.data());
  };
  c.error = [d, n, k] {
    std::vector<float> sorted(d->scores.begin(), d->scores.begin() + n);
    std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<>());
    double wrong = 0;
    for (int64_t i = 0; i < k; ++i) wrong += d->scores[size_t(d->out[size_t(i)])] < sorted[size_t(k - 1)];
    for (int64_t i = 1; i < k; ++i) wrong += d->out[size_t(i)] <= d->out[size_t(i - 1)];
    return wrong;
  };
  b.Measure(c);
}

// --- row ops ---

void BenchRowOps(Bench& b, int64_t rows, int64_t dim) {
  struct Data {
    std::vector<float> x, w, up;
    std::vector<uint16_t> y;
  };
  auto d = std::make_shared<Data>();
  d->x = b.noise().Floats(rows * dim);
  d->w = b.noise().Floats(dim);
  d->y.resize(size_t(rows * dim));
  Case c{.op = "rms_norm",
         .shape = fmt::format("{} x {}", rows, dim),
         .bytes = double(rows * dim * 6),
         .memory = true,
         .error_bound = 0x1p-8,
         .keep = d};
  c.run = [&b, d, rows, dim] {
    b.backend().RmsNorm(b.queue(), {.rows = rows,
                                    .dim = dim,
                                    .x = d->x.data(),
                                    .weight = d->w.data(),
                                    .eps = 1e-5f,
                                    .y_act = d->y.data()});
  };
  c.error = [d, dim] {
    double sum = 0, worst = 0;
    for (int64_t i = 0; i < dim; ++i) sum += double(d->x[size_t(i)]) * d->x[size_t(i)];
    const double r = 1 / std::sqrt(sum / double(dim) + 1e-5);
    for (int64_t i = 0; i < dim; ++i) {
      const double want = d->x[size_t(i)] * r * d->w[size_t(i)];
      worst = std::max(worst, std::fabs(At(d->y, i) - want) / (std::fabs(want) + 1e-9));
    }
    return worst;
  };
  if (b.Wanted(c.op, c.shape)) b.Measure(c);
  auto s = std::make_shared<Data>();
  s->x = b.noise().Floats(rows * 2 * dim);
  s->y.resize(size_t(rows * dim));
  Case m{.op = "silu_mul",
         .shape = fmt::format("{} x {}", rows, dim),
         .bytes = double(rows * dim * 10),
         .memory = true,
         .error_bound = 0x1p-8,
         .keep = s};
  m.run = [&b, s, rows, dim] {
    b.backend().SiluMul(b.queue(), {.rows = rows, .dim = dim, .gate_up = s->x.data(), .act = s->y.data()});
  };
  m.error = [s, dim] {
    double worst = 0;
    for (int64_t i = 0; i < dim; ++i) {
      const double g = s->x[size_t(i)], want = g / (1 + std::exp(-g)) * s->x[size_t(dim + i)];
      worst = std::max(worst, std::fabs(At(s->y, i) - want) / (std::fabs(want) + 1e-9));
    }
    return worst;
  };
  if (b.Wanted(m.op, m.shape)) b.Measure(m);
}

}  // namespace

StatusOr<OpsBenchResult> BenchCpuOps(const OpsBenchOptions& options, void (*progress)(const std::string&)) {
  ASSIGN_OR_RETURN(std::unique_ptr<ops::Backend> backend,
                   cpu::MakeCpuBackend({.act = DType::kBF16, .isa = options.isa}));
  Bench b(options, std::move(backend), progress);
  const bool quick = options.quick;
  const int64_t prefill = quick ? 48 : 512;
  BenchLinear(b, prefill, 2048, 2048);
  if (!quick) {
    BenchLinear(b, prefill, 4096, 6144);
    BenchLinear(b, prefill, 6144, 2048);
    BenchLinear(b, prefill, 384, 384);
  }
  for (const int64_t rows : {1, 4, 16}) BenchLinear(b, rows, quick ? 512 : 4096, quick ? 512 : 6144);
  BenchHeads(b, prefill, 16, 512, 128);
  BenchHeads(b, prefill, 16, 128, 512);
  BenchMoe(b, prefill, 32, 4, quick ? 256 : 1024, quick ? 128 : 768);
  for (const int64_t rows : {1, 8}) BenchMoe(b, rows, 32, 4, quick ? 256 : 1024, quick ? 128 : 768);
  {
    const auto seq = Sequence::Make(b, prefill, DType::kBF16);
    BenchAttention(b, "attention_dense", seq, "bf16", 0, prefill, 16, 0, false);
    BenchAttention(b, "attention_dense", seq, "bf16", prefill - 1, 1, 16, 0, false);
  }
  const int64_t near = quick ? 512 : 8192, far = quick ? 1024 : 131072, topk = quick ? 128 : 2048,
                rows = quick ? 3 : 16;
  for (const DType dtype : {DType::kBF16, DType::kF8E4M3}) {
    for (const int64_t context : {near, far}) {
      const std::string kv(Name(dtype));
      if (!b.Wanted("attention_sparse index_select attention_sparse_full_dequant", kv)) continue;
      const auto seq = Sequence::Make(b, context, dtype);
      BenchAttention(b, "attention_sparse", seq, kv, context - rows, rows, 64, topk, false);
      if (dtype == DType::kF8E4M3) {
        BenchAttention(b, "attention_sparse_full_dequant", seq, kv, context - rows, rows, 64, topk, true);
      }
      BenchIndex(b, seq, kv, rows, 32, topk);
      BenchIndex(b, seq, kv, 1, 32, topk);
    }
  }
  BenchTopK(b, near, topk);
  BenchTopK(b, far, topk);
  BenchRowOps(b, prefill, quick ? 512 : 6144);
  return b.Result();
}

}  // namespace sluice
