#include "machine_rates.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "dnnl.hpp"

namespace sluice {
namespace {

using SteadyTime = std::chrono::steady_clock;

double Seconds(SteadyTime::time_point since) {
  return std::chrono::duration<double>(SteadyTime::now() - since).count();
}

constexpr int64_t kGemmRows = 1024, kGemmDim = 2048;

// Kept between samples: packing is not what is measured.
struct GemmState {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::matmul::primitive_desc desc;
  dnnl::matmul product;
  dnnl::memory src, weights, dst;

  explicit GemmState(dnnl::memory::data_type type) {
    using Desc = dnnl::memory::desc;
    using Tag = dnnl::memory::format_tag;
    const Desc src_desc({kGemmRows, kGemmDim}, type, Tag::ab), any({kGemmDim, kGemmDim}, type, Tag::any);
    const Desc dst_desc({kGemmRows, kGemmDim}, dnnl::memory::data_type::f32, Tag::ab);
    desc = dnnl::matmul::primitive_desc(dnnl::matmul::desc(src_desc, any, dst_desc), engine);
    product = dnnl::matmul(desc);
    src = dnnl::memory(desc.src_desc(), engine);
    weights = dnnl::memory(desc.weights_desc(), engine);
    dst = dnnl::memory(desc.dst_desc(), engine);
    for (dnnl::memory* m : {&src, &weights}) {
      auto* p = static_cast<uint8_t*>(m->get_data_handle());
      const size_t n = m->get_desc().get_size();
      // Small positive numbers in either type: no denormals, no overflow.
      for (size_t i = 0; i + 1 < n; i += 2) p[i] = uint8_t(i * 37), p[i + 1] = 0x3d;
    }
  }
  void Run() {
    product.execute(stream, {{DNNL_ARG_SRC, src}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, dst}});
    stream.wait();
  }
};

GemmState& StateFor(DType dtype) {
  using Type = dnnl::memory::data_type;
  if (dtype == DType::kBF16) {
    static std::unique_ptr<GemmState> bf16 = []() -> std::unique_ptr<GemmState> {
      try {
        return std::make_unique<GemmState>(Type::bf16);
      } catch (const dnnl::error&) {
        return nullptr;
      }
    }();
    if (bf16 != nullptr) return *bf16;
  }
  static GemmState f32(Type::f32);
  return f32;
}

}  // namespace

double LargeGemmRate(DType dtype, int threads) {
  omp_set_num_threads(threads);
  GemmState& state = StateFor(dtype);
  state.Run();
  const double flops = 2.0 * double(kGemmRows) * double(kGemmDim) * double(kGemmDim);
  double best = 0;
  const auto start = SteadyTime::now();
  do {
    const auto one = SteadyTime::now();
    state.Run();
    best = std::max(best, flops / Seconds(one));
  } while (Seconds(start) < 0.1);
  return best;
}

double MemoryReadRate(int threads) {
  constexpr size_t kWords = size_t(64) << 20;  // 512 MiB
  static const std::vector<uint64_t> buffer(kWords, 0x0101010101010101ull);
  std::atomic<uint64_t> sink{0};
  const auto part = [&](int t) {
    const uint64_t* p = buffer.data() + kWords * size_t(t) / size_t(threads);
    const uint64_t* end = buffer.data() + kWords * (size_t(t) + 1) / size_t(threads);
    uint64_t a[8] = {};
    for (; p + 8 <= end; p += 8) {
      for (int i = 0; i < 8; ++i) a[i] += p[i];
    }
    uint64_t sum = 0;
    for (uint64_t v : a) sum += v;
    sink += sum;
  };
  const auto start = SteadyTime::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(part, t);
  part(0);
  for (std::thread& t : others) t.join();
  const double seconds = Seconds(start);
  return sink.load() == 0 ? 0 : double(kWords * sizeof(uint64_t)) / seconds;
}

}  // namespace sluice
