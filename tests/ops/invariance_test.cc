// The rule that caching, chunking, batching and sharing rest on: the bits of a row depend on that row's
// inputs alone. Attention and index selection under other chunks, batches, page places, lanes and thread
// counts; and what must never be read.
#include "backends/cpu/test_support.h"
#include "gtest/gtest.h"
#include "kv_world.h"

namespace sluice {
namespace {

using cpu::testing::AllNumerics;
using cpu::testing::Numerics;
using cpu::testing::ToAct;
using testing::KvShape;
using testing::KvWorld;
using testing::Normal;

constexpr int64_t kHeads = 6, kIndexHeads = 5, kTopk = 80;

class InvarianceTest : public ::testing::TestWithParam<Numerics> {
 protected:
  struct Result {
    std::vector<std::byte> out;     // [rows, heads, kv_lora] Act
    std::vector<int32_t> selected;  // [rows, topk]
    std::vector<float> gap;         // [rows]
  };

  // Index selection and attention over the selected set (or everything) for the rows of `spans`. A row's
  // queries are a function of (sequence, position).
  Result Run(const KvWorld& w, const std::vector<KvWorld::Span>& spans, int threads, bool dense) {
    const KvShape& s = w.shape();
    const auto batch = w.MakeBatch(spans);
    const int64_t rows = batch.tables().rows, dim = s.kv_lora + s.rope;
    std::vector<float> q, iq, hw;
    for (const auto& span : spans) {
      const auto take = [&](std::vector<float>& to, int64_t width, uint64_t seed) {
        const std::vector<float> all = Normal(span.last * width, seed + uint64_t(span.seq));
        to.insert(to.end(), all.begin() + span.first * width, all.end());
      };
      take(q, kHeads * dim, 1000);
      take(iq, kIndexHeads * s.index_dim, 2000);
      take(hw, kIndexHeads, 3000);
    }
    const auto qa = ToAct(GetParam().act, q);
    Result r;
    r.out.resize(size_t(rows * kHeads * s.kv_lora * SizeOf(GetParam().act)));
    r.selected.resize(size_t(rows * kTopk));
    r.gap.resize(size_t(rows));
    std::vector<int32_t> count(static_cast<size_t>(rows));
    auto queue = backend_->MakeQueue(threads, -1);
    backend_->IndexSelect(*queue, {.seqs = batch.tables(),
                                   .heads = kIndexHeads,
                                   .dim = s.index_dim,
                                   .rope = s.rope,
                                   .topk = kTopk,
                                   .q = iq.data(),
                                   .head_weight = hw.data(),
                                   .scale = 0.1f,
                                   .table = w.rope(),
                                   .pool = &w.pool(),
                                   .layer = KvWorld::kLayer,
                                   .selected = r.selected.data(),
                                   .selected_count = count.data(),
                                   .gap = r.gap.data()});
    backend_->Attention(*queue, {.seqs = batch.tables(),
                                 .heads = kHeads,
                                 .kv_lora = s.kv_lora,
                                 .rope = s.rope,
                                 .topk = kTopk,
                                 .q = qa.data(),
                                 .scale = 0.1f,
                                 .pool = &w.pool(),
                                 .layer = KvWorld::kLayer,
                                 .selected = dense ? nullptr : r.selected.data(),
                                 .selected_count = dense ? nullptr : count.data(),
                                 .out = r.out.data()});
    return r;
  }

  // Rows of sequence 0 in `part` (which start at batch row `at`) equal rows [first, first + n) of `whole`.
  void ExpectRows(const Result& part, int64_t at, const Result& whole, int64_t first, int64_t n,
                  const std::string& what) {
    const int64_t bytes = int64_t(whole.out.size()) / int64_t(whole.gap.size());
    ASSERT_EQ(std::memcmp(part.out.data() + at * bytes, whole.out.data() + first * bytes, size_t(n * bytes)),
              0)
        << what;
    ASSERT_EQ(std::memcmp(part.selected.data() + at * kTopk, whole.selected.data() + first * kTopk,
                          size_t(n * kTopk) * 4),
              0)
        << what;
    ASSERT_EQ(std::memcmp(part.gap.data() + at, whole.gap.data() + first, size_t(n) * 4), 0) << what;
  }

  std::vector<KvShape> Shapes() const {
    std::vector<KvShape> shapes = {{.latent = DType::kBF16, .index = DType::kBF16},
                                   {.latent = DType::kF8E4M3, .index = DType::kF8E4M3}};
    if (GetParam().act == DType::kF32) shapes.push_back({.latent = DType::kF32, .index = DType::kF32});
    return shapes;
  }

