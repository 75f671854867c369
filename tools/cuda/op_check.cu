// Checks every CUDA kernel against double-precision sums at the shapes of GLM-5 and at degenerate ones, and
// times it against what bounds it. Needs nothing but the CUDA toolkit: see build.sh beside it. Exit code 1
// when a check fails.
#include "tools/cuda/check.h"

namespace sluice::cuda {

__global__ void ReadPass(const float4* p, size_t n, float* out) {
  float s = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    const float4 v = __ldcs(p + i);
    s += v.x + v.y + v.z + v.w;
  }
  if (s == 1.2345f) *out = s;
}

static void Ceilings() {
  const size_t bytes = size_t(2) << 30;
  Dev<char> a(bytes), b(bytes);
  CUDA_OK(cudaMemset(a.p, 3, bytes));
  const double ms =
      Time([&] { CUDA_OK(cudaMemcpyAsync(b.p, a.p, bytes, cudaMemcpyDeviceToDevice, stream)); }, 7);
  copy_gbs = 2.0 * bytes / ms / 1e6;
  Dev<float> out(1);
  const double rms = Time(
      [&] {
        ReadPass<<<132 * 16, 512, 0, stream>>>(reinterpret_cast<const float4*>(a.p), bytes / 16, out.p);
      },
      7);
  read_gbs = bytes / rms / 1e6;
  char* host;
  CUDA_OK(cudaHostAlloc(reinterpret_cast<void**>(&host), size_t(1) << 30, cudaHostAllocMapped));
  std::memset(host, 1, size_t(1) << 30);
  h2d_gbs = (1 << 30) /
            Time([&] { CUDA_OK(cudaMemcpyAsync(a.p, host, 1 << 30, cudaMemcpyHostToDevice, stream)); }, 5) /
            1e6;
  d2h_gbs = (1 << 30) /
            Time([&] { CUDA_OK(cudaMemcpyAsync(host, a.p, 1 << 30, cudaMemcpyDeviceToHost, stream)); }, 5) /
            1e6;
  std::printf(
      "CEILING device copy %.0f GB/s (read + write), one read pass %.0f GB/s, H2D %.1f, D2H %.1f GB/s\n",
      copy_gbs, read_gbs, h2d_gbs, d2h_gbs);
  // Page copies reuse the host buffer.
  for (const int64_t bytes_page : {41984, 8448}) {
    for (const int pages : {4096, 256}) {
      const int total = int((size_t(1) << 30) / bytes_page);
      std::vector<int32_t> si(pages), di(pages), all(total);
      std::iota(all.begin(), all.end(), 0);
      std::mt19937 rng(5);
      std::shuffle(all.begin(), all.end(), rng);
      std::copy_n(all.begin(), pages, si.begin());
      std::shuffle(all.begin(), all.end(), rng);
      std::copy_n(all.begin(), pages, di.begin());
      Dev<int32_t> dsi(si), ddi(di);
      for (size_t i = 0; i < (size_t(1) << 30) / 8; i += 64) reinterpret_cast<uint64_t*>(host)[i] = Mix(i);
      for (const bool to_device : {true, false}) {
        const std::byte* src = reinterpret_cast<const std::byte*>(to_device ? host : a.p);
        std::byte* dst = reinterpret_cast<std::byte*>(to_device ? a.p : host);
        if (!to_device) {
          CUDA_OK(cudaMemcpy(b.p, host, size_t(1) << 30, cudaMemcpyHostToDevice));
          CUDA_OK(cudaMemcpy(a.p, b.p, size_t(1) << 30, cudaMemcpyDeviceToDevice));
        }
        for (const int blocks : {8, 16, 32}) {
          const double t = Time(
              [&] {
                LaunchPageCopy(stream, src, bytes_page, dsi.p, dst, bytes_page, ddi.p, pages, bytes_page,
                               blocks);
              },
              7);
          char shape[64];
          std::snprintf(shape, sizeof(shape), "%lld B x %d, %d blocks", (long long)bytes_page, pages, blocks);
          Row(to_device ? "page copy H2D" : "page copy D2H", shape, t, pages * double(bytes_page) / t / 1e6,
              "GB/s", to_device ? h2d_gbs : d2h_gbs, "link");
        }
        Done();
        double bad = 0;
        std::vector<char> page(bytes_page);
        for (int i = 0; i < pages; i += 37) {
          CUDA_OK(cudaMemcpy(page.data(), reinterpret_cast<char*>(dst) + int64_t(di[i]) * bytes_page,
                             bytes_page, cudaMemcpyDefault));
          std::vector<char> want(bytes_page);
          CUDA_OK(cudaMemcpy(want.data(), reinterpret_cast<const char*>(src) + int64_t(si[i]) * bytes_page,
                             bytes_page, cudaMemcpyDefault));
          bad += std::memcmp(page.data(), want.data(), bytes_page) != 0;
        }
        Check(to_device ? "page copy H2D bytes" : "page copy D2H bytes", bad, 0);
      }
    }
  }
  CUDA_OK(cudaFreeHost(host));
  {  // own memory: gather of random pages
    const int64_t page = 41984;
    const int n = 16384, total = int(bytes / page);
    std::vector<int32_t> si(n), di(n), all(total);
    std::iota(all.begin(), all.end(), 0);
    std::mt19937 rng(6);
    std::shuffle(all.begin(), all.end(), rng);
    std::copy_n(all.begin(), n, si.begin());
    std::iota(di.begin(), di.end(), 0);
    Dev<int32_t> dsi(si), ddi(di);
    Fill(reinterpret_cast<float*>(a.p), bytes / 4, 3);
    for (const int blocks : {132, 264}) {
      const double t = Time([&] {
        LaunchPageCopy(stream, (std::byte*)a.p, page, dsi.p, (std::byte*)b.p, page, ddi.p, n, page, blocks);
      });
      char shape[64];
      std::snprintf(shape, sizeof(shape), "41984 B x %d, %d blocks", n, blocks);
      Row("page gather D2D", shape, t, 2.0 * n * page / t / 1e6, "GB/s", copy_gbs, "copy");
    }
    Done();
    double bad = 0;
    std::vector<char> x(page), y(page);
    for (int i = 0; i < n; i += 131) {
      CUDA_OK(cudaMemcpy(x.data(), b.p + i * page, page, cudaMemcpyDeviceToHost));
      CUDA_OK(cudaMemcpy(y.data(), a.p + int64_t(si[i]) * page, page, cudaMemcpyDeviceToHost));
      bad += x != y;
    }
    Check("page gather D2D bytes", bad, 0);
  }
}

