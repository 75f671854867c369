// Random weights of a config's shapes (--load-format dummy). Scaled so that activations keep their size
// through the layers.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "base/random.h"
#include "weights/checkpoint.h"

namespace sluice {
namespace {

uint64_t SeedOf(std::string_view name, uint64_t seed) {
  uint64_t h = 0xcbf29ce484222325ull ^ seed;
  for (char c : name) h = (h ^ uint8_t(c)) * 0x100000001b3ull;
  return h;
}

constexpr int64_t kOneThread = 64 << 20;  // bytes that are not worth more

// Four values in (-1, 1) from one draw.
template <typename Store>
void Fill(uint64_t seed, int64_t n, Store store) {
  SeededStream random(seed);
  for (int64_t i = 0; i < n; i += 4) {
    const uint64_t bits = random.Next();
    for (int64_t j = 0; j < std::min<int64_t>(4, n - i); ++j) {
      store(i + j, float(int16_t(bits >> (16 * j))) * (1.0f / 32768.0f));
    }
  }
}

}  // namespace

StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Dummy(const ModelConfig& config, bool with_draft,
                                                        uint64_t seed) {
  std::unique_ptr<Checkpoint> c(new Checkpoint());
  c->source_ = "dummy weights";
  const bool fp8 = config.quant_method == "fp8";
  struct Plan {
    StoredTensor tensor;
    int64_t offset;
    TensorRole role;
    bool scale;
  };
  std::vector<Plan> plan;
  int64_t total = 0;
  const auto add = [&](std::string name, DType dtype, std::string_view dtype_name, std::vector<int64_t> shape,
                       TensorRole role, bool scale) {
    StoredTensor t;
    t.name = std::move(name);
    t.dtype = dtype;
    t.dtype_name = dtype_name;
    t.shape = std::move(shape);
    t.file = c->source_;
    t.bytes = t.elements() * SizeOf(dtype);
    plan.push_back({std::move(t), total, role, scale});
    total = AlignUp(total + plan.back().tensor.bytes, 64);
  };
  for (const ExpectedTensor& e : ExpectedTensors(config, with_draft)) {
    if (fp8 && e.role == TensorRole::kLinear) {
      add(e.name, DType::kF8E4M3, "F8_E4M3", e.shape, e.role, false);
      add(e.name + "_scale_inv", DType::kF32, "F32",
          {CeilDiv(e.shape[0], config.quant_block_n), CeilDiv(e.shape[1], config.quant_block_k)}, e.role,
          true);
    } else {
      add(e.name, DType::kBF16, "BF16", e.shape, e.role, false);
    }
  }
  c->arena_bytes_ = size_t(AlignUp(std::max<int64_t>(total, 64), 64));
  void* arena = mmap(nullptr, c->arena_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (arena == MAP_FAILED) return Exhausted("dummy weights: {} bytes cannot be allocated", total);
  c->arena_ = static_cast<std::byte*>(arena);
  for (Plan& p : plan) p.tensor.data = c->arena_ + p.offset;
  const auto fill = [&](const Plan& p) {
    const StoredTensor& t = p.tensor;
    std::byte* data = c->arena_ + p.offset;
    const int64_t n = t.elements();
    const uint64_t s = SeedOf(t.name, seed);
    const float unit =
        std::sqrt(3.0f / float(t.shape.back()));  // uniform values whose product keeps the variance
    if (p.scale) {
      auto* out = reinterpret_cast<float*>(data);
      const int64_t in = plan[size_t(&p - plan.data()) - 1].tensor.shape[1];
      std::fill(out, out + n, std::sqrt(3.0f / float(in)) / 448.0f);
    } else if (t.dtype == DType::kF8E4M3) {
      auto* out = reinterpret_cast<uint8_t*>(data);
      // Random codes are not uniform values; take the code of a uniform value from a table of 4096 steps.
      std::vector<uint8_t> codes(4096);
      for (int i = 0; i < 4096; ++i) codes[size_t(i)] = F32ToE4M3(448.0f * (float(i) - 2047.5f) / 2048.0f);
      Fill(s, n, [&](int64_t i, float v) { out[i] = codes[size_t((v + 1.0f) * 2047.99f)]; });
    } else {
      auto* out = reinterpret_cast<uint16_t*>(data);
      float scale = unit, base = 0;
      if (p.role == TensorRole::kNorm) scale = 0.1f, base = 1.0f;
      if (p.role == TensorRole::kBias) scale = 0.05f;
      if (t.name == "model.embed_tokens.weight") scale = 1.7f;
      Fill(s, n, [&](int64_t i, float v) { out[i] = F32ToBF16(base + scale * v); });
    }
  };
  // Each tensor's values follow from its name, so any thread may make any of them.
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < plan.size(); i = next++) fill(plan[i]);
  };
  std::vector<std::thread> others;
  if (total > kOneThread)
    for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  for (const Plan& p : plan) {
    const StoredTensor& t = p.tensor;
    c->by_name_.emplace(t.name, c->tensors_.size());
    c->tensors_.push_back(t);
  }
  return c;
}

}  // namespace sluice
