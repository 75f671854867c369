// One catalogue of cases for every op and every built backend, against the double-precision reference
// backend.
//
// Tolerances come from the types and the reduction length: an f32 chain of n steps is off by at most n half
// units of the sum of magnitudes; a value stored as Act or bf16 by half a unit of it.
#include <cmath>
#include <limits>

#include "backends/cpu/test_support.h"
#include "gtest/gtest.h"
#include "kv_world.h"
#include "ops/reference/reference_backend.h"

namespace sluice {
namespace {

using cpu::testing::AllNumerics;
using cpu::testing::FromAct;
using cpu::testing::Numerics;
using cpu::testing::ToAct;
using cpu::testing::Ulp;
using testing::KvShape;
using testing::KvWorld;
using testing::Normal;

class CatalogueTest : public ::testing::TestWithParam<Numerics> {
 protected:
  DType act() const { return GetParam().act; }
  int64_t element() const { return SizeOf(act()); }
  std::vector<std::byte> ActBuffer(int64_t n) const { return std::vector<std::byte>(size_t(n * element())); }

  // tested and reference run the same op; both get their own output vector.
  template <typename Out, typename Fn>
  void Both(Out* got, Out* want, Fn fn) {
    fn(*tested_, *queue_, *got);
    fn(*oracle_, *oracle_queue_, *want);
  }
  void ExpectNear(const std::vector<float>& got, const std::vector<float>& want, double relative,
                  double absolute) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], relative * std::fabs(want[i]) + absolute) << "at " << i;
    }
  }

  std::unique_ptr<ops::Backend> tested_ = cpu::testing::Make(GetParam());
  std::unique_ptr<ops::Backend> oracle_ = ops::MakeReferenceBackend(GetParam().act);
  std::unique_ptr<ops::Queue> queue_ = tested_->MakeQueue(2, -1);
  std::unique_ptr<ops::Queue> oracle_queue_ = oracle_->MakeQueue(1, -1);
};

TEST_P(CatalogueTest, Embed) {
  const int64_t vocab = 11, hidden = 70;
  const std::vector<float> table = Normal(vocab * hidden, 1);
  std::vector<uint16_t> half(table.size());
  for (size_t i = 0; i < table.size(); ++i) half[i] = F32ToBF16(table[i]);
  const std::vector<int32_t> tokens = {10, 0, 3, 3};
  for (const DType t : {DType::kF32, DType::kBF16}) {
    for (const int64_t rows : {0, 1, 4}) {
      std::vector<float> got(size_t(rows * hidden) + 1), want = got;
      Both(&got, &want, [&](ops::Backend& b, ops::Queue& q, std::vector<float>& out) {
        b.Embed(q, {.rows = rows,
                    .hidden = hidden,
                    .vocab = vocab,
                    .table = {.dtype = t,
                              .out = vocab,
                              .in = hidden,
                              .data = t == DType::kF32 ? (const void*)table.data() : half.data()},
                    .tokens = tokens.data(),
                    .x = out.data()});
      });
      EXPECT_EQ(got, want);
    }
  }
}

TEST_P(CatalogueTest, RmsNorm) {
  for (const int64_t dim : {1, 7, 64, 384, 1023, 6144}) {
    for (const int64_t rows : {0, 1, 5}) {
      const int64_t ld = dim + 3;
      std::vector<float> x = Normal(rows * ld, 2);
      if (rows > 1) std::fill(x.begin(), x.begin() + ld, 0.0f);  // a row of zeros stays zero
      const std::vector<float> w = Normal(dim, 3);
      std::vector<float> got(size_t(rows * dim)), want = got;
      std::vector<std::byte> act_got = ActBuffer(rows * dim), act_want = act_got;
      auto run = [&](ops::Backend& b, ops::Queue& q, std::vector<float>& f32, std::vector<std::byte>& y) {
        b.RmsNorm(q, {.rows = rows,
                      .dim = dim,
                      .x = x.data(),
                      .x_ld = ld,
                      .weight = w.data(),
                      .eps = 1e-5f,
                      .y_act = y.data(),
                      .y_f32 = f32.data()});
      };
      run(*tested_, *queue_, got, act_got);
      run(*oracle_, *oracle_queue_, want, act_want);
      ExpectNear(got, want, 0x1p-23 * (4 + std::sqrt(double(dim))), 0);
      ExpectNear(FromAct(act(), act_got), FromAct(act(), act_want),
                 Ulp(act()) + 0x1p-23 * (4 + std::sqrt(double(dim))), 0);
    }
  }
}

