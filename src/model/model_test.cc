#include "model/model.h"

#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/model_cost.h"
#include "model/sequence_runner.h"
#include "ops/reference/reference_backend.h"
#include "ops/reference/reference_kv.h"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Tiny(const std::string& name) {
  return std::string(SLUICE_SOURCE_DIR) + "/tests/data/tiny-random/" + name;
}
std::vector<int32_t> Prompt(int n) {
  std::vector<int32_t> ids;
  for (int i = 0; i < n; ++i) ids.push_back((i * 37 + 11) % 255);
  return ids;
}

struct Loaded {
  std::unique_ptr<ops::Backend> backend = ops::MakeReferenceBackend();
  std::unique_ptr<Model> model;
  std::unique_ptr<SequenceRunner> runner;
};

Loaded Load(const ModelConfig& config, std::unique_ptr<Checkpoint> checkpoint, bool draft = false,
            int64_t chunk = 64, DType kv = DType::kF32) {
  Loaded l;
  auto model = Model::Load(config, std::move(checkpoint), *l.backend, {draft});
  EXPECT_TRUE(model.ok()) << model.status();
  l.model = std::move(*model);
  RunnerOptions o;
  o.max_context = 256;
  o.chunk = chunk;
  o.latent_dtype = o.index_dtype = kv;
  l.runner = SequenceRunner::Make(*l.model, *l.backend, o).value();
  return l;
}

Loaded Load(const std::string& dir, const ModelOverrides& overrides = {}, bool draft = false,
            int64_t chunk = 64, DType kv = DType::kF32) {
  return Load(LoadModelConfig(dir, overrides).value(), Checkpoint::Open(dir).value(), draft, chunk, kv);
}

// The tiny GLM shape with a draft layer, random weights.
Loaded LoadDraft(bool draft, int64_t chunk) {
  ModelOverrides o;
  o.json = R"({"num_nextn_predict_layers": 1})";
  const ModelConfig config = LoadModelConfig(Tiny("glm-moe-dsa"), o).value();
  return Load(config, Checkpoint::Dummy(config, true, 3).value(), draft, chunk);
}

std::vector<std::byte> PoolBytes(const SequenceRunner& runner, LogicalLayer layer, int64_t tokens) {
  std::vector<std::byte> bytes;
  const DevicePool& pool = runner.pool();
  for (const KvPiece& p : pool.layout().pieces()) {
    if (p.layer != layer) continue;
    for (int64_t page = 0; page < CeilDiv(tokens, kPageTokens); ++page) {
      const std::byte* at = pool.Piece(p, PageId(int32_t(page + 1)));
      bytes.insert(bytes.end(), at, at + p.bytes);
    }
  }
  return bytes;
}

// ---- batch tables
// -----------------------------------------------------------------------------------------------------

ForwardBatch TwoSequences() {
  ForwardBatch b;
  b.tokens = {5, 6, 7, 8};
  b.pages = {PageId(9), PageId(4), PageId(2)};
  BatchSeq a, c;
  a.num_rows = 3;
  a.start = 62;
  a.num_pages = 2;
  c.row_begin = 3;
  c.num_rows = 1;
  c.start = 10;
  c.page_begin = 2;
  c.num_pages = 1;
  b.seqs = {a, c};
  return b;
}

TEST(BatchTables, MapRowsToPositionsAndPlaces) {
  BatchTables tables(8, 2);
  const ForwardBatch b = TwoSequences();
  const auto m = tables.Build(b, b.tokens, 100);
  ASSERT_TRUE(m.ok()) << m.status();
  EXPECT_THAT(std::vector(m->positions, m->positions + 4), ElementsAre(62, 63, 64, 10));
  EXPECT_THAT(std::vector(m->slots.offset, m->slots.offset + 4), ElementsAre(62, 63, 0, 10));
  EXPECT_THAT(std::vector(m->slots.page, m->slots.page + 4),
              ElementsAre(PageId(9), PageId(9), PageId(4), PageId(2)));
  EXPECT_THAT(std::vector(m->seqs.seq_of_row, m->seqs.seq_of_row + 4), ElementsAre(0, 0, 0, 1));
  EXPECT_EQ(m->max_context, 65);
}

