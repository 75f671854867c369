#include "sampling/sampler.h"

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "base/random.h"
#include "gtest/gtest.h"
#include "sampling/reduced_reference.h"

namespace sluice {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

SampleRow Row(float temperature, uint64_t seed = 1, int32_t position = 10) {
  SampleRow row;
  row.slot = SlotId(0);
  row.temperature = temperature;
  row.seed = seed;
  row.position = position;
  return row;
}

SampledToken Once(const std::vector<float>& logits, const SampleRow& row, const SlotInit* init = nullptr) {
  Sampler sampler(int32_t(logits.size()), 1);
  if (init != nullptr) sampler.InitSlot(*init);
  SampledToken out;
  sampler.Sample(row, logits.data(), &out);
  return out;
}

std::set<int32_t> TokensOver(const std::vector<float>& logits, SampleRow row, int draws = 400) {
  std::set<int32_t> seen;
  for (int i = 0; i < draws; ++i) {
    row.seed = uint64_t(i) * 7919;
    const SampledToken out = Once(logits, row);
    EXPECT_TRUE(out.status.ok());
    seen.insert(out.token);
  }
  return seen;
}

const std::vector<float> kCorner{1, 3, 3, -kInf};

TEST(Sampler, GreedyTakesTheLowestIdOfATie) { EXPECT_EQ(Once(kCorner, Row(0)).token, 1); }

TEST(Sampler, TinyTemperatureKeepsTheTiedBestOnly) {
  for (const float t : {1e-4f, 1e-30f, 1e-42f})
    EXPECT_EQ(TokensOver(kCorner, Row(t)), (std::set<int32_t>{1, 2})) << t;
}

TEST(Sampler, TopKCornersAreOneOffAndMoreThanTheVocabulary) {
  SampleRow row = Row(1);
  row.top_k = 1;
  EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{1}));
  row.top_k = 2;
  EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{1, 2}));
  for (const int32_t off : {0, -1, 5, 1 << 30}) {
    row.top_k = off;
    EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{0, 1, 2})) << off;
  }
}

TEST(Sampler, TopPCornersKeepAtLeastTheBest) {
  SampleRow row = Row(1);
  for (const float p : {1e-9f, 0.0f}) {
    row.top_p = p;
    EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{1})) << p;
  }
  row.top_p = 0.6f;  // each of the tied two holds 0.468
  EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{1, 2}));
  row.top_p = 1;
  EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{0, 1, 2}));
}

TEST(Sampler, TopPCountsTheShareOfWhatTopKLeft) {
  // Probabilities 0.4 0.3 0.2 0.1; top_k 2 leaves 4/7 and 3/7.
  const std::vector<float> logits{std::log(4.f), std::log(3.f), std::log(2.f), std::log(1.f)};
  SampleRow row = Row(1);
  row.top_k = 2;
  row.top_p = 0.55f;
  EXPECT_EQ(TokensOver(logits, row), (std::set<int32_t>{0}));
  row.top_k = -1;
  EXPECT_EQ(TokensOver(logits, row), (std::set<int32_t>{0, 1}));
}

TEST(Sampler, MinPOneKeepsTheBestAndItsTies) {
  SampleRow row = Row(1);
  row.min_p = 1;
  EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{1, 2}));
  row.min_p = 0.1f;  // exp(-2) = 0.135
  EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{0, 1, 2}));
  row.min_p = 0.14f;
  EXPECT_EQ(TokensOver(kCorner, row), (std::set<int32_t>{1, 2}));
}

TEST(Sampler, RepetitionPenaltyDividesPositiveAndMultipliesNegativeLogits) {
  // Seen ids have logits 2 and -1: with penalty 2 they become 1 and -2, so a fresh 1.5 and -1.5 win over
  // them.
  SlotInit init;
  init.slot = SlotId(0);
  init.prompt_tokens = {0, 1};
  init.track_tokens = true;
  SampleRow row = Row(0);
  row.repetition_penalty = 2;
  EXPECT_EQ(Once({2, -1, 1.001f, -9}, row, &init).token, 2);
  EXPECT_EQ(Once({2, -1, 0.999f, -9}, row, &init).token, 0);
  EXPECT_EQ(Once({-9, -1, -1.999f, -9}, row, &init).token, 2);
  EXPECT_EQ(Once({-9, -1, -2.001f, -9}, row, &init).token, 1);
}

