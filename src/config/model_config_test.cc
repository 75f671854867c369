#include "config/model_config.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include "config/index_schedule.h"
#include "config/json_fields.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Json Base() {
  return Json::parse(R"({
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 256, "hidden_size": 128,
    "intermediate_size": 96, "moe_intermediate_size": 16, "num_hidden_layers": 10, "num_attention_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": true, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 32, "index_n_heads": 8, "index_head_dim": 128,
    "index_topk": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 163840,
    "rope_theta": 10000.0, "eos_token_id": 255})");
}

// A patch is merged over the base; null removes a key.
Json With(const Json& patch) {
  Json j = Base();
  j.merge_patch(patch);
  return j;
}

StatusOr<ModelConfig> Parse(const Json& j, const ModelOverrides& o = {}) {
  return ParseModelConfig(j.dump(), o);
}

ModelConfig Good(const Json& j, const ModelOverrides& o = {}) {
  auto c = Parse(j, o);
  EXPECT_TRUE(c.ok()) << c.status();
  return c.ok() ? *c : ModelConfig{};
}

std::string Error(const Json& j, const ModelOverrides& o = {}) {
  auto c = Parse(j, o);
  EXPECT_FALSE(c.ok()) << "accepted: " << j.dump();
  return std::string(c.status().message());
}

std::string Schedule(const ModelConfig& c) { return ScheduleString(c.index.computes); }

// ---- rope
// -------------------------------------------------------------------------------------------------------------

TEST(RopeSettings, PlainRopeIsTheSameInBothSpellings) {
  const ModelConfig a = Good(With({{"rope_theta", 1e6}, {"rope_scaling", nullptr}}));
  const ModelConfig b = Good(
      With({{"rope_theta", nullptr}, {"rope_parameters", {{"rope_theta", 1e6}, {"rope_type", "default"}}}}));
  EXPECT_EQ(a.rope.inv_freq, b.rope.inv_freq);
  EXPECT_FALSE(a.rope.yarn);
  EXPECT_FALSE(b.rope.yarn);
  EXPECT_EQ(a.attn_scale, 0.0625f);
  EXPECT_EQ(b.attn_scale, 0.0625f);
  ASSERT_EQ(a.rope.inv_freq.size(), 32u);
  EXPECT_EQ(a.rope.inv_freq[0], 1.0f);
  EXPECT_NEAR(a.rope.inv_freq[31], std::pow(1e6, -62.0 / 64), 1e-12);
}

TEST(RopeSettings, YarnIsTheSameInAllThreeSpellings) {
  const Json body = {{"factor", 40},    {"mscale", 1.0},  {"mscale_all_dim", 1.0},
                     {"beta_fast", 32}, {"beta_slow", 1}, {"original_max_position_embeddings", 4096}};
  Json by_type = body, by_rope_type = body, inside = body;
  by_type["type"] = "yarn";
  by_rope_type["rope_type"] = "yarn";
  inside["rope_type"] = "yarn";
  inside["rope_theta"] = 10000.0;
  const Json head = {{"qk_nope_head_dim", 128}};
  Json three = With(head), four = With(head), five = With(head), plain = With(head);
  three["rope_scaling"] = by_type;
  four["rope_scaling"] = by_rope_type;
  five["rope_parameters"] = inside;
  five.erase("rope_theta");
  const ModelConfig a = Good(three), b = Good(four), c = Good(five), p = Good(plain);
  EXPECT_TRUE(a.rope.yarn);
  EXPECT_EQ(a.rope.inv_freq, b.rope.inv_freq);
  EXPECT_EQ(a.rope.inv_freq, c.rope.inv_freq);
  for (const ModelConfig* m : {&a, &b, &c}) EXPECT_NEAR(m->attn_scale, 0.135234f, 5e-7);
  EXPECT_NEAR(p.attn_scale, 0.072169f, 5e-7);
  EXPECT_NEAR(std::sqrt(a.attn_scale / p.attn_scale), 1.368888, 1e-6);
  EXPECT_EQ(a.rope.cos_sin_scale, 1.0f);
  // Fast pairs keep their frequency, slow ones are divided by the factor. Correction dims: floor(10.47) and
  // ceil(22.51).
  for (size_t i = 0; i <= 10; ++i) EXPECT_EQ(a.rope.inv_freq[i], p.rope.inv_freq[i]) << i;
  for (size_t i = 23; i < 32; ++i) EXPECT_NEAR(a.rope.inv_freq[i] * 40, p.rope.inv_freq[i], 1e-9) << i;
  EXPECT_LT(a.rope.inv_freq[16], p.rope.inv_freq[16]);
  EXPECT_GT(a.rope.inv_freq[16] * 40, p.rope.inv_freq[16]);
}

