#include "kv/kv_layout.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "kv/layout_fixture.h"

namespace sluice {
namespace {

using testing::Glm5;
using testing::MakeLayout;
using testing::Small;

TEST(KvLayout, RowAndPageBytesOfGlm5) {
  const KvLayout fp8 = MakeLayout(Glm5(), DType::kF8E4M3, DType::kF8E4M3);
  EXPECT_EQ(fp8.latent_row_bytes(), 512 + 4 * 4 + 64 * 2);
  EXPECT_EQ(fp8.latent_row_bytes(), 656);
  EXPECT_EQ(fp8.latent_page_bytes(), 41984);
  EXPECT_EQ(fp8.index_page_bytes(), 8448);
  EXPECT_EQ(fp8.index_page_bytes() / kPageTokens, 132);
  const KvLayout bf16 = MakeLayout(Glm5());
  EXPECT_EQ(bf16.latent_row_bytes(), 1152);
  EXPECT_EQ(bf16.index_page_bytes(), 64 * 128 * 2);
  const KvLayout f32 = MakeLayout(Glm5(), DType::kF32, DType::kF32);
  EXPECT_EQ(f32.latent_row_bytes(), 2304);
  EXPECT_EQ(f32.index_page_bytes(), 64 * 128 * 4);
}

TEST(KvLayout, TokenBytesOfDenseAndSharedIndexSchedules) {
  const KvLayout dense = MakeLayout(Glm5(), DType::kF8E4M3, DType::kF8E4M3);
  EXPECT_EQ(dense.index_layers().size(), 78u);
  EXPECT_EQ(dense.bytes_per_token(), 61464.0);
  const KvLayout shared = MakeLayout(Glm5(4, 3), DType::kF8E4M3, DType::kF8E4M3);
  ASSERT_EQ(shared.index_layers().size(), 21u);
  EXPECT_EQ(shared.bytes_per_token(), 53940.0);
  EXPECT_EQ(shared.index_layers()[0].value, 0);
  EXPECT_EQ(shared.index_layers()[2].value, 2);
  EXPECT_EQ(shared.index_layers()[3].value, 6);
  EXPECT_EQ(shared.index_layers()[20].value, 74);
}

TEST(KvLayout, DraftLayerAddsOneLatentAndOneIndexPiece) {
  const KvLayout plain = MakeLayout(Glm5(4, 3), DType::kF8E4M3, DType::kF8E4M3);
  const KvLayout draft = MakeLayout(Glm5(4, 3), DType::kF8E4M3, DType::kF8E4M3, true);
  EXPECT_EQ(draft.bytes_per_token() - plain.bytes_per_token(), 656 + 132);
  EXPECT_EQ(draft.latent_layers().back().value, 78);
  EXPECT_EQ(draft.index_layers().back().value, 78);
  EXPECT_EQ(draft.IndexSlot(LogicalLayer(78)).value, 21);
  EXPECT_FALSE(plain.LatentSlot(LogicalLayer(78)).valid());
}

TEST(KvLayout, PiecesCoverThePageInLayerOrderWithoutGaps) {
  const KvLayout l = MakeLayout(Small(), DType::kF8E4M3, DType::kBF16);
  ASSERT_EQ(l.pieces().size(), 5u);
  const int64_t latent = 64 * (32 + 4 + 16), index = 64 * 16 * 2;
  EXPECT_EQ(l.page_bytes(), 3 * latent + 2 * index);
  int64_t offset = 0;
  for (const KvPiece& p : l.pieces()) {
    EXPECT_EQ(p.offset, offset);
    EXPECT_EQ(p.bytes, p.component == KvComponent::kLatent ? latent : index);
    offset += p.bytes;
  }
  EXPECT_EQ(offset, l.page_bytes());
  EXPECT_EQ(l.pieces()[1].component, KvComponent::kIndex);
  EXPECT_EQ(l.pieces()[1].layer.value, 0);
  EXPECT_EQ(l.pieces()[4].layer.value, 2);
  EXPECT_EQ(l.pieces()[4].slot.value, 1);
  EXPECT_FALSE(l.IndexSlot(LogicalLayer(1)).valid());
  EXPECT_EQ(l.IndexSlot(LogicalLayer(2)).value, 1);
}

TEST(KvLayout, DenseModelHasNoIndexBytes) {
  ModelConfig m = Small();
  m.index = {};
  const KvLayout l = MakeLayout(m);
  EXPECT_TRUE(l.index_layers().empty());
  EXPECT_EQ(l.index_page_bytes(), 0);
  EXPECT_EQ(l.page_bytes(), 3 * 64 * 40 * 2);
}

TEST(KvLayout, FingerprintChangesWithEveryPartOfTheIdentity) {
  std::set<std::string> seen;
  auto add = [&](const std::function<void(ModelConfig&, KvLayoutOptions&)>& change) {
    ModelConfig m = Small();
    KvLayoutOptions o;
    o.numerics_class = "cpu/avx512/deterministic";
    change(m, o);
    const auto l = KvLayout::Make(m, o);
    ASSERT_TRUE(l.ok()) << l.status();
    EXPECT_TRUE(seen.insert(Hex(l->content_fingerprint())).second);
  };
  add([](ModelConfig&, KvLayoutOptions&) {});
  add([](ModelConfig&, KvLayoutOptions& o) { o.model_identity[3] = 1; });
  add([](ModelConfig&, KvLayoutOptions& o) { o.latent_dtype = DType::kF32; });
  add([](ModelConfig&, KvLayoutOptions& o) { o.latent_dtype = DType::kF8E4M3; });
  add([](ModelConfig&, KvLayoutOptions& o) { o.index_dtype = DType::kF8E4M3; });
  add([](ModelConfig&, KvLayoutOptions& o) { o.with_draft = true; });
  add([](ModelConfig&, KvLayoutOptions& o) { o.hadamard = true; });
  add([](ModelConfig&, KvLayoutOptions& o) { o.numerics_class = "cpu/avx2/deterministic"; });
  add([](ModelConfig& m, KvLayoutOptions&) { m.rope_interleave = false; });
  add([](ModelConfig& m, KvLayoutOptions&) { m.index.rope_interleave = false; });
  add([](ModelConfig& m, KvLayoutOptions&) { m.index.computes[1] = true; });
  add([](ModelConfig& m, KvLayoutOptions&) { m.index.computes = {true, true, false}; });
  add([](ModelConfig& m, KvLayoutOptions&) { m.index.topk = 128; });
  add([](ModelConfig& m, KvLayoutOptions&) { m.kv_lora_rank = 64; });
  EXPECT_EQ(seen.size(), 14u);
}

TEST(KvLayout, FingerprintIsAFunctionOfTheValuesAlone) {
  EXPECT_EQ(MakeLayout(Glm5(4, 3)).content_fingerprint(), MakeLayout(Glm5(4, 3)).content_fingerprint());
}

TEST(KvLayout, RefusesWhatCannotBeStored) {
  KvLayoutOptions o;
  o.latent_dtype = DType::kF16;
  EXPECT_EQ(KvLayout::Make(Small(), o).status().code(), absl::StatusCode::kUnimplemented);
  o = {};
  ModelConfig m = Small();
  m.num_draft_layers = 0;
  o.with_draft = true;
  EXPECT_EQ(KvLayout::Make(m, o).status().code(), absl::StatusCode::kInvalidArgument);
  m = Small();
  m.index.computes.pop_back();
  EXPECT_EQ(KvLayout::Make(m, {}).status().code(), absl::StatusCode::kInvalidArgument);
  m = Small();
  m.kv_lora_rank = 30;
  o = {};
  o.latent_dtype = DType::kF8E4M3;
  EXPECT_EQ(KvLayout::Make(m, o).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace sluice
