#include "schedule/draft_control.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

constexpr DraftCost kCost{.row = 0.3, .more_row = 0.3, .pass = 0.15, .pass_row = 0.05};

TEST(DraftControl, FixedLengthIgnoresLoadAndAcceptance) {
  DraftControl control(3, false, kCost);
  for (int i = 0; i < 100; ++i) control.Observe(3, 3, 0);
  control.BeginStep(200);
  EXPECT_EQ(control.drafts(), 3);
}

TEST(DraftControl, DraftsLessTheMoreSequencesShareAStep) {
  DraftControl control(5, true, kCost);
  for (int i = 0; i < 200; ++i) control.Observe(5, 5, i % 4 == 0 ? 1 : 4);
  int32_t last = 5;
  for (const int64_t sequences : {1, 2, 4, 8, 16, 64, 256}) {
    control.BeginStep(sequences);
    EXPECT_LE(control.drafts(), last) << sequences;
    last = control.drafts();
  }
  control.BeginStep(1);
  EXPECT_GE(control.drafts(), 3);
  control.BeginStep(256);
  EXPECT_EQ(control.drafts(), 0);
}

TEST(DraftControl, StopsWhenDraftsFailAndTriesAgainWithoutLoad) {
  DraftControl control(3, true, kCost);
  for (int i = 0; i < 400; ++i) control.Observe(3, 3, 0);
  int64_t tries = 0;
  for (int i = 0; i < 1280; ++i) {
    control.BeginStep(1);
    EXPECT_LE(control.drafts(), 1);
    tries += control.drafts();
  }
  EXPECT_EQ(tries, 10);
  for (int i = 0; i < 1280; ++i) {
    control.BeginStep(32);
    EXPECT_EQ(control.drafts(), 0);
  }
  for (int i = 0; i < 400; ++i) control.Observe(1, 1, 1);  // the tries were right: more is drafted again
  control.BeginStep(1);
  EXPECT_GT(control.drafts(), 0);
}

TEST(DraftControl, DraftsWhereItIsWorthMoreThanNot) {
  DraftControl control(6, true, kCost);
  for (int i = 0; i < 300; ++i) control.Observe(6, i % 7, i % 7);
  for (const int64_t sequences : {1, 3, 9, 40}) {
    control.BeginStep(sequences);
    EXPECT_EQ(control.drafts(), control.Worth(6, sequences) > control.Worth(0, sequences) ? 6 : 0)
        << sequences;
  }
  control.BeginStep(1);
  EXPECT_EQ(control.drafts(), 6);
  control.BeginStep(40);
  EXPECT_EQ(control.drafts(), 0);
}

TEST(DraftControl, KeepsWhatGivesTokensAtTheRateOfTheStep) {
  DraftControl control(3, true, kCost), fixed(3, false, kCost);
  for (int i = 0; i < 300; ++i) control.Observe(3, 1 + i % 3, 1 + i % 3);
  double keep = 0;
  for (const int64_t sequences : {1, 2, 4}) {
    control.BeginStep(sequences);
    ASSERT_GT(control.drafts(), 0) << sequences;
    EXPECT_DOUBLE_EQ(control.keep(), control.Worth(control.drafts(), sequences) * kCost.row);
    EXPECT_GT(control.go_on(), control.keep()) << "a further pass costs time, too";
    EXPECT_GT(control.keep(), keep) << "time is worth more among more sequences";
    keep = control.keep();
  }
  fixed.BeginStep(1);
  EXPECT_EQ(fixed.keep(), 0);
  EXPECT_EQ(fixed.go_on(), 0);
}

TEST(DraftControl, DraftsThatGetNoRowCostOnlyTheirPass) {
  DraftControl cut(3, true, kCost), rejected(3, true, kCost);
  for (int i = 0; i < 300; ++i) {
    cut.Observe(3, i % 2 == 0 ? 3 : 1, i % 2 == 0 ? 3 : 1);
    rejected.Observe(3, 3, i % 2 == 0 ? 3 : 1);
  }
  EXPECT_GT(cut.Worth(3, 2), rejected.Worth(3, 2));
}

TEST(DraftControl, SameHistorySameAnswers) {
  DraftControl a(4, true, kCost), b(4, true, kCost);
  for (int i = 0; i < 500; ++i) {
    const int32_t stood = (i * 7 + i / 3) % 5;
    a.Observe(4, 4, stood);
    b.Observe(4, 4, stood);
    a.BeginStep(1 + i % 20);
    b.BeginStep(1 + i % 20);
    ASSERT_EQ(a.drafts(), b.drafts());
  }
}

}  // namespace
}  // namespace sluice