static void Norms() {
  for (const auto& [rows, dim] : {std::pair{4096, 6144}, {64, 6144}, {1, 2048}, {3, 384}, {5, 257}}) {
    Dev<float> x(size_t(rows) * dim), w(dim), yf(size_t(rows) * dim);
    Dev<__nv_bfloat16> y(size_t(rows) * dim);
    Fill(x.p, x.n, 11);
    Fill(w.p, w.n, 12);
    y.Poison();
    LaunchRmsNorm(stream, x.p, dim, w.p, 1e-5f, rows, dim, y.p, dim, false, yf.p);
    Done();
    double diff = 0, ref = 0;
    const auto wh = w.Get();
    for (int r = 0; r < rows; r += std::max(1, rows / 50)) {
      const auto xr = x.Get(size_t(r) * dim, dim);
      const auto yr = y.Get(size_t(r) * dim, dim);
      const auto fr = yf.Get(size_t(r) * dim, dim);
      double sum = 0;
      for (float v : xr) sum += double(v) * v;
      const double scale = 1 / std::sqrt(sum / dim + 1e-5);
      for (int i = 0; i < dim; ++i) {
        const double want = xr[i] * scale * wh[i];
        diff += std::pow(BF(yr[i]) - want, 2) + std::pow((fr[i] - want) * 1e3, 2);
        ref += want * want;
      }
    }
    char name[64];
    std::snprintf(name, sizeof(name), "rms norm %d x %d", rows, dim);
    Check(name, Norm2(diff, ref), 3e-3);
    if (rows == 4096) {
      const double t =
          Time([&] { LaunchRmsNorm(stream, x.p, dim, w.p, 1e-5f, rows, dim, y.p, dim, false, nullptr); });
      Row("rms norm", "4096 x 6144 f32 -> bf16", t, 6.0 * rows * dim / t / 1e6, "GB/s", copy_gbs, "copy");
    }
  }
}

