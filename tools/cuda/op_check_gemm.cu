// Matrix products and experts: checks and times at the shapes of GLM-5 and at degenerate ones.
#include "tools/cuda/expert_run.h"

namespace sluice::cuda {
namespace {

// One product's operands on the device, e4m3 on both sides, bf16 on both sides, or bf16 with e4m3 weights.
enum class Kind { kFp8, kBF16, kW8A16 };
const char* NameOf(Kind k) { return k == Kind::kFp8 ? "e4m3" : k == Kind::kBF16 ? "bf16" : "w8a16"; }

struct Product {
  Kind kind;
  int m, n, k, groups;
  int64_t x_ld;
  Dev<__nv_bfloat16> x, wb;
  Dev<uint8_t> x8, w8;
  Dev<float> xs, ws, wn, y;

  Product(Kind kind_, int m_, int n_, int k_, int groups_ = 1)
      : kind(kind_),
        m(m_),
        n(n_),
        k(k_),
        groups(groups_),
        x_ld(int64_t(groups_) * k_),
        x(size_t(m_) * x_ld),
        wb(kind_ == Kind::kBF16 ? size_t(groups_) * n_ * k_ : 1),
        x8(kind_ == Kind::kFp8 ? size_t(m_) * k_ : 1),
        w8(kind_ != Kind::kBF16 ? size_t(groups_) * n_ * k_ : 1),
        xs(size_t(RowScales(m_, k_))),
        ws(size_t(groups_) * WeightScales(n_, k_)),
        wn(size_t(groups_) * ((k_ + 127) / 128) * n_),
        y(size_t(m_) * groups_ * n_) {
    Fill(x.p, x.n, 31);
    Fill(wb.p, wb.n, 32);
    Fill(w8.p, w8.n, 33);
    Fill(ws.p, ws.n, 34, 0.01f);
    Fill(wn.p, wn.n, 35, 0.01f);
    if (kind == Kind::kFp8) LaunchQuantise(stream, x.p, x_ld, m, k, x8.p, xs.p);
    y.Poison();
  }
  Gemm Task() {
    Gemm g;
    g.rows = m;
    g.n = n;
    g.k = k;
    g.groups = groups;
    g.x = kind == Kind::kFp8 ? (void*)x8.p : (void*)x.p;
    g.x_ld = x_ld;
    g.x_group = k;
    g.x_fp8 = kind == Kind::kFp8;
    g.x_scale = xs.p;
    g.w = kind == Kind::kBF16 ? (void*)wb.p : (void*)w8.p;
    g.w_fp8 = kind != Kind::kBF16;
    g.scale = wn.p;
    g.scale64 = ws.p;
    g.y = y.p;
    g.y_ld = int64_t(groups) * n;
    g.y_group = n;
    return g;
  }
};

void RunGemm(const Gemm& g) { CUDA_OK(LaunchGemm(stream, g)); }

void CheckProduct(Kind kind, int m, int n, int k, int groups) {
  Product p(kind, m, n, k, groups);
  const Gemm g = p.Task();
  RunGemm(g);
  // The last row alone: the same bits, although another shape of kernel may run.
  Dev<float> alone(size_t(groups) * n), alone_scale(size_t(RowScales(1, k)));
  Dev<uint8_t> alone8(static_cast<size_t>(k));
  Gemm one = g;
  one.rows = 1;
  one.y = alone.p;
  if (kind == Kind::kFp8) {
    LaunchQuantise(stream, p.x.p + size_t(m - 1) * p.x_ld, p.x_ld, 1, k, alone8.p, alone_scale.p);
    one.x = alone8.p;
    one.x_scale = alone_scale.p;
  } else {
    one.x = p.x.p + size_t(m - 1) * p.x_ld;
  }
  RunGemm(one);
  Dev<float> split(size_t(m) * groups * n);
  split.Poison();
  Gemm parts = g;
  parts.split = true;
  parts.y = split.p;
  RunGemm(parts);
  Done();
  const auto xh = p.x.Get();
  const auto x8h = p.x8.Get();
  const auto wh = p.wb.Get();
  const auto w8h = p.w8.Get();
  const auto xsh = p.xs.Get(), wsh = p.ws.Get(), wnh = p.wn.Get(), yh = p.y.Get(), sh = split.Get();
  const auto last = alone.Get();
  const int blocks = (k + 127) / 128;
  double diff = 0, ref = 0, sdiff = 0;
  for (int i = 0; i < 2000; ++i) {
    const int r = int(Mix(i) % m), c = int(Mix(i + 77777) % n), h = int(Mix(i + 999) % groups);
    double sum = 0;
    for (int j = 0; j < k; ++j) {
      const size_t w = (size_t(h) * n + c) * k + j;
      if (kind == Kind::kFp8) {
        sum += E4(x8h[size_t(r) * k + j]) * xsh[RowScaleAt(r, j / 128, blocks)] * E4(w8h[w]) *
               wsh[h * WeightScales(n, k) + WeightScaleAt(c, j / 128, blocks)];
      } else {
        const double xv = BF(xh[size_t(r) * p.x_ld + h * k + j]);
        sum +=
            xv * (kind == Kind::kBF16 ? BF(wh[w]) : E4(w8h[w]) * wnh[size_t(h * blocks + j / 128) * n + c]);
      }
    }
    const size_t at = (size_t(r) * groups + h) * n + c;
    diff += std::pow(yh[at] - sum, 2);
    sdiff += std::pow(sh[at] - sum, 2);
    ref += sum * sum;
  }
  char name[96];
  std::snprintf(name, sizeof(name), "gemm %s %d x %d x %d%s", NameOf(kind), m, n, k,
                groups > 1 ? ", by heads" : "");
  const double bound = kind == Kind::kFp8 ? 3e-4 : 2e-5;
  Check(name, Norm2(diff, ref), bound);
  Check("  in parts", Norm2(sdiff, ref), bound);
  Check("  last row alone has the same bits",
        std::memcmp(last.data(), yh.data() + size_t(m - 1) * groups * n, last.size() * 4) != 0, 0);
}

// Every output mode and both shapes of kernel write the same value.
void CheckModes() {
  for (const int m : {40, 4096 + 61}) {
    const int n = 1344, k = 512;  // n ends inside a tile and inside 16 bytes of a quad
    Product p(Kind::kFp8, m, n, k);
    Gemm g = p.Task();
    RunGemm(g);
    Dev<float> sum(p.y.n);
    Fill(sum.p, sum.n, 77);
    const auto before = sum.Get();
    Gemm add = g;
    add.y = sum.p;
    add.out = Out::kF32Add;
    RunGemm(add);
    Dev<__nv_bfloat16> act(p.y.n);
    act.Poison();
    Gemm narrow = g;
    narrow.y = act.p;
    narrow.out = Out::kAct;
    RunGemm(narrow);
    Done();
    const auto y = p.y.Get(), s = sum.Get();
    const auto b = act.Get();
    double bad = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      bad += s[i] != before[i] + y[i];
      bad += BF(b[i]) != BF(__float2bfloat16_rn(y[i]));
    }
    Check("gemm e4m3: added and bf16 outputs", bad, 0);
  }
}

void CheckQuantise() {
  for (const auto& [m, k] : {std::pair{5, 6144}, {1, 128}, {3, 400}, {130, 2048}}) {
    Dev<__nv_bfloat16> x(size_t(m) * k);
    Dev<uint8_t> y(size_t(m) * k);
    Dev<float> s(size_t(RowScales(m, k)));
    Fill(x.p, x.n, 61, 3.0f);
    y.Poison();
    s.Poison();
    LaunchQuantise(stream, x.p, k, m, k, y.p, s.p);
    Done();
    const auto xh = x.Get();
    const auto yh = y.Get();
    const auto sh = s.Get();
    double diff = 0, ref = 0;
    for (int r = 0; r < m; ++r) {
      for (int j = 0; j < k; ++j) {
        const double v = BF(xh[size_t(r) * k + j]);
        diff += std::pow(E4(yh[size_t(r) * k + j]) * sh[RowScaleAt(r, j / 128, (k + 127) / 128)] - v, 2);
        ref += v * v;
      }
    }
    Check("activations as e4m3 (rounding is 2.6e-2)", Norm2(diff, ref), 3e-2);
  }
}

void TimeGemms() {
  struct Shape {
    int n, k;
    double deepgemm;  // TFLOP/s at m 4096, measured elsewhere; cuBLASLt runs beside it in op_check_peer.cu
  };
  for (const Shape& s : {Shape{2624, 6144, 1125},
                         {16384, 2048, 1347},
                         {6144, 16384, 1485},
                         {4096, 6144, 1411},
                         {6144, 2048, 1271},
                         {24576, 6144, 1438},
                         {6144, 12288, 1444}}) {
    for (const int m : {4096, 4093, 512, 128, 64, 1}) {
      Product p(Kind::kFp8, m, s.n, s.k);
      Dev<__nv_bfloat16> act(size_t(m) * s.n);
      Gemm g = p.Task();
      g.y = act.p;
      g.out = Out::kAct;
      g.split = true;
      const double t = Time([&] { RunGemm(g); }, 7);
      char shape[64];
      std::snprintf(shape, sizeof(shape), "%d x %d x %d", m, s.n, s.k);
      if (m >= 512) {
        Row("gemm e4m3", shape, t, 2.0 * m * s.n * s.k / t / 1e9, "TFLOP/s", s.deepgemm, "DeepGEMM");
        if (m == 4096) {
          g.y = p.y.p;
          g.out = Out::kF32;
          const double tf = Time([&] { RunGemm(g); }, 7);
          Row("gemm e4m3, f32 out", shape, tf, 2.0 * m * s.n * s.k / tf / 1e9, "TFLOP/s", s.deepgemm,
              "DeepGEMM");
        }
      } else {
        Row("gemm e4m3", shape, t, double(s.n) * s.k / t / 1e6, "GB/s", copy_gbs, "copy");
        if (m == 64) {
          g.split = false;
          const double tf = Time([&] { RunGemm(g); }, 7);
          Row("gemm e4m3, one part", shape, tf, double(s.n) * s.k / tf / 1e6, "GB/s", copy_gbs, "copy");
        }
      }
    }
  }
  for (const auto& [m, n, k] : {std::tuple{4096, 16384, 2048},
                                {4096, 6144, 16384},
                                {64, 4096, 6144},
                                {64, 32, 6144},
                                {4096, 32, 6144},
                                {1, 154880, 6144},
                                {64, 154880, 6144}}) {
    Product p(Kind::kBF16, m, n, k);
    Gemm g = p.Task();
    g.split = true;
    const double t = Time([&] { RunGemm(g); }, 5);
    char shape[64];
    std::snprintf(shape, sizeof(shape), "%d x %d x %d", m, n, k);
    if (m >= 512 && n > 512) {
      Row("gemm bf16", shape, t, 2.0 * m * n * k / t / 1e9, "TFLOP/s", 776, "cuBLAS");
    } else {
      Row("gemm bf16", shape, t, (double(n) + m) * k * 2 / t / 1e6, "GB/s", copy_gbs, "copy");
    }
  }
  for (const auto& [m, n, k] :
       {std::tuple{4096, 512, 192}, {4096, 256, 512}, {64, 512, 192}, {64, 256, 512}}) {
    Product p(Kind::kBF16, m, n, k, 64);
    Dev<__nv_bfloat16> act(size_t(m) * 64 * n);
    Gemm g = p.Task();
    g.y = act.p;
    g.out = Out::kAct;
    const double t = Time([&] { RunGemm(g); }, 7);
    char shape[64];
    std::snprintf(shape, sizeof(shape), "%d x %d x %d, 64 heads", m, n, k);
    Row("gemm bf16 by heads", shape, t, 2.0 * 64 * (double(m) * n + double(m) * k + double(n) * k) / t / 1e6,
        "GB/s", copy_gbs, "copy");
  }
  for (const auto& [m, k] : {std::pair{4096, 6144}, {4096, 16384}, {64, 6144}}) {
    Dev<__nv_bfloat16> x(size_t(m) * k);
    Dev<uint8_t> y(size_t(m) * k);
    Dev<float> s(size_t(RowScales(m, k)));
    Fill(x.p, x.n, 61);
    const double t = Time([&] { LaunchQuantise(stream, x.p, k, m, k, y.p, s.p); });
    char shape[64];
    std::snprintf(shape, sizeof(shape), "%d x %d bf16 -> e4m3", m, k);
    Row("quantise", shape, t, 3.0 * m * k / t / 1e6, "GB/s", copy_gbs, "copy");
  }
}

void CheckGate() {
  const int topk = 8, hidden = 6144;
  for (const bool planes : {true, false}) {
    for (const int rows : {1, 64, 512, 4096}) {
      if (!planes && rows > 64) continue;
      Dev<float> x(size_t(rows) * hidden), w(size_t(256) * hidden), bias(256), ew(size_t(rows) * topk),
          scores(size_t(GateScoreParts(hidden)) * rows * 256);
      Dev<__nv_bfloat16> wp(3 * w.n), xp(3 * x.n);
      Dev<int32_t> e(size_t(rows) * topk);
      Fill(x.p, x.n, 41);
      Fill(w.p, w.n, 42, 0.02f);
      Fill(bias.p, 256, 43, 0.1f);
      LaunchSplitBF16(stream, w.p, int64_t(w.n), wp.p);
      Gate g;
      g.rows = rows;
      g.hidden = hidden;
      g.experts = 256;
      g.topk = topk;
      g.scaling = 2.5f;
      g.x = x.p;
      g.weight = w.p;
      g.bias = bias.p;
      g.weight_planes = planes ? wp.p : nullptr;
      g.x_planes = xp.p;
      g.scores = scores.p;
      g.expert = e.p;
      g.expert_weight = ew.p;
      CUDA_OK(LaunchGate(stream, g));
      Done();
      const auto eh = e.Get();
      const auto weights = ew.Get();
      const auto wh = w.Get(), bh = bias.Get();
      double worst = 0, wrong = 0;
      for (int r = 0; r < rows; r += std::max(1, rows / 4)) {
        const auto xr = x.Get(size_t(r) * hidden, hidden);
        std::vector<double> s(256), c(256);
        for (int i = 0; i < 256; ++i) {
          double d = 0;
          for (int j = 0; j < hidden; ++j) d += double(xr[j]) * wh[size_t(i) * hidden + j];
          s[i] = 1 / (1 + std::exp(-d));
          c[i] = s[i] + bh[i];
        }
        double total = 0;
        std::vector<int> order(256);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return c[a] > c[b]; });
        for (int k = 0; k < topk; ++k) total += s[order[k]];
        for (int k = 0; k < topk; ++k) {
          if (eh[r * topk + k] != order[k] && std::fabs(c[eh[r * topk + k]] - c[order[k]]) > 2e-6) ++wrong;
          worst = std::max(worst, std::fabs(weights[r * topk + k] - s[eh[r * topk + k]] / total * 2.5));
        }
      }
      Check(planes ? "gate: experts" : "gate without planes: experts", wrong, 0);
      Check("  weights", worst, 2e-6);
      const double t = Time([&] { CUDA_OK(LaunchGate(stream, g)); });
      char shape[64];
      std::snprintf(shape, sizeof(shape), "%d rows, 256 experts", rows);
      Row(planes ? "gate" : "gate without planes", shape, t, (rows * 6144.0 * 4 + 256 * 6144.0 * 4) / t / 1e6,
          "GB/s", copy_gbs, "copy");
    }
  }
}

