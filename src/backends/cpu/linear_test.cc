// Matrix products against double sums, and the rule that everything rests on: a row's bits depend on that row
// alone.
#include <cmath>

#include "backends/cpu/test_support.h"
#include "base/ids.h"
#include "gtest/gtest.h"

namespace sluice::cpu {
namespace {

using testing::AllNumerics;
using testing::FromAct;
using testing::Normal;
using testing::Numerics;
using testing::RoundTo;
using testing::ToAct;

class LinearTest : public ::testing::TestWithParam<Numerics> {
 protected:
  DType act() const { return GetParam().act; }
  std::unique_ptr<ops::Backend> backend_ = testing::Make(GetParam());
};

std::vector<float> Apply(ops::Backend& b, int threads, const ops::Linear& w, const std::vector<std::byte>& x,
                         int64_t rows) {
  auto q = b.MakeQueue(threads, -1);
  std::vector<float> y(size_t(rows * w.out), -7.0f);
  b.Apply(*q, {.weight = &w, .rows = rows, .x = x.data(), .y = y.data()});
  return y;
}

struct Shape {
  int64_t out, in;
};

TEST_P(LinearTest, MatchesDoubleSums) {
  for (const Shape s : {Shape{1, 1}, {3, 7}, {64, 128}, {33, 65}, {130, 384}, {100, 1000}}) {
    for (const int64_t rows : {1, 2, 5, 13, 40}) {
      const std::vector<float> w = Normal(s.out * s.in, 1), x = Normal(rows * s.in, 2);
      const ops::WeightView view{.dtype = DType::kF32, .out = s.out, .in = s.in, .data = w.data()};
      const auto packed = backend_->Pack({&view, 1}).value();
      const std::vector<float> y = Apply(*backend_, 2, *packed, ToAct(act(), x), rows);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t n = 0; n < s.out; ++n) {
          double sum = 0, size = 0;
          for (int64_t k = 0; k < s.in; ++k) {
            const double p =
                double(RoundTo(act(), x[size_t(r * s.in + k)])) * RoundTo(act(), w[size_t(n * s.in + k)]);
            sum += p;
            size += std::fabs(p);
          }
          // f32 accumulation: each of `in` steps rounds to half a unit of a partial sum, which is at most
          // `size`.
          ASSERT_NEAR(y[size_t(r * s.out + n)], sum, 0x1p-24 * double(s.in + 1) * size + 1e-30)
              << s.out << "x" << s.in << " rows " << rows << " at " << r << "," << n;
        }
      }
    }
  }
}

TEST_P(LinearTest, OutputModesAgree) {
  const int64_t rows = 9, out = 70, in = 48;
  const std::vector<float> w = Normal(out * in, 3), x = Normal(rows * in, 4), base = Normal(rows * out, 5);
  const ops::WeightView view{.dtype = DType::kF32, .out = out, .in = in, .data = w.data()};
  const auto packed = backend_->Pack({&view, 1}).value();
  const auto xa = ToAct(act(), x);
  auto q = backend_->MakeQueue(1, -1);
  const std::vector<float> plain = Apply(*backend_, 1, *packed, xa, rows);
  std::vector<float> sum = base;
  backend_->Apply(
      *q,
      {.weight = packed.get(), .rows = rows, .x = xa.data(), .y = sum.data(), .mode = ops::OutMode::kF32Add});
  std::vector<std::byte> half(size_t(rows * out * SizeOf(act())));
  backend_->Apply(
      *q,
      {.weight = packed.get(), .rows = rows, .x = xa.data(), .y = half.data(), .mode = ops::OutMode::kAct});
  const std::vector<float> acts = FromAct(act(), half);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(sum[i], base[i] + plain[i]);
    EXPECT_EQ(acts[i], RoundTo(act(), plain[i]));
  }
}

TEST_P(LinearTest, StridesAndNeighboursAreKept) {
  const int64_t rows = 7, out = 37, in = 40, x_ld = 50, y_ld = 45;
  const std::vector<float> w = Normal(out * in, 6), wide = Normal(rows * x_ld, 7);
  std::vector<float> dense;
  for (int64_t r = 0; r < rows; ++r)
    dense.insert(dense.end(), wide.begin() + r * x_ld, wide.begin() + r * x_ld + in);
  const ops::WeightView view{.dtype = DType::kF32, .out = out, .in = in, .data = w.data()};
  const auto packed = backend_->Pack({&view, 1}).value();
  auto q = backend_->MakeQueue(2, -1);
  const auto xa = ToAct(act(), wide);
  std::vector<float> y(size_t(rows * y_ld), -7.0f);
  backend_->Apply(
      *q, {.weight = packed.get(), .rows = rows, .x = xa.data(), .x_ld = x_ld, .y = y.data(), .y_ld = y_ld});
  const std::vector<float> want = Apply(*backend_, 1, *packed, ToAct(act(), dense), rows);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < y_ld; ++n) {
      ASSERT_EQ(y[size_t(r * y_ld + n)], n < out ? want[size_t(r * out + n)] : -7.0f);
    }
  }
}

