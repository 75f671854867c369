#include "config/legality.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "config/flag_values.h"
#include "config/flags.h"

namespace sluice {
namespace {

// The flags of `text` alone, without the legality check that the parser runs at its end.
ServerConfig Unchecked(std::string_view text) {
  ServerConfig config;
  const auto words = SplitWords(text, ' ');
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t eq = words[i].find('=');
    const FlagSpec* flag = FindFlag(words[i].substr(0, eq));
    EXPECT_NE(flag, nullptr) << words[i];
    if (flag == nullptr) return config;
    std::vector<std::string> values;
    if (eq != std::string_view::npos) {
      values.emplace_back(words[i].substr(eq + 1));
    } else if (i + 1 < words.size() && !words[i + 1].starts_with("--")) {
      values.emplace_back(words[++i]);
    }
    EXPECT_TRUE(SetFlagValue(*flag, values, &config).ok()) << words[i];
  }
  return config;
}

// A model of four layers, two of which reuse their neighbour's selection, trained for 4096 positions.
ModelConfig SharingModel() {
  ModelConfig model;
  model.num_layers = 4;
  model.max_positions = 4096;
  model.index.num_heads = 4;
  model.index.computes = {true, false, true, false};
  return model;
}

std::set<std::string> Violated(const ServerConfig& config, const ModelConfig* model) {
  std::set<std::string> ids;
  for (const LegalityRow& row : LegalityTable()) {
    if (row.needs_model && model == nullptr) continue;
    if (!row.violation(config, model).empty()) ids.insert(row.id);
  }
  return ids;
}

TEST(Legality, EachRowRefusesItsExampleAndNothingElseDoes) {
  const ModelConfig model = SharingModel();
  for (const LegalityRow& row : LegalityTable()) {
    const ServerConfig illegal = Unchecked(row.illegal_example);
    EXPECT_THAT(Violated(illegal, row.needs_model ? &model : nullptr), ::testing::ElementsAre(row.id))
        << row.illegal_example;
    const ServerConfig legal = Unchecked(row.legal_example);
    EXPECT_THAT(Violated(legal, row.needs_model ? &model : nullptr), ::testing::IsEmpty())
        << row.id << ": " << row.legal_example;
  }
}

TEST(Legality, MessagesHoldValuesReasonAndRemedy) {
  const ModelConfig model = SharingModel();
  std::set<std::string> ids;
  for (const LegalityRow& row : LegalityTable()) {
    EXPECT_TRUE(ids.insert(row.id).second) << row.id;
    const ServerConfig config = Unchecked(row.illegal_example);
    const std::vector<std::string> lines = IllegalCombinations(config, row.needs_model ? &model : nullptr);
    ASSERT_EQ(lines.size(), 1u) << row.id;
    EXPECT_THAT(lines[0], ::testing::HasSubstr(row.reason));
    EXPECT_THAT(lines[0], ::testing::HasSubstr(row.remedy));
    EXPECT_THAT(lines[0], ::testing::StartsWith("--"));
    EXPECT_EQ(lines[0].find('\n'), std::string::npos);
  }
}

TEST(Legality, AllPairsOfHostLayoutAndCopyBackend) {
  const std::set<std::string> legal = {"layer_first direct", "layer_first kernel", "page_first kernel",
                                       "page_first_direct direct", "layer_page_first direct"};
  for (const char* layout : {"layer_first", "page_first", "page_first_direct", "layer_page_first"}) {
    for (const char* backend : {"direct", "kernel"}) {
      ServerConfig config;
      config.enable_hierarchical_cache = true;
      config.hicache_mem_layout = layout;
      config.hicache_io_backend = backend;
      const bool expected = legal.contains(fmt::format("{} {}", layout, backend));
      EXPECT_EQ(IllegalCombinations(config, nullptr).empty(), expected) << layout << " " << backend;
    }
  }
}

TEST(Legality, ParserRefusesIllegalCombinations) {
  EXPECT_FALSE(ParseServerFlags({"--page-size", "1"}).ok());
  EXPECT_TRUE(ParseServerFlags({"--page-size", "64"}).ok());
}

TEST(Legality, ModelRowsWaitForTheModel) {
  const ServerConfig config = Unchecked("--enable-two-batch-overlap --context-length 8192");
  EXPECT_THAT(IllegalCombinations(config, nullptr), ::testing::IsEmpty());
  const Status status = CheckWithModel(config, SharingModel());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Message(status)),
              ::testing::AllOf(
                  ::testing::HasSubstr("--context-length 8192 with max_position_embeddings 4096"),
                  ::testing::HasSubstr("--enable-two-batch-overlap with 2 layers that reuse a selection")));
  ModelConfig dense = SharingModel();
  dense.index = {};
  EXPECT_TRUE(CheckWithModel(Unchecked("--enable-two-batch-overlap"), dense).ok());
}

TEST(Legality, DefaultsAreLegal) {
  EXPECT_THAT(IllegalCombinations(ServerConfig{}, nullptr), ::testing::IsEmpty());
}

}  // namespace
}  // namespace sluice