TEST_P(CatalogueTest, SplitQuery) {
  const int64_t rows = 5, heads = 3, nope = 20, rope = 16, kv = 24;
  const testing::Rope table(1000, rope);
  const std::vector<float> q = Normal(rows * heads * (nope + rope), 4);
  const std::vector<int32_t> positions = {0, 1, 63, 64, 999};
  for (const bool interleave : {true, false}) {
    std::vector<std::byte> nope_got = ActBuffer(rows * heads * nope), nope_want = nope_got;
    std::vector<std::byte> full_got = ActBuffer(rows * heads * (kv + rope)), full_want = full_got;
    auto run = [&](ops::Backend& b, ops::Queue& queue, std::vector<std::byte>& n, std::vector<std::byte>& f) {
      b.SplitQuery(queue, {.rows = rows,
                           .heads = heads,
                           .nope = nope,
                           .rope = rope,
                           .kv_lora = kv,
                           .q = q.data(),
                           .positions = positions.data(),
                           .table = table.table(),
                           .interleave = interleave,
                           .q_nope = n.data(),
                           .q_full = f.data()});
    };
    run(*tested_, *queue_, nope_got, full_got);
    run(*oracle_, *oracle_queue_, nope_want, full_want);
    EXPECT_EQ(nope_got, nope_want);
    ExpectNear(FromAct(act(), full_got), FromAct(act(), full_want), Ulp(act()), 8 * 0x1p-24);
  }
}

TEST_P(CatalogueTest, SiluMulAndGatherRows) {
  for (const int64_t dim : {1, 33, 256}) {
    const int64_t rows = 4;
    std::vector<float> x = Normal(rows * 2 * dim, 5, 8.0f);
    x[0] = 100, x[size_t(dim) - 1] = -100;
    std::vector<std::byte> got = ActBuffer(rows * dim), want = got;
    Both(&got, &want, [&](ops::Backend& b, ops::Queue& q, std::vector<std::byte>& y) {
      b.SiluMul(q, {.rows = rows, .dim = dim, .gate_up = x.data(), .act = y.data()});
    });
    ExpectNear(FromAct(act(), got), FromAct(act(), want), Ulp(act()) + 0x1p-21, 1e-34);  // e^x ends at e^-87
    const std::vector<int32_t> index = {3, 0, 3};
    std::vector<float> rows_got(size_t(3 * 2 * dim)), rows_want = rows_got;
    Both(&rows_got, &rows_want, [&](ops::Backend& b, ops::Queue& q, std::vector<float>& y) {
      b.GatherRows(q, x.data(), index.data(), 3, 2 * dim * 4, y.data());
    });
    EXPECT_EQ(rows_got, rows_want);
  }
}

TEST_P(CatalogueTest, GateChoosesTheReferencesExperts) {
  struct Form {
    int64_t experts, topk, groups, kept;
    bool softmax, normalize, top2, bias;
  };
  for (const Form f : {Form{8, 2, 1, 1, false, true, false, true},
                       {256, 8, 8, 4, false, true, true, true},
                       {64, 6, 8, 3, true, false, false, false},
                       {7, 7, 1, 1, true, true, false, false}}) {
    const int64_t rows = 13, hidden = 130;
    const std::vector<float> x = Normal(rows * hidden, 6), w = Normal(f.experts * hidden, 7, 0.1f),
                             bias = Normal(f.experts, 8, 0.1f);
    std::vector<int32_t> got(size_t(rows * f.topk)), want = got;
    std::vector<float> weight(got.size()), weight_want = weight;
    auto run = [&](ops::Backend& b, ops::Queue& q, std::vector<int32_t>& e, std::vector<float>& ew) {
      b.Gate(q, {.rows = rows,
                 .hidden = hidden,
                 .experts = f.experts,
                 .topk = f.topk,
                 .x = x.data(),
                 .weight = w.data(),
                 .bias = f.bias ? bias.data() : nullptr,
                 .softmax = f.softmax,
                 .normalize = f.normalize,
                 .groups = f.groups,
                 .groups_kept = f.kept,
                 .group_sum_top2 = f.top2,
                 .scaling = 2.5f,
                 .expert = e.data(),
                 .expert_weight = ew.data()});
    };
    run(*tested_, *queue_, got, weight);
    run(*oracle_, *oracle_queue_, want, weight_want);
    EXPECT_EQ(got, want);
    ExpectNear(weight, weight_want, 2e-5, 1e-9);
  }
}