TEST_P(LinearTest, RowBitsDependOnTheRowAlone) {
  std::vector<Shape> shapes = {{384, 384}, {96, 2048}, {200, 33}};
  if (GetParam().isa == "portable") shapes = {{40, 64}};
  for (const Shape s : shapes) {
    const std::vector<float> w = Normal(s.out * s.in, 8);
    const auto x = ToAct(act(), Normal(300 * s.in, 9));
    const ops::WeightView view{.dtype = DType::kF32, .out = s.out, .in = s.in, .data = w.data()};
    const auto packed = backend_->Pack({&view, 1}).value();
    const std::vector<float> all = Apply(*backend_, 1, *packed, x, 300);
    for (int threads : {1, 2}) {
      auto q = backend_->MakeQueue(threads, -1);
      std::vector<float> y(size_t(300 * s.out));
      for (int64_t rows = 1; rows <= 300; rows += rows < 40 || s.in < 500 ? 1 : 13) {
        // The last `rows` rows: each row also stands at another place of the batch than in `all`.
        const std::byte* tail = x.data() + (300 - rows) * s.in * SizeOf(act());
        backend_->Apply(*q, {.weight = packed.get(), .rows = rows, .x = tail, .y = y.data()});
        ASSERT_EQ(std::memcmp(y.data(), all.data() + (300 - rows) * s.out, size_t(rows * s.out) * 4), 0)
            << s.out << "x" << s.in << " rows " << rows << " threads " << threads;
      }
    }
  }
}

TEST_P(LinearTest, CheckpointFormsGiveTheirDequantisedValues) {
  const int64_t rows = 5, out = 150, in = 300;
  const std::vector<float> x = Normal(rows * in, 10);
  std::vector<uint8_t> codes(size_t(out * in));
  std::mt19937 rng(11);
  for (uint8_t& c : codes) {
    do c = uint8_t(rng());
    while ((c & 0x7f) == 0x7f);
  }
  std::vector<float> scale = Normal(2 * 3, 12, 0.01f), dense(codes.size());
  std::vector<uint16_t> bf16(codes.size()), f16(codes.size());
  for (int64_t n = 0; n < out; ++n) {
    for (int64_t k = 0; k < in; ++k) {
      const size_t i = size_t(n * in + k);
      dense[i] = E4M3ToF32(codes[i]) * scale[size_t(n / 128 * 3 + k / 128)];
      bf16[i] = F32ToBF16(dense[i]);
      f16[i] = uint16_t((codes[i] & 0x80) << 8 | (codes[i] & 0x7f)
                                                     << 7);  // e4m3's fields in f16: 2^-8 times the value
    }
  }
  auto apply = [&](ops::WeightView v) {
    v.out = out;
    v.in = in;
    return Apply(*backend_, 1, *backend_->Pack({&v, 1}).value(), ToAct(act(), x), rows);
  };
  const auto from_dense = apply({.dtype = DType::kF32, .data = dense.data()});
  EXPECT_EQ(apply({.dtype = DType::kF8E4M3,
                   .data = codes.data(),
                   .scale = scale.data(),
                   .scale_block_n = 128,
                   .scale_block_k = 128}),
            from_dense);
  std::vector<float> widened(codes.size());
  for (size_t i = 0; i < bf16.size(); ++i) widened[i] = BF16ToF32(bf16[i]);
  EXPECT_EQ(apply({.dtype = DType::kBF16, .data = bf16.data()}),
            apply({.dtype = DType::kF32, .data = widened.data()}));
  for (size_t i = 0; i < f16.size(); ++i) widened[i] = E4M3ToF32(codes[i]) / 256;
  EXPECT_EQ(apply({.dtype = DType::kF16, .data = f16.data()}),
            apply({.dtype = DType::kF32, .data = widened.data()}));
}

// e4m3 weights may stay e4m3 in memory; the products must not show it, at any number of rows.
TEST_P(LinearTest, Fp8WeightsGiveTheBitsOfTheirBf16Form) {
  const int64_t in = 320;
  const int64_t outs[] = {160, 72};  // concatenated; the second starts inside a panel's scale block
  std::vector<std::vector<uint8_t>> codes;
  std::vector<std::vector<float>> scales, dense;
  std::mt19937 rng(21);
  for (int64_t out : outs) {
    codes.emplace_back(size_t(out * in));
    for (uint8_t& c : codes.back()) {
      do c = uint8_t(rng());
      while ((c & 0x7f) == 0x7f);
    }
    scales.push_back(Normal(CeilDiv(out, 128) * CeilDiv(in, 128), 22, 0.01f));
    dense.emplace_back();
    for (int64_t i = 0; i < out * in; ++i) {
      const float s = scales.back()[size_t(i / in / 128 * CeilDiv(in, 128) + i % in / 128)];
      dense.back().push_back(RoundTo(act(), E4M3ToF32(codes.back()[size_t(i)]) * s));
    }
  }
  std::vector<ops::WeightView> fp8, plain;
  for (size_t i = 0; i < 2; ++i) {
    fp8.push_back({.dtype = DType::kF8E4M3,
                   .out = outs[i],
                   .in = in,
                   .data = codes[i].data(),
                   .scale = scales[i].data(),
                   .scale_block_n = 128,
                   .scale_block_k = 128});
    plain.push_back({.dtype = DType::kF32, .out = outs[i], .in = in, .data = dense[i].data()});
  }
  const auto packed = backend_->Pack(fp8).value(), want = backend_->Pack(plain).value();
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 40, 300}) {
    const auto x = ToAct(act(), Normal(rows * in, 23));
    ASSERT_EQ(Apply(*backend_, 2, *packed, x, rows), Apply(*backend_, 1, *want, x, rows)) << rows;
  }
  if (GetParam().isa == "avx512_bf16" && act() == DType::kBF16) {
    EXPECT_LT(packed->packed_bytes, want->packed_bytes * 6 / 10 + 8192) << packed->kernel;
  }
  codes[0][77] = 0x7f;  // NaN must come out as NaN
  const auto nan = backend_->Pack(fp8).value();
  const std::vector<float> y = Apply(*backend_, 1, *nan, ToAct(act(), Normal(in, 24)), 1);
  EXPECT_TRUE(std::isnan(y[77 / in]));
}