TEST(BatchTables, DraftRowsHaveThePositionBeforeTheirPlace) {
  BatchTables tables(8, 2);
  ForwardBatch b = TwoSequences();
  const auto m = tables.Build(b, b.tokens, 100, 1);
  ASSERT_TRUE(m.ok()) << m.status();
  EXPECT_THAT(std::vector(m->positions, m->positions + 4), ElementsAre(61, 62, 63, 9));
  EXPECT_THAT(std::vector(m->slots.offset, m->slots.offset + 4), ElementsAre(62, 63, 0, 10));
  EXPECT_EQ(m->seqs.slot_shift, 1);
  b.seqs[1].start = 0;  // place 0 holds no draft row
  EXPECT_FALSE(tables.Build(b, b.tokens, 100, 1).ok());
}

TEST(BatchTables, RowsThatThePagesHoldAlreadyAreNotStored) {
  BatchTables tables(8, 2);
  ForwardBatch b = TwoSequences();
  b.seqs[0].known = 1;
  const auto m = tables.Build(b, b.tokens, 100);
  ASSERT_TRUE(m.ok()) << m.status();
  EXPECT_FALSE(m->slots.page[0].valid());
  EXPECT_THAT(std::vector(m->slots.page + 1, m->slots.page + 4),
              ElementsAre(PageId(9), PageId(4), PageId(2)));
  EXPECT_THAT(std::vector(m->positions, m->positions + 4), ElementsAre(62, 63, 64, 10));
}

TEST(BatchTables, RefuseBatchesThatContradictThemselves) {
  BatchTables tables(4, 2);
  const auto error = [&](const ForwardBatch& b) {
    const auto m = tables.Build(b, b.tokens, 100);
    EXPECT_FALSE(m.ok());
    return std::string(m.status().message());
  };
  ForwardBatch b = TwoSequences();
  b.tokens[2] = 100;
  EXPECT_THAT(error(b), HasSubstr("token 100"));
  b = TwoSequences();
  b.tokens[0] = -1;
  EXPECT_THAT(error(b), HasSubstr("token -1"));
  b = TwoSequences();
  b.seqs[0].num_pages = 1;
  EXPECT_THAT(error(b), HasSubstr("pages"));
  b = TwoSequences();
  b.seqs[1].row_begin = 2;
  EXPECT_THAT(error(b), HasSubstr("do not follow"));
  b = TwoSequences();
  b.seqs.pop_back();
  EXPECT_THAT(error(b), HasSubstr("belong to no sequence"));
  b = TwoSequences();
  b.tokens.push_back(1);
  EXPECT_THAT(error(b), HasSubstr("exceeds the planned"));
}

// ---- index schedule
// -----------------------------------------------------------------------------------------------------

TEST(IndexSharing, AReusingLayerReachedWithoutIndicesIsAnInternalError) {
  ModelConfig config = LoadModelConfig(Tiny("deepseek-v32")).value();
  config.index.computes[0] = false;  // no config file can say this
  Loaded l = Load(config, Checkpoint::Open(Tiny("deepseek-v32")).value());
  const auto logits = l.runner->Extend(Prompt(20), 1);
  ASSERT_FALSE(logits.ok());
  EXPECT_TRUE(absl::IsInternal(logits.status()));
  EXPECT_THAT(std::string(logits.status().message()), HasSubstr("layer 0 reuses"));
}

TEST(IndexSharing, FrequencyOneChangesNothingAndFourRunsOnFewerIndexLayers) {
  Loaded plain = Load(Tiny("deepseek-v32"));
  ModelOverrides o;
  o.index_topk_freq = 1;
  Loaded one = Load(Tiny("deepseek-v32"), o);
  o.index_topk_freq = 4;
  Loaded four = Load(Tiny("deepseek-v32"), o);
  const auto a = plain.runner->Extend(Prompt(60), 60), b = one.runner->Extend(Prompt(60), 60),
             c = four.runner->Extend(Prompt(60), 60);
  ASSERT_TRUE(a.ok() && b.ok() && c.ok());
  EXPECT_EQ(*a, *b);
  EXPECT_NE(*a, *c);
  EXPECT_EQ(plain.runner->pool().layout().index_layers().size(), 4u);
  EXPECT_THAT(four.runner->pool().layout().index_layers(), ElementsAre(LogicalLayer(0), LogicalLayer(1)));
  EXPECT_EQ(four.runner->pool().layout().latent_layers().size(), 4u);
  // Up to topk positions every set holds all of them, whoever computes it.
  plain.runner->Reset();
  four.runner->Reset();
  EXPECT_EQ(*plain.runner->Extend(Prompt(16), 16), *four.runner->Extend(Prompt(16), 16));
}