TEST_P(CatalogueTest, GateTiesGoToTheLowerId) {
  const int64_t hidden = 16;
  const std::vector<float> x(size_t(hidden), 1.0f), w(size_t(6 * hidden), 0.25f);
  std::vector<int32_t> expert(4);
  std::vector<float> weight(4);
  tested_->Gate(*queue_, {.rows = 1,
                          .hidden = hidden,
                          .experts = 6,
                          .topk = 4,
                          .x = x.data(),
                          .weight = w.data(),
                          .groups = 3,
                          .groups_kept = 2,
                          .group_sum_top2 = true,
                          .expert = expert.data(),
                          .expert_weight = weight.data()});
  EXPECT_EQ(expert, (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(weight, std::vector<float>(4, 0.25f));
}

TEST_P(CatalogueTest, Moe) {
  const int64_t experts = 6, hidden = 72, inner = 40, topk = 2;
  const std::vector<float> wu = Normal(experts * 2 * inner * hidden, 9, 0.1f),
                           wd = Normal(experts * hidden * inner, 10, 0.1f);
  std::vector<std::vector<ops::WeightView>> up, down;
  for (int64_t e = 0; e < experts; ++e) {
    const float* g = wu.data() + e * 2 * inner * hidden;
    up.push_back({{.dtype = DType::kF32, .out = inner, .in = hidden, .data = g},
                  {.dtype = DType::kF32, .out = inner, .in = hidden, .data = g + inner * hidden}});
    down.push_back(
        {{.dtype = DType::kF32, .out = hidden, .in = inner, .data = wd.data() + e * hidden * inner}});
  }
  for (const int64_t rows : {0, 1, 3, 50}) {
    std::vector<int32_t> expert;
    for (int64_t r = 0; r < rows; ++r) {  // expert 4 gets no row, expert 0 many
      expert.push_back(r % 3 == 0 ? 0 : int32_t(r % 4));
      expert.push_back(r % 7 == 6 ? -1 : 5);
    }
    const std::vector<float> weight = Normal(rows * topk, 11), base = Normal(rows * hidden, 12);
    const auto x = ToAct(act(), Normal(rows * hidden, 13));
    std::vector<float> got = base, want = base;
    Both(&got, &want, [&](ops::Backend& b, ops::Queue& q, std::vector<float>& y) {
      const auto pu = b.PackGroups(up).value(), pd = b.PackGroups(down).value();
      b.Moe(q, {.rows = rows,
                .topk = topk,
                .gate_up = pu.get(),
                .down = pd.get(),
                .x = x.data(),
                .expert = expert.data(),
                .expert_weight = weight.data(),
                .y = y.data()});
    });
    ExpectNear(got, want, 1e-5, act() == DType::kBF16 ? 0.02 : 1e-5);
  }
}

std::vector<KvShape> PoolShapes(DType act) {
  std::vector<KvShape> shapes;
  for (const DType latent : {DType::kBF16, DType::kF8E4M3, DType::kF32}) {
    if (latent == DType::kF32 && act == DType::kBF16) continue;
    shapes.push_back({.latent = latent, .index = latent});
    shapes.push_back(
        {.kv_lora = 200, .rope = 64, .index_dim = 128, .latent = latent, .index = latent, .lanes = 3});
  }
  shapes.push_back({.kv_lora = 512, .rope = 64, .index_dim = 128});
  return shapes;
}

// All rows of a pool as values.
std::vector<float> LatentValues(const KvWorld& w, int64_t length) {
  std::vector<float> out;
  const KvLayout& layout = w.pool().layout();
  for (int64_t p = 0; p < length; ++p) {
    const std::byte* row =
        w.pool().Latent(KvWorld::kLayer, w.Page(0, p)) + p % kPageTokens * layout.latent_row_bytes();
    for (int64_t i = 0; i < layout.kv_lora() + layout.rope(); ++i) {
      if (layout.latent_dtype() == DType::kF32) {
        out.push_back(reinterpret_cast<const float*>(row)[i]);
      } else if (layout.latent_dtype() == DType::kBF16) {
        out.push_back(BF16ToF32(reinterpret_cast<const uint16_t*>(row)[i]));
      } else if (i < layout.kv_lora()) {
        float scale;
        std::memcpy(&scale, row + layout.kv_lora() + i / 128 * 4, 4);
        out.push_back(E4M3ToF32(uint8_t(row[i])) * scale);
      } else {
        uint16_t b;
        std::memcpy(
            &b, row + layout.kv_lora() + CeilDiv(layout.kv_lora(), 128) * 4 + (i - layout.kv_lora()) * 2, 2);
        out.push_back(BF16ToF32(b));
      }
    }
  }
  return out;
}

std::vector<float> IndexValues(const KvWorld& w, int64_t length) {
  std::vector<float> out;
  const KvLayout& layout = w.pool().layout();
  for (int64_t p = 0; p < length; ++p) {
    const std::byte* page = w.pool().Index(KvWorld::kLayer, w.Page(0, p));
    for (int64_t i = 0; i < layout.index_dim(); ++i) {
      const int64_t at = p % kPageTokens * layout.index_dim() + i;
      if (layout.index_dtype() == DType::kF32) {
        out.push_back(reinterpret_cast<const float*>(page)[at]);
      } else if (layout.index_dtype() == DType::kBF16) {
        out.push_back(BF16ToF32(reinterpret_cast<const uint16_t*>(page)[at]));
      } else {
        const float* scale = reinterpret_cast<const float*>(page + kPageTokens * layout.index_dim());
        out.push_back(E4M3ToF32(uint8_t(page[at])) * scale[p % kPageTokens]);
      }
    }
  }
  return out;
}

// A unit of what a row format keeps of values near 1 of rows with magnitude up to 4 or so.
double FormatStep(DType t) { return t == DType::kF32 ? 0x1p-20 : (t == DType::kBF16 ? 0x1p-7 : 0x1p-3); }

TEST_P(CatalogueTest, WritesLatentAndIndexRows) {
  for (const KvShape& shape : PoolShapes(act())) {
    KvWorld got(shape, {130}), want(shape, {130});
    got.Fill(*tested_, 20);
    want.Fill(*oracle_, 20);
    ExpectNear(LatentValues(got, 130), LatentValues(want, 130), FormatStep(shape.latent),
               shape.latent == DType::kF8E4M3 ? 2e-2 : 2e-6);
    ExpectNear(IndexValues(got, 130), IndexValues(want, 130), FormatStep(shape.index),
               shape.index == DType::kF8E4M3 ? 4e-2 : 4e-6);
    // Rows after the last stay poisoned.
    const std::byte* tail =
        got.pool().Latent(KvWorld::kLayer, got.Page(0, 129)) + 2 * got.pool().layout().latent_row_bytes();
    EXPECT_EQ(int(tail[0]), 0xff);
  }
}

TEST_P(CatalogueTest, ZeroRowsAreWrittenAsZerosAndDummyRowsNowhere) {
  const KvShape shape{.latent = DType::kF8E4M3, .index = DType::kF8E4M3};
  KvWorld w(shape, {64});
  const std::vector<float> zeros(size_t(64 * 200), 0.0f), ones(200, 1.0f);
  const std::vector<PageId> page = {w.Page(0, 0), PageId(-1)};
  const std::vector<int32_t> offset = {5, 6}, position = {5, 6};
  tested_->WriteLatent(*queue_, {.rows = 2,
                                 .ckv = zeros.data(),
                                 .norm_weight = ones.data(),
                                 .eps = 1e-6f,
                                 .positions = position.data(),
                                 .table = w.rope(),
                                 .pool = &w.pool(),
                                 .layer = KvWorld::kLayer,
                                 .slots = {page.data(), offset.data()}});
  tested_->WriteIndex(*queue_, {.rows = 2,
                                .dim = shape.index_dim,
                                .rope = shape.rope,
                                .k = zeros.data(),
                                .norm_weight = ones.data(),
                                .norm_bias = zeros.data(),
                                .eps = 1e-6f,
                                .positions = position.data(),
                                .table = w.rope(),
                                .pool = &w.pool(),
                                .layer = KvWorld::kLayer,
                                .slots = {page.data(), offset.data()}});
  const int64_t dim = shape.kv_lora + shape.rope;
  const std::vector<float> latent = LatentValues(w, 7), index = IndexValues(w, 7);
  for (int64_t i = 0; i < dim; ++i) {
    EXPECT_EQ(latent[size_t(5 * dim + i)], 0.0f);
    EXPECT_TRUE(std::isnan(latent[size_t(6 * dim + i)]));
  }
  for (int64_t i = 0; i < shape.index_dim; ++i) {
    EXPECT_EQ(index[size_t(5 * shape.index_dim + i)], 0.0f);
    EXPECT_TRUE(std::isnan(index[size_t(6 * shape.index_dim + i)]));
  }
}

TEST_P(CatalogueTest, AttentionDenseAndSelected) {
  for (const KvShape& shape : PoolShapes(act())) {
    KvWorld w(shape, {200, 1, 65, 320});
    w.Fill(*oracle_, 30);
    const auto batch = w.MakeBatch({{0, 150, 200}, {1, 0, 1}, {2, 64, 65}, {3, 310, 320}});
    const int64_t rows = batch.tables().rows, heads = 5, dim = shape.kv_lora + shape.rope, topk = 70;
    const auto q = ToAct(act(), Normal(rows * heads * dim, 31));
    std::vector<int32_t> selected(size_t(rows * topk), -1), count;
    std::mt19937 rng(32);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t n = batch.positions[size_t(r)] + 1;
      std::vector<int32_t> all(static_cast<size_t>(n));
      for (int32_t i = 0; i < n; ++i) all[size_t(i)] = i;
      std::shuffle(all.begin(), all.end(), rng);
      const int32_t k = std::min<int32_t>(n, r % 4 == 0 ? 64 : int32_t(topk));
      std::sort(all.begin(), all.begin() + k);
      std::copy(all.begin(), all.begin() + k, selected.begin() + r * topk);
      count.push_back(k);
    }
    for (const bool sparse : {false, true}) {
      std::vector<std::byte> got = ActBuffer(rows * heads * shape.kv_lora), want = got;
      Both(&got, &want, [&](ops::Backend& b, ops::Queue& queue, std::vector<std::byte>& out) {
        b.Attention(queue, {.seqs = batch.tables(),
                            .heads = heads,
                            .kv_lora = shape.kv_lora,
                            .rope = shape.rope,
                            .topk = topk,
                            .q = q.data(),
                            .scale = 0.1f,
                            .pool = &w.pool(),
                            .layer = KvWorld::kLayer,
                            .selected = sparse ? selected.data() : nullptr,
                            .selected_count = sparse ? count.data() : nullptr,
                            .out = out.data()});
      });
      // |latent| stays under 20 here; a weight is off by its rounding, and by the score's error (dim products
      // of size ~1).
      const double tolerance = act() == DType::kBF16 ? 20 * 0x1p-8 : 20 * 0x1p-24 * double(dim);
      ExpectNear(FromAct(act(), got), FromAct(act(), want), Ulp(act()), tolerance);
    }
  }
}

TEST_P(CatalogueTest, IndexSelectsTheReferencesPositions) {
  for (const KvShape& shape : PoolShapes(act())) {
    KvWorld w(shape, {300, 20, 129});
    w.Fill(*oracle_, 40);
    const auto batch = w.MakeBatch({{0, 250, 300}, {1, 0, 20}, {2, 60, 129}});
    const int64_t rows = batch.tables().rows, heads = 9, topk = 64;
    const std::vector<float> q = Normal(rows * heads * shape.index_dim, 41), hw = Normal(rows * heads, 42);
    struct Out {
      std::vector<int32_t> selected, count;
      std::vector<float> gap;
    };
    Out got{std::vector<int32_t>(size_t(rows * topk)), std::vector<int32_t>(size_t(rows)),
            std::vector<float>(size_t(rows))};
    Out want = got;
    Both(&got, &want, [&](ops::Backend& b, ops::Queue& queue, Out& o) {
      b.IndexSelect(queue, {.seqs = batch.tables(),
                            .heads = heads,
                            .dim = shape.index_dim,
                            .rope = shape.rope,
                            .topk = topk,
                            .q = q.data(),
                            .head_weight = hw.data(),
                            .scale = 0.05f,
                            .table = w.rope(),
                            .pool = &w.pool(),
                            .layer = KvWorld::kLayer,
                            .selected = o.selected.data(),
                            .selected_count = o.count.data(),
                            .gap = o.gap.data()});
    });
    EXPECT_EQ(got.count, want.count);
    int64_t equal = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const auto row = [&](const Out& o) {
        return std::vector<int32_t>(o.selected.begin() + r * topk, o.selected.begin() + (r + 1) * topk);
      };
      equal += row(got) == row(want);
      // A gap of no more than the scores' own error may go either way; bf16 queries are rounded alike on both
      // sides.
      if (want.gap[size_t(r)] > 1e-4) {
        EXPECT_EQ(row(got), row(want)) << "row " << r << " gap " << want.gap[size_t(r)];
      }
      if (std::isinf(want.gap[size_t(r)])) {
        EXPECT_EQ(got.gap[size_t(r)], want.gap[size_t(r)]);
      } else {
        EXPECT_NEAR(got.gap[size_t(r)], want.gap[size_t(r)], 1e-4);
      }
    }
    EXPECT_GE(equal, rows * 9 / 10);
  }
}