TEST(RopeSettings, CosAndSinAreScaledWhenTheTwoMscalesDiffer) {
  Json j = Base();
  j["rope_scaling"] = {{"type", "yarn"}, {"factor", 40}, {"original_max_position_embeddings", 4096}};
  const ModelConfig bare = Good(j);
  EXPECT_NEAR(bare.rope.cos_sin_scale, 1.368888, 1e-6);
  EXPECT_EQ(bare.attn_scale, 0.0625f);
  j["rope_scaling"]["mscale"] = 0.707;
  j["rope_scaling"]["mscale_all_dim"] = 1.0;
  EXPECT_NEAR(Good(j).rope.cos_sin_scale, (0.0707 * std::log(40) + 1) / (0.1 * std::log(40) + 1), 1e-6);
}

TEST(RopeSettings, BothSpellingsPresentMustAgree) {
  const Json p = {{"rope_type", "yarn"},
                  {"factor", 4},
                  {"original_max_position_embeddings", 64},
                  {"rope_theta", 10000.0}};
  Json same = p;
  same.erase("rope_theta");
  EXPECT_TRUE(Good(With({{"rope_parameters", p}, {"rope_scaling", same}})).rope.yarn);
  Json other = p;
  other["factor"] = 8;
  EXPECT_THAT(Error(With({{"rope_parameters", p}, {"rope_scaling", other}})),
              AllOf(HasSubstr("rope_parameters"), HasSubstr("4"), HasSubstr("8")));
  EXPECT_THAT(Error(With({{"rope_theta", 5e5}, {"rope_parameters", p}})), HasSubstr("rope_theta: 500000"));
}

TEST(RopeSettings, ThetaIsNeverMadeUp) {
  const Json no_theta = {{"rope_theta", nullptr}};
  EXPECT_THAT(Error(With(no_theta)), HasSubstr("rope_theta: missing"));
  for (const char* parameters : {"{}", R"({"rope_type": "default"})"}) {
    Json j = With(no_theta);
    j["rope_parameters"] = Json::parse(parameters);
    EXPECT_THAT(Error(j), HasSubstr("rope_parameters.rope_theta: missing"));
    j["rope_theta"] = 1e6;  // the key beside it will do
    EXPECT_EQ(Good(j).rope.theta, 1e6);
  }
}

TEST(ModelConfigText, OnlyDtypesOfSupportedWeightsPass) {
  for (const char* dtype : {"bfloat16", "float16", "float32", "float8_e4m3fn", "torch.bfloat16"}) {
    Good(With({{"dtype", dtype}}));
    Good(With({{"torch_dtype", dtype}}));
  }
  for (const char* dtype : {"int8", "float64", "uint8", "float8_e5m2", "auto", "bf16"}) {
    EXPECT_THAT(Error(With({{"dtype", dtype}})),
                AllOf(HasSubstr("dtype: \""), HasSubstr(dtype), HasSubstr("bfloat16")));
    EXPECT_THAT(Error(With({{"torch_dtype", dtype}})), HasSubstr("torch_dtype: \""));
  }
  EXPECT_THAT(Error(With({{"dtype", 8}})), HasSubstr("dtype: 8 is not a string"));
  EXPECT_THAT(Error(With({{"dtype", "bfloat16"}, {"torch_dtype", "float16"}})),
              HasSubstr("differs from torch_dtype"));
}