TEST(IndexSharing, ReusingLayersSeeTheSetOfTheLayerBefore) {
  // FFSF: layer 2 attends to what layer 1 chose. With layer 1 reusing too, layer 2 gets layer 0's.
  class Sets final : public LayerHooks {
   public:
    std::vector<int32_t> layers;
    void IndexSelected(LogicalLayer layer, const int32_t*, const int32_t*) override {
      layers.push_back(layer.value);
    }
  };
  Sets sets;
  Loaded l = Load(Tiny("glm-moe-dsa"));
  l.runner->forward_options().hooks = &sets;
  ASSERT_TRUE(l.runner->Extend(Prompt(40), 1).ok());
  EXPECT_THAT(sets.layers, ElementsAre(0, 1, 3));
}

TEST(IndexKeys, AreStoredEvenWhereNoScoreIsNeeded) {
  Loaded l = Load(Tiny("glm-moe-dsa"));
  for (int p = 0; p < 2; ++p) l.runner->pool().Poison(PageId(p));
  ASSERT_TRUE(l.runner->Extend(Prompt(3), 1).ok());  // topk is 16
  std::vector<float> key(32);
  for (int layer : {0, 1, 3}) {
    ops::reference::LoadIndexRow(l.runner->pool(), LogicalLayer(layer), PageId(1), 2, key.data());
    for (float v : key) EXPECT_TRUE(std::isfinite(v));
    ops::reference::LoadIndexRow(l.runner->pool(), LogicalLayer(layer), PageId(1), 3, key.data());
    EXPECT_TRUE(std::isnan(key[0]));  // nothing is written beyond the rows of the batch
  }
}

// ---- forward
// ------------------------------------------------------------------------------------------------------------

class KvFormats : public testing::TestWithParam<DType> {};

