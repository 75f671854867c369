#include "ops/reference/reference_backend.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/reference/reference_kv.h"

namespace sluice::ops {
namespace {

using ::testing::ElementsAre;

ModelConfig TinyConfig() {
  ModelConfig m;
  m.num_layers = 1;
  m.kv_lora_rank = 256;
  m.qk_rope = 8;
  m.index.num_heads = 1;
  m.index.head_dim = 16;
  m.index.topk = 3;
  m.index.computes = {true};
  return m;
}

std::unique_ptr<DevicePool> Pool(DType dtype) {
  KvLayoutOptions o;
  o.latent_dtype = o.index_dtype = dtype;
  o.numerics_class = "test";
  return DevicePool::Make(KvLayout::Make(TinyConfig(), o).value(), 1, 4).value();
}

struct OneSequence {
  std::vector<int32_t> seq, positions, begin = {0}, rows, page_begin = {0};
  std::vector<PageId> pages = {PageId(2), PageId(1), PageId(3)};
  explicit OneSequence(std::vector<int32_t> p)
      : seq(p.size(), 0), positions(std::move(p)), rows{int32_t(positions.size())} {}
  SeqTables tables() const {
    SeqTables t;
    t.rows = int64_t(positions.size());
    t.seqs = 1;
    t.seq_of_row = seq.data();
    t.positions = positions.data();
    t.row_begin = begin.data();
    t.num_rows = rows.data();
    t.page_begin = page_begin.data();
    t.pages = pages.data();
    return t;
  }
};

TEST(IndexSelection, TakesTheLowerPositionAtATie) {
  auto backend = MakeReferenceBackend();
  auto queue = backend->MakeQueue(1, -1);
  auto pool = Pool(DType::kF32);
  std::vector<float> key(16, 0.0f);
  const float values[] = {1, 3, 2, 2, 2, 3, 0};
  for (int i = 0; i < 7; ++i) {
    key[15] = values[i];
    reference::StoreIndexRow(*pool, LogicalLayer(0), PageId(2), i, key.data());
  }
  const OneSequence s({6, 1});
  std::vector<float> q(2 * 16, 0.0f), cos(7 * 4, 1.0f), sin(7 * 4, 0.0f), weight = {1.0f, 1.0f}, gap(2);
  q[15] = q[31] = 1.0f;
  std::vector<int32_t> selected(6), count(2);
  IndexSelectArgs a;
  a.seqs = s.tables();
  a.heads = 1;
  a.dim = 16;
  a.rope = 8;
  a.topk = 3;
  a.q = q.data();
  a.head_weight = weight.data();
  a.scale = 0.5f;
  a.table = {cos.data(), sin.data(), 4};
  a.pool = pool.get();
  a.layer = LogicalLayer(0);
  a.selected = selected.data();
  a.selected_count = count.data();
  a.gap = gap.data();
  backend->IndexSelect(*queue, a);
  EXPECT_THAT(selected, ElementsAre(1, 2, 5, 0, 1, -1));
  EXPECT_THAT(count, ElementsAre(3, 2));
  EXPECT_EQ(gap[0], 0.0f);
  EXPECT_TRUE(std::isinf(gap[1]));
  weight[0] = -1.0f;  // a negative head weight turns the order round; relu comes before it
  backend->IndexSelect(*queue, a);
  EXPECT_THAT(std::vector(selected.begin(), selected.begin() + 3), ElementsAre(0, 2, 6));
}

TEST(Gate, MasksGroupsBelowAnyBiasedScoreAndWeighsByTheUnbiasedOne) {
  auto backend = MakeReferenceBackend();
  auto queue = backend->MakeQueue(1, -1);
  const float x = 1.0f;
  const std::vector<float> weight = {0.0f, 0.1f, 2.0f, -3.0f}, bias = {-2.0f, -2.0f, -3.0f, -3.0f};
  std::vector<int32_t> expert(2);
  std::vector<float> w(2);
  GateArgs a;
  a.rows = 1;
  a.hidden = 1;
  a.experts = 4;
  a.topk = 2;
  a.x = &x;
  a.weight = weight.data();
  a.bias = bias.data();
  a.groups = 2;
  a.groups_kept = 1;
  a.group_sum_top2 = true;
  a.scaling = 2.5f;
  a.expert = expert.data();
  a.expert_weight = w.data();
  backend->Gate(*queue, a);
  // All biased scores are negative; a masked score of 0 would win.
  EXPECT_THAT(expert, ElementsAre(1, 0));
  const double s0 = 0.5, s1 = 1 / (1 + std::exp(-0.1));
  EXPECT_NEAR(w[0], 2.5 * s1 / (s0 + s1), 1e-6);
  EXPECT_NEAR(w[1], 2.5 * s0 / (s0 + s1), 1e-6);
  a.bias = nullptr;
  a.softmax = true;
  a.normalize = false;
  a.groups = 1;
  backend->Gate(*queue, a);
  const double sum = 1 + std::exp(0.1) + std::exp(2) + std::exp(-3);
  EXPECT_THAT(expert, ElementsAre(2, 1));
  EXPECT_NEAR(w[0], 2.5 * std::exp(2) / sum, 1e-6);
}

class Rows : public testing::TestWithParam<DType> {};

TEST_P(Rows, ComeBackAsWrittenWithinTheFormat) {
  auto pool = Pool(GetParam());
  const double tolerance = GetParam() == DType::kF32 ? 0 : GetParam() == DType::kBF16 ? 1.0 / 256 : 1.0 / 16;
  std::vector<float> row(264), back(264);
  for (size_t i = 0; i < row.size(); ++i)
    row[i] = float(std::sin(double(i) * 1.7)) * (i < 128 ? 100.0f : 0.01f);
  reference::StoreLatentRow(*pool, LogicalLayer(0), PageId(3), 63, row.data());
  reference::LoadLatentRow(*pool, LogicalLayer(0), PageId(3), 63, back.data());
  for (size_t i = 0; i < row.size(); ++i)
    EXPECT_NEAR(back[i], row[i], tolerance * (i < 128 ? 100 : 0.01)) << i;
  std::vector<float> key(16, 0.0f), key_back(16, 1.0f);
  reference::StoreIndexRow(*pool, LogicalLayer(0), PageId(1), 5, key.data());
  reference::LoadIndexRow(*pool, LogicalLayer(0), PageId(1), 5, key_back.data());
  EXPECT_EQ(key, key_back);  // an all-zero row has a finite scale
  key[3] = 1e-30f;
  reference::StoreIndexRow(*pool, LogicalLayer(0), PageId(1), 5, key.data());
  reference::LoadIndexRow(*pool, LogicalLayer(0), PageId(1), 5, key_back.data());
  EXPECT_TRUE(std::isfinite(key_back[3]));
  key[3] = std::numeric_limits<float>::quiet_NaN();
  reference::StoreIndexRow(*pool, LogicalLayer(0), PageId(1), 5, key.data());
  reference::LoadIndexRow(*pool, LogicalLayer(0), PageId(1), 5, key_back.data());
  EXPECT_TRUE(std::isnan(key_back[3]));
}

INSTANTIATE_TEST_SUITE_P(Formats, Rows, testing::Values(DType::kF32, DType::kBF16, DType::kF8E4M3),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST(Attention, ReadsOnlyTheSelectedRows) {
  auto backend = MakeReferenceBackend();
  auto queue = backend->MakeQueue(1, -1);
  auto pool = Pool(DType::kF32);
  for (int p = 1; p < 4; ++p) pool->Poison(PageId(p));
  std::vector<float> row(264, 0.0f);
  for (int position : {3, 70}) {  // the second page of the sequence is page 1
    row[0] = float(position);
    reference::StoreLatentRow(*pool, LogicalLayer(0), position < 64 ? PageId(2) : PageId(1), position % 64,
                              row.data());
  }
  const OneSequence s({100});
  const std::vector<int32_t> selected = {3, 70, -1}, count = {2};
  std::vector<float> q(264, 0.0f), out(256, -1.0f);
  q[0] = 1.0f;
  AttentionArgs a;
  a.seqs = s.tables();
  a.heads = 1;
  a.kv_lora = 256;
  a.rope = 8;
  a.topk = 3;
  a.q = q.data();
  a.scale = 0.01f;
  a.pool = pool.get();
  a.layer = LogicalLayer(0);
  a.selected = selected.data();
  a.selected_count = count.data();
  a.out = out.data();
  backend->Attention(*queue, a);
  const double e3 = std::exp(0.03), e70 = std::exp(0.70);
  EXPECT_NEAR(out[0], (3 * e3 + 70 * e70) / (e3 + e70), 1e-4);
  EXPECT_EQ(out[1], 0.0f);
}

TEST(Writes, OfDummyRowsGoNowhere) {
  auto backend = MakeReferenceBackend();
  auto queue = backend->MakeQueue(1, -1);
  auto pool = Pool(DType::kF32);
  std::vector<float> ckv(2 * 264, 1.0f), norm(256, 1.0f), cos(4, 1.0f), sin(4, 0.0f), back(264);
  const std::vector<PageId> page = {PageId(), PageId(1)};
  const std::vector<int32_t> offset = {0, 1}, positions = {0, 0};
  for (int p = 0; p < 4; ++p) pool->Poison(PageId(p));
  WriteLatentArgs a;
  a.rows = 2;
  a.ckv = ckv.data();
  a.norm_weight = norm.data();
  a.eps = 1e-6f;
  a.positions = positions.data();
  a.table = {cos.data(), sin.data(), 4};
  a.pool = pool.get();
  a.layer = LogicalLayer(0);
  a.slots = {page.data(), offset.data()};
  backend->WriteLatent(*queue, a);
  int written = 0;
  for (int p = 0; p < 4; ++p) {
    for (int i = 0; i < 64; ++i) {
      reference::LoadLatentRow(*pool, LogicalLayer(0), PageId(p), i, back.data());
      written += !std::isnan(back[0]);
    }
  }
  EXPECT_EQ(written, 1);
}

}  // namespace
}  // namespace sluice::ops