// The draft layer's rows lie one slot after their position; slot 0 holds nothing and stays poison.
TEST_P(CatalogueTest, ShiftedSlotsAreReadWhereTheyLie) {
  for (const KvShape& shape : PoolShapes(act())) {
    KvWorld w(shape, {193});
    w.Write(*oracle_, *oracle_queue_, 0, 1, 193, 45);
    auto batch = w.MakeBatch({{0, 120, 192}});
    for (int64_t p = int64_t(batch.pages.size()); p < 4; ++p)
      batch.pages.push_back(w.Page(0, p * kPageTokens));
    ops::SeqTables seqs = batch.tables();
    seqs.slot_shift = 1;
    const int64_t rows = seqs.rows, heads = 3, topk = 64, dim = shape.kv_lora + shape.rope;
    const std::vector<float> iq = Normal(rows * heads * shape.index_dim, 46), hw = Normal(rows * heads, 47);
    const auto q = ToAct(act(), Normal(rows * heads * dim, 48));
    std::vector<int32_t> selected(size_t(rows * topk)), count(static_cast<size_t>(rows)),
        want_selected = selected;
    std::vector<float> gap(static_cast<size_t>(rows));
    auto select = [&](ops::Backend& b, ops::Queue& queue, std::vector<int32_t>& out) {
      b.IndexSelect(queue, {.seqs = seqs,
                            .heads = heads,
                            .dim = shape.index_dim,
                            .rope = shape.rope,
                            .topk = topk,
                            .q = iq.data(),
                            .head_weight = hw.data(),
                            .scale = 0.05f,
                            .table = w.rope(),
                            .pool = &w.pool(),
                            .layer = KvWorld::kLayer,
                            .selected = out.data(),
                            .selected_count = count.data(),
                            .gap = gap.data()});
    };
    select(*tested_, *queue_, selected);
    select(*oracle_, *oracle_queue_, want_selected);
    for (int64_t r = 0; r < rows; ++r) {
      if (gap[size_t(r)] < 1e-4) continue;
      EXPECT_TRUE(std::equal(selected.begin() + r * topk, selected.begin() + (r + 1) * topk,
                             want_selected.begin() + r * topk));
    }
    for (const bool sparse : {false, true}) {
      std::vector<std::byte> got = ActBuffer(rows * heads * shape.kv_lora), want = got;
      Both(&got, &want, [&](ops::Backend& b, ops::Queue& queue, std::vector<std::byte>& out) {
        b.Attention(queue, {.seqs = seqs,
                            .heads = heads,
                            .kv_lora = shape.kv_lora,
                            .rope = shape.rope,
                            .topk = topk,
                            .q = q.data(),
                            .scale = 0.1f,
                            .pool = &w.pool(),
                            .layer = KvWorld::kLayer,
                            .selected = sparse ? want_selected.data() : nullptr,
                            .selected_count = sparse ? count.data() : nullptr,
                            .out = out.data()});
      });
      const double tolerance = act() == DType::kBF16 ? 20 * 0x1p-8 : 20 * 0x1p-24 * double(dim);
      ExpectNear(FromAct(act(), got), FromAct(act(), want), Ulp(act()), tolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, CatalogueTest, ::testing::ValuesIn(AllNumerics()),
                         [](const auto& info) { return cpu::testing::Label(info.param); });

}  // namespace
}  // namespace sluice