  std::unique_ptr<ops::Backend> backend_ = cpu::testing::Make(GetParam());
};

TEST_P(InvarianceTest, ChunksBatchesThreadsAndPagesChangeNoBit) {
  const int64_t n = GetParam().isa == "portable" ? 150 : 230;
  for (KvShape shape : Shapes()) {
    KvWorld w(shape, {n, 200, 90});
    w.Fill(*backend_, 50);
    for (const bool dense : {true, false}) {
      const Result whole = Run(w, {{0, 0, n}}, 1, dense);
      ExpectRows(Run(w, {{0, 0, n}}, 2, dense), 0, whole, 0, n, "threads");
      // Few rows share out their heads to threads.
      for (const int64_t chunk : {1, 2, 5, 8, 17, 64}) {
        for (int64_t p = 0; p < n; p += chunk <= 8 ? 29 : chunk) {
          const int64_t end = std::min(n, p + chunk);
          ExpectRows(Run(w, {{0, p, end}}, 2, dense), 0, whole, p, end - p,
                     fmt::format("chunk {} at {}", chunk, p));
        }
      }
      const Result batch = Run(w, {{1, 150, 200}, {0, n - 40, n}, {2, 0, 90}}, 2, dense);
      ExpectRows(batch, 50, whole, n - 40, 40, "batch");
      // The same contents in other pages of another lane count.
      shape.lanes = 3;
      KvWorld moved(shape, {n, 200, 90}, 99);
      moved.Fill(*backend_, 50);
      ExpectRows(Run(moved, {{0, 0, n}}, 2, dense), 0, whole, 0, n, "pages");
      shape.lanes = 1;
    }
  }
}

TEST_P(InvarianceTest, CacheRowsDependOnTheirTokenAlone) {
  for (const KvShape& shape : Shapes()) {
    KvWorld whole(shape, {150}), parts(shape, {150}, 5);
    whole.Fill(*backend_, 60);
    auto queue = backend_->MakeQueue(2, -1);
    for (int64_t p = 0; p < 150; p += 37)
      parts.Write(*backend_, *queue, 0, p, std::min<int64_t>(150, p + 37), 60);
    for (int64_t p = 0; p < 150; p += kPageTokens) {
      // Unwritten rows are poison on both sides, so whole pages compare.
      ASSERT_EQ(std::memcmp(whole.pool().Latent(KvWorld::kLayer, whole.Page(0, p)),
                            parts.pool().Latent(KvWorld::kLayer, parts.Page(0, p)),
                            size_t(whole.pool().layout().latent_page_bytes())),
                0);
      ASSERT_EQ(std::memcmp(whole.pool().Index(KvWorld::kLayer, whole.Page(0, p)),
                            parts.pool().Index(KvWorld::kLayer, parts.Page(0, p)),
                            size_t(whole.pool().layout().index_page_bytes())),
                0);
    }
  }
}

TEST_P(InvarianceTest, RowsThatAreNotSelectedAreNeverRead) {
  for (const KvShape& shape : Shapes()) {
    KvWorld w(shape, {300});
    w.Fill(*backend_, 70);
    const Result clean = Run(w, {{0, 299, 300}}, 2, false);
    // Poison every latent row that the selection leaves out; index rows stay, scores need them.
    std::vector<bool> keep(300, false);
    for (int32_t p : clean.selected) keep[size_t(p)] = true;
    const int64_t bytes = w.pool().layout().latent_row_bytes();
    for (int64_t p = 0; p < 300; ++p) {
      if (!keep[size_t(p)])
        std::memset(w.pool().Latent(KvWorld::kLayer, w.Page(0, p)) + p % kPageTokens * bytes, 0xff,
                    size_t(bytes));
    }
    ExpectRows(Run(w, {{0, 299, 300}}, 2, false), 0, clean, 0, 1, "poisoned");
  }
}

TEST_P(InvarianceTest, FullDequantisationGivesTheSameBits) {
  const KvShape shape{.kv_lora = 200, .latent = DType::kF8E4M3, .index = DType::kF8E4M3};
  KvWorld w(shape, {300, 100});
  w.Fill(*backend_, 80);
  const auto batch = w.MakeBatch({{0, 280, 300}, {1, 50, 100}});
  const int64_t rows = batch.tables().rows, dim = shape.kv_lora + shape.rope;
  const auto q = ToAct(GetParam().act, Normal(rows * kHeads * dim, 81));
  std::vector<int32_t> selected(size_t(rows * kTopk), -1), count(size_t(rows), 51);
  for (int64_t r = 0; r < rows; ++r) {
    for (int32_t i = 0; i < 51; ++i)
      selected[size_t(r * kTopk + i)] = i == 50 ? batch.positions[size_t(r)] : i;
  }
  auto queue = backend_->MakeQueue(2, -1);
  std::vector<std::byte> out[2];
  int32_t failed = 7;
  for (int full = 0; full < 2; ++full) {
    out[full].resize(size_t(rows * kHeads * shape.kv_lora * SizeOf(GetParam().act)));
    backend_->Attention(*queue, {.seqs = batch.tables(),
                                 .heads = kHeads,
                                 .kv_lora = shape.kv_lora,
                                 .rope = shape.rope,
                                 .topk = kTopk,
                                 .q = q.data(),
                                 .scale = 0.1f,
                                 .pool = &w.pool(),
                                 .layer = KvWorld::kLayer,
                                 .selected = selected.data(),
                                 .selected_count = count.data(),
                                 .out = out[full].data(),
                                 .dequant_only_topk = full == 0,
                                 .dequant_verify = true,
                                 .verify_failed_row = &failed});
    EXPECT_EQ(failed, -1);
  }
  EXPECT_EQ(out[0], out[1]);
}

TEST_P(InvarianceTest, PaddingRowsGiveZerosAndNoSelection) {
  const KvShape shape{};
  KvWorld w(shape, {70});
  w.Fill(*backend_, 90);
  auto batch = w.MakeBatch({{0, 60, 70}});
  for (int i = 0; i < 3; ++i) {
    batch.seq_of_row.push_back(-1);
    batch.positions.push_back(-1);
  }
  const auto q = ToAct(GetParam().act, Normal(13 * kHeads * 80, 91));
  const std::vector<float> iq = Normal(13 * kIndexHeads * shape.index_dim, 92),
                           hw = Normal(13 * kIndexHeads, 93);
  std::vector<std::byte> out(size_t(13 * kHeads * shape.kv_lora * SizeOf(GetParam().act)), std::byte(0x55));
  std::vector<int32_t> selected(13 * kTopk, 5), count(13, 5);
  auto queue = backend_->MakeQueue(2, -1);
  backend_->IndexSelect(*queue, {.seqs = batch.tables(),
                                 .heads = kIndexHeads,
                                 .dim = shape.index_dim,
                                 .rope = shape.rope,
                                 .topk = kTopk,
                                 .q = iq.data(),
                                 .head_weight = hw.data(),
                                 .scale = 0.1f,
                                 .table = w.rope(),
                                 .pool = &w.pool(),
                                 .layer = KvWorld::kLayer,
                                 .selected = selected.data(),
                                 .selected_count = count.data()});
  backend_->Attention(*queue, {.seqs = batch.tables(),
                               .heads = kHeads,
                               .kv_lora = shape.kv_lora,
                               .rope = shape.rope,
                               .topk = kTopk,
                               .q = q.data(),
                               .scale = 0.1f,
                               .pool = &w.pool(),
                               .layer = KvWorld::kLayer,
                               .selected = selected.data(),
                               .selected_count = count.data(),
                               .out = out.data()});
  const size_t row = out.size() / 13;
  for (size_t i = 10 * row; i < out.size(); ++i) ASSERT_EQ(out[i], std::byte(0));
  EXPECT_EQ(count[12], 0);
  EXPECT_EQ(selected[12 * kTopk], -1);
  EXPECT_EQ(count[9], 70);
}

// Scores of few integers: exact in every type, full of ties.
TEST_P(InvarianceTest, TiesGoToTheEarlierPosition) {
  const KvShape shape{.kv_lora = 64, .rope = 2, .index_dim = 8};
  KvWorld w(shape, {400});
  for (int64_t p = 0; p < 400; ++p) {
    uint16_t* row =
        reinterpret_cast<uint16_t*>(w.pool().Index(KvWorld::kLayer, w.Page(0, p))) + p % kPageTokens * 8;
    for (int64_t i = 0; i < 8; ++i) row[i] = F32ToBF16(i == 3 ? float(p % 5) : 0.0f);
  }
  std::vector<float> iq(8, 0.0f), hw(1, 1.0f);
  iq[3] = 1;
  const auto batch = w.MakeBatch({{0, 399, 400}});
  auto queue = backend_->MakeQueue(1, -1);
  for (const int64_t topk : {1, 80, 81, 200, 399}) {
    std::vector<int32_t> selected(static_cast<size_t>(topk)), count(1), want;
    std::vector<float> gap(1);
    backend_->IndexSelect(*queue, {.seqs = batch.tables(),
                                   .heads = 1,
                                   .dim = 8,
                                   .rope = 2,
                                   .topk = topk,
                                   .q = iq.data(),
                                   .head_weight = hw.data(),
                                   .scale = 1,
                                   .table = w.rope(),
                                   .pool = &w.pool(),
                                   .layer = KvWorld::kLayer,
                                   .selected = selected.data(),
                                   .selected_count = count.data(),
                                   .gap = gap.data()});
    for (int32_t value = 4; value >= 0; --value) {
      for (int32_t p = 0; p < 400 && int64_t(want.size()) < topk; ++p) {
        if (p % 5 == value) want.push_back(p);
      }
    }
    std::sort(want.begin(), want.end());
    EXPECT_EQ(selected, want) << topk;
    EXPECT_EQ(gap[0], topk % 80 == 0 ? 1.0f : 0.0f) << topk;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, InvarianceTest, ::testing::ValuesIn(AllNumerics()),
                         [](const auto& info) { return cpu::testing::Label(info.param); });

}  // namespace
}  // namespace sluice