TEST_P(LinearTest, ConcatenatedMatricesEqualSeparateOnes) {
  const int64_t rows = 3, in = 64;
  const std::vector<float> a = Normal(40 * in, 13), b = Normal(50 * in, 14);
  const ops::WeightView views[] = {{.dtype = DType::kF32, .out = 40, .in = in, .data = a.data()},
                                   {.dtype = DType::kF32, .out = 50, .in = in, .data = b.data()}};
  const auto x = ToAct(act(), Normal(rows * in, 15));
  const auto both = Apply(*backend_, 1, *backend_->Pack(views).value(), x, rows);
  const auto first = Apply(*backend_, 1, *backend_->Pack({views, 1}).value(), x, rows);
  const auto second = Apply(*backend_, 1, *backend_->Pack({views + 1, 1}).value(), x, rows);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < 90; ++n) {
      ASSERT_EQ(both[size_t(r * 90 + n)],
                n < 40 ? first[size_t(r * 40 + n)] : second[size_t(r * 50 + n - 40)]);
    }
  }
}

TEST_P(LinearTest, HeadsEqualTheirOwnMatrices) {
  const int64_t heads = 5, out = 48, in = 40;
  const std::vector<float> w = Normal(heads * out * in, 16);
  std::vector<std::vector<ops::WeightView>> groups;
  for (int64_t h = 0; h < heads; ++h) {
    groups.push_back({{.dtype = DType::kF32, .out = out, .in = in, .data = w.data() + h * out * in}});
  }
  const auto packed = backend_->PackGroups(groups).value();
  for (const int64_t rows : {0, 1, 6, 200}) {
    const std::vector<float> x = Normal(rows * heads * in, 17);
    const int64_t y_row = heads * (out + 8), element = SizeOf(act());
    std::vector<std::byte> y(size_t(rows * y_row * element));
    auto q = backend_->MakeQueue(2, -1);
    const auto xa = ToAct(act(), x);
    backend_->ApplyHeads(*q, {.weight = packed.get(),
                              .rows = rows,
                              .x = xa.data(),
                              .x_row = heads * in,
                              .x_head = in,
                              .y = y.data(),
                              .y_row = y_row,
                              .y_head = out + 8});
    for (int64_t h = 0; h < heads; ++h) {
      const auto one = backend_->Pack(groups[size_t(h)]).value();
      std::vector<std::byte> want(size_t(rows * out * element));
      backend_->Apply(*q, {.weight = one.get(),
                           .rows = rows,
                           .x = xa.data() + h * in * element,
                           .x_ld = heads * in,
                           .y = want.data(),
                           .mode = ops::OutMode::kAct});
      for (int64_t r = 0; r < rows; ++r) {
        ASSERT_EQ(std::memcmp(y.data() + (r * y_row + h * (out + 8)) * element,
                              want.data() + r * out * element, size_t(out * element)),
                  0);
      }
    }
  }
}

TEST_P(LinearTest, RefusesWhatItCannotPack) {
  const float w[4] = {};
  const ops::WeightView ints{.dtype = DType::kI32, .out = 2, .in = 2, .data = w};
  EXPECT_EQ(backend_->Pack({&ints, 1}).status().code(), absl::StatusCode::kUnimplemented);
  const ops::WeightView unequal[] = {{.dtype = DType::kF32, .out = 2, .in = 2, .data = w},
                                     {.dtype = DType::kF32, .out = 4, .in = 1, .data = w}};
  EXPECT_EQ(backend_->Pack(unequal).status().code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(All, LinearTest, ::testing::ValuesIn(AllNumerics()),
                         [](const auto& info) { return testing::Label(info.param); });

TEST(CpuBackendTest, RefusesUnknownOptions) {
  EXPECT_EQ(MakeCpuBackend({.isa = "avx9"}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeCpuBackend({.act = DType::kF16}).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace sluice::cpu