void Experts() {
  const int topk = 8, hidden = 6144, inter = 2048;
  for (const auto& [rows, experts, tile] : {std::tuple{3, 32, 64},
                                            {64, 32, 64},
                                            {16, 32, 64},
                                            {1024, 32, 64},
                                            {1024, 32, 128},
                                            {4096, 32, 128},
                                            {4096, 256, 128},
                                            {128, 256, 64}}) {
    const int pairs = rows * topk;
    std::vector<int32_t> eh(pairs);
    std::vector<float> wh(pairs);
    for (int r = 0; r < rows; ++r) {
      std::vector<int> all(experts);
      std::iota(all.begin(), all.end(), 0);
      std::mt19937 rng(r);
      std::shuffle(all.begin(), all.end(), rng);
      for (int k = 0; k < topk; ++k) {
        eh[r * topk + k] =
            all[k] == 5 && rows <= 1024 ? -1 : all[k];  // expert 5 gets no row; a slot may be empty
        wh[r * topk + k] = 0.1f * float(k + 1);
      }
    }
    ExpertRun run(experts, hidden, inter, topk, eh, wh, tile);
    const auto before = run.y.Get();
    run.All();
    Done();
    const auto got = run.y.Get();
    const auto sorted = run.sorted.Get();
    std::vector<int> place(pairs, -1);
    const int used = run.tiles.Get().back() * tile;
    for (int i = 0; i < used; ++i) {
      if (sorted[i] >= 0) place[sorted[i]] = i;
    }
    const auto suh = run.su.Get(), sdh = run.sd.Get(), xsh = run.xs.Get();
    double diff = 0, ref = 0, misplaced = 0;
    for (int p = 0; p < pairs; ++p) misplaced += (place[p] < 0) != (eh[p] < 0);
    for (const int r : {0, rows / 2, rows - 1}) {
      std::vector<double> want(8, 0);
      const int cols[8] = {0, 1, 63, 64, 1000, 3333, 6142, 6143};
      for (int i = 0; i < 8; ++i) want[i] = before[size_t(r) * hidden + cols[i]];
      for (int k = 0; k < topk; ++k) {
        const int ex = eh[r * topk + k], at = place[r * topk + k];
        if (ex < 0 || at < 0) continue;
        const auto xr = run.x8.Get(size_t(at) * hidden, hidden);
        const auto wu = run.wu.Get(size_t(ex) * 2 * inter * hidden, size_t(2) * inter * hidden);
        std::vector<double> h(inter);
        for (int i = 0; i < inter; ++i) {
          double gu[2];
          for (int half = 0; half < 2; ++half) {
            const size_t c = size_t(half) * inter + i;
            double s = 0;
            for (int b = 0; b < hidden / 128; ++b) {
              double part = 0;
              for (int j = b * 128; j < b * 128 + 128; ++j) part += E4(xr[j]) * E4(wu[c * hidden + j]);
              s += part * xsh[RowScaleAt(at, b, hidden / 128)] *
                   suh[ex * WeightScales(2 * inter, hidden) + WeightScaleAt(int64_t(c), b, hidden / 128)];
            }
            gu[half] = s;
          }
          h[i] = gu[0] / (1 + std::exp(-gu[0])) * gu[1];
        }
        const auto wd = run.wd.Get(size_t(ex) * inter * hidden, size_t(inter) * hidden);
        for (int i = 0; i < 8; ++i) {
          double s = 0;
          for (int j = 0; j < inter; ++j)
            s += h[j] * E4(wd[size_t(cols[i]) * inter + j]) *
                 sdh[ex * WeightScales(hidden, inter) + WeightScaleAt(cols[i], j / 128, inter / 128)];
          want[i] += s * wh[r * topk + k];
        }
      }
      for (int i = 0; i < 8; ++i) {
        diff += std::pow(got[size_t(r) * hidden + cols[i]] - want[i], 2);
        ref += want[i] * want[i];
      }
      if (rows > 1024) break;
    }
    char name[80];
    std::snprintf(name, sizeof(name), "experts %d rows of %d, tiles of %d (act e4m3)", rows, experts, tile);
    Check(name, Norm2(diff, ref), 4e-2);
    Check("  every pair has a place", misplaced, 0);
    const double all = Time([&] { run.All(); }, 7), up = Time([&] { run.Up(); }, 7),
                 down = Time([&] { run.Down(); }, 7), sort = Time([&] { run.Sort(); }, 7),
                 gather = Time([&] { run.Gather(); }, 7),
                 combine = Time(
                     [&] {
                       LaunchCombine(stream, run.out.p, true, run.e.p, run.ew.p, rows, topk, hidden, run.y.p);
                     },
                     7);
    char shape[64];
    std::snprintf(shape, sizeof(shape), "%d rows x 8 of %d, tiles %d", rows, experts, tile);
    Say("PARTS %-36s sort %.1f gather %.1f up %.1f down %.1f combine %.1f all %.1f us\n", shape, sort * 1e3,
        gather * 1e3, up * 1e3, down * 1e3, combine * 1e3, all * 1e3);
    if (rows >= 512) {
      Row("experts up (+ silu)", shape, up, 2.0 * pairs * 2 * hidden * inter / up / 1e9, "TFLOP/s", 1358,
          "DeepGEMM");
      Row("experts down", shape, down, 2.0 * pairs * hidden * inter / down / 1e9, "TFLOP/s", 1322,
          "DeepGEMM");
      Row("experts, all", shape, all, 2.0 * pairs * 3 * hidden * inter / all / 1e9, "TFLOP/s", 1340,
          "DeepGEMM");
    } else {
      Row("experts up", shape, up, 2.0 * experts * hidden * inter / up / 1e6, "GB/s", copy_gbs, "copy");
      Row("experts down", shape, down, 1.0 * experts * hidden * inter / down / 1e6, "GB/s", copy_gbs, "copy");
      Row("experts, all", shape, all, 3.0 * experts * hidden * inter / all / 1e6, "GB/s", copy_gbs, "copy");
    }
  }
  {  // both tile sizes give the same bits
    std::vector<int32_t> eh(300 * 8);
    std::vector<float> wh(eh.size());
    for (size_t i = 0; i < eh.size(); ++i) {
      eh[i] = int32_t(i % 3 == 0 ? i / 8 % 4 : Mix(i) % 4);
      wh[i] = 0.25f;
    }
    ExpertRun a(4, 512, 384, 8, eh, wh, 64), b(4, 512, 384, 8, eh, wh, 128);
    a.All();
    b.All();
    Done();
    Check("experts: tiles of 64 and 128 rows give the same bits",
          std::memcmp(a.y.Get().data(), b.y.Get().data(), a.y.n * 4) != 0, 0);
  }
}

}  // namespace

void CheckGemms() {
  for (const Kind kind : {Kind::kFp8, Kind::kBF16, Kind::kW8A16}) {
    for (const auto& [m, n, k] : {std::tuple{130, 2624, 6144},
                                  {1, 576, 384},
                                  {64, 100, 256},
                                  {7, 128, 128},
                                  {300, 64, 64},
                                  {33, 40, 48},
                                  {4096 + 65, 1344, 256},
                                  {1, 2, 16}})
      CheckProduct(kind, m, n, k, 1);
  }
  CheckProduct(Kind::kBF16, 300, 512, 192, 8);
  CheckProduct(Kind::kBF16, 3, 256, 512, 64);
  CheckProduct(Kind::kBF16, 33, 40, 24, 1);
  CheckModes();
  CheckQuantise();
  Gemm none;  // no rows at all
  none.n = 128;
  none.k = 128;
  RunGemm(none);
  Done();
  TimeGemms();
}
void CheckExperts() {
  CheckGate();
  Experts();
}

}  // namespace sluice::cuda
