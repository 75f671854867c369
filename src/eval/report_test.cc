#include "eval/report.h"

#include "gtest/gtest.h"

namespace sluice::eval {
namespace {

Dataset TwoSessions() {
  Dataset d =
      ParseDataset(
          R"({"id":"a","bucket":1024,"kinds":["x"],"sure":[true],"reference_ok":[true],"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"yes"}]})"
          "\n"
          R"({"id":"b","bucket":512,"kinds":["y"],"sure":[false],"reference_ok":[true],"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"no"}]})",
          -1)
          .value();
  return d;
}

PassResult Pass(const Dataset& d, const std::string& name, uint64_t second_hash) {
  PassResult p;
  p.name = name;
  for (size_t i = 0; i < 2; ++i) {
    TurnResult t;
    t.session = &d.sessions[i];
    t.turn = &d.sessions[i].turns[0];
    t.answer.text = i == 0 ? "yes" : "perhaps";
    t.answer.finish = FinishReason::kStop;
    t.answer.output_ids = {1, int32_t(i)};
    t.answer.logits_hash = i == 0 ? 7 : second_hash;
    t.answer.prompt_tokens = 10;
    t.answer.output_tokens = 3;
    t.answer.cached = {5, 2, 1};
    t.right = i == 0;
    p.turns.push_back(t);
  }
  return p;
}

TEST(Report, SharesAreCountedByKindBucketAndAgreement) {
  const Dataset d = TwoSessions();
  const PassResult cold = Pass(d, "cold", 8);
  const Json j = PassJson(cold, &cold, d, true);
  EXPECT_EQ(j["accuracy"], 0.5);
  EXPECT_EQ(j["accuracy_sure"], 1.0);
  EXPECT_EQ(j["agreement_reference"], 0.5);
  EXPECT_EQ(j["by_bucket"]["512"], 0.0);
  EXPECT_EQ(j["by_bucket"].begin().key(), "512");  // numbers in order
  EXPECT_EQ(j["by_kind"]["x"], 1.0);
  EXPECT_EQ(j["identical_to_cold"], 1.0);
  EXPECT_EQ(j["cached_tokens"], 16);
  EXPECT_EQ(j["cached_by_tier"]["l2"], 4);
  EXPECT_EQ(j["prompt_tokens"], 20);
  EXPECT_TRUE(j["accept_length"].is_null());
}

TEST(Report, ADifferentLogitBitIsSeenEvenWhenTheTextIsTheSame) {
  const Dataset d = TwoSessions();
  const PassResult cold = Pass(d, "cold", 8), warm = Pass(d, "warm", 9);
  const Json j = PassJson(warm, &cold, d, true);
  EXPECT_EQ(j["identical_to_cold"], 1.0);
  EXPECT_EQ(j["logits_identical_to_cold"], 0.5);
  EXPECT_TRUE(PassJson(warm, nullptr, d, true)["identical_to_cold"].is_null());
  EXPECT_NE(PassTable(Json::array({j})).find("warm"), std::string::npos);
}

TEST(Report, DraftsAreCountedByPlace) {
  const Dataset d = TwoSessions();
  PassResult cold = Pass(d, "cold", 8);
  EXPECT_TRUE(PassJson(cold, &cold, d, true)["draft_places"].is_null());
  cold.drafts.emplace();
  EXPECT_TRUE(PassJson(cold, &cold, d, true)["draft_places"].empty());
  EXPECT_EQ(PassTable(Json::array({PassJson(cold, &cold, d, true)})).find("of reached"), std::string::npos);
  for (const int32_t stood : {2, 1, 0, 2}) cold.drafts->Add(2, stood, stood);
  const Json j = PassJson(cold, &cold, d, true);
  ASSERT_EQ(j["draft_places"].size(), 2u);
  EXPECT_EQ(j["draft_places"][0]["acceptance"], 0.75);
  EXPECT_EQ(j["draft_places"][1]["proposed"], 4);
  EXPECT_EQ(j["draft_places"][1]["reached"], 3);
  EXPECT_EQ(j["draft_places"][1]["accepted"], 2);
  EXPECT_NE(PassTable(Json::array({j})).find("66.67%"), std::string::npos);
}

TEST(Report, OutputLinesCarryHashesOnlyWhenThereAreSome) {
  const Dataset d = TwoSessions();
  const PassResult cold = Pass(d, "cold", 8);
  const Json with = Json::parse(OutputLine(cold, cold.turns[1], true));
  EXPECT_EQ(with["logits_hash"], "0000000000000008");
  EXPECT_EQ(with["output_ids"], (std::vector<int32_t>{1, 1}));
  EXPECT_FALSE(Json::parse(OutputLine(cold, cold.turns[1], false)).contains("output_ids"));
}

}  // namespace
}  // namespace sluice::eval
