// Checks every CUDA kernel against double-precision sums at the shapes of GLM-5 and at degenerate ones, and
// times it against what bounds it. Needs nothing but the CUDA toolkit: see build.sh beside it. Exit code 1
// when a check fails.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/device.cuh"
#include "backends/cuda/kernels.h"

using namespace sluice::cuda;

#define CUDA_OK(x)                                                                             \
  do {                                                                                         \
    const cudaError_t e_ = (x);                                                                \
    if (e_ != cudaSuccess) {                                                                   \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      std::exit(2);                                                                            \
    }                                                                                          \
  } while (0)

static cudaStream_t stream;
static int failures = 0;
static double copy_gbs = 0, read_gbs = 0, h2d_gbs = 0, d2h_gbs = 0;
static std::string only;

template <typename T>
struct Dev {
  T* p = nullptr;
  size_t n = 0;
  explicit Dev(size_t count) : n(count) {
    CUDA_OK(cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T) + 256));
  }
  explicit Dev(const std::vector<T>& v) : Dev(v.size()) { Put(v); }
  Dev(const Dev&) = delete;
  ~Dev() { cudaFree(p); }
  void Put(const std::vector<T>& v) {
    CUDA_OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void Poison() { CUDA_OK(cudaMemset(p, 0xff, n * sizeof(T))); }
  std::vector<T> Get() const {
    std::vector<T> v(n);
    CUDA_OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
  std::vector<T> Get(size_t at, size_t count) const {
    std::vector<T> v(count);
    CUDA_OK(cudaMemcpy(v.data(), p + at, count * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

static uint64_t Mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
__host__ __device__ inline float UnitNoise(uint64_t seed,
                                           uint64_t i) {  // sum of four uniforms: near normal, variance 1
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + i * 0xD1B54A32D192ED03ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  float s = 0;
  for (int k = 0; k < 4; ++k) s += float((z >> (16 * k)) & 0xffff) / 65536.0f - 0.5f;
  return s * 1.7320508f;
}
__global__ void FillF32(float* p, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = UnitNoise(seed, i) * scale;
}
__global__ void FillBF16(__nv_bfloat16* p, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = __float2bfloat16_rn(UnitNoise(seed, i) * scale);
}
__global__ void FillE4M3(uint8_t* p, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = ToE4M3(UnitNoise(seed, i) * scale);
}
static void Fill(float* p, size_t n, uint64_t seed, float scale = 1) {
  FillF32<<<1024, 256, 0, stream>>>(p, n, seed, scale);
}
static void Fill(__nv_bfloat16* p, size_t n, uint64_t seed, float scale = 1) {
  FillBF16<<<1024, 256, 0, stream>>>(p, n, seed, scale);
}
static void Fill(uint8_t* p, size_t n, uint64_t seed, float scale = 60) {
  FillE4M3<<<1024, 256, 0, stream>>>(p, n, seed, scale);
}

static double BF(uint16_t b) {
  const uint32_t u = uint32_t(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
static double BF(__nv_bfloat16 b) { return double(__bfloat162float(b)); }
static double E4Slow(uint8_t b) {
  const int e = (b >> 3) & 15, m = b & 7;
  if ((b & 0x7f) == 0x7f) return NAN;
  const double v = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
  return b & 0x80 ? -v : v;
}
static double E4(uint8_t b) {
  static const std::vector<double> table = [] {
    std::vector<double> t;
    for (int i = 0; i < 256; ++i) t.push_back(E4Slow(uint8_t(i)));
    return t;
  }();
  return table[b];
}

// Median milliseconds of `fn`, with the L2 emptied before each run when `cold`.
static double Time(const std::function<void()>& fn, int runs = 11, bool cold = true) {
  static Dev<char>* flush = new Dev<char>(size_t(256) << 20);
  cudaEvent_t a, b;
  CUDA_OK(cudaEventCreate(&a));
  CUDA_OK(cudaEventCreate(&b));
  fn();
  fn();
  std::vector<float> ms;
  for (int i = 0; i < runs; ++i) {
    if (cold) CUDA_OK(cudaMemsetAsync(flush->p, i, size_t(256) << 20, stream));
    CUDA_OK(cudaEventRecord(a, stream));
    fn();
    CUDA_OK(cudaEventRecord(b, stream));
    CUDA_OK(cudaEventSynchronize(b));
    float t;
    CUDA_OK(cudaEventElapsedTime(&t, a, b));
    ms.push_back(t);
  }
  CUDA_OK(cudaGetLastError());
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2];
}
static void Done() {
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaGetLastError());
}
static void Check(const char* what, double error, double bound) {
  const bool ok = error <= bound;  // NaN fails
  failures += !ok;
  std::printf("%-52s error %.3e (bound %.1e)  %s\n", what, error, bound, ok ? "ok" : "FAIL");
  std::fflush(stdout);
}
static void Row(const char* op, const char* shape, double ms, double amount, const char* unit, double limit,
                const char* limit_name) {
  std::printf("TIME %-22s %-34s %9.2f us %9.1f %-8s %5.2f of %s\n", op, shape, ms * 1e3, amount, unit,
              amount / limit, limit_name);
  std::fflush(stdout);
}
static double Norm2(double diff, double ref) { return std::sqrt(diff / std::max(ref, 1e-300)); }

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

struct Ropes {
  Dev<float> cos, sin;
  Rope rope;
  explicit Ropes(int positions, bool interleave) : cos(size_t(positions) * 32), sin(size_t(positions) * 32) {
    std::vector<float> c(cos.n), s(sin.n);
    for (int p = 0; p < positions; ++p) {
      for (int i = 0; i < 32; ++i) {
        const float angle = float(p) * std::pow(1e6f, -float(i) / 32);
        c[size_t(p) * 32 + i] = std::cos(angle);
        s[size_t(p) * 32 + i] = std::sin(angle);
      }
    }
    cos.Put(c);
    sin.Put(s);
    rope = {cos.p, sin.p, 32, interleave};
  }
};

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

struct Paged {  // sequences of given lengths over shuffled pages; rows: the last `rows_each` positions of
                // each
  std::vector<int32_t> seq_of_row, positions, page_begin, pages;
  Dev<int32_t>*a = nullptr, *b = nullptr, *c = nullptr, *d = nullptr;
  Seqs seqs;
  int num_pages = 1;
  Paged(const std::vector<int>& lengths, const std::vector<int>& rows_each, bool share_pages = false) {
    int total = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      page_begin.push_back(int(pages.size()));
      for (int p = 0; p < (lengths[s] + 63) / 64; ++p) pages.push_back(share_pages ? p + 1 : 1 + total++);
      for (int i = 0; i < rows_each[s]; ++i) {
        seq_of_row.push_back(int(s));
        positions.push_back(lengths[s] - rows_each[s] + i);
      }
      seqs.max_context = std::max(seqs.max_context, lengths[s]);
    }
    if (share_pages) total = (seqs.max_context + 63) / 64;
    num_pages = total + 1;
    if (!share_pages) {
      std::mt19937 rng(9);
      std::shuffle(pages.begin(), pages.end(), rng);
    }
    seqs.rows = int(seq_of_row.size());
    seqs.seqs = int(lengths.size());
    a = new Dev<int32_t>(seq_of_row);
    b = new Dev<int32_t>(positions);
    c = new Dev<int32_t>(page_begin);
    d = new Dev<int32_t>(pages);
    seqs.seq_of_row = a->p;
    seqs.positions = b->p;
    seqs.page_begin = c->p;
    seqs.pages = d->p;
  }
  ~Paged() {
    delete a;
    delete b;
    delete c;
    delete d;
  }
};

__global__ void FillIndexPages(uint8_t* p, int pages, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < int64_t(pages) * 8448;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t at = i % 8448;
    if (at < 8192) {
      p[i] = ToE4M3(UnitNoise(seed, uint64_t(i)) * 100);
    } else if (at % 4 == 0) {
      *reinterpret_cast<float*>(p + i) = 0.01f + 0.001f * fabsf(UnitNoise(seed + 1, uint64_t(i)));
    }
  }
}

static void Indexer() {
  const int heads = 32;
  const auto run = [&](const char* what, const std::vector<int>& lengths, const std::vector<int>& rows_each,
                       bool check, bool time, Elem format, bool share) {
    Paged paged(lengths, rows_each, share);
    const int rows = paged.seqs.rows;
    const int64_t page_bytes = format == Elem::kE4M3 ? 8448 : 16384;
    Dev<uint8_t> pool(size_t(paged.num_pages) * page_bytes);
    if (format == Elem::kE4M3) {
      FillIndexPages<<<1024, 256, 0, stream>>>(pool.p, paged.num_pages, 61);
    } else {
      Fill((__nv_bfloat16*)pool.p, pool.n / 2, 61);
    }
    const Slab slab{(std::byte*)pool.p, int64_t(pool.n), page_bytes, 1, format};
    Ropes ropes(paged.seqs.max_context, true);
    Dev<float> q(size_t(rows) * heads * 128), hw(size_t(rows) * heads), w(size_t(rows) * 32);
    Dev<uint8_t> q8(size_t(rows) * heads * 128 * 2);
    Fill(q.p, q.n, 62);
    Fill(hw.p, hw.n, 63);
    const int64_t ld = (paged.seqs.max_context + 3) / 4 * 4;
    Dev<float> scores(size_t(rows) * ld);
    scores.Poison();
    const int padded = PaddedIndexHeads(format, heads);
    const IndexQuery iq{format, padded, q8.p, w.p};
    LaunchIndexQuery(stream, q.p, hw.p, 0.015625f, paged.seqs.positions, ropes.rope, rows, heads, 128, 64,
                     iq);
    LaunchIndexScores(stream, paged.seqs, 0, rows, heads, 128, iq, slab, scores.p, ld);
    Done();
    if (check) {
      const auto qh = q8.Get();
      const auto wh = w.Get();
      const auto ph = pool.Get();
      double diff = 0, ref = 0, beyond = 0;
      for (int i = 0; i < 3000; ++i) {
        const int r = int(Mix(i) % rows), seq = paged.seq_of_row[r];
        const int p = i % 5 == 0 ? paged.positions[r] : int(Mix(i + 1234) % (paged.positions[r] + 1));
        const uint8_t* page = ph.data() + size_t(paged.pages[paged.page_begin[seq] + p / 64]) * page_bytes;
        double want = 0;
        for (int h = 0; h < heads; ++h) {
          double dot = 0;
          for (int j = 0; j < 128; ++j) {
            const size_t qi = (size_t(r) * heads + h) * 128 + j;
            if (format == Elem::kE4M3) {
              dot += E4(qh[qi]) * E4(page[(p % 64) * 128 + j]);
            } else {
              uint16_t a, b;
              std::memcpy(&a, qh.data() + qi * 2, 2);
              std::memcpy(&b, page + ((p % 64) * 128 + j) * 2, 2);
              dot += BF(a) * BF(b);
            }
          }
          want += std::max(dot, 0.0) * wh[size_t(r) * heads + h];
        }
        if (format == Elem::kE4M3) {
          float s;
          std::memcpy(&s, page + 8192 + (p % 64) * 4, 4);
          want *= s;
        }
        const float got = scores.Get(size_t(r) * ld + p, 1)[0];
        diff += std::pow(got - want, 2);
        ref += want * want;
      }
      for (int r = 0; r < rows; r += std::max(1, rows / 100)) {
        if (paged.positions[r] + 1 < paged.seqs.max_context)
          beyond += !std::isnan(scores.Get(size_t(r) * ld + paged.positions[r] + 1, 1)[0]);
      }
      char name[96];
      std::snprintf(name, sizeof(name), "index scores %s %s", format == Elem::kE4M3 ? "fp8" : "bf16", what);
      Check(name, Norm2(diff, ref), 1e-3);
      Check("  nothing written past a row's position", beyond, 0);
    }
    if (time) {
      const double t = Time(
          [&] { LaunchIndexScores(stream, paged.seqs, 0, rows, heads, 128, iq, slab, scores.p, ld); }, 7);
      double positions = 0;
      for (int p : paged.positions) positions += p + 1;
      if (rows_each[0] >= 64) {
        Row("index scores", what, t, positions * heads * 128 * 2 / t / 1e9, "TFLOP/s",
            lengths[0] > 40000 ? 960 : 1002, "DeepGEMM");
      } else {
        double bytes = 0;
        for (int l : lengths) bytes += (l + 63) / 64 * double(page_bytes);
        Row("index scores", what, t, (bytes + 4.0 * positions) / t / 1e6, "GB/s", copy_gbs, "copy");
      }
    }
  };
  for (const Elem f : {Elem::kE4M3, Elem::kBF16}) {
    run("ragged 1-5 rows", {1, 63, 64, 65, 200, 1000, 4097}, {1, 1, 2, 4, 5, 1, 3}, true, false, f, false);
    run("extend, two sequences", {700, 333}, {300, 133}, true, false, f, false);
  }
  run("decode 64 x 32k", std::vector<int>(64, 32768), std::vector<int>(64, 1), true, true, Elem::kE4M3,
      false);
  run("decode 64 x 32k, 2 rows", std::vector<int>(64, 32768), std::vector<int>(64, 2), false, true,
      Elem::kE4M3, false);
  run("decode 1 x 128k", {131072}, {1}, false, true, Elem::kE4M3, false);
  run("prefill 4096 x 32k", {32768 + 2048}, {4096}, true, true, Elem::kE4M3, false);
  run("prefill 4096 x 128k", {131072}, {4096}, false, true, Elem::kE4M3, false);
}

static void TopK() {
  const int k = 2048;
  const auto make = [&](const char* kind, std::vector<float>& v, int n, int r) {
    v.resize(n);
    for (int i = 0; i < n; ++i) {
      const uint64_t z = Mix(uint64_t(r) * 1000003 + i);
      const float u = float(z >> 40) / float(1 << 24);
      if (!std::strcmp(kind, "random")) v[i] = UnitNoise(r, i);
      if (!std::strcmp(kind, "constant")) v[i] = 1.5f;
      if (!std::strcmp(kind, "ties")) v[i] = std::floor(u * 8);
      if (!std::strcmp(kind, "ascending")) v[i] = float(i);
      if (!std::strcmp(kind, "descending")) v[i] = float(-i);
      if (!std::strcmp(kind, "negative")) v[i] = -u - 1e-3f * float(i % 7);
      if (!std::strcmp(kind, "zeros and few")) v[i] = z % 50 == 0 ? u : 0.0f;
    }
  };
  for (const char* kind :
       {"random", "constant", "ties", "ascending", "descending", "negative", "zeros and few"}) {
    for (const int n : {2049, 5000, 33000, 131072}) {
      const int rows = 3;
      std::vector<float> all;
      std::vector<int32_t> pos, seq(rows, 0);
      const int64_t ld = (n + 3) / 4 * 4;
      all.assign(size_t(rows) * ld, NAN);
      for (int r = 0; r < rows; ++r) {
        std::vector<float> v;
        make(kind, v, n, r);
        std::copy(v.begin(), v.end(), all.begin() + r * ld);
        pos.push_back(n - 1 - r);
      }
      Dev<float> s(all), gap(rows);
      Dev<int32_t> dp(pos), ds(seq), sel(size_t(rows) * k), count(rows), sel2(size_t(rows) * k);
      sel.Poison();
      LaunchTopK(stream, s.p, ld, dp.p, ds.p, rows, k, n, sel.p, count.p, gap.p);
      LaunchTopK(stream, s.p, ld, dp.p, ds.p, rows, k, n, sel2.p, count.p, nullptr);
      Done();
      const auto got = sel.Get();
      double wrong = got != sel2.Get();
      const auto gaps = gap.Get();
      for (int r = 0; r < rows; ++r) {
        const int len = pos[r] + 1;
        std::vector<int32_t> order(len);
        std::iota(order.begin(), order.end(), 0);
        const float* v = all.data() + r * ld;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return v[a] > v[b]; });
        if (len > k) wrong += gaps[r] != v[order[k - 1]] - v[order[k]];
        order.resize(std::min(k, len));
        std::sort(order.begin(), order.end());
        order.resize(k, -1);
        wrong += std::memcmp(order.data(), got.data() + size_t(r) * k, size_t(k) * 4) != 0;
      }
      char name[64];
      std::snprintf(name, sizeof(name), "top-k 2048 of %d, %s", n, kind);
      Check(name, wrong, 0);
    }
  }
  for (const auto& [rows, n] :
       {std::pair{4096, 32768}, {4096, 131072}, {64, 32768}, {64, 131072}, {1, 131072}}) {
    for (const char* kind : {"random", "ties"}) {
      if (!std::strcmp(kind, "ties") && rows * int64_t(n) > (int64_t(1) << 28)) continue;
      Dev<float> s(size_t(rows) * n);
      if (!std::strcmp(kind, "ties")) {
        std::vector<float> v;
        make(kind, v, n, 1);
        for (int r = 0; r < rows; ++r)
          CUDA_OK(cudaMemcpy(s.p + size_t(r) * n, v.data(), size_t(n) * 4, cudaMemcpyHostToDevice));
      } else {
        Fill(s.p, s.n, 71);
      }
      std::vector<int32_t> pos(rows, n - 1), seq(rows, 0);
      Dev<int32_t> dp(pos), ds(seq), sel(size_t(rows) * k), count(rows);
      const double t =
          Time([&] { LaunchTopK(stream, s.p, n, dp.p, ds.p, rows, k, n, sel.p, count.p, nullptr); });
      const double pass = 4.0 * rows * n / read_gbs / 1e6;
      char shape[64];
      std::snprintf(shape, sizeof(shape), "%d x %d %s", rows, n, kind);
      std::printf("TIME %-22s %-34s %9.2f us   %.2f x one read pass (%.2f us)\n", "top-k 2048", shape,
                  t * 1e3, t / pass, pass * 1e3);
    }
  }
}

__global__ void FillLatentPages(uint8_t* p, int pages, bool fp8, uint64_t seed) {
  const int row_bytes = fp8 ? 656 : 1152;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < int64_t(pages) * 64 * 576;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / 576;
    const int at = int(i % 576);
    uint8_t* out = p + row * row_bytes;
    const float v = UnitNoise(seed, uint64_t(i));
    if (!fp8) {
      reinterpret_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(v);
    } else if (at < 512) {
      out[at] = ToE4M3(v * 100);
      if (at % 128 == 0) *reinterpret_cast<float*>(out + 512 + at / 32) = 0.01f * (1 + 0.3f * fabsf(v));
    } else {
      reinterpret_cast<__nv_bfloat16*>(out + 528)[at - 512] = __float2bfloat16_rn(v);
    }
  }
}

