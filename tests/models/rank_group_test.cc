// Context parallelism changes no bit: the same steps over 1 rank and over N, on the bundled model.
#include "exec/rank_group.h"

#include <gtest/gtest.h>

#include <cstring>

#include "backends/cpu/cpu_backend.h"
#include "base/check.h"
#include "base/plant.h"
#include "base/random.h"

namespace sluice {
namespace {

struct Extend {
  int seq;
  int rows;
  bool decode;
};

// Three sequences; B and C share A's first two pages.
const std::vector<std::vector<Extend>> kSteps = {
    {{0, 200, false}},
    {{0, 211, false}, {1, 90, false}, {2, 64, false}},
    {{0, 1, true}, {1, 3, false}, {2, 1, false}},
    {{0, 4, true}, {1, 1, true}, {2, 9, false}},
    {{0, 1, true}, {1, 1, true}, {2, 1, true}},
};
constexpr int kShared = 2;  // pages

struct Setting {
  int32_t ranks = 1;
  bool spread_experts = false;
  KvExchangeMode exchange = KvExchangeMode::kDirect;
  int64_t buffer_bytes = 64 << 20;
  std::string Name() const {
    return std::to_string(ranks) + " ranks" + (spread_experts ? ", experts spread" : "") +
           (exchange == KvExchangeMode::kGather ? ", gather into " + std::to_string(buffer_bytes) : "");
  }
};

struct Counted {
  int64_t moved = 0, in_place = 0;
};

std::vector<float> RunSteps(const Model& model, ops::Backend& backend, const KvLayout& layout,
                            const Setting& setting, Counted* counted) {
  const int32_t ranks = setting.ranks;
  auto pool = DevicePool::Make(layout, ranks, 40);
  EXPECT_TRUE(pool.ok());
  for (int32_t p = 0; p < ranks * 40; ++p)
    (*pool)->Poison(PageId(p));  // a row that is read before it was written is NaN
  RankGroupOptions o;
  o.ranks = ranks;
  o.spread_experts = setting.spread_experts;
  o.kv_exchange = setting.exchange;
  o.gather_buffer_bytes = setting.buffer_bytes;
  o.limits = {600, 8, 600, 1024};
  auto group = RankGroup::Make(model, backend, **pool, o);
  EXPECT_TRUE(group.ok()) << group.status();

  std::vector<std::vector<PageId>> pages(3);
  int32_t next = ranks;  // local page 0 of every lane is scratch
  for (int j = 0; j < 8; ++j)
    for (int s = 0; s < 3; ++s) {
      if (s > 0 && j < kShared)
        pages[size_t(s)].push_back(pages[0][size_t(j)]);
      else
        pages[size_t(s)].push_back(PageId(next++));
    }
  const auto token = [&](int seq, int position) {
    const uint64_t key =
        position < kShared * kPageTokens ? uint64_t(position) : uint64_t(seq) * 100003 + uint64_t(position);
    return int32_t(SeededStream(key + 1).Below(uint64_t(model.config().vocab_size)));
  };
  std::vector<int> length = {0, kShared * int(kPageTokens), kShared * int(kPageTokens)};
  std::vector<float> all;
  for (const auto& step : kSteps) {
    ForwardBatch b;
    std::vector<int32_t> rows;
    for (const Extend& e : step) {
      BatchSeq s;
      s.slot = SlotId(e.seq);
      s.row_begin = b.rows();
      s.num_rows = e.rows;
      s.start = length[size_t(e.seq)];
      s.decode = e.decode;
      s.page_begin = int32_t(b.pages.size());
      s.num_pages = int32_t(CeilDiv(s.start + e.rows, kPageTokens));
      b.pages.insert(b.pages.end(), pages[size_t(e.seq)].begin(), pages[size_t(e.seq)].begin() + s.num_pages);
      for (int i = 0; i < e.rows; ++i) b.tokens.push_back(token(e.seq, s.start + i));
      for (int i = 0; i < e.rows; i += 7) rows.push_back(s.row_begin + i);
      rows.push_back(s.row_begin + e.rows - 1);
      b.seqs.push_back(s);
      length[size_t(e.seq)] += e.rows;
    }
    ForwardOptions options;
    const Status status = (*group)->Forward(b, b.tokens, options);
    EXPECT_TRUE(status.ok()) << status;
    const float* logits = (*group)->Logits(rows);
    all.insert(all.end(), logits, logits + rows.size() * size_t(model.config().vocab_size));
  }
  *counted = {(*group)->bytes_moved(), (*group)->pages_in_place()};
  return all;
}

struct World {
  std::unique_ptr<ops::Backend> backend;
  std::unique_ptr<Model> model;
  KvLayout layout;
};

constexpr std::string_view kBundled = "models/ledger-28m-fp8", kTiny = "tests/data/tiny-random/glm-moe-dsa";

World Load(std::string_view model_folder, const std::string& isa, DType act, DType kv) {
  auto backend = cpu::MakeCpuBackend({act, isa});
  SLUICE_CHECK(backend.ok(), "{}", Message(backend.status()));
  const std::string folder = fmt::format("{}/{}", SLUICE_SOURCE_DIR, model_folder);
  const auto config = LoadModelConfig(folder);
  SLUICE_CHECK(config.ok(), "{}", Message(config.status()));
  auto checkpoint = Checkpoint::Open(folder);
  SLUICE_CHECK(checkpoint.ok(), "{}", Message(checkpoint.status()));
  auto model = Model::Load(*config, std::move(*checkpoint), **backend);
  SLUICE_CHECK(model.ok(), "{}", Message(model.status()));
  KvLayoutOptions lo;
  lo.latent_dtype = lo.index_dtype = kv;
  auto layout = KvLayout::Make(*config, lo);
  SLUICE_CHECK(layout.ok(), "{}", Message(layout.status()));
  return {std::move(*backend), std::move(*model), std::move(*layout)};
}

#ifdef SLUICE_PLANTS
// The simulation's mistakes in the product's tables change what real ranks compute.
TEST(RankGroupPlants, EachMistakeInTheTablesOfTheExchangeChangesBits) {
  const World w = Load(kTiny, "auto", DType::kBF16, DType::kF8E4M3);
  Counted counted;
  const Setting setting{4, false, KvExchangeMode::kGather};
  const auto run = [&](const Setting& s) { return RunSteps(*w.model, *w.backend, w.layout, s, &counted); };
  const auto equal = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  const std::vector<float> clean = run({});
  ASSERT_TRUE(equal(clean, run(setting)));
  for (const Plant plant : {Plant::kBatchInverse, Plant::kPaddingAsSuffix, Plant::kValidSourceOffset,
                            Plant::kWrongOwnerSpace, Plant::kDummyRowWritten}) {
    planted = plant;
    EXPECT_FALSE(equal(clean, run(setting))) << kPlants[size_t(plant) - 1].name;
    planted = Plant::kNone;
  }
}
#else
class RankGroupBits : public testing::TestWithParam<std::tuple<std::string, DType, DType>> {};

TEST_P(RankGroupBits, AreThoseOfOneRank) {
  const auto& [isa, act, kv] = GetParam();
  const World w = Load(kBundled, isa, act, kv);
  Counted counted;
  const std::vector<float> one = RunSteps(*w.model, *w.backend, w.layout, {}, &counted);
  EXPECT_EQ(counted.moved, 0);
  for (const float v : one) ASSERT_FALSE(std::isnan(v));
  constexpr auto kGather = KvExchangeMode::kGather;
  std::vector<Setting> settings = {{2}, {3}, {4}, {8}, {2, true}, {3, true}, {8, true}};
  for (const int32_t ranks : {2, 3, 4, 8}) settings.push_back({ranks, false, kGather});
  settings.push_back({3, true, kGather});
  settings.push_back({4, false, kGather, 1});  // room for one page
  for (const Setting& setting : settings) {
    const std::vector<float> many = RunSteps(*w.model, *w.backend, w.layout, setting, &counted);
    ASSERT_EQ(one.size(), many.size());
    EXPECT_EQ(std::memcmp(one.data(), many.data(), one.size() * sizeof(float)), 0) << setting.Name();
    EXPECT_GT(counted.moved, 0) << setting.Name();
    // Without pages in place no op can reach another lane: what it read has come through the communicator.
    EXPECT_EQ(counted.in_place > 0, setting.buffer_bytes == 1) << setting.Name();
  }
}

INSTANTIATE_TEST_SUITE_P(KvTypes, RankGroupBits,
                         testing::Values(std::tuple("auto", DType::kBF16, DType::kBF16),
                                         std::tuple("auto", DType::kBF16, DType::kF8E4M3),
                                         std::tuple("avx2", DType::kF32, DType::kF32)));

// What a cut prompt's chunk leaves in the draft layer's pages, for a chunk of each of two sequences whose
// rows do not divide evenly over the ranks' segments, so that compute padding lies between them.
struct DraftChunk {
  std::vector<std::byte> rows;  // of the draft layer, slot after slot of both sequences
  int64_t moved = 0, expected = 0;
  bool padded = false;
};

DraftChunk FillDraftChunk(const Model& model, ops::Backend& backend, const KvLayout& layout, int32_t ranks) {
  DraftChunk out;
  auto pool = DevicePool::Make(layout, ranks, 16);
  EXPECT_TRUE(pool.ok());
  for (int32_t p = 0; p < ranks * 16; ++p) (*pool)->Poison(PageId(p));
  RankGroupOptions o;
  o.ranks = ranks;
  o.limits = {400, 8, 8, 1024};
  auto group = RankGroup::Make(model, backend, **pool, o);
  EXPECT_TRUE(group.ok()) << group.status();
  ForwardBatch b;
  std::vector<int32_t> next;
  int32_t page = ranks;
  for (const int32_t length : {203, 77}) {
    BatchSeq s;
    s.slot = SlotId(int32_t(b.seqs.size()));
    s.row_begin = b.rows();
    s.num_rows = length;
    s.page_begin = int32_t(b.pages.size());
    s.num_pages = int32_t(CeilDiv(length + 1, kPageTokens));
    for (int32_t i = 0; i < s.num_pages; ++i) b.pages.push_back(PageId(page++));
    for (int32_t i = 0; i < length; ++i) {
      b.tokens.push_back(int32_t(SeededStream(uint64_t(length * 1000 + i)).Below(2000)));
      next.push_back(int32_t(SeededStream(uint64_t(length * 1000 + i + 1)).Below(2000)));
    }
    b.seqs.push_back(s);
  }
  ForwardOptions options;
  Status status = (*group)->Forward(b, b.tokens, options);
  EXPECT_TRUE(status.ok()) << status;
  const RankSplit& split = (*group)->split();
  int64_t row_bytes = 0;
  for (const KvPiece& piece : layout.pieces())
    if (piece.layer == model.config().draft_layer()) row_bytes += piece.bytes / kPageTokens;
  for (int32_t r = 0; r < ranks; ++r) {
    const RankPart& part = split.part(Rank(r));
    out.padded |= part.valid_rows() < split.compute_rows_per_rank();
    for (const BatchSeq& s : part.seqs)
      for (int32_t i = 0; i < s.num_rows; ++i) {
        const PageId to = b.pages[size_t(s.page_begin + (s.start + i + 1) / kPageTokens)];
        out.expected += PageOwner(to, ranks) == r ? 0 : row_bytes;
      }
  }
  status = (*group)->FillDraft(b, next);
  EXPECT_TRUE(status.ok()) << status;
  out.moved = (*group)->draft_bytes_moved();
  for (const BatchSeq& s : b.seqs)
    for (int32_t slot = 1; slot <= s.num_rows; ++slot)
      for (const KvPiece& piece : layout.pieces()) {
        if (piece.layer != model.config().draft_layer()) continue;
        const int64_t bytes = piece.bytes / kPageTokens;
        const std::byte* at = (*pool)->Piece(piece, b.pages[size_t(s.page_begin + slot / kPageTokens)]) +
                              slot % kPageTokens * bytes;
        out.rows.insert(out.rows.end(), at, at + bytes);
      }
  return out;
}

// The rows go into their owners' pages, and nothing else crosses ranks: the hidden states that they are made
// from are taken where the forward left them.
TEST(RankGroupDraft, APromptsDraftRowsAreMadeFromEachRanksOwnStates) {
  static_assert(!std::is_convertible_v<RankHidden, BatchHidden> &&
                !std::is_convertible_v<BatchHidden, RankHidden>);
  auto backend = cpu::MakeCpuBackend({DType::kBF16, "auto"});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const std::string folder = std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8";
  const auto config = LoadModelConfig(folder);
  ASSERT_TRUE(config.ok());
  auto checkpoint = Checkpoint::Open(folder);
  ASSERT_TRUE(checkpoint.ok());
  auto model = Model::Load(*config, std::move(*checkpoint), **backend, {.with_draft = true});
  ASSERT_TRUE(model.ok()) << model.status();
  KvLayoutOptions lo;
  lo.with_draft = true;
  const auto layout = KvLayout::Make(*config, lo);
  ASSERT_TRUE(layout.ok());
  const DraftChunk one = FillDraftChunk(**model, **backend, *layout, 1);
  EXPECT_EQ(one.moved, 0);
  for (const int32_t ranks : {2, 4, 8}) {
    const DraftChunk many = FillDraftChunk(**model, **backend, *layout, ranks);
    EXPECT_TRUE(many.padded) << ranks;
    EXPECT_EQ(many.rows, one.rows) << ranks << " ranks";
    EXPECT_EQ(many.moved, many.expected) << ranks << " ranks";
    EXPECT_GT(many.moved, 0) << ranks << " ranks";
  }
}

#endif  // SLUICE_PLANTS

}  // namespace
}  // namespace sluice
