// The own e4m3 product beside cuBLASLt's, on the same operands: both results are checked, then both are timed
// in alternating rounds. Without cuBLASLt this part says so.
#include "backends/cuda/cublaslt_gemm.h"
#include "backends/cuda/gemm_choice.h"
#include "tools/cuda/check.h"

namespace sluice::cuda {
namespace {

__global__ void EvenScales(float* ws, size_t n) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n / 2;
       i += size_t(gridDim.x) * blockDim.x)
    ws[2 * i + 1] = ws[2 * i];
}
__global__ void BlockScalesOf(const float* ws, int n, int k, int ld, float* w) {
  const int blocks = k / 128, step = int(gridDim.x * blockDim.x);
  for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < (n + 127) / 128 * blocks; i += step)
    w[size_t(i / blocks) * ld + i % blocks] = ws[WeightScaleAt(i / blocks * 128, i % blocks, blocks)];
}
template <typename T>
__global__ void Difference(const T* a, const T* b, size_t n, double* out) {
  double diff = 0, ref = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    const double x = double(ToFloat(a[i])), y = double(ToFloat(b[i]));
    diff += (x - y) * (x - y);
    ref += y * y;
  }
  atomicAdd(out, diff);
  atomicAdd(out + 1, ref);
}
template <typename T>
double Apart(const T* a, const T* b, size_t n) {
  Dev<double> sum(2);
  CUDA_OK(cudaMemset(sum.p, 0, 16));
  Difference<<<1024, 256, 0, stream>>>(a, b, n, sum.p);
  Done();
  const auto s = sum.Get();
  return Norm2(s[0], s[1]);
}

struct Samples {
  std::vector<float> us;
  float Median() {
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
  }
};
// Rounds of all contenders in turn, L2 emptied by writing 256 MB before each.
std::vector<Samples> Alternate(const std::vector<std::function<void()>>& run, int rounds) {
  static Dev<char>* flush = new Dev<char>(size_t(256) << 20);
  cudaEvent_t a, b;
  CUDA_OK(cudaEventCreate(&a));
  CUDA_OK(cudaEventCreate(&b));
  std::vector<Samples> all(run.size());
  for (const auto& f : run) f();
  for (int r = 0; r < rounds; ++r) {
    for (size_t i = 0; i < run.size(); ++i) {
      CUDA_OK(cudaMemsetAsync(flush->p, r, size_t(256) << 20, stream));
      CUDA_OK(cudaEventRecord(a, stream));
      run[i]();
      CUDA_OK(cudaEventRecord(b, stream));
      CUDA_OK(cudaEventSynchronize(b));
      float ms;
      CUDA_OK(cudaEventElapsedTime(&ms, a, b));
      all[i].us.push_back(ms * 1e3f);
    }
  }
  CUDA_OK(cudaGetLastError());
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  return all;
}

