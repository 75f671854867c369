#include "schedule/draft_control.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

constexpr DraftCost kCost{.row = 0.3, .pass = 0.15, .pass_row = 0.05};

TEST(DraftControl, FixedLengthIgnoresLoadAndAcceptance) {
  DraftControl control(3, false, kCost);
  for (int i = 0; i < 100; ++i) control.Observe(3, 0);
  control.BeginStep(200);
  EXPECT_EQ(control.drafts(), 3);
}

TEST(DraftControl, DraftsLessTheMoreSequencesShareAStep) {
  DraftControl control(5, true, kCost);
  for (int i = 0; i < 200; ++i) control.Observe(5, i % 4 == 0 ? 1 : 4);
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
  for (int i = 0; i < 400; ++i) control.Observe(3, 0);
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
  for (int i = 0; i < 400; ++i) control.Observe(1, 1);  // the tries were right: more is drafted again
  control.BeginStep(1);
  EXPECT_GT(control.drafts(), 0);
}

TEST(DraftControl, ChoosesWhatIsWorthMost) {
  DraftControl control(6, true, kCost);
  for (int i = 0; i < 300; ++i) control.Observe(6, i % 7);
  for (const int64_t sequences : {1, 3, 9, 40}) {
    control.BeginStep(sequences);
    for (int32_t k = 0; k <= 6; ++k)
      EXPECT_GE(control.Worth(control.drafts(), sequences), control.Worth(k, sequences)) << k;
  }
}

TEST(DraftControl, SameHistorySameAnswers) {
  DraftControl a(4, true, kCost), b(4, true, kCost);
  for (int i = 0; i < 500; ++i) {
    const int32_t stood = (i * 7 + i / 3) % 5;
    a.Observe(4, stood);
    b.Observe(4, stood);
    a.BeginStep(1 + i % 20);
    b.BeginStep(1 + i % 20);
    ASSERT_EQ(a.drafts(), b.drafts());
  }
}

}  // namespace
}  // namespace sluice
