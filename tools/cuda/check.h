// What the kernel checks share: device arrays, noise, timing with the L2 emptied, and the two kinds of output
// line.
#pragma once

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
#include "tools/cuda/op_report.h"

namespace sluice::cuda {

#define CUDA_OK(x)                                                                             \
  do {                                                                                         \
    const cudaError_t e_ = (x);                                                                \
    if (e_ != cudaSuccess) {                                                                   \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      std::exit(2);                                                                            \
    }                                                                                          \
  } while (0)

inline cudaStream_t stream;
inline double copy_gbs = 0, read_gbs = 0, h2d_gbs = 0, d2h_gbs = 0;
inline OpCatalogueOptions options;
inline OpReport* report = nullptr;

template <typename... Args>
void Say(const char* format, const Args&... args) {
  if (!options.print) return;
  std::printf(format, args...);
  std::fflush(stdout);
}

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

inline uint64_t Mix(uint64_t z) {
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
static __global__ void FillF32(float* p, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = UnitNoise(seed, i) * scale;
}
static __global__ void FillBF16(__nv_bfloat16* p, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = __float2bfloat16_rn(UnitNoise(seed, i) * scale);
}
static __global__ void FillE4M3(uint8_t* p, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    p[i] = ToE4M3(UnitNoise(seed, i) * scale);
}
inline void Fill(float* p, size_t n, uint64_t seed, float scale = 1) {
  FillF32<<<1024, 256, 0, stream>>>(p, n, seed, scale);
}
inline void Fill(__nv_bfloat16* p, size_t n, uint64_t seed, float scale = 1) {
  FillBF16<<<1024, 256, 0, stream>>>(p, n, seed, scale);
}
inline void Fill(uint8_t* p, size_t n, uint64_t seed, float scale = 60) {
  FillE4M3<<<1024, 256, 0, stream>>>(p, n, seed, scale);
}

inline double BF(uint16_t b) {
  const uint32_t u = uint32_t(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline double BF(__nv_bfloat16 b) { return double(__bfloat162float(b)); }
inline double E4Slow(uint8_t b) {
  const int e = (b >> 3) & 15, m = b & 7;
  if ((b & 0x7f) == 0x7f) return NAN;
  const double v = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
  return b & 0x80 ? -v : v;
}
inline double E4(uint8_t b) {
  static const std::vector<double> table = [] {
    std::vector<double> t;
    for (int i = 0; i < 256; ++i) t.push_back(E4Slow(uint8_t(i)));
    return t;
  }();
  return table[b];
}

// How the L2 is emptied before each run: by writing 256 MB, whose last dirty lines the run then pays for (as
// the peers' times do), or by reading them, for rows whose ceiling is a copy or a read pass that pays for no
// others' lines.
enum class Flush { kWrite, kRead };
static __global__ void ReadAll(const float4* p, size_t n, float* out) {
  float s = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    const float4 v = p[i];
    s += v.x + v.y + v.z + v.w;
  }
  if (s == 1.2345f) *out = s;
}

// Median milliseconds of `fn`; `runs` unless the options say otherwise.
inline double Time(const std::function<void()>& fn, int runs = 11, Flush how = Flush::kWrite) {
  static Dev<char>* flush = new Dev<char>(size_t(256) << 20);
  static Dev<float>* sum = new Dev<float>(1);
  cudaEvent_t a, b;
  CUDA_OK(cudaEventCreate(&a));
  CUDA_OK(cudaEventCreate(&b));
  fn();
  fn();
  std::vector<float> ms;
  if (options.runs > 0) runs = options.runs;
  for (int i = 0; i < runs; ++i) {
    if (how == Flush::kWrite) {
      CUDA_OK(cudaMemsetAsync(flush->p, i, size_t(256) << 20, stream));
    } else {
      ReadAll<<<132 * 8, 256, 0, stream>>>(reinterpret_cast<const float4*>(flush->p),
                                           (size_t(256) << 20) / 16, sum->p);
    }
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
inline void Done() {
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaGetLastError());
}
inline void Check(const char* what, double error, double bound) {
  const OpCheck check{what, error, bound};
  Say("%-52s error %.3e (bound %.1e)  %s\n", what, error, bound, check.ok() ? "ok" : "FAIL");
  report->checks.push_back(check);
}
inline void Row(const char* op, const char* shape, double ms, double amount, const char* unit, double limit,
                const char* limit_name) {
  Say("TIME %-22s %-34s %9.2f us %9.1f %-8s %5.2f of %s\n", op, shape, ms * 1e3, amount, unit, amount / limit,
      limit_name);
  report->times.push_back({op, shape, ms * 1e3, amount, unit, limit, limit_name});
}
inline double Norm2(double diff, double ref) { return std::sqrt(diff / std::max(ref, 1e-300)); }

// Rope tables of 64 dims.
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

void CheckGemms();
void CheckExperts();
void CheckPeer();  // beside cuBLASLt
void CheckIndexer();
void CheckTopK();
void CheckAttention();
void CheckSampling();
void CheckDegenerate();

}  // namespace sluice::cuda
