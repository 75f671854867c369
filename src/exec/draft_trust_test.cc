#include "exec/draft_trust.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

TEST(DraftTrust, BelievesTheLayerUntilItKnowsBetter) {
  DraftTrust trust;
  double last = 0, last_further = 0;
  for (const float share : {0.1f, 0.4f, 0.6f, 0.8f, 0.9f, 0.97f, 0.995f, 1.0f}) {
    EXPECT_GT(trust.Chance(false, 0, share), last) << share;
    EXPECT_GT(trust.Chance(false, 3, share), last_further) << share;
    EXPECT_LT(trust.Chance(false, 3, share), trust.Chance(false, 0, share)) << "trained for the next token";
    last = trust.Chance(false, 0, share);
    last_further = trust.Chance(false, 3, share);
  }
  EXPECT_LT(last, 1);
  for (int i = 0; i < 50; ++i) trust.Observe(false, 2, 0.9f, i % 4 == 0);
  EXPECT_NEAR(trust.Chance(false, 2, 0.9f), 0.25, 0.1);
}

TEST(DraftTrust, KnowsBehindWhichDraftsAnotherOneIsWorthIt) {
  DraftTrust trust;
  for (int i = 0; i < 100; ++i) {
    trust.ObserveGain(false, 0, 1.0f, i % 2 == 0 ? 0.6 : 0);
    trust.ObserveGain(false, 0, 0.9f, 0);
  }
  EXPECT_NEAR(trust.Gain(false, 0, 1.0f), 0.3, 0.02);
  EXPECT_NEAR(trust.Gain(false, 0, 0.9f), 0, 0.02);
  EXPECT_EQ(trust.Gain(false, 1, 0.9f), DraftTrust().Gain(false, 1, 0.9f));
}

TEST(DraftTrust, KeepsPlacesAndKindsApart) {
  DraftTrust trust;
  const double before = trust.Chance(true, 1, 0.4f), next = trust.Chance(false, 0, 0.4f);
  for (int i = 0; i < 50; ++i) trust.Observe(false, 1, 0.4f, true);
  EXPECT_GT(trust.Chance(false, 1, 0.4f), 0.9);
  EXPECT_EQ(trust.Chance(true, 1, 0.4f), before);
  EXPECT_EQ(trust.Chance(false, 0, 0.4f), next);
  EXPECT_EQ(trust.Chance(false, 1, 0.6f), DraftTrust().Chance(false, 1, 0.6f));
  trust.Observe(false, 15, 0.4f, true);  // further ahead than places are told apart
  EXPECT_EQ(trust.Chance(false, 9, 0.4f), trust.Chance(false, 15, 0.4f));
}

}  // namespace
}  // namespace sluice
