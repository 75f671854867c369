// Exact selection against a sort, over shapes of scores that a sampled guess gets wrong.
#include "backends/cpu/index_select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "backends/cpu/test_support.h"
#include "gtest/gtest.h"

namespace sluice::cpu {
namespace {

std::vector<int32_t> Sorted(const std::vector<float>& scores, int64_t k, float* gap) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int32_t i) {
    return std::isnan(scores[size_t(i)]) ? -std::numeric_limits<float>::infinity() : scores[size_t(i)];
  };
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return value(x) > value(y); });
  *gap = value(order[size_t(k - 1)]) - value(order[size_t(k)]);
  order.resize(size_t(k));
  std::sort(order.begin(), order.end());
  return order;
}

TEST(SelectTopKTest, EqualsAStableSort) {
  struct Form {
    const char* name;
    std::function<float(int64_t, float)> value;  // of (position, noise)
  };
  const Form forms[] = {
      {"noise", [](int64_t, float x) { return x; }},
      {"constant", [](int64_t, float) { return 3.0f; }},
      {"few values", [](int64_t, float x) { return std::round(x); }},
      {"rising", [](int64_t i, float) { return float(i); }},
      {"falling", [](int64_t i, float) { return -float(i); }},
      {"best where the sample looks", [](int64_t i, float x) { return i % 8 == 0 ? 100 + x : x; }},
      {"best where it does not", [](int64_t i, float x) { return i % 8 == 3 ? 100 + x : x; }},
      {"one cluster", [](int64_t i, float x) { return i >= 5000 && i < 7100 ? 50 + x : x; }},
      {"signed zeros", [](int64_t i, float x) { return x > 0 ? 0.0f : (i % 2 != 0 ? -0.0f : 0.0f); }},
      {"infinities",
       [](int64_t i, float x) { return i % 3 == 0 ? std::numeric_limits<float>::infinity() : x; }},
      {"some NaN",
       [](int64_t i, float x) { return i % 5 == 0 ? std::numeric_limits<float>::quiet_NaN() : x; }},
  };
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    const Isa which = isa == std::string("portable")
                          ? Isa::kPortable
                          : (isa == std::string("avx2") ? Isa::kAvx2 : Isa::kAvx512);
    const KernelTable* t = KernelsFor(which, false);
    if (t == nullptr) continue;
    for (const Form& f : forms) {
      for (const int64_t n : {2, 65, 2100, 8192, 8199, 20000}) {
        std::vector<float> scores = testing::Normal(n, uint64_t(n));
        for (int64_t i = 0; i < n; ++i) scores[size_t(i)] = f.value(i, scores[size_t(i)]);
        for (const int64_t k : {1, 64, 1000, 2048}) {
          if (k >= n) continue;
          std::vector<int32_t> got(static_cast<size_t>(k)), found(size_t(n + 64));
          std::vector<uint32_t> keys(static_cast<size_t>(n));
          float gap = 0;
          const std::vector<int32_t> want = Sorted(scores, k, &gap);
          const float got_gap = SelectTopK(*t, scores.data(), n, k, got.data(), found.data(), keys.data());
          ASSERT_EQ(got, want) << isa << " " << f.name << " n " << n << " k " << k;
          ASSERT_EQ(got_gap, std::isnan(gap) ? 0.0f : gap)
              << isa << " " << f.name << " n " << n << " k " << k;
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice::cpu