// One product by the own kernel, by cuBLASLt and by whoever CublasLtIsFaster names.
template <typename T>
void Compare(CublasLtGemm& lt, int m, int n, int k, bool add = false) {
  const int blocks = (k + 127) / 128;
  Dev<__nv_bfloat16> x(size_t(m) * k);
  Dev<uint8_t> x8(x.n), w8(size_t(n) * k);
  Dev<float> xs(size_t(RowScales(m, k))), flat(size_t(m) * blocks), ws(size_t(WeightScales(n, k))),
      wb(size_t(BlockScales(n, k)));
  Dev<T> y(size_t(m) * n), z(y.n);
  Fill(x.p, x.n, 131);
  Fill(w8.p, w8.n, 133);
  Fill(ws.p, ws.n, 134, 0.01f);
  EvenScales<<<64, 256, 0, stream>>>(ws.p, ws.n);
  LaunchQuantise(stream, x.p, k, m, k, x8.p, xs.p);
  LaunchQuantise(stream, x.p, k, m, k, x8.p, flat.p, true);
  BlockScalesOf<<<256, 256, 0, stream>>>(ws.p, n, k, int(BlockScaleLd(k)), wb.p);
  y.Poison();
  z.Poison();
  Gemm g;
  g.rows = m;
  g.n = n;
  g.k = k;
  g.x = x8.p;
  g.x_ld = k;
  g.x_fp8 = g.w_fp8 = true;
  g.x_scale = xs.p;
  g.w = w8.p;
  g.scale64 = ws.p;
  g.y = y.p;
  g.y_ld = n;
  g.out = sizeof(T) == 2 ? Out::kAct : add ? Out::kF32Add : Out::kF32;
  g.split = true;
  if (add) {
    CUDA_OK(cudaMemsetAsync(y.p, 0, y.n * sizeof(T), stream));
    CUDA_OK(cudaMemsetAsync(z.p, 0, z.n * sizeof(T), stream));
  }
  CUDA_OK(LaunchGemm(stream, g));
  const BlockScaledProduct p{m, n, k, x8.p, flat.p, w8.p, wb.p, z.p, n, g.out};
  lt.Prepare(n, k, m);
  const bool theirs = lt.Launch(stream, p);
  Done();
  char name[96], text[128];
  std::snprintf(name, sizeof(name), "%d x %d x %d -> %s", m, n, k,
                sizeof(T) == 2 ? "bf16"
                : add          ? "f32, added"
                               : "f32");
  {  // against a double-precision sum
    double diff = 0, ref = 0;
    const auto xsh = xs.Get(), wsh = ws.Get();
    for (int i = 0; i < 200; ++i) {
      const int r = i == 0 ? m - 1 : int(Mix(i) % m), c = i == 1 ? n - 1 : int(Mix(i + 77777) % n);
      const auto xr = x8.Get(size_t(r) * k, k), wr = w8.Get(size_t(c) * k, k);
      double sum = 0;
      for (int j = 0; j < k; ++j)
        sum += E4(xr[j]) * xsh[RowScaleAt(r, j / 128, blocks)] * E4(wr[j]) *
               wsh[WeightScaleAt(c, j / 128, blocks)];
      const T got = y.Get(size_t(r) * n + c, 1)[0];
      double v;
      if constexpr (sizeof(T) == 2) {
        v = BF(got);
      } else {
        v = got;
      }
      diff += (v - sum) * (v - sum);
      ref += sum * sum;
    }
    std::snprintf(text, sizeof(text), "gemm e4m3 %s", name);
    Check(text, Norm2(diff, ref), sizeof(T) == 2 ? 3e-3 : 3e-4);
  }
  if (!theirs) {
    Say("PEER %-30s cuBLASLt has no such product\n", name);
    return;
  }
  Check("  cuBLASLt's beside the own kernel's", Apart(z.p, y.p, y.n), sizeof(T) == 2 ? 1e-3 : 1e-5);
  const bool by_theirs = CublasLtIsFaster(m, n, report->multiprocessors);
  std::vector<std::function<void()>> run;
  run.push_back([&] { CUDA_OK(LaunchGemm(stream, g)); });
  run.push_back([&] { (void)lt.Launch(stream, p); });
  run.push_back([&] {
    if (!by_theirs || !lt.Launch(stream, p)) CUDA_OK(LaunchGemm(stream, g));
  });
  auto all = Alternate(run, options.runs > 0 ? options.runs : 9);
  const double flops = 2.0 * m * n * k;
  double us[3];
  for (int i = 0; i < 3; ++i) us[i] = all[i].Median();
  Say("PEER %-30s own %8.2f us (%.1f to %.1f) %5.0f TFLOP/s | cuBLASLt %8.2f us (%.1f to %.1f) %5.0f | runs: "
      "%-8s "
      "%8.2f us %5.0f, %.3f of cuBLASLt (own %.3f)\n",
      name, us[0], all[0].us.front(), all[0].us.back(), flops / us[0] / 1e6, us[1], all[1].us.front(),
      all[1].us.back(), flops / us[1] / 1e6, by_theirs ? "cuBLASLt" : "own", us[2], flops / us[2] / 1e6,
      us[1] / us[2], us[1] / us[0]);
  Row("gemm e4m3 as dispatched", name, us[2] / 1e3, flops / us[2] / 1e6, "TFLOP/s", flops / us[1] / 1e6,
      "cuBLASLt, same run");
}

}  // namespace

void CheckPeer() {
  std::string why;
  const auto lt = CublasLtGemm::Open(&why);
  if (lt == nullptr) {
    Say("not compared with cuBLASLt: %s\n", why.c_str());
    return;
  }
  Say("cuBLASLt %s at %s\n", lt->version().c_str(), lt->path().c_str());
  Compare<__nv_bfloat16>(*lt, 4092, 512, 640);
  for (const auto& [n, k] : {std::pair{16384, 2048},
                             {6144, 2048},
                             {4096, 6144},
                             {24576, 6144},
                             {6144, 16384},
                             {6144, 12288},
                             {2624, 6144}}) {
    Compare<__nv_bfloat16>(*lt, 4096, n, k);
    if (getenv("QUICK") != nullptr) continue;
    Compare<float>(*lt, 4096, n, k);
    Compare<float>(*lt, 4096, n, k, true);
    for (const int m : {2048, 1024, 512, 256, 128}) Compare<__nv_bfloat16>(*lt, m, n, k);
  }
}

}  // namespace sluice::cuda