static void Attention() {
  const auto run = [&](const char* what, const std::vector<int>& lengths, const std::vector<int>& rows_each,
                       int heads, int topk, bool sparse, bool fp8, int splits, bool check, bool time,
                       bool any, bool share, int shift) {
    Paged paged(lengths, rows_each, share);
    paged.seqs.slot_shift = shift;
    if (shift) {
      for (auto& p : paged.positions) p -= shift;
      paged.b->Put(paged.positions);
    }
    const int rows = paged.seqs.rows;
    const int64_t row_bytes = fp8 ? 656 : 1152, page_bytes = 64 * row_bytes;
    Dev<uint8_t> pool(size_t(paged.num_pages) * page_bytes);
    pool.Poison();
    FillLatentPages<<<2048, 256, 0, stream>>>(pool.p, paged.num_pages, fp8, 81);
    Dev<__nv_bfloat16> q(size_t(rows) * heads * 576), out(size_t(rows) * heads * 512);
    Fill(q.p, q.n, 82, 1.0f);
    std::vector<int32_t> sel(size_t(rows) * topk, -1), count(rows);
    for (int r = 0; r < rows; ++r) {
      const int n = paged.positions[r] + 1;
      const int c = std::min(n, topk);
      count[r] = c;
      if (n <= topk) {
        for (int i = 0; i < c; ++i) sel[size_t(r) * topk + i] = i;
      } else {  // ascending, spread at random
        const double step = double(n) / c;
        for (int i = 0; i < c; ++i)
          sel[size_t(r) * topk + i] =
              std::min(n - 1, int(i * step + double(Mix(r * 7919ull + i) % 1000) / 1000 * (step - 1)));
      }
    }
    Dev<int32_t> dsel(sel), dcount(count);
    Dev<float> partial(size_t(AttendScratchFloats(rows, splits)));
    Attend a;
    a.seqs = paged.seqs;
    a.heads = heads;
    a.kv_lora = 512;
    a.rope = 64;
    a.topk = topk;
    a.q = q.p;
    a.scale = 0.0625f;
    a.slab = {(std::byte*)pool.p, int64_t(pool.n), page_bytes, 1, fp8 ? Elem::kE4M3 : Elem::kBF16};
    a.selected = sparse ? dsel.p : nullptr;
    a.count = sparse ? dcount.p : nullptr;
    a.out = out.p;
    a.partial = partial.p;
    a.splits = splits;
    out.Poison();
    const auto go = [&] {
      if (any) {
        LaunchAttendAny(stream, a);
      } else {
        LaunchSparseMla(stream, a);
      }
    };
    go();
    Done();
    if (check) {
      const auto ph = pool.Get();
      double diff = 0, ref = 0;
      for (int i = 0; i < 24; ++i) {
        const int r = i == 0 ? rows - 1 : int(Mix(i) % rows),
                  h = i == 1 ? heads - 1 : int(Mix(i + 55) % heads), seq = paged.seq_of_row[r];
        const auto qh = q.Get((size_t(r) * heads + h) * 576, 576);
        const auto oh = out.Get((size_t(r) * heads + h) * 512, 512);
        const int n = sparse ? count[r] : paged.positions[r] + 1;
        std::vector<double> p(n), acc(512, 0), kv(size_t(n) * 576);
        double max = -1e300, sum = 0;
        for (int j = 0; j < n; ++j) {
          const int slot = (sparse ? sel[size_t(r) * topk + j] : j) + shift;
          const uint8_t* row = ph.data() +
                               size_t(paged.pages[paged.page_begin[seq] + slot / 64]) * page_bytes +
                               (slot % 64) * row_bytes;
          double dot = 0;
          for (int c = 0; c < 576; ++c) {
            double v;
            if (fp8 && c < 512) {
              float s;
              std::memcpy(&s, row + 512 + c / 128 * 4, 4);
              v = E4(row[c]) * s;
            } else {
              uint16_t b;
              std::memcpy(&b, fp8 ? row + 528 + (c - 512) * 2 : row + c * 2, 2);
              v = BF(b);
            }
            kv[size_t(j) * 576 + c] = v;
            dot += v * BF(qh[c]);
          }
          p[j] = dot * 0.0625;
          max = std::max(max, p[j]);
        }
        for (int j = 0; j < n; ++j) {
          const double e = std::exp(p[j] - max);
          sum += e;
          for (int c = 0; c < 512; ++c) acc[c] += e * kv[size_t(j) * 576 + c];
        }
        for (int c = 0; c < 512; ++c) {
          diff += std::pow(BF(oh[c]) - acc[c] / sum, 2);
          ref += std::pow(acc[c] / sum, 2);
        }
      }
      char name[96];
      std::snprintf(name, sizeof(name), "%s %s %s splits %d", any ? "attend any" : "sparse mla",
                    fp8 ? "fp8" : "bf16", what, splits);
      Check(name, Norm2(diff, ref), 6e-3);
    }
    if (time) {
      const double t = Time(go, 9);
      double keys = 0;
      for (int c : count) keys += c;
      const double tf = keys * heads * (576 + 512) * 2 / t / 1e9;
      char shape[96];
      std::snprintf(shape, sizeof(shape), "%s %s s%d", what, fp8 ? "fp8" : "bf16", splits);
      Row(rows_each[0] > 64 ? "sparse prefill" : "sparse decode", shape, t, tf, "TFLOP/s",
          rows_each[0] > 64 ? (lengths[0] > 40000 ? 530 : 625) : 213,
          rows_each[0] > 64 ? "FlashMLA" : "FlashMLA b64");
    }
  };
  for (const bool fp8 : {true, false}) {
    for (const int splits : {1, 2, 4}) {
      run("ragged", {1, 64, 65, 130, 700, 5000}, {1, 1, 2, 4, 5, 3}, 64, 2048, true, fp8, splits, true, false,
          false, false, 0);
    }
    run("8 heads, top 128", {1, 64, 65, 130, 700, 5000}, {1, 1, 2, 4, 5, 3}, 8, 128, true, fp8, 1, true,
        false, false, false, 0);
    run("dense", {1, 64, 65, 130, 700, 3000}, {1, 1, 2, 4, 5, 3}, 64, 2048, false, fp8, 2, true, false, false,
        false, 0);
    run("dense, shift 1", {2, 64, 65, 130, 700, 3000}, {1, 1, 2, 4, 5, 3}, 16, 2048, false, fp8, 1, true,
        false, false, false, 1);
    run("any shape", {1, 64, 65, 130, 700}, {1, 1, 2, 4, 5}, 8, 128, true, fp8, 1, true, false, true, false,
        0);
  }
  for (const int b : {1, 8, 64, 128}) {
    for (const int splits : {1, 2, 4, 8, 16}) {
      if (b * splits > 512 || (b < 8 && splits < 4)) continue;
      char what[32];
      std::snprintf(what, sizeof(what), "b %d x 32k", b);
      run(what, std::vector<int>(b, 32768), std::vector<int>(b, 1), 64, 2048, true, true, splits,
          b == 64 && splits == 2, true, false, false, 0);
    }
  }
  run("b 64 x 2 rows", std::vector<int>(64, 32768), std::vector<int>(64, 2), 64, 2048, true, true, 1, false,
      true, false, false, 0);
  run("b 128 x 2 rows", std::vector<int>(128, 32768), std::vector<int>(128, 2), 64, 2048, true, true, 1,
      false, true, false, false, 0);
  for (const bool fp8 : {true, false}) {
    run("4096 x 32k", {32768 + 4096}, {4096}, 64, 2048, true, fp8, 1, true, true, false, false, 0);
    run("4096 x 128k", {131072}, {4096}, 64, 2048, true, fp8, 1, false, true, false, false, 0);
  }
}

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
  part("indexer", Indexer);
  part("topk", TopK);
  part("attention", Attention);
  part("experts", Experts);
  std::printf("%s: %d checks failed\n", failures == 0 ? "ALL OK" : "FAILED", failures);
  return failures == 0 ? 0 : 1;
}