TEST(RopeSettings, WrongScalingIsRefused) {
  const Json yarn = {{"type", "yarn"}, {"original_max_position_embeddings", 4096}};
  Json j = With({{"rope_scaling", yarn}});
  EXPECT_THAT(Error(j), HasSubstr("rope_scaling.factor: missing"));
  j["rope_scaling"]["factor"] = 0;
  EXPECT_THAT(Error(j), HasSubstr("rope_scaling.factor: 0"));
  j["rope_scaling"] = {{"type", "spiral"}, {"factor", 2}};
  EXPECT_THAT(Error(j), AllOf(HasSubstr("spiral"), HasSubstr("yarn")));
  j["rope_scaling"] = {{"type", "linear"}, {"factor", 2}};
  EXPECT_THAT(Error(j), HasSubstr("linear"));
  j["rope_scaling"] = {{"type", "yarn"}, {"rope_type", "default"}, {"factor", 2}};
  EXPECT_THAT(Error(j), HasSubstr("rope_type"));
  j["rope_scaling"] = "yarn";
  EXPECT_THAT(Error(j), HasSubstr("rope_scaling"));
}

TEST(StopTokens, ComeAsOneIdOrAsAList) {
  EXPECT_THAT(Good(Base()).eos_token_ids, ElementsAre(255));
  EXPECT_THAT(Good(With({{"eos_token_id", {7, 9, 7}}})).eos_token_ids, ElementsAre(7, 9));
  EXPECT_TRUE(Good(With({{"eos_token_id", nullptr}})).eos_token_ids.empty());
  EXPECT_THAT(Error(With({{"eos_token_id", "x"}})), HasSubstr("eos_token_id"));
  EXPECT_THAT(Error(With({{"eos_token_id", 256}})),
              HasSubstr("eos_token_id: 256 is not below vocab_size 256"));
  EXPECT_THAT(Error(With({{"eos_token_id", {1, 99999}}})), HasSubstr("eos_token_id: 99999"));
}

TEST(StopTokens, OfGenerationConfigAreAdded) {
  const std::string dir = testing::TempDir() + "/sluice_generation_config";
  std::filesystem::create_directories(dir);
  std::ofstream(dir + "/config.json") << Base().dump();
  std::ofstream(dir + "/generation_config.json") << R"({"eos_token_id": [254, 255]})";
  auto c = LoadModelConfig(dir);
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_THAT(c->eos_token_ids, ElementsAre(255, 254));
  std::ofstream(dir + "/generation_config.json") << "{";
  EXPECT_THAT(std::string(LoadModelConfig(dir).status().message()), HasSubstr("generation_config.json"));
}

// ---- index schedule
// ---------------------------------------------------------------------------------------------------

TEST(IndexSchedule, FrequencyWithoutOffset) {
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 4}}))), "FFSSSFSSSF");
  const ModelConfig c = Good(With({{"index_topk_freq", 4}, {"num_hidden_layers", 78}}));
  EXPECT_EQ(std::count(c.index.computes.begin(), c.index.computes.end(), true), 21);
  EXPECT_TRUE(c.index.computes[77]);
}

TEST(IndexSchedule, FrequencyWithOffset) {
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 4}, {"index_skip_topk_offset", 3}}))), "FFFSSSFSSS");
  const ModelConfig c =
      Good(With({{"index_topk_freq", 4}, {"index_skip_topk_offset", 3}, {"num_hidden_layers", 78}}));
  std::vector<int> full;
  for (int i = 0; i < 78; ++i) {
    if (c.index.computes[size_t(i)]) full.push_back(i);
  }
  EXPECT_THAT(full,
              ElementsAre(0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74));
  // No offset is the same as offset 2.
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 4}, {"index_skip_topk_offset", 2}}))),
            Schedule(Good(With({{"index_topk_freq", 4}}))));
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 3}, {"index_skip_topk_offset", 1}}))), "FSSFSSFSSF");
}

TEST(IndexSchedule, AbsentOrOneMeansEveryLayer) {
  EXPECT_EQ(Schedule(Good(Base())), "FFFFFFFFFF");
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 1}}))), "FFFFFFFFFF");
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 1}, {"index_skip_topk_offset", 3}}))), "FFFFFFFFFF");
}

