#include "backends/cpu/cpu_backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>

#include "backends/cpu/attention.h"
#include "backends/cpu/cpu_queue.h"
#include "backends/cpu/index_select.h"
#include "backends/cpu/kernel_table.h"
#include "backends/cpu/linear.h"
#include "backends/cpu/row_drivers.h"

namespace sluice::cpu {
namespace {

struct IsaName {
  Isa isa;
  const char* name;
};
constexpr std::array<IsaName, 4> kIsaNames = {{{Isa::kPortable, "portable"},
                                               {Isa::kAvx2, "avx2"},
                                               {Isa::kAvx512, "avx512"},
                                               {Isa::kAvx512Bf16, "avx512_bf16"}}};

class CpuBackend final : public ops::Backend, public ops::SlotSum {
 public:
  CpuBackend(const KernelTable& table, ops::BackendInfo info) : t_(table), info_(std::move(info)) {}

  const ops::BackendInfo& info() const override { return info_; }
  const KernelTable& table() const { return t_; }
  std::unique_ptr<ops::Queue> MakeQueue(int threads, int first_core) override {
    return std::make_unique<CpuQueue>(threads, first_core);
  }
  int64_t RowCapacity(int64_t rows) const override { return rows; }
  Status Plan(const ops::Limits&) override { return OkStatus(); }

  StatusOr<std::unique_ptr<ops::Linear>> Pack(std::span<const ops::WeightView> concat_out) override {
    const std::vector<ops::WeightView> group(concat_out.begin(), concat_out.end());
    return PackGroups({&group, 1});
  }
  StatusOr<std::unique_ptr<ops::Linear>> PackGroups(
      std::span<const std::vector<ops::WeightView>> groups) override {
    ASSIGN_OR_RETURN(std::unique_ptr<PackedLinear> p, PackLinear(t_, info_.act, groups, weights_));
    return std::unique_ptr<ops::Linear>(std::move(p));
  }

  void Embed(ops::Queue& q, const ops::EmbedArgs& a) override { RunEmbed(Cpu(q), t_, a); }
  void Apply(ops::Queue& q, const ops::LinearArgs& a) override { RunLinear(Cpu(q), t_, info_.act, a); }
  void ApplyHeads(ops::Queue& q, const ops::HeadLinearArgs& a) override {
    RunHeads(Cpu(q), t_, info_.act, a);
  }
  void RmsNorm(ops::Queue& q, const ops::RmsNormArgs& a) override { RunRmsNorm(Cpu(q), t_, info_.act, a); }
  void SplitQuery(ops::Queue& q, const ops::SplitQueryArgs& a) override {
    RunSplitQuery(Cpu(q), t_, info_.act, a);
  }
  void WriteLatent(ops::Queue& q, const ops::WriteLatentArgs& a) override { RunWriteLatent(Cpu(q), t_, a); }
  void WriteIndex(ops::Queue& q, const ops::WriteIndexArgs& a) override { RunWriteIndex(Cpu(q), t_, a); }
  void IndexSelect(ops::Queue& q, const ops::IndexSelectArgs& a) override {
    RunIndexSelect(Cpu(q), t_, info_.act, a);
  }
  void Attention(ops::Queue& q, const ops::AttentionArgs& a) override {
    RunAttention(Cpu(q), t_, info_.act, a);
  }
  void Gate(ops::Queue& q, const ops::GateArgs& a) override { RunGate(Cpu(q), t_, a); }
  void Moe(ops::Queue& q, const ops::MoeArgs& a) override { RunMoe(Cpu(q), t_, info_.act, a); }
  void SumSlots(ops::Queue& q, const ops::SumSlotsArgs& a) override { RunSumSlots(Cpu(q), t_, a); }
  void SiluMul(ops::Queue& q, const ops::SiluMulArgs& a) override { RunSiluMul(Cpu(q), t_, info_.act, a); }
  void GatherRows(ops::Queue& q, const void* src, const int32_t* index, int64_t rows, int64_t bytes,
                  void* dst) override {
    RunGatherRows(Cpu(q), src, index, rows, bytes, dst);
  }