TEST(Sampler, PresenceAndFrequencyCountProducedTokensOnly) {
  SlotInit init;
  init.slot = SlotId(0);
  init.prompt_tokens = {0, 0, 0};
  init.output_tokens = {1, 1};
  init.track_tokens = true;
  SampleRow row = Row(0);
  row.frequency_penalty = 0.5f;  // token 1: -1
  row.presence_penalty = 0.25f;  // token 1: -0.25
  EXPECT_EQ(Once({3.7f, 5, 3.76f, 0}, row, &init).token, 2);
  EXPECT_EQ(Once({3.7f, 5, 3.74f, 0}, row, &init).token, 1);
  row.frequency_penalty = -0.5f;
  EXPECT_EQ(Once({5.7f, 5, 0, 0}, row, &init).token, 1);
}

TEST(Sampler, ProducedTokensJoinTheHistoryOfTheSlot) {
  Sampler sampler(3, 1);
  SlotInit init;
  init.slot = SlotId(0);
  init.track_tokens = true;
  sampler.InitSlot(init);
  SampleRow row = Row(0);
  row.presence_penalty = 1;
  const std::vector<float> logits{2, 1.5f, 0.6f};
  std::vector<int32_t> tokens;
  for (int i = 0; i < 3; ++i) {
    SampledToken out;
    sampler.Sample(row, logits.data(), &out);
    tokens.push_back(out.token);
    EXPECT_EQ(sampler.LastToken(SlotId(0)), out.token);
  }
  EXPECT_EQ(tokens, (std::vector<int32_t>{0, 1, 0}));  // 2 > 1.5 > (1, 1.5) > (1, .5, .6)
}

TEST(Sampler, LogitBiasMovesAndMinTokensMasksStops) {
  SlotInit init;
  init.slot = SlotId(0);
  init.logit_bias = {{0, -100.0f}};
  init.stop_token_ids = {1, 999};
  SampleRow row = Row(0);
  EXPECT_EQ(Once({9, 8, 7}, row, &init).token, 1);
  row.suppress_stop = true;
  EXPECT_EQ(Once({9, 8, 7}, row, &init).token, 2);
  init.stop_token_ids = {0, 1, 2};
  EXPECT_FALSE(Once({9, 8, 7}, row, &init).status.ok());  // nothing is left to sample
}

TEST(Sampler, UnusableLogitsEndTheRequestWithAnError) {
  for (const std::vector<float>& logits :
       {std::vector<float>{-kInf, -kInf, -kInf}, {0, std::nanf(""), 1}, {0, kInf, 1}}) {
    for (const float t : {0.0f, 1.0f}) {
      const SampledToken out = Once(logits, Row(t));
      EXPECT_EQ(out.status.code(), absl::StatusCode::kInternal);
      EXPECT_EQ(out.token, -1);
    }
  }
}

TEST(Sampler, TokenDependsOnSeedChoiceAndPositionAlone) {
  SeededStream random(3);
  std::vector<float> logits(500), other(500);
  for (float& v : logits) v = float(random.Unit() * 6);
  for (float& v : other) v = float(random.Unit() * 6);
  Sampler alone(500, 4), busy(500, 4);
  SampledToken a, b, noise;
  int different_seed = 0, different_choice = 0, different_position = 0;
  for (int32_t p = 0; p < 200; ++p) {
    SampleRow row = Row(1, 42, p);
    row.slot = SlotId(2);
    alone.Sample(row, logits.data(), &a);
    SampleRow neighbour = Row(float(p % 3), 43, p * 3);
    neighbour.slot = SlotId(1);
    busy.Sample(neighbour, other.data(), &noise);
    row.slot = SlotId(3);
    busy.Sample(row, logits.data(), &b);
    EXPECT_EQ(a.token, b.token);
    row.seed = 44;
    alone.Sample(row, logits.data(), &b);
    different_seed += a.token != b.token;
    row.seed = 42;
    row.choice = 1;
    alone.Sample(row, logits.data(), &b);
    different_choice += a.token != b.token;
    row.choice = 0;
    row.position = p + 1000;
    alone.Sample(row, logits.data(), &b);
    different_position += a.token != b.token;
  }
  EXPECT_GT(different_seed, 150);
  EXPECT_GT(different_choice, 150);
  EXPECT_GT(different_position, 150);
}

