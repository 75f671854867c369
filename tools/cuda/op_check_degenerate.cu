// Shapes at the edges of the catalogue: one row, one block of 128 inputs or outputs, sizes that are no
// multiple of 128, experts without rows, no rows at all, and scales whose last dimension is 1.
#include "tools/cuda/expert_run.h"

namespace sluice::cuda {
namespace {

// One e4m3 product against double precision, every element; scales laid out by hand, not by RowScaleAt and
// WeightScaleAt.
void CheckFp8(int m, int n, int k) {
  Dev<__nv_bfloat16> x(size_t(m) * k);
  Dev<uint8_t> x8(size_t(m) * k), w(size_t(n) * k);
  Dev<float> xs(size_t(RowScales(m, k))), ws(size_t(WeightScales(n, k))), y(size_t(m) * n);
  Fill(x.p, x.n, 41);
  Fill(w.p, w.n, 42);
  Fill(ws.p, ws.n, 43, 0.01f);
  y.Poison();
  xs.Poison();
  LaunchQuantise(stream, x.p, k, m, k, x8.p, xs.p);
  Gemm g;
  g.rows = m;
  g.n = n;
  g.k = k;
  g.x = x8.p;
  g.x_ld = k;
  g.x_fp8 = g.w_fp8 = true;
  g.x_scale = xs.p;
  g.w = w.p;
  g.scale64 = ws.p;
  g.y = y.p;
  g.y_ld = n;
  CUDA_OK(LaunchGemm(stream, g));
  Done();
  const auto xh = x8.Get(), wh = w.Get();
  const auto xsh = xs.Get(), wsh = ws.Get(), yh = y.Get();
  const int blocks = (k + 127) / 128;
  double diff = 0, ref = 0;
  for (int r = 0; r < m; ++r) {
    for (int c = 0; c < n; ++c) {
      double sum = 0;
      for (int b = 0; b < blocks; ++b) {
        double part = 0;
        for (int j = b * 128; j < std::min(k, b * 128 + 128); ++j)
          part += E4(xh[size_t(r) * k + j]) * E4(wh[size_t(c) * k + j]);
        sum += part * xsh[size_t(r / 64) * blocks * 64 + b * 64 + r % 64] *
               wsh[size_t(c / 256) * blocks * 4 + b * 4 + c % 256 / 64];
      }
      diff += std::pow(yh[size_t(r) * n + c] - sum, 2);
      ref += sum * sum;
    }
  }
  char name[96];
  std::snprintf(name, sizeof(name), "gemm e4m3 %d x %d x %d, every element", m, n, k);
  Check(name, Norm2(diff, ref), 3e-4);
}

// Experts of any width by one of both paths of rows, against double precision over what the products took.
void CheckFewExperts(int rows, int experts, int hidden, int inter, int topk, int tile, int only_expert) {
  std::vector<int32_t> expert(size_t(rows) * topk);
  std::vector<float> weight(expert.size());
  for (size_t i = 0; i < expert.size(); ++i) {
    expert[i] = only_expert >= 0 ? only_expert : int32_t(Mix(i) % unsigned(experts));
    if (only_expert < 0 && expert[i] == 1) expert[i] = 0;  // expert 1 gets no row
    weight[i] = 0.1f * float(i % 7 + 1);
  }
  ExpertRun run(experts, hidden, inter, topk, expert, weight, tile, 2e-3f);
  run.out.Poison();
  CUDA_OK(cudaMemset(run.y.p, 0, run.y.n * 4));
  run.All();
  Done();
  const auto xh = run.x.Get();
  const auto wuh = run.wu.Get(), wdh = run.wd.Get();
  const auto suh = run.su.Get(), sdh = run.sd.Get(), yh = run.y.Get();
  double diff = 0, ref = 0;
  for (int i = 0; i < std::min(rows, 24); ++i) {
    const int r = i == 0 ? rows - 1 : int(Mix(i) % unsigned(rows));
    std::vector<double> want(static_cast<size_t>(hidden), 0.0), h(static_cast<size_t>(inter));
    for (int k = 0; k < topk; ++k) {
      const int ex = expert[size_t(r) * topk + k];
      for (int j = 0; j < inter; ++j) {
        double gu[2];
        for (int half = 0; half < 2; ++half) {
          const int c = half * inter + j;
          double sum = 0;
          for (int q = 0; q < hidden; ++q)
            sum += BF(xh[size_t(r) * hidden + q]) * E4(wuh[(size_t(ex) * 2 * inter + c) * hidden + q]) *
                   suh[size_t(ex) * WeightScales(2 * inter, hidden) +
                       WeightScaleAt(c, q / 128, (hidden + 127) / 128)];
          gu[half] = sum;
        }
        h[j] = gu[0] / (1 + std::exp(-gu[0])) * gu[1];
      }
      for (int c = 0; c < hidden; ++c) {
        double sum = 0;
        for (int j = 0; j < inter; ++j)
          sum +=
              h[j] * E4(wdh[(size_t(ex) * hidden + c) * inter + j]) *
              sdh[size_t(ex) * WeightScales(hidden, inter) + WeightScaleAt(c, j / 128, (inter + 127) / 128)];
        want[c] += sum * weight[size_t(r) * topk + k];
      }
    }
    for (int c = 0; c < hidden; ++c) {
      diff += std::pow(yh[size_t(r) * hidden + c] - want[c], 2);
      ref += want[c] * want[c];
    }
  }
  char name[96];
  std::snprintf(name, sizeof(name), "experts %d rows of %d, %d x %d, tiles %d%s", rows, experts, hidden,
                inter, tile, only_expert >= 0 ? ", all to one" : "");
  Check(name, Norm2(diff, ref), 6e-2);  // both activations are e4m3
}

void NoRows() {
  Dev<float> f(1 << 16);
  Dev<int32_t> i(1 << 12);
  Dev<uint8_t> b(1 << 16);
  Ropes ropes(64, true);
  const Slab latent{(std::byte*)b.p, int64_t(b.n), 41984, 1, Elem::kE4M3},
      index{(std::byte*)b.p, int64_t(b.n), 8448, 1, Elem::kE4M3};
  Seqs seqs;
  seqs.max_context = 4096;
  LaunchEmbed(stream, b.p, Elem::kBF16, nullptr, 0, 0, i.p, 0, 256, f.p);
  LaunchRmsNorm(stream, f.p, 256, f.p, 1e-5f, 0, 256, b.p, 256, false, f.p);
  LaunchSplitQuery(stream, f.p, i.p, ropes.rope, 0, 64, 192, 64, 512, b.p, b.p, false);
  LaunchWriteLatent(stream, f.p, 576, f.p, 1e-5f, i.p, ropes.rope, i.p, i.p, 0, 512, 64, latent);
  LaunchWriteIndex(stream, f.p, 128, f.p, f.p, 1e-6f, i.p, ropes.rope, i.p, i.p, 0, 128, 64, index);
  LaunchSiluMul(stream, f.p, 0, 128, b.p, false);
  LaunchGatherRows(stream, f.p, i.p, 0, 1024, f.p);
  LaunchFiniteRows(stream, f.p, 0, 256, i.p);
  LaunchArgmaxRows(stream, f.p, 0, 256, i.p);
  LaunchQuantise(stream, b.p, 128, 0, 128, b.p, f.p);
  LaunchSiluQuantise(stream, f.p, 0, 128, nullptr, b.p, f.p);
  LaunchSplitBF16(stream, f.p, 0, b.p);
  for (const bool f32 : {false, true}) {
    Gemm g;
    g.n = g.k = 128;
    g.f32 = f32;
    CUDA_OK(LaunchGemm(stream, g));
  }
  Gate gate;
  gate.hidden = 256;
  gate.experts = 8;
  gate.topk = 2;
  CUDA_OK(LaunchGate(stream, gate));
  LaunchCombine(stream, b.p, true, i.p, f.p, 0, 8, 256, f.p);
  const IndexQuery iq{Elem::kE4M3, 32, b.p, f.p};
  LaunchIndexQuery(stream, f.p, f.p, 1.0f, i.p, ropes.rope, 0, 32, 128, 64, iq);
  LaunchIndexScores(stream, seqs, 0, 0, 32, 128, iq, index, f.p, 4096);
  LaunchTopK(stream, f.p, 4096, i.p, i.p, 0, 2048, 4096, i.p, i.p, nullptr);
  LaunchSelectAll(stream, i.p, i.p, 0, 2048, i.p, i.p, nullptr);
  Attend a;
  a.seqs = seqs;
  a.heads = 64;
  a.kv_lora = 512;
  a.rope = 64;
  a.topk = 2048;
  a.slab = latent;
  LaunchSparseMla(stream, a);
  LaunchAttendAny(stream, a);
  LaunchDequantisePages(stream, latent, i.p, 0, (std::byte*)b.p, i.p);
  LaunchPageCopy(stream, (std::byte*)b.p, 64, i.p, (std::byte*)b.p, 64, i.p, 0, 64, 8);
  LaunchRunCopy(stream, nullptr, 0, 8);
  LaunchPageRows(stream, PageRows{}, 8);
  const cudaError_t error = cudaStreamSynchronize(stream);
  Check("no rows at all: every launcher takes them",
        error != cudaSuccess || cudaGetLastError() != cudaSuccess, 0);
}

}  // namespace

void CheckDegenerate() {
  // One block of 128 inputs (row and weight scales then have a last dimension of 1), one of outputs, both,
  // one row, and sizes that end inside a block.
  for (const int m : {1, 3, 64, 65, 129, 300})
    for (const auto& [n, k] : {std::pair{128, 128},
                               {256, 128},
                               {64, 128},
                               {130, 128},
                               {128, 512},
                               {128, 400},
                               {1344, 128},
                               {200, 208},
                               {2, 16}})
      CheckFp8(m, n, k);
  for (const int tile : {64, 128}) {
    CheckFewExperts(1, 4, 128, 128, 1, tile, -1);
    CheckFewExperts(5, 4, 128, 128, 2, tile, -1);
    CheckFewExperts(70, 3, 256, 128, 2, tile, -1);
    CheckFewExperts(70, 3, 208, 128, 2, tile, -1);
    CheckFewExperts(130, 8, 128, 256, 2, tile, 3);
  }
  NoRows();
}

}  // namespace sluice::cuda