static void Writes() {
  const int rows = 4096, pages = 128;
  Ropes ropes(8192, true);
  std::vector<int32_t> page(rows), offset(rows), position(rows);
  for (int r = 0; r < rows; ++r) {
    page[r] = 1 + (r / 64 * 7) % 97;
    offset[r] = r % 64;
    position[r] = r;
  }
  page[5] = -1;
  Dev<int32_t> dp(page), dofs(offset), dpos(position);
  Dev<float> ckv(size_t(rows) * 2752), norm(512), inorm(128), ibias(128);
  Fill(ckv.p, ckv.n, 21);
  Fill(norm.p, 512, 22);
  Fill(inorm.p, 128, 23);
  Fill(ibias.p, 128, 24);
  Dev<uint8_t> latent(size_t(pages) * 41984), index(size_t(pages) * 8448);
  latent.Poison();
  index.Poison();
  const Slab ls{(std::byte*)latent.p, int64_t(latent.n), 41984, 1, Elem::kE4M3},
      is{(std::byte*)index.p, int64_t(index.n), 8448, 1, Elem::kE4M3};
  LaunchWriteLatent(stream, ckv.p + 2048, 2752, norm.p, 1e-5f, dpos.p, ropes.rope, dp.p, dofs.p, rows, 512,
                    64, ls);
  LaunchWriteIndex(stream, ckv.p + 2624, 2752, inorm.p, ibias.p, 1e-6f, dpos.p, ropes.rope, dp.p, dofs.p,
                   rows, 128, 64, is);
  Done();
  const auto lat = latent.Get();
  const auto idx = index.Get();
  const auto nh = norm.Get();
  const auto in = inorm.Get(), ib = ibias.Get();
  const auto ch = ropes.cos.Get(), sh = ropes.sin.Get();
  double diff = 0, ref = 0, idiff = 0, iref = 0;
  for (int r = 0; r < 64 * 90; r += 17) {
    if (r >= rows || page[r] < 0) continue;
    const auto x = ckv.Get(size_t(r) * 2752 + 2048, 704);
    double sum = 0;
    for (int i = 0; i < 512; ++i) sum += double(x[i]) * x[i];
    const double scale = 1 / std::sqrt(sum / 512 + 1e-5);
    const uint8_t* row = lat.data() + size_t(page[r]) * 41984 + offset[r] * 656;
    for (int i = 0; i < 512; ++i) {
      float s;
      std::memcpy(&s, row + 512 + i / 128 * 4, 4);
      const double want = x[i] * scale * nh[i], got = E4(row[i]) * s;
      diff += (got - want) * (got - want);
      ref += want * want;
    }
    for (int i = 0; i < 32; ++i) {
      uint16_t a, b;
      std::memcpy(&a, row + 528 + 4 * i, 2);
      std::memcpy(&b, row + 530 + 4 * i, 2);
      const double c = ch[size_t(r) * 32 + i], s = sh[size_t(r) * 32 + i];
      const double wa = x[512 + 2 * i] * c - x[513 + 2 * i] * s, wb = x[513 + 2 * i] * c + x[512 + 2 * i] * s;
      diff += std::pow((BF(a) - wa) * 8, 2) + std::pow((BF(b) - wb) * 8, 2);
      ref += wa * wa + wb * wb;
    }
    double mean = 0, var = 0, y[128];
    for (int i = 0; i < 128; ++i) mean += x[576 + i] / 128.0;
    for (int i = 0; i < 128; ++i) var += std::pow(x[576 + i] - mean, 2) / 128.0;
    for (int i = 0; i < 128; ++i) y[i] = (x[576 + i] - mean) / std::sqrt(var + 1e-6) * in[i] + ib[i];
    for (int i = 0; i < 32; ++i) {
      const double c = ch[size_t(r) * 32 + i], s = sh[size_t(r) * 32 + i], a = y[2 * i], b = y[2 * i + 1];
      y[2 * i] = a * c - b * s;
      y[2 * i + 1] = b * c + a * s;
    }
    const uint8_t* block = idx.data() + size_t(page[r]) * 8448;
    float s;
    std::memcpy(&s, block + 8192 + offset[r] * 4, 4);
    for (int i = 0; i < 128; ++i) {
      const double got = E4(block[offset[r] * 128 + i]) * s;
      idiff += (got - y[i]) * (got - y[i]);
      iref += y[i] * y[i];
    }
  }
  Check("latent rows fp8 (e4m3 rounding is 2.6e-2)", Norm2(diff, ref), 4e-2);
  Check("index rows fp8", Norm2(idiff, iref), 4e-2);
  const double t = Time([&] {
    LaunchWriteLatent(stream, ckv.p + 2048, 2752, norm.p, 1e-5f, dpos.p, ropes.rope, dp.p, dofs.p, rows, 512,
                      64, ls);
  });
  Row("norm+rope+pack+scatter", "4096 rows of 656 B", t, rows * (576 * 4.0 + 656) / t / 1e6, "GB/s", copy_gbs,
      "copy");
  const double ti = Time([&] {
    LaunchWriteIndex(stream, ckv.p + 2624, 2752, inorm.p, ibias.p, 1e-6f, dpos.p, ropes.rope, dp.p, dofs.p,
                     rows, 128, 64, is);
  });
  Row("index row write", "4096 rows of 132 B", ti, rows * (128 * 4.0 + 132) / ti / 1e6, "GB/s", copy_gbs,
      "copy");
}