TEST(Sampler, DrawsFollowTheDistribution) {
  const std::vector<float> logits{std::log(1.f), std::log(2.f), std::log(3.f), std::log(4.f)};
  for (const bool filtered : {false, true}) {
    std::map<int32_t, int> counts;
    SampleRow row = Row(1);
    if (filtered) row.min_p = 1e-6f;
    Sampler sampler(4, 1);
    SampledToken out;
    constexpr int kDraws = 40000;
    for (int i = 0; i < kDraws; ++i) {
      row.position = i;
      sampler.Sample(row, logits.data(), &out);
      ++counts[out.token];
    }
    double chi2 = 0;
    for (int t = 0; t < 4; ++t) {
      const double want = kDraws * (t + 1) / 10.0;
      chi2 += (counts[t] - want) * (counts[t] - want) / want;
    }
    EXPECT_LT(chi2, 16.27) << filtered;  // p = 0.001 at 3 degrees of freedom; the draws are fixed
  }
}

TEST(Sampler, NucleusEqualsTheSlowDefinition) {
  SeededStream random(9);
  for (int round = 0; round < 60; ++round) {
    const int32_t vocab = 1 + int32_t(random.Below(300));
    std::vector<float> logits(size_t(vocab), 0);
    for (float& v : logits) v = float(random.Below(40)) * 0.25f;
    const double top_p = random.Unit();
    std::vector<std::pair<double, int32_t>> sorted;
    double total = 0;
    for (int32_t i = 0; i < vocab; ++i) {
      sorted.push_back({-double(logits[size_t(i)]), i});
      total += std::exp(double(logits[size_t(i)]));
    }
    std::sort(sorted.begin(), sorted.end());
    std::set<int32_t> nucleus;
    double sum = 0;
    for (const auto& [neg, id] : sorted) {
      nucleus.insert(id);
      sum += std::exp(-neg);
      if (sum >= top_p * total * (1 + 1e-6)) break;
    }
    SampleRow row = Row(1);
    row.top_p = float(top_p);
    for (const int32_t token : TokensOver(logits, row, 200)) EXPECT_TRUE(nucleus.count(token)) << token;
  }
}

TEST(Sampler, LogprobsAreOfTheRawLogits) {
  const std::vector<float> logits{0, std::log(3.f), std::log(4.f), -kInf};
  SlotInit init;
  init.slot = SlotId(0);
  init.logit_bias = {{0, 100.0f}};
  SampleRow row = Row(0);
  row.top_logprobs = 3;
  const SampledToken out = Once(logits, row, &init);
  EXPECT_EQ(out.token, 0);
  EXPECT_NEAR(out.logprob, std::log(1 / 8.0), 1e-6);
  ASSERT_EQ(out.top.size(), 3u);
  EXPECT_EQ(out.top[0].token, 2);
  EXPECT_NEAR(out.top[0].logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(out.top[1].token, 1);
  EXPECT_EQ(out.top[2].token, 0);
}

TEST(Sampler, TopLogprobsOrderTiesByIdAndStopAtTheVocabulary) {
  SampleRow row = Row(0);
  row.top_logprobs = 100;
  const SampledToken out = Once({1, 2, 2, 1, 2}, row);
  ASSERT_EQ(out.top.size(), 5u);
  std::vector<int32_t> ids;
  for (const TopLogprob& t : out.top) ids.push_back(t.token);
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 2, 4, 0, 3}));
}

TEST(Sampler, ScoringARowSamplesNothing) {
  SampleRow row = Row(1);
  row.sample = false;
  row.logprob_of = 1;
  row.hash_logits = true;
  const SampledToken out = Once({0, std::log(3.f)}, row);
  EXPECT_EQ(out.token, -1);
  EXPECT_NEAR(out.logprob, std::log(0.75), 1e-6);
  EXPECT_NE(out.logits_hash, 0u);
}

