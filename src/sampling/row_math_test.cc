#include "sampling/row_math.h"

#include <cmath>
#include <limits>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"

namespace sluice {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(RowMath, ScanFindsTheMaximumAndRefusesWhatCannotBeSampled) {
  EXPECT_EQ(ScanRow(std::vector<float>{1, 3, 3, -kInf}.data(), 4).max, 3);
  EXPECT_FALSE(ScanRow(std::vector<float>{-5, -kInf}.data(), 2).unusable);
  EXPECT_EQ(ScanRow(std::vector<float>{-5, -7}.data(), 2).max, -5);
  EXPECT_TRUE(ScanRow(std::vector<float>{-kInf, -kInf}.data(), 2).unusable);
  EXPECT_TRUE(ScanRow(std::vector<float>{1, kNan, 2}.data(), 3).unusable);
  EXPECT_TRUE(ScanRow(std::vector<float>{1, -kNan, 2}.data(), 3).unusable);
  EXPECT_TRUE(ScanRow(std::vector<float>{1, kInf}.data(), 2).unusable);
}

TEST(RowMath, NegativeZeroTiesWithZero) {
  const std::vector<float> x{-1, -0.0f, 0.0f};
  EXPECT_EQ(FirstIndexOf(x.data(), 3, ScanRow(x.data(), 3).max), 1);
}

TEST(RowMath, ExpIsAccurateToTwoInTenMillion) {
  std::vector<float> x, w;
  for (float v = 0; v > -86.9f; v -= 0.0137f) x.push_back(v);
  w.resize(x.size());
  ExpWeights(x.data(), int32_t(x.size()), 0.0f, 1.0f, w.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(double(x[i]));
    EXPECT_NEAR(double(w[i]) / want, 1.0, 2e-7) << x[i];
  }
  EXPECT_EQ(w[0], 1.0f);
}

TEST(RowMath, ExpOfTinyTemperatureIsZeroOrOneNeverNan) {
  const std::vector<float> x{1, 3, 3, -kInf};
  std::vector<float> w(4);
  for (const float t : {1e-4f, 1e-30f, 1e-44f}) {
    ExpWeights(x.data(), 4, 3, t, w.data());
    EXPECT_EQ(w, (std::vector<float>{0, 1, 1, 0})) << t;
  }
}

TEST(RowMath, LogSumExpMatchesDoubles) {
  SeededStream random(5);
  std::vector<float> x(1000), w(1000);
  double max = -1e9, want = 0;
  for (float& v : x) {
    v = float(random.Unit() * 40 - 20);
    max = std::max(max, double(v));
  }
  for (const float v : x) want += std::exp(double(v) - max);
  EXPECT_NEAR(LogSumExp(x.data(), 1000, float(max), w.data()), max + std::log(want), 1e-6);
}

TEST(RowMath, AllFiniteSeesNansAndInfinitiesOfBothSigns) {
  std::vector<float> x(100, -3.0f);
  EXPECT_TRUE(AllFinite(x.data(), 100));
  for (const float bad : {kInf, -kInf, kNan, -kNan}) {
    x[57] = bad;
    EXPECT_FALSE(AllFinite(x.data(), 100));
  }
}

TEST(RowMath, HashSeesEveryBitOfEveryElement) {
  std::vector<float> x(37, 1.0f);
  const uint64_t base = HashRow(x.data(), 37);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = std::nextafter(1.0f, 2.0f);
    EXPECT_NE(HashRow(x.data(), 37), base) << i;
    x[i] = 1.0f;
  }
  EXPECT_NE(HashRow(x.data(), 36), base);
  std::swap(x[3] = 2, x[4]);
  const uint64_t swapped = HashRow(x.data(), 37);
  std::swap(x[3], x[4]);
  EXPECT_NE(HashRow(x.data(), 37), swapped);
}

TEST(RowMath, ShareOfIsTheSoftmaxAtAToken) {
  std::vector<float> x(5000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i * 37 % 100) * 0.1f - 20;
  x[77] = 3;
  x[78] = 2;
  double sum = 0;
  for (const float v : x) sum += std::exp(double(v) - 3);
  EXPECT_NEAR(ShareOf(x.data(), int32_t(x.size()), 3, 77), 1 / sum, 0.01 / sum);
  EXPECT_NEAR(ShareOf(x.data(), int32_t(x.size()), 3, 78), std::exp(-1) / sum, 0.01 / sum);
  x.assign(100, -std::numeric_limits<float>::infinity());
  x[5] = 1;
  EXPECT_EQ(ShareOf(x.data(), 100, 1, 5), 1);
  EXPECT_EQ(ShareOf(x.data(), 100, 1, 6), 0);
}

}  // namespace
}  // namespace sluice
