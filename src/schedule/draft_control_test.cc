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

TEST(DraftControl, PassesThatAreNotMadeCostNothing) {
  DraftControl all(3, true, kCost), some(3, true, kCost);
  for (int i = 0; i < 300; ++i) {
    for (DraftControl* c : {&all, &some}) c->Observe(3, 1, 1);
    all.ObserveWork({.rows = 2, .drafting = 1, .draft_passes = 2, .draft_rows = 2});
    some.ObserveWork({.rows = 2, .drafting = 1, .draft_passes = 1, .draft_rows = 1});
  }
  EXPECT_GT(some.Worth(3, 1), all.Worth(3, 1));
}

TEST(DraftControl, TriesOfOneDraftSayNothingOfFurtherPasses) {
  DraftControl control(3, true, kCost);
  for (int i = 0; i < 300; ++i) {
    control.Observe(3, 3, 3);
    control.ObserveWork({.drafting = 1, .draft_passes = 3, .draft_rows = 3, .draft_most = 3});
  }
  const double before = control.Worth(3, 1);
  for (int i = 0; i < 300; ++i)
    control.ObserveWork({.drafting = 1, .draft_passes = 1, .draft_rows = 1, .draft_most = 1});
  EXPECT_NEAR(control.Worth(3, 1), before, 1e-9);
}

TEST(DraftControl, KeepsWhatGivesTokensAtTheRateOfTheStep) {
  DraftControl control(3, true, kCost), fixed(3, false, kCost);
  for (int i = 0; i < 300; ++i) control.Observe(3, 1 + i % 3, 1 + i % 3);
  double keep = 0;
  for (const int64_t sequences : {1, 2, 4}) {
    control.BeginStep(sequences);
    ASSERT_GT(control.drafts(), 0) << sequences;
    EXPECT_DOUBLE_EQ(control.keep(), control.Worth(control.drafts(), sequences) * kCost.row);
    EXPECT_GT(control.another_pass(), 0) << "a further pass costs time, too";
    EXPECT_GT(control.keep(), keep) << "time is worth more among more sequences";
    keep = control.keep();
  }
  fixed.BeginStep(1);
  EXPECT_EQ(fixed.keep(), 0);
  EXPECT_EQ(fixed.another_pass(), 0);
}

TEST(DraftControl, DraftsThatGetNoRowCostOnlyTheirPass) {
  DraftControl cut(3, true, kCost), rejected(3, true, kCost);
  for (int i = 0; i < 300; ++i) {
    cut.Observe(3, i % 2 == 0 ? 3 : 1, i % 2 == 0 ? 3 : 1);
    rejected.Observe(3, 3, i % 2 == 0 ? 3 : 1);
  }
  EXPECT_GT(cut.Worth(3, 2), rejected.Worth(3, 2));
}

StepWork Work(int32_t rows, int32_t passes, int32_t pass_rows, const DraftCost& cost, double unit) {
  const double units = cost.Rows(rows) + cost.pass * passes + cost.pass_row * (pass_rows - passes);
  return {.rows = rows,
          .drafting = passes > 0 ? pass_rows / passes : 0,
          .draft_passes = passes,
          .draft_rows = pass_rows,
          .ns = int64_t(unit * units)};
}

TEST(DraftControl, LearnsWhatRowsAndPassesCostFromTheTimesOfSteps) {
  constexpr DraftCost kTrue{.row = 0.02, .more_row = 0.03, .pass = 0.08, .pass_row = 0.01};
  DraftControl control(3, true, kCost), untimed(3, true, kCost);
  for (int i = 0; i < 600; ++i) {
    const int32_t rows = 1 + i * 7 % 12, passes = i % 4;
    StepWork work = Work(rows, passes, passes * (1 + i % 3), kTrue, 2e6);
    if (i % 50 == 49) work.ns *= 10;  // held up by something else
    control.ObserveWork(work);
    work.ns = 0;
    untimed.ObserveWork(work);
  }
  EXPECT_NEAR(control.cost().row, kTrue.row, 0.03);
  EXPECT_NEAR(control.cost().more_row, kTrue.more_row, 0.02);
  EXPECT_NEAR(control.cost().pass, kTrue.pass, 0.08);
  EXPECT_NEAR(control.cost().pass_row, kTrue.pass_row, 0.04);
  EXPECT_EQ(untimed.cost().row, kCost.row);
  // Rows that cost next to nothing make drafts worth it for many sequences.
  for (int i = 0; i < 200; ++i) {
    control.Observe(3, 3, 2);
    untimed.Observe(3, 3, 2);
  }
  control.BeginStep(8);
  untimed.BeginStep(8);
  EXPECT_GT(control.drafts(), 0);
  EXPECT_EQ(untimed.drafts(), 0);
}

TEST(DraftControl, StepsOfOneKindLeaveTheOtherCostsAsTheyWere) {
  DraftControl control(3, true, kCost);
  for (int i = 0; i < 1000; ++i) control.ObserveWork(Work(1, 0, 0, kCost, 1e6));
  EXPECT_NEAR(control.cost().row, kCost.row, 0.01);
  EXPECT_NEAR(control.cost().pass, kCost.pass, 0.01);
  // Another speed of the machine is no other cost.
  for (int i = 0; i < 1000; ++i) control.ObserveWork(Work(1 + i % 4, i % 3, i % 3, kCost, 5e6));
  EXPECT_NEAR(control.cost().row, kCost.row, 0.01);
  EXPECT_NEAR(control.cost().pass, kCost.pass, 0.01);
}

TEST(DraftControl, SameHistorySameAnswers) {
  DraftControl a(4, true, kCost), b(4, true, kCost);
  for (int i = 0; i < 500; ++i) {
    const int32_t stood = (i * 7 + i / 3) % 5;
    for (DraftControl* c : {&a, &b}) {
      c->Observe(4, 4, stood);
      c->ObserveWork(Work(1 + stood, 4, 4, kCost, 1e6 + i % 13 * 1e4));
    }
    a.BeginStep(1 + i % 20);
    b.BeginStep(1 + i % 20);
    ASSERT_EQ(a.drafts(), b.drafts());
    ASSERT_EQ(a.keep(), b.keep());
  }
}

TEST(DraftCounters, PlacesCountWhatWasProposedReachedAndStood) {
  DraftCounters c;
  c.Add(3, 3, 3);
  const DraftCounters before = c;
  c.Add(3, 1, 1);
  c.Add(2, 0, 0);
  c.Add(3, 2, 1);  // the answer ended inside the run
  const DraftCounters d = c.Since(before);
  EXPECT_EQ(d.runs, 3);
  EXPECT_EQ(d.proposed, 8);
  EXPECT_EQ(d.accepted, 2);
  const std::array<int64_t, 4> proposed = {3, 3, 2, 0}, reached = {3, 2, 1, 0}, stood = {2, 1, 0, 0};
  for (size_t i = 0; i < proposed.size(); ++i) {
    EXPECT_EQ(d.proposed_at[i], proposed[i]) << i;
    EXPECT_EQ(d.reached_at[i], reached[i]) << i;
    EXPECT_EQ(d.accepted_at[i], stood[i]) << i;
  }
  EXPECT_EQ(d.runs_by_accepted[0], 1);
  EXPECT_EQ(d.runs_by_accepted[1], 2);
  EXPECT_EQ(d.runs_by_accepted[3], 0);
}

}  // namespace
}  // namespace sluice
