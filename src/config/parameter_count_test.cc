#include "config/parameter_count.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace sluice {
namespace {

ModelConfig Config(const std::string& file) {
  std::ifstream in(std::string(SLUICE_SOURCE_DIR) + "/tests/data/" + file);
  std::stringstream text;
  text << in.rdbuf();
  auto config = ParseModelConfig(text.str());
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

TEST(ParameterCount, Glm52HasThePublishedSize) {
  const ParameterCount c = CountParameters(Config("configs/glm-5.2.json"));
  EXPECT_NEAR(double(c.total() - c.draft), 744e9, 4e9);
  // 75 MoE layers x 256 experts x 3 matrices of 6144 x 2048.
  EXPECT_EQ(c.routed_experts, 75ll * 256 * 3 * 6144 * 2048);
}

TEST(ParameterCount, TinyModelByHand) {
  const ParameterCount c = CountParameters(Config("tiny-random/glm-moe-dsa/config.json"));
  // hidden 128, 4 heads, q_lora 64, kv_lora 64, nope 32, rope 32, v 32; indexers on layers 0, 1, 3: 8 heads
  // of 32.
  const int64_t mla = 128 * 64 + 64 * 4 * 64 + 128 * (64 + 32) + 64 * 4 * 64 + 4 * 32 * 128;
  const int64_t indexer = 64 * 8 * 32 + 128 * 32 + 128 * 8;
  EXPECT_EQ(c.attention, 4 * mla + 3 * indexer);
  EXPECT_EQ(c.routed_experts, 3 * 8 * 3 * 128 * 16);
  EXPECT_EQ(c.dense_mlp, 3 * 128 * 96 + 3 * (3 * 128 * 16 + 8 * 128));
  EXPECT_EQ(c.embedding, 2 * 256 * 128);
}

TEST(ParameterCount, ExpertsAreSpreadAndTheRestIsReplicated) {
  const ParameterCount c = CountParameters(Config("configs/glm-5.2.json"));
  EXPECT_EQ(ParametersPerRank(c, 1, true), c.total());
  EXPECT_EQ(ParametersPerRank(c, 8, false), c.embedding + c.attention + c.dense_mlp + c.routed_experts / 8);
}

}  // namespace
}  // namespace sluice