TEST(IndexSchedule, ListOverPatternOverFrequencyAndAllMustAgree) {
  const Json list = {"full", "full",   "shared", "shared", "shared",
                     "full", "shared", "shared", "shared", "full"};
  EXPECT_EQ(Schedule(Good(With({{"indexer_types", list}}))), "FFSSSFSSSF");
  EXPECT_EQ(Schedule(Good(With({{"index_topk_pattern", "FFFSSSFSSS"}}))), "FFFSSSFSSS");
  EXPECT_EQ(Schedule(Good(With(
                {{"indexer_types", list}, {"index_topk_pattern", "FFSSSFSSSF"}, {"index_topk_freq", 4}}))),
            "FFSSSFSSSF");
  EXPECT_THAT(Error(With({{"indexer_types", list}, {"index_topk_freq", 2}})),
              AllOf(HasSubstr("FFSSSFSSSF"), HasSubstr("FFSFSFSFSF")));
  EXPECT_THAT(Error(With({{"indexer_types", list}, {"index_topk_pattern", "FFFSSSFSSS"}})),
              HasSubstr("FFFSSSFSSS"));
  EXPECT_THAT(Error(With({{"index_topk_pattern", "FFFSSSFSSS"}, {"index_topk_freq", 4}})),
              HasSubstr("index_topk_freq"));
}

TEST(IndexSchedule, WrongValuesAreRefused) {
  EXPECT_THAT(Error(With({{"index_topk_pattern", "FFF"}})),
              AllOf(HasSubstr("3 characters"), HasSubstr("10")));
  EXPECT_THAT(Error(With({{"index_topk_pattern", "SFFFFFFFFF"}})), HasSubstr("starts with S"));
  EXPECT_THAT(Error(With({{"index_topk_pattern", "FFFFxFFFFF"}})), HasSubstr("'x' at layer 4"));
  EXPECT_THAT(Error(With({{"index_topk_pattern", "FFFFfFFFFF"}})), HasSubstr("'f' at layer 4"));
  EXPECT_THAT(Error(With({{"index_topk_freq", 0}})), HasSubstr("index_topk_freq: 0"));
  EXPECT_THAT(Error(With({{"index_topk_freq", -1}})), HasSubstr("index_topk_freq: -1"));
  EXPECT_THAT(Error(With({{"index_topk_freq", 2.5}})), HasSubstr("index_topk_freq: 2.5"));
  EXPECT_THAT(Error(With({{"index_topk_freq", 4}, {"index_skip_topk_offset", 0}})),
              HasSubstr("index_skip_topk_offset: 0"));
  EXPECT_THAT(Error(With({{"index_skip_topk_offset", 0}})), HasSubstr("index_skip_topk_offset: 0"));
  EXPECT_THAT(Error(With({{"indexer_types", {"full", "shared"}}})), HasSubstr("2 entries"));
  Json first = Json::array();
  for (int i = 0; i < 10; ++i) first.push_back(i == 0 ? "shared" : "full");
  EXPECT_THAT(Error(With({{"indexer_types", first}})), HasSubstr("indexer_types[0]"));
  first[0] = "half";
  EXPECT_THAT(Error(With({{"indexer_types", first}})), HasSubstr("half"));
}

// ---- overrides
// --------------------------------------------------------------------------------------------------------

TEST(Overrides, EachFlagAloneAddsItsKey) {
  ModelOverrides o;
  o.index_topk_freq = 4;
  EXPECT_EQ(Schedule(Good(Base(), o)), "FFSSSFSSSF");
  EXPECT_EQ(Json::parse(Good(Base(), o).merged_json)["index_topk_freq"], 4);
  o = {};
  o.index_topk_pattern = "FSFSFSFSFS";
  EXPECT_EQ(Schedule(Good(Base(), o)), "FSFSFSFSFS");
  EXPECT_EQ(Json::parse(Good(Base(), o).merged_json)["index_topk_pattern"], "FSFSFSFSFS");
  o = {};
  o.index_skip_topk_offset = 3;
  EXPECT_EQ(Schedule(Good(Base(), o)), "FFFFFFFFFF");
  EXPECT_EQ(Json::parse(Good(Base(), o).merged_json)["index_skip_topk_offset"], 3);
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 4}}), o)), "FFFSSSFSSS");
}

