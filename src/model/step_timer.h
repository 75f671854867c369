// Where a forward pass spends its time, by kind of work. Off (a null pointer) it costs one test per op.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>

namespace sluice {

enum class Zone : uint8_t {
  kEmbed,
  kNorm,
  kGemm,
  kHeadGemm,
  kQuerySplit,
  kKvWrite,
  kIndexGemm,
  kIndexSelect,
  kAttention,
  kGate,
  kExperts,
  kActivation,
  kLogits,
  kCount
};

constexpr std::string_view Name(Zone z) {
  constexpr std::string_view kNames[] = {"embed",    "norm",       "gemm",         "head_gemm", "query_split",
                                         "kv_write", "index_gemm", "index_select", "attention", "gate",
                                         "experts",  "activation", "logits"};
  return kNames[size_t(z)];
}

// Matrix products and attention: what a forward pass is for. The rest is overhead.
constexpr bool IsCompute(Zone z) {
  return z == Zone::kGemm || z == Zone::kHeadGemm || z == Zone::kIndexGemm || z == Zone::kIndexSelect ||
         z == Zone::kAttention || z == Zone::kExperts || z == Zone::kLogits;
}

class StepTimer {
 public:
  // Called where a zone begins and ends: waits for a queue that runs behind, so that its work is what is
  // timed.
  std::function<void()> settle;
  void Add(Zone z, int64_t ns) { ns_[size_t(z)] += ns; }
  int64_t ns(Zone z) const { return ns_[size_t(z)]; }
  int64_t total_ns() const {
    int64_t n = 0;
    for (int64_t v : ns_) n += v;
    return n;
  }
  double compute_share() const {
    int64_t n = 0;
    for (size_t z = 0; z < size_t(Zone::kCount); ++z) n += IsCompute(Zone(z)) ? ns_[z] : 0;
    return total_ns() == 0 ? 0 : double(n) / double(total_ns());
  }
  void Reset() { ns_ = {}; }

 private:
  std::array<int64_t, size_t(Zone::kCount)> ns_{};
};

// Times a scope. Exact where a queue runs inline; elsewhere it times the submission.
class ZoneScope {
 public:
  ZoneScope(StepTimer* timer, Zone zone) : timer_(timer), zone_(zone) {
    if (timer_ == nullptr) return;
    if (timer_->settle) timer_->settle();
    start_ = std::chrono::steady_clock::now();
  }
  ~ZoneScope() {
    if (timer_ == nullptr) return;
    if (timer_->settle) timer_->settle();
    timer_->Add(
        zone_, std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_)
                   .count());
  }
  ZoneScope(const ZoneScope&) = delete;
  ZoneScope& operator=(const ZoneScope&) = delete;

 private:
  StepTimer* timer_;
  Zone zone_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace sluice
