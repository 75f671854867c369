#include "sampling/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/random.h"

namespace sluice {
namespace {

constexpr int32_t kVocab = 12;

// A small language: the logits after a token depend on that token and on the position's parity.
std::vector<float> LogitsAfter(int32_t token, int32_t position) {
  SeededStream random(uint64_t(token) * 2 + uint64_t(position % 2));
  std::vector<float> x(kVocab);
  for (float& v : x) v = float(random.Unit() * 4);
  return x;
}

SampleRow Row(int32_t position, uint64_t seed) {
  SampleRow r;
  r.slot = SlotId(0);
  r.position = position;
  r.temperature = 0.7f;
  r.top_p = 0.9f;
  r.seed = seed;
  return r;
}

SlotInit Fresh() {
  SlotInit init;
  init.slot = SlotId(0);
  return init;
}

// `count` tokens after token 0 at position 0, drafting with the true logits where `good`, else with others.
std::vector<int32_t> Speculate(Sampler& sampler, uint64_t seed, int32_t count, int32_t drafts, bool good) {
  sampler.InitSlot(Fresh());
  RunVerifier verifier(&sampler);
  std::vector<int32_t> out;
  int32_t last = 0;
  while (int32_t(out.size()) < count) {
    const auto start = int32_t(out.size());
    std::vector<int32_t> tokens = {last};
    for (int32_t i = 0; i < drafts; ++i) {
      const std::vector<float> guess = LogitsAfter(good ? tokens.back() : tokens.back() + 100, start + i);
      tokens.push_back(sampler.Propose(Row(start + i + 1, seed), guess.data()));
    }
    for (int32_t i = 0; i <= drafts; ++i) {
      SampleRow row = Row(start + i + 1, seed);
      row.run_left = drafts - i;
      if (i < drafts) row.expected = tokens[size_t(i + 1)];
      SampledToken sampled;
      if (!verifier.Wanted(row, &sampled)) continue;
      verifier.Sample(row, LogitsAfter(tokens[size_t(i)], start + i).data(), &sampled);
      out.push_back(last = sampled.token);
    }
  }
  out.resize(size_t(count));
  return out;
}

std::vector<int32_t> Plain(Sampler& sampler, uint64_t seed, int32_t count) {
  sampler.InitSlot(Fresh());
  std::vector<int32_t> out;
  int32_t last = 0;
  for (int32_t p = 0; p < count; ++p) {
    SampledToken sampled;
    sampler.Sample(Row(p + 1, seed), LogitsAfter(last, p).data(), &sampled);
    out.push_back(last = sampled.token);
  }
  return out;
}

TEST(RunVerifier, GivesTheTokensOfPlainSamplingAtEveryDraftLength) {
  Sampler sampler(kVocab, 1);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const std::vector<int32_t> want = Plain(sampler, seed, 30);
    for (const int32_t drafts : {1, 2, 5})
      for (const bool good : {false, true})
        EXPECT_EQ(Speculate(sampler, seed, 30, drafts, good), want) << "seed " << seed << ", " << drafts;
  }
}

TEST(RunVerifier, ARightDraftRunsThroughAndAWrongOneEndsTheRun) {
  Sampler sampler(kVocab, 1);
  sampler.InitSlot(Fresh());
  RunVerifier verifier(&sampler);
  std::vector<float> x(kVocab, 0.0f);
  x[7] = 5;
  SampleRow row = Row(1, 0);
  row.temperature = 0;
  SampledToken out;
  const auto step = [&](int32_t left, int32_t expected) {
    row.run_left = left;
    row.expected = expected;
    if (!verifier.Wanted(row, &out)) return false;
    verifier.Sample(row, x.data(), &out);
    return true;
  };
  EXPECT_TRUE(step(2, 7));
  EXPECT_TRUE(step(1, 3));  // 7 is drawn, 3 was drafted
  EXPECT_EQ(out.token, 7);
  EXPECT_FALSE(step(0, -1));
  EXPECT_EQ(out.token, -1);
  EXPECT_TRUE(out.status.ok());
  EXPECT_TRUE(step(0, -1));  // the next run
}

TEST(RunVerifier, UnusableLogitsEndTheRun) {
  Sampler sampler(kVocab, 1);
  sampler.InitSlot(Fresh());
  RunVerifier verifier(&sampler);
  const std::vector<float> bad(kVocab, std::nanf(""));
  SampleRow row = Row(1, 0);
  row.run_left = 1;
  row.expected = 0;
  SampledToken out;
  ASSERT_TRUE(verifier.Wanted(row, &out));
  verifier.Sample(row, bad.data(), &out);
  EXPECT_FALSE(out.status.ok());
  row.run_left = 0;
  EXPECT_FALSE(verifier.Wanted(row, &out));
}

// 200,000 tokens of speculation against the exact distribution (temperature 0.7, top_p 0.9), by token pairs.
TEST(RunVerifier, SpeculationDrawsFromTheDistributionOfPlainSampling) {
  constexpr int32_t kSequences = 4000, kLength = 50;
  Sampler sampler(kVocab, 1);
  std::vector<double> seen(size_t(2 * kVocab * kVocab));
  for (int32_t s = 0; s < kSequences; ++s) {
    const std::vector<int32_t> tokens =
        Speculate(sampler, 0x1234567890ull + uint64_t(s) * 977, kLength, 1 + s % 4, s % 3 != 0);
    int32_t last = 0;
    for (int32_t p = 0; p < kLength; ++p) {
      ++seen[size_t((p % 2) * kVocab * kVocab + last * kVocab + tokens[size_t(p)])];
      last = tokens[size_t(p)];
    }
  }
  double chi2 = 0;
  int64_t freedom = 0;
  for (int32_t parity = 0; parity < 2; ++parity) {
    for (int32_t last = 0; last < kVocab; ++last) {
      const std::vector<float> x = LogitsAfter(last, parity);
      // The nucleus, by hand.
      std::vector<std::pair<double, int32_t>> sorted;
      double total = 0;
      for (int32_t t = 0; t < kVocab; ++t) {
        sorted.push_back({std::exp(double(x[size_t(t)]) / 0.7), t});
        total += sorted.back().first;
      }
      std::sort(sorted.rbegin(), sorted.rend());
      double kept = 0;
      size_t size = 0;
      while (kept < 0.9 * total) kept += sorted[size++].first;
      double row = 0;
      for (int32_t t = 0; t < kVocab; ++t) row += seen[size_t(parity * kVocab * kVocab + last * kVocab + t)];
      if (row == 0) continue;
      for (size_t i = 0; i < sorted.size(); ++i) {
        const double got = seen[size_t(parity * kVocab * kVocab + last * kVocab + sorted[i].second)];
        if (i >= size) {
          EXPECT_EQ(got, 0) << "a token outside the nucleus";
          continue;
        }
        const double want = row * sorted[i].first / kept;
        if (want < 5) continue;
        chi2 += (got - want) * (got - want) / want;
        ++freedom;
      }
      --freedom;
    }
  }
  ASSERT_GT(freedom, 50);
  // Wilson-Hilferty: the cube root of chi2 / freedom is nearly normal. p > 0.001 means z < 3.09.
  const double h = 2.0 / (9.0 * double(freedom));
  const double z = (std::cbrt(chi2 / double(freedom)) - (1 - h)) / std::sqrt(h);
  EXPECT_LT(z, 3.09) << "chi2 " << chi2 << " at " << freedom << " degrees of freedom";
  EXPECT_GT(z, -3.09) << "too even: noise is used twice";
}

}  // namespace
}  // namespace sluice