TEST_P(KvFormats, CachedRowsGiveTheBitsOfComputedOnes) {
  Loaded whole = Load(Tiny("glm-moe-dsa"), {}, false, 128, GetParam());
  Loaded chunks = Load(Tiny("glm-moe-dsa"), {}, false, 7, GetParam());
  Loaded single = Load(Tiny("glm-moe-dsa"), {}, false, 1, GetParam());
  const auto prompt = Prompt(70);
  const auto want = whole.runner->Extend(prompt, 70);
  ASSERT_TRUE(want.ok()) << want.status();
  EXPECT_EQ(*want, *chunks.runner->Extend(prompt, 70));
  EXPECT_EQ(*want, *single.runner->Extend(prompt, 70));
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(PoolBytes(*whole.runner, LogicalLayer(layer), 70),
              PoolBytes(*single.runner, LogicalLayer(layer), 70));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, KvFormats, testing::Values(DType::kF32, DType::kBF16, DType::kF8E4M3),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST(LayerHooks, WaitThenReportEachLayerOnceInOrderAfterItsRowsAreWritten) {
  class Recorder final : public LayerHooks {
   public:
    explicit Recorder(const DevicePool& pool) : pool_(pool) {}
    std::vector<std::string> calls;
    void WaitReadable(LogicalLayer layer) override { calls.push_back("wait" + std::to_string(layer.value)); }
    void LayerFinal(LogicalLayer layer) override {
      std::vector<float> row(96);
      ops::reference::LoadLatentRow(pool_, layer, PageId(1), 9, row.data());
      calls.push_back((std::isnan(row[0]) ? "unwritten" : "final") + std::to_string(layer.value));
    }

   private:
    const DevicePool& pool_;
  };
  Loaded l = Load(Tiny("glm-moe-dsa"));
  l.runner->pool().Poison(PageId(1));
  Recorder recorder(l.runner->pool());
  l.runner->forward_options().hooks = &recorder;
  ASSERT_TRUE(l.runner->Extend(Prompt(10), 1).ok());
  EXPECT_THAT(recorder.calls,
              ElementsAre("wait0", "final0", "wait1", "final1", "wait2", "final2", "wait3", "final3"));
}

TEST(Forward, RefusesMoreRowsThanPlanned) {
  Loaded l = Load(Tiny("deepseek-v3"));
  BatchTables tables(200, 1);
  ForwardBatch b;
  b.tokens = Prompt(100);
  b.pages = {PageId(1), PageId(2)};
  BatchSeq s;
  s.num_rows = 100;
  s.num_pages = 2;
  b.seqs = {s};
  const auto m = tables.Build(b, b.tokens, 256);
  ASSERT_TRUE(m.ok());
  ForwardOptions options;
  const Status status =
      l.model->Forward(l.runner->queue(), *m, l.runner->pool(), l.runner->buffers(), options);
  EXPECT_TRUE(absl::IsInternal(status));
}

TEST(StepTimer, CountsEveryZoneOnlyWhenOn) {
  Loaded l = Load(Tiny("deepseek-v3"));
  StepTimer timer;
  ASSERT_TRUE(l.runner->Extend(Prompt(10), 1).ok());
  EXPECT_EQ(timer.total_ns(), 0);
  l.runner->forward_options().timer = &timer;
  ASSERT_TRUE(l.runner->Extend(Prompt(10), 1).ok());
  for (Zone z : {Zone::kEmbed, Zone::kNorm, Zone::kGemm, Zone::kHeadGemm, Zone::kKvWrite, Zone::kAttention,
                 Zone::kGate, Zone::kExperts, Zone::kLogits}) {
    EXPECT_GT(timer.ns(z), 0) << Name(z);
  }
  EXPECT_EQ(timer.ns(Zone::kIndexSelect), 0);
  EXPECT_GT(timer.compute_share(), 0.3);
}

// ---- draft layer
// --------------------------------------------------------------------------------------------------------

TEST(Draft, RowsDoNotDependOnChunksAndLeaveSlotZeroAlone) {
  Loaded whole = LoadDraft(true, 40), chunks = LoadDraft(true, 9);
  for (Loaded* l : {&whole, &chunks}) l->runner->pool().Poison(PageId(1));
  std::vector<float> a, b;
  ASSERT_TRUE(whole.runner->Extend(Prompt(30), 29, &a).ok());
  ASSERT_TRUE(chunks.runner->Extend(Prompt(30), 29, &b).ok());
  EXPECT_EQ(a.size(), 29u * 256);
  EXPECT_EQ(a, b);
  const LogicalLayer draft = whole.model->config().draft_layer();
  EXPECT_EQ(PoolBytes(*whole.runner, draft, 30), PoolBytes(*chunks.runner, draft, 30));
  std::vector<float> row(96);
  ops::reference::LoadLatentRow(whole.runner->pool(), draft, PageId(1), 0, row.data());
  EXPECT_TRUE(std::isnan(row[0]));
  ops::reference::LoadLatentRow(whole.runner->pool(), draft, PageId(1), 1, row.data());
  EXPECT_TRUE(std::isfinite(row[0]));
}

TEST(Draft, KvOnlyStoresTheSameRows) {
  Loaded full = LoadDraft(true, 40), kv_only = LoadDraft(true, 40);
  kv_only.runner->forward_options().kv_only = true;
  const auto a = full.runner->Extend(Prompt(20), 1), b = kv_only.runner->Extend(Prompt(20), 1);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(*a, *b);  // the model's own layers run in full
  const LogicalLayer draft = full.model->config().draft_layer();
  EXPECT_EQ(PoolBytes(*full.runner, draft, 20), PoolBytes(*kv_only.runner, draft, 20));
}

TEST(Draft, DoesNotChangeTheModelsOwnLogits) {
  Loaded with = LoadDraft(true, 16), without = LoadDraft(false, 16);
  const auto a = with.runner->Extend(Prompt(20), 20), b = without.runner->Extend(Prompt(20), 20);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(*a, *b);
  EXPECT_EQ(with.model->identity(), without.model->identity());
}

// index_share_for_mtp_iteration: a later pass attends to the positions that the first one chose.
TEST(Draft, ALaterPassTakesTheSelectionOfTheFirst) {
  std::vector<float> states[2];
  std::vector<int32_t> first, selected[2];
  for (const bool carried : {false, true}) {
    Loaded l = LoadDraft(true, 40);
    const ModelConfig& c = l.model->config();
    ASSERT_TRUE(l.runner->Extend(Prompt(30), 1).ok());  // its draft pass had 29 rows
    ModelBuffers& b = l.runner->buffers();
    const int64_t topk = c.index.topk;
    ASSERT_LT(topk, 29);
    first.assign(b.selected + 28 * topk, b.selected + 29 * topk);
    BatchSeq seq;
    seq.slot = SlotId(0);
    seq.num_rows = 1;
    seq.start = 30;
    seq.num_pages = 1;
    const PageId page(1);
    const std::vector<int32_t> token = {7};
    BatchTables tables(1, 1);
    const auto batch = tables.Build({&seq, 1}, {&page, 1}, token, c.vocab_size, 1);
    ASSERT_TRUE(batch.ok()) << batch.status();
    const std::vector<float> hidden(size_t(c.hidden), 0.5f);
    const int32_t from = 28;
    ForwardOptions options;
    if (carried) options.carried_selection = &from;
    const Status status = l.model->DraftForward(l.runner->queue(), *batch, {hidden.data(), 1, c.hidden},
                                                l.runner->pool(), b, options);
    ASSERT_TRUE(status.ok()) << status;
    selected[carried].assign(b.selected, b.selected + topk);
    states[carried].assign(b.x, b.x + c.hidden);
    for (const float x : states[carried]) EXPECT_TRUE(std::isfinite(x));
  }
  EXPECT_EQ(selected[1], first);
  EXPECT_NE(selected[0], first);
  EXPECT_NE(states[0], states[1]);
}

TEST(Draft, NeedsADraftLayer) {
  Loaded l = Load(Tiny("deepseek-v3"));
  ForwardOptions options;
  EXPECT_TRUE(absl::IsInternal(
      l.model->DraftForward(l.runner->queue(), {}, {}, l.runner->pool(), l.runner->buffers(), options)));
  const auto backend = ops::MakeReferenceBackend();
  // The config promises one, the checkpoint has none.
  const auto model = Model::Load(LoadModelConfig(Tiny("deepseek-v3")).value(),
                                 Checkpoint::Open(Tiny("deepseek-v3")).value(), *backend, {true});
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("draft (MTP) layer"));
}