static void Gemms() {
  for (const bool fp8 : {false, true}) {
    for (const auto& [m, n, k] : {std::tuple{130, 2624, 6144},
                                  {1, 576, 384},
                                  {64, 100, 256},
                                  {7, 128, 128},
                                  {300, 64, 64},
                                  {33, 40, 24}}) {
      Dev<__nv_bfloat16> x(size_t(m) * k), wb(size_t(n) * k);
      Dev<uint8_t> w8(size_t(n) * k);
      Dev<float> scale(size_t((k + 127) / 128) * n), y(size_t(m) * n), y2(size_t(m) * n);
      Fill(x.p, x.n, 31);
      Fill(wb.p, wb.n, 32);
      Fill(w8.p, w8.n, 33);
      Fill(scale.p, scale.n, 34, 0.01f);
      y.Poison();
      Gemm g;
      g.rows = m;
      g.n = n;
      g.k = k;
      g.x = x.p;
      g.x_ld = k;
      g.w = fp8 ? (void*)w8.p : (void*)wb.p;
      g.w_fp8 = fp8;
      g.scale = scale.p;
      g.y = y.p;
      g.y_ld = n;
      LaunchGemm(stream, g);
      Gemm one = g;  // the last row alone: same bits
      one.rows = 1;
      one.x = x.p + size_t(m - 1) * k;
      one.y = y2.p;
      LaunchGemm(stream, one);
      Done();
      const auto xh = x.Get();
      const auto wh = wb.Get();
      const auto w8h = w8.Get();
      const auto sh = scale.Get();
      const auto yh = y.Get();
      const auto last = y2.Get(0, n);
      double diff = 0, ref = 0;
      for (int i = 0; i < 2000; ++i) {
        const int r = int(Mix(i) % m), c = int(Mix(i + 77777) % n);
        double sum = 0;
        for (int j = 0; j < k; ++j)
          sum += BF(xh[size_t(r) * k + j]) *
                 (fp8 ? E4(w8h[size_t(c) * k + j]) * sh[size_t(j / 128) * n + c] : BF(wh[size_t(c) * k + j]));
        diff += std::pow(yh[size_t(r) * n + c] - sum, 2);
        ref += sum * sum;
      }
      char name[64];
      std::snprintf(name, sizeof(name), "gemm %s %d x %d x %d", fp8 ? "fp8 weights" : "bf16", m, n, k);
      Check(name, Norm2(diff, ref), 2e-5);
      Check("  last row alone has the same bits",
            std::memcmp(last.data(), yh.data() + size_t(m - 1) * n, size_t(n) * 4) != 0, 0);
    }
  }
  for (const bool fp8 : {false, true}) {
    for (const auto& [m, n, k] : {std::tuple{4096, 16384, 2048},
                                  {4096, 6144, 16384},
                                  {64, 4096, 6144},
                                  {64, 6144, 2048},
                                  {64, 24576, 6144}}) {
      Dev<__nv_bfloat16> x(size_t(m) * k), wb(size_t(n) * k);
      Dev<uint8_t> w8(size_t(n) * k);
      Dev<float> scale(size_t((k + 127) / 128) * n), y(size_t(m) * n);
      Fill(x.p, x.n, 31);
      Fill(wb.p, wb.n, 32);
      Fill(w8.p, w8.n, 33);
      Fill(scale.p, scale.n, 34, 0.01f);
      Gemm g;
      g.rows = m;
      g.n = n;
      g.k = k;
      g.x = x.p;
      g.x_ld = k;
      g.w = fp8 ? (void*)w8.p : (void*)wb.p;
      g.w_fp8 = fp8;
      g.scale = scale.p;
      g.y = y.p;
      g.y_ld = n;
      const double t = Time([&] { LaunchGemm(stream, g); }, 7);
      char shape[64];
      std::snprintf(shape, sizeof(shape), "%d x %d x %d", m, n, k);
      if (m >= 512) {
        Row(fp8 ? "gemm w8a16" : "gemm bf16", shape, t, 2.0 * m * n * k / t / 1e9, "TFLOP/s",
            fp8 ? 1526 : 800, fp8 ? "fp8 peak" : "bf16 peak");
      } else {
        Row(fp8 ? "gemm w8a16" : "gemm bf16", shape, t, double(n) * k * (fp8 ? 1 : 2) / t / 1e6, "GB/s",
            copy_gbs, "copy");
      }
    }
  }
}