TEST(Overrides, ZeroInjectsNothing) {
  ModelOverrides o;
  o.index_topk_freq = 0;
  o.index_skip_topk_offset = 0;
  const Json before = With({{"index_topk_freq", 4}});
  EXPECT_EQ(Good(before, o).merged_json, before.dump());
  EXPECT_FALSE(Json::parse(Good(Base(), o).merged_json).contains("index_topk_freq"));
  EXPECT_FALSE(Json::parse(Good(Base(), o).merged_json).contains("index_skip_topk_offset"));
  EXPECT_FALSE(Json::parse(Good(Base(), o).merged_json).contains("index_topk_pattern"));
}

TEST(Overrides, FlagsLeaveTheOtherKeysOfTheOverrideAlone) {
  ModelOverrides o;
  o.json = R"({"max_position_embeddings": 1000, "rope_parameters": {"factor": 8}, "index_topk": 32})";
  o.index_topk_freq = 4;
  o.index_skip_topk_offset = 3;
  Json base = Base();
  base["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 64}};
  const ModelConfig c = Good(base, o);
  EXPECT_EQ(c.max_positions, 1000);
  EXPECT_EQ(c.rope.factor, 8);
  EXPECT_EQ(c.rope.original_max_position, 64);  // the rest of the nested object stays
  EXPECT_EQ(c.index.topk, 32);
  EXPECT_EQ(Schedule(c), "FFFSSSFSSS");
}

TEST(Overrides, AFlagAndAnOverrideOfOneKeyMustAgree) {
  ModelOverrides o;
  o.json = R"({"index_topk_freq": 2})";
  o.index_topk_freq = 4;
  EXPECT_THAT(Error(Base(), o),
              AllOf(HasSubstr("--nsa-index-topk-freq 4"), HasSubstr("\"index_topk_freq\": 2")));
  o.index_topk_freq = 2;
  EXPECT_EQ(Schedule(Good(Base(), o)), "FFSFSFSFSF");
  o = {};
  o.json = R"({"index_topk_pattern": "FSFSFSFSFS"})";
  o.index_topk_pattern = "FFFSSSFSSS";
  EXPECT_THAT(Error(Base(), o), AllOf(HasSubstr("FSFSFSFSFS"), HasSubstr("FFFSSSFSSS")));
  o = {};
  o.json = R"({"index_skip_topk_offset": 1})";
  o.index_skip_topk_offset = 3;
  EXPECT_THAT(Error(Base(), o), AllOf(HasSubstr("--nsa-index-skip-topk-offset 3"), HasSubstr(": 1")));
  o = {};
  o.json = R"({"index_topk_freq": null})";  // an override can unset a key of the file
  EXPECT_EQ(Schedule(Good(With({{"index_topk_freq", 4}}), o)), "FFFFFFFFFF");
  o.index_topk_freq = 4;
  EXPECT_THAT(Error(Base(), o), AllOf(HasSubstr("4"), HasSubstr("null")));
}

TEST(Overrides, BadJsonAndNegativeFlagsAreRefused) {
  ModelOverrides o;
  o.json = "{";
  EXPECT_THAT(Error(Base(), o), HasSubstr("--json-model-override-args"));
  o.json = "[1]";
  EXPECT_THAT(Error(Base(), o), HasSubstr("expected an object"));
  o = {};
  o.index_topk_freq = -1;
  EXPECT_THAT(Error(Base(), o), HasSubstr("-1"));
  o = {};
  o.index_skip_topk_offset = -2;
  EXPECT_THAT(Error(Base(), o), HasSubstr("-2"));
}

TEST(Overrides, IndexFlagsOnADenseModelAreRefused) {
  Json dense = With(
      {{"architectures", {"DeepseekV3ForCausalLM"}}, {"model_type", "deepseek_v3"}, {"index_topk", nullptr}});
  EXPECT_FALSE(Good(dense).sparse());
  ModelOverrides o;
  o.index_topk_freq = 4;
  EXPECT_THAT(Error(dense, o), AllOf(HasSubstr("index_topk_freq"), HasSubstr("no indexer")));
}

// ---- families and refusals
// ----------------------------------------------------------------------------------------------

TEST(Families, DifferInRoutingAndIndexerPairing) {
  const ModelConfig glm = Good(Base());
  EXPECT_TRUE(glm.index.rope_interleave);
  EXPECT_TRUE(glm.moe.has_bias);
  EXPECT_EQ(glm.moe.scoring, ScoringFunc::kSigmoid);
  EXPECT_EQ(glm.moe.group_score, GroupScore::kNone);
  const ModelConfig v32 = Good(With({{"architectures", {"DeepseekV32ForCausalLM"}},
                                     {"model_type", "deepseek_v32"},
                                     {"n_group", 4},
                                     {"topk_group", 2}}));
  EXPECT_FALSE(v32.index.rope_interleave);
  EXPECT_TRUE(v32.rope_interleave);
  EXPECT_EQ(v32.moe.group_score, GroupScore::kSumTop2);
  EXPECT_FALSE(Good(With({{"indexer_rope_interleave", false}})).index.rope_interleave);
  Json v2 = With({{"architectures", {"DeepseekV2ForCausalLM"}},
                  {"index_topk", nullptr},
                  {"norm_topk_prob", false},
                  {"q_lora_rank", nullptr}});
  const ModelConfig greedy = Good(v2);
  EXPECT_EQ(greedy.moe.scoring, ScoringFunc::kSoftmax);
  EXPECT_FALSE(greedy.moe.normalize);
  EXPECT_FALSE(greedy.moe.has_bias);
  EXPECT_EQ(greedy.q_lora_rank, 0);
  v2["topk_method"] = "group_limited_greedy";
  v2["n_group"] = 4;
  v2["topk_group"] = 2;
  EXPECT_EQ(Good(v2).moe.group_score, GroupScore::kMax);
  v2["norm_topk_prob"] = true;
  EXPECT_THAT(Error(v2), HasSubstr("norm_topk_prob"));
}

TEST(Families, LatentNormsKeepTheirOwnEpsilon) {
  const ModelConfig c = Good(Base());
  EXPECT_EQ(c.rms_eps, 1e-5f);
  EXPECT_EQ(c.latent_norm_eps, 1e-6f);
}

TEST(Refusals, NameTheKeyTheValueAndWhatIsRight) {
  EXPECT_THAT(Error(With({{"architectures", {"LlamaForCausalLM"}}})),
              AllOf(HasSubstr("LlamaForCausalLM"), HasSubstr("GlmMoeDsaForCausalLM")));
  EXPECT_THAT(Error(With({{"hidden_size", nullptr}})), HasSubstr("hidden_size: missing"));
  EXPECT_THAT(Error(With({{"hidden_size", -1}})), HasSubstr("hidden_size: -1"));
  EXPECT_THAT(Error(With({{"hidden_size", 1.5}})), HasSubstr("hidden_size: 1.5"));
  EXPECT_THAT(Error(With({{"hidden_size", "128"}})), HasSubstr("hidden_size: \"128\""));
  EXPECT_THAT(Error(With({{"hidden_size", 1e300}})), HasSubstr("hidden_size"));
  EXPECT_THAT(Error(With({{"qk_rope_head_dim", 63}})), HasSubstr("qk_rope_head_dim: 63"));
  EXPECT_THAT(Error(With({{"qk_head_dim", 100}})), HasSubstr("qk_head_dim: 100"));
  EXPECT_THAT(Error(With({{"hidden_act", "gelu"}})), HasSubstr("gelu"));
  EXPECT_THAT(Error(With({{"attention_bias", true}})), HasSubstr("attention_bias"));
  EXPECT_THAT(Error(With({{"n_group", 3}})), HasSubstr("n_group: 3"));
  EXPECT_THAT(Error(With({{"n_group", 8}, {"topk_group", 4}})), HasSubstr("fewer than 2 experts"));
  EXPECT_THAT(Error(With({{"num_experts_per_tok", 9}})), HasSubstr("num_experts_per_tok: 9"));
  EXPECT_THAT(Error(With({{"mlp_layer_types", {"dense"}}})), HasSubstr("mlp_layer_types"));
  EXPECT_THAT(Error(With({{"quantization_config", {{"quant_method", "awq"}}}})), HasSubstr("awq"));
  EXPECT_THAT(Error(With({{"quantization_config", {{"quant_method", "fp8"}}}})),
              HasSubstr("weight_block_size"));
  EXPECT_THAT(std::string(ParseModelConfig("{\"a\":").status().message()), HasSubstr("not valid JSON"));
  EXPECT_THAT(std::string(ParseModelConfig(std::string(100000, '[')).status().message()),
              HasSubstr("nested deeper"));
  EXPECT_THAT(std::string(LoadModelConfig("/nonexistent").status().message()),
              HasSubstr("/nonexistent/config.json"));
}

TEST(Refusals, NoValueOfAnyKeyGetsPastTheReaderUnchecked) {
  // Every key of every config takes every kind of wrong value: parsing ends with a config or a message, never
  // otherwise.
  const Json values = Json::parse(
      R"([null, true, false, 0, 1, -1, 2, 3, 7, 1000000007, 9223372036854775807, 18446744073709551615, 0.5, -1e300, 1e-300,
          "", "x", "yarn", [], [0], ["full"], ["dense", 1], {}, {"rope_type": "yarn"}, {"type": 3}, [[[]]]])");
  Json sparse =
      With({{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 64}}},
            {"index_topk_freq", 2},
            {"index_topk_pattern", nullptr},
            {"topk_method", "noaux_tc"},
            {"scoring_func", "sigmoid"},
            {"num_nextn_predict_layers", 1},
            {"moe_layer_freq", 1},
            {"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}},
            {"mlp_layer_types", nullptr},
            {"layer_types", nullptr}});
  for (const char* key :
       {"index_topk_pattern", "indexer_types", "mlp_layer_types", "layer_types", "rope_parameters",
        "rope_interleave", "tie_word_embeddings", "index_skip_topk_offset", "indexer_rope_interleave"}) {
    sparse[key] = nullptr;
  }
  int accepted = 0, refused = 0;
  for (const auto& [key, unused] : sparse.items()) {
    for (const Json& value : values) {
      Json changed = sparse;
      changed[key] = value;
      const auto c = Parse(changed);
      c.ok() ? ++accepted : ++refused;
      if (!c.ok()) {
        EXPECT_FALSE(c.status().message().empty()) << key;
      } else {
        EXPECT_EQ(int64_t(c->layer_is_moe.size()), c->num_layers);
        EXPECT_EQ(int64_t(c->rope.inv_freq.size()), c->qk_rope / 2);
      }
    }
    if (!sparse[key].is_object()) continue;
    for (const auto& [inner, unused2] : sparse[key].items()) {
      for (const Json& value : values) {
        Json changed = sparse;
        changed[key][inner] = value;
        Parse(changed).ok() ? ++accepted : ++refused;
      }
    }
  }
  EXPECT_GT(accepted, 50);
  EXPECT_GT(refused, 500);
}

TEST(CheckpointFolders, OfTheTreeAreAllAccepted) {
  const std::string data = std::string(SLUICE_SOURCE_DIR) + "/tests/data/";
  for (std::string name : {"tiny-random/glm-moe-dsa", "tiny-random/deepseek-v32", "tiny-random/deepseek-v3",
                           "tiny-random/deepseek-v2", "tiny-random/glm4-moe-lite", "synthetic-120m"}) {
    auto c = LoadModelConfig(data + name);
    ASSERT_TRUE(c.ok()) << name << ": " << c.status();
    EXPECT_EQ(c->layer_is_moe[0], false);
    EXPECT_EQ(c->layer_is_moe[1], true);
  }
  auto ledger = LoadModelConfig(std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8");
  ASSERT_TRUE(ledger.ok()) << ledger.status();
  EXPECT_EQ(ScheduleString(ledger->index.computes), "FFSFSF");
  EXPECT_TRUE(ledger->IsFullIndexLayer(ledger->draft_layer()));
  EXPECT_EQ(ledger->quant_block_n, 128);
  EXPECT_THAT(ledger->eos_token_ids, ElementsAre(2028, 2035, 2037));
}

}  // namespace
}  // namespace sluice