// ---- cost
// -----------------------------------------------------------------------------------------------------------------

TEST(ModelCost, CountsAHandCheckedShape) {
  // DeepSeek-V2 tiny: 4 layers, no query latent, dense attention; two tokens.
  Loaded l = Load(Tiny("deepseek-v2"));
  KvLayoutOptions kv;
  kv.latent_dtype = kv.index_dtype = DType::kF32;
  const ModelCost cost(l.model->config(), *l.model, kv);
  const double attention_weights = 128 * 256 + 128 * 96 + 128 * 128, kv_b = 4 * 64 * 64;
  const double dense = 3 * 128 * 96, moe = 128 * 8 + 3 * 128 * (2 + 2) * 16;
  const double weights = 4 * attention_weights + dense + 3 * moe + 4 * kv_b;
  const double keys = 3, head = 128 * 256;
  EXPECT_DOUBLE_EQ(cost.PrefillFlops(2), 2 * (2 * weights + head + 4 * 4 * keys * (96 + 64)));
  EXPECT_DOUBLE_EQ(cost.PrefillFlopsExpanded(2), 2 * (2 * weights + head + 4 * 4 * keys * (64 + 32)));
  EXPECT_DOUBLE_EQ(cost.DecodeBytes(1, 10) - cost.DecodeBytes(1, 9), 4 * 96 * 4);
}

TEST(DummyWeights, GiveFiniteLogitsThatDependOnTheSeedAlone) {
  const ModelConfig config = LoadModelConfig(Tiny("glm-moe-dsa")).value();
  Loaded a = Load(config, Checkpoint::Dummy(config, false, 7).value());
  Loaded b = Load(config, Checkpoint::Dummy(config, false, 7).value());
  Loaded c = Load(config, Checkpoint::Dummy(config, false, 8).value());
  const auto x = a.runner->Extend(Prompt(40), 1), y = b.runner->Extend(Prompt(40), 1),
             z = c.runner->Extend(Prompt(40), 1);
  ASSERT_TRUE(x.ok() && y.ok() && z.ok());
  for (float v : *x) EXPECT_TRUE(std::isfinite(v));
  EXPECT_EQ(*x, *y);
  EXPECT_NE(*x, *z);
}

}  // namespace
}  // namespace sluice