static void Experts() {
  const int experts = 32, topk = 8, hidden = 6144, inter = 2048;
  for (const int rows : {1, 64, 512, 4096}) {
    Dev<float> x(size_t(rows) * hidden), w(size_t(256) * hidden), bias(256), scores(size_t(rows) * 256),
        ew(size_t(rows) * topk);
    Dev<int32_t> e(size_t(rows) * topk);
    Fill(x.p, x.n, 41);
    Fill(w.p, w.n, 42, 0.02f);
    Fill(bias.p, 256, 43, 0.1f);
    LaunchGate(stream, x.p, w.p, bias.p, rows, hidden, 256, topk, false, true, 1, 1, false, 2.5f, scores.p,
               e.p, ew.p);
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
        if (eh[r * topk + k] != order[k] && std::fabs(c[eh[r * topk + k]] - c[order[k]]) > 1e-5) ++wrong;
        worst = std::max(worst, std::fabs(weights[r * topk + k] - s[eh[r * topk + k]] / total * 2.5));
      }
    }
    Check("gate: experts", wrong, 0);
    Check("gate: weights", worst, 1e-4);
    const double t = Time([&] {
      LaunchGate(stream, x.p, w.p, bias.p, rows, hidden, 256, topk, false, true, 1, 1, false, 2.5f, scores.p,
                 e.p, ew.p);
    });
    char shape[64];
    std::snprintf(shape, sizeof(shape), "%d rows, 256 experts", rows);
    Row("gate", shape, t, (rows * 6144.0 * 4 + 256 * 6144.0 * 4) / t / 1e6, "GB/s", copy_gbs, "copy");
  }
  // The whole expert path of one rank of 8: 32 experts.
  for (const int rows : {3, 64, 1024}) {
    const int pairs = rows * topk;
    std::vector<int32_t> eh(pairs);
    std::vector<float> wh(pairs);
    for (int r = 0; r < rows; ++r) {
      std::vector<int> all(experts);
      std::iota(all.begin(), all.end(), 0);
      std::mt19937 rng(r);
      std::shuffle(all.begin(), all.end(), rng);
      for (int k = 0; k < topk; ++k) {
        eh[r * topk + k] = all[k] == 5 ? -1 : all[k];  // expert 5 gets no row; a slot may be empty
        wh[r * topk + k] = 0.1f * float(k + 1);
      }
    }
    const int cap = int(MaxSortedRows(pairs, experts, kGemmTileRows));
    Dev<int32_t> e(eh), begins(experts), sorted(cap), tile(cap / kGemmTileRows);
    Dev<float> ew(wh), gate_up(size_t(cap) * 2 * inter), out(size_t(pairs) * hidden),
        y(size_t(rows) * hidden);
    Dev<__nv_bfloat16> x(size_t(rows) * hidden), act(size_t(cap) * inter);
    Dev<uint8_t> wu(size_t(experts) * 2 * inter * hidden), wd(size_t(experts) * inter * hidden);
    Dev<float> su(size_t(experts) * (hidden / 128) * 2 * inter), sd(size_t(experts) * (inter / 128) * hidden);
    Fill(x.p, x.n, 51);
    Fill(wu.p, wu.n, 52);
    Fill(wd.p, wd.n, 53);
    Fill(su.p, su.n, 54, 2e-4f);
    Fill(sd.p, sd.n, 55, 2e-4f);
    Fill(y.p, y.n, 56);
    const auto before = y.Get();
    const auto run = [&] {
      LaunchSortPairs(stream, e.p, pairs, experts, kGemmTileRows, nullptr, begins.p, sorted.p, tile.p, cap);
      Gemm g;
      g.rows = cap;
      g.n = 2 * inter;
      g.k = hidden;
      g.groups = experts;
      g.x = x.p;
      g.x_ld = hidden;
      g.w = wu.p;
      g.scale = su.p;
      g.w_fp8 = true;
      g.y = gate_up.p;
      g.y_ld = 2 * inter;
      g.sorted = sorted.p;
      g.tile_group = tile.p;
      g.divide_x = topk;
      g.gather = true;
      LaunchGemm(stream, g);
      LaunchSiluMul(stream, gate_up.p, cap, inter, act.p, false);
      g.n = hidden;
      g.k = inter;
      g.x = act.p;
      g.x_ld = inter;
      g.w = wd.p;
      g.scale = sd.p;
      g.y = out.p;
      g.y_ld = hidden;
      g.gather = false;
      g.scatter = true;
      LaunchGemm(stream, g);
      LaunchCombine(stream, out.p, e.p, ew.p, rows, topk, hidden, y.p);
    };
    CUDA_OK(cudaMemset(gate_up.p, 0, gate_up.n * 4));
    run();
    Done();
    const auto got = y.Get();
    const auto xh = x.Get();
    const auto wuh = wu.Get(), wdh = wd.Get();
    const auto suh = su.Get(), sdh = sd.Get();
    double diff = 0, ref = 0;
    for (const int r : {0, rows / 2, rows - 1}) {
      std::vector<double> want(8, 0);
      const int cols[8] = {0, 1, 63, 64, 1000, 3333, 6142, 6143};
      for (int i = 0; i < 8; ++i) want[i] = before[size_t(r) * hidden + cols[i]];
      for (int k = 0; k < topk; ++k) {
        const int ex = eh[r * topk + k];
        if (ex < 0) continue;
        std::vector<double> h(inter);
        for (int i = 0; i < inter; ++i) {
          double gu[2];
          for (int half = 0; half < 2; ++half) {
            const size_t c = size_t(half) * inter + i;
            double s = 0;
            for (int j = 0; j < hidden; ++j)
              s += BF(xh[size_t(r) * hidden + j]) * E4(wuh[(size_t(ex) * 2 * inter + c) * hidden + j]) *
                   suh[(size_t(ex) * 48 + j / 128) * 2 * inter + c];
            gu[half] = s;
          }
          h[i] = double(__bfloat162float(__float2bfloat16_rn(float(gu[0] / (1 + std::exp(-gu[0])) * gu[1]))));
        }
        for (int i = 0; i < 8; ++i) {
          double s = 0;
          for (int j = 0; j < inter; ++j)
            s += h[j] * E4(wdh[(size_t(ex) * hidden + cols[i]) * inter + j]) *
                 sdh[(size_t(ex) * 16 + j / 128) * hidden + cols[i]];
          want[i] += s * wh[r * topk + k];
        }
      }
      for (int i = 0; i < 8; ++i) {
        diff += std::pow(got[size_t(r) * hidden + cols[i]] - want[i], 2);
        ref += want[i] * want[i];
      }
    }
    char name[64];
    std::snprintf(name, sizeof(name), "experts %d rows of 32 (w8a16)", rows);
    Check(name, Norm2(diff, ref), 3e-3);
    const double t = Time(run, 7);
    char shape[64];
    std::snprintf(shape, sizeof(shape), "%d rows x 8 of 32 experts", rows);
    if (rows >= 512)
      Row("experts w8a16", shape, t, 2.0 * pairs * 3 * hidden * inter / t / 1e9, "TFLOP/s", 1340,
          "DeepGEMM grouped");
    else
      Row("experts w8a16", shape, t, 3.0 * experts * hidden * inter / t / 1e6, "GB/s", copy_gbs, "copy");
  }
}

}  // namespace sluice::cuda

using namespace sluice::cuda;

int main(int argc, char** argv) {
  if (argc > 1) only = argv[1];
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "op_check: no CUDA device on this machine\n");
    return 3;
  }
  cudaDeviceProp prop;
  CUDA_OK(cudaGetDeviceProperties(&prop, 0));
  std::printf("%s, %d multiprocessors, L2 %d MB\n", prop.name, prop.multiProcessorCount,
              int(prop.l2CacheSize >> 20));
  CUDA_OK(cudaStreamCreate(&stream));
  const auto part = [&](const char* name, void (*fn)()) {
    if (only.empty() || only.find(name) != std::string::npos) {
      std::printf("---- %s\n", name);
      fn();
    }
  };
  copy_gbs = 4244;
  read_gbs = 4452;
  part("ceilings", Ceilings);
  part("norms", Norms);
  part("writes", Writes);
  part("gemms", Gemms);
  part("indexer", CheckIndexer);
  part("topk", CheckTopK);
  part("attention", CheckAttention);
  part("experts", Experts);
  std::printf("%s: %d checks failed\n", failures == 0 ? "ALL OK" : "FAILED", failures);
  return failures == 0 ? 0 : 1;
}