// Every row that may come reduced gives the token, the hash and the error that the whole row gives, wherever
// the list of candidates ends; a list that ends too early says so.
TEST(Sampler, ReducedRowsGiveWhatWholeRowsGive) {
  constexpr int32_t kVocab = 331;
  int unsettled = 0, filtered = 0;
  for (uint64_t c = 0; c < 4000; ++c) {
    auto random = [&, n = uint32_t(0)](uint32_t below) mutable {
      return Philox4x32({n++, 0, 0, 9}, {uint32_t(c), 5})[0] % below;
    };
    std::vector<float> logits(kVocab);
    for (float& x : logits) x = float(random(2000)) * 0.01f - float(random(3));
    if (random(3) == 0)
      for (float& x : logits) x = float(int(x));  // ties
    if (random(50) == 0) logits[random(kVocab)] = kInf;
    if (random(20) == 0) std::fill(logits.begin(), logits.end(), -0.0f);
    const float temperatures[] = {0, 1, 0.3f, 1.7f, 1e-3f};
    SampleRow row = Row(temperatures[random(5)], c, int32_t(random(1000)));
    const int32_t top_ks[] = {-1, 0, 1, 5, 50, 400};
    const float top_ps[] = {1, 1, 0.95f, 0.5f, 0.999f}, min_ps[] = {0, 0, 0.02f, 0.5f};
    row.top_k = top_ks[random(6)];
    row.top_p = top_ps[random(5)];
    row.min_p = min_ps[random(4)];
    row.hash_logits = random(2) == 0;
    Sampler whole(kVocab, 1), part(kVocab, 1);
    ASSERT_TRUE(part.TakesReduced(row));
    SampledToken expected, got;
    whole.Sample(row, logits.data(), &expected);
    const RowRequest request = part.RequestFor(row);
    const float ends[] = {0, 1e-6f, 1e-3f, 0.1f, 1};
    // A device ends the list no higher than min_p when nothing else bounds it.
    float end = ends[random(5)];
    if (request.filtered && request.top_k == 0 && request.top_p >= 1) end = std::min(end, request.min_p);
    std::vector<RowCandidate> candidates;
    ReducedRow reduced = testing::Reduce(logits.data(), kVocab, request, end, &candidates);
    filtered += request.filtered;
    if (!part.SampleReduced(row, reduced, candidates.data(), &got)) {
      ++unsettled;
      EXPECT_EQ(part.LastToken(SlotId(0)), -1);
      reduced = testing::Reduce(logits.data(), kVocab, request, 0, &candidates);
      ASSERT_TRUE(part.SampleReduced(row, reduced, candidates.data(), &got)) << c;
    }
    ASSERT_EQ(got.token, expected.token) << c;
    EXPECT_EQ(got.logits_hash, expected.logits_hash);
    EXPECT_EQ(got.status.ok(), expected.status.ok());
    EXPECT_EQ(part.LastToken(SlotId(0)), whole.LastToken(SlotId(0)));
    int32_t proposed = -1, same = -1;
    float share = 0, roughly = 0;
    same = whole.Propose(row, logits.data(), &share);
    RowRequest asked = request;
    asked.near = true;
    reduced = testing::Reduce(logits.data(), kVocab, asked, 0, &candidates);
    ASSERT_TRUE(part.ProposeReduced(row, reduced, candidates.data(), &proposed, &roughly));
    EXPECT_EQ(proposed, same);
    EXPECT_NEAR(roughly, share, 0.02f * share + 1e-6f) << c;
  }
  EXPECT_GT(filtered, 1000);
  EXPECT_GT(unsettled, 100);
}

TEST(Sampler, RowsThatNeedMoreThanAReducedOneSaySo) {
  Sampler sampler(4, 1);
  SampleRow row = Row(1);
  EXPECT_TRUE(sampler.TakesReduced(row));
  row.top_logprobs = 0;
  EXPECT_FALSE(sampler.TakesReduced(row));
  row = Row(1);
  row.sample = false;
  EXPECT_FALSE(sampler.TakesReduced(row));
  SlotInit init;
  init.slot = SlotId(0);
  init.stop_token_ids = {2};
  sampler.InitSlot(init);
  row = Row(1);
  EXPECT_TRUE(sampler.TakesReduced(row));
  row.suppress_stop = true;
  EXPECT_FALSE(sampler.TakesReduced(row));
  row.suppress_stop = false;
  init.logit_bias = {{1, 2.0f}};
  sampler.InitSlot(init);
  EXPECT_FALSE(sampler.TakesReduced(row));
  init.logit_bias.clear();
  init.track_tokens = true;
  sampler.InitSlot(init);
  EXPECT_FALSE(sampler.TakesReduced(row));
}

}  // namespace
}  // namespace sluice