 private:
  const KernelTable& t_;
  ops::BackendInfo info_;
  WeightMemory weights_;
};

}  // namespace

StatusOr<std::unique_ptr<ops::Backend>> MakeCpuBackend(const CpuOptions& options) {
  if (options.act != DType::kBF16 && options.act != DType::kF32) {
    return Unsupported("activation type {} is not supported on the CPU; use bf16 or float32",
                       Name(options.act));
  }
  Isa isa = BestIsa();
  if (options.isa != "auto") {
    const auto* found = std::find_if(kIsaNames.begin(), kIsaNames.end(),
                                     [&](const IsaName& n) { return options.isa == n.name; });
    if (found == kIsaNames.end()) {
      return Invalid("cpu instruction class '{}' is unknown; use auto, portable, avx2, avx512 or avx512_bf16",
                     options.isa);
    }
    isa = found->isa;
  }
  const KernelTable* table = KernelsFor(isa, options.act == DType::kBF16);
  const char* name = kIsaNames[size_t(isa)].name;
  if (table == nullptr) {
    return Unsupported("this processor lacks {}; the best it has is {}", name,
                       kIsaNames[size_t(BestIsa())].name);
  }
  // A change of any kernel's arithmetic must change the number: caches written by another are then not
  // reused.
  return std::make_unique<CpuBackend>(
      *table, ops::BackendInfo{.device = "cpu",
                               .isa = name,
                               .act = options.act,
                               .numerics_class = fmt::format("cpu/{}/{}/1", name, Name(options.act)),
                               .own_blocks = true});
}

void SelectTopKRows(const ops::Backend& backend, ops::Queue& queue, const float* scores, int64_t rows,
                    int64_t n, int64_t k, int32_t* out) {
  ThreadGroup& group = Cpu(queue).group();
  group.ParallelFor(rows, [&](int thread, int64_t r) {
    auto* keys = reinterpret_cast<uint32_t*>(group.scratch(thread).Get((2 * n + 64) * 4));
    SelectTopK(static_cast<const CpuBackend&>(backend).table(), scores + r * n, n, k, out + r * k,
               reinterpret_cast<int32_t*>(keys + n), keys);
  });
}

double MeasurePeakFlops(const ops::Backend& backend, ops::Queue& queue) {
  const KernelTable& t = static_cast<const CpuBackend&>(backend).table();
  ThreadGroup& group = Cpu(queue).group();
  constexpr int64_t kRounds = 10000;  // about a quarter of a millisecond
  std::vector<double> done(size_t(group.threads()) * 20);
  const auto start = std::chrono::steady_clock::now();
  group.ParallelFor(int64_t(done.size()), [&](int, int64_t i) {
    float sink[3] = {0.5f, 0.25f, 0};
    done[size_t(i)] = t.peak(kRounds, sink);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  double total = 0;
  for (double d : done) total += d;
  return total / seconds.count();
}

double MeasureReadBytesPerSecond(ops::Queue& queue, std::span<const std::byte> memory) {
  ThreadGroup& group = Cpu(queue).group();
  constexpr int64_t kPiece = 1 << 20;
  const int64_t pieces = int64_t(memory.size()) / kPiece;
  std::vector<uint64_t> sums(static_cast<size_t>(pieces));
  const auto start = std::chrono::steady_clock::now();
  group.ParallelFor(pieces, [&](int, int64_t i) {
    const auto* p = reinterpret_cast<const uint64_t*>(memory.data() + i * kPiece);
    uint64_t s[8] = {};
    for (int64_t k = 0; k < kPiece / 8; k += 8) {
      for (int j = 0; j < 8; ++j) s[j] += p[k + j];
    }
    sums[size_t(i)] = s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  static std::atomic<uint64_t> keep;  // the sums are used, so the reads happen
  for (uint64_t s : sums) keep.fetch_add(s, std::memory_order_relaxed);
  return double(pieces * kPiece) / seconds.count();
}

}  // namespace sluice::cpu
