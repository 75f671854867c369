#include "exec/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "base/end_process.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Watchdog, NamesTheStepThatDoesNotEndAndWhereItHangs) {
  std::promise<std::string> report;
  Watchdog dog(
      0.05, [] { return std::string("running: index select"); },
      [&](const std::string& text) { report.set_value(text); });
  dog.StepBegins(41, 7);
  EXPECT_THAT(report.get_future().get(),
              AllOf(HasSubstr("step 41 of 7 rows"), HasSubstr("0.05 s"), HasSubstr("--watchdog-timeout"),
                    HasSubstr("running: index select")));
}

TEST(Watchdog, AStepThatBeginsAfterAPauseIsWatchedToo) {
  std::promise<std::string> report;
  Watchdog dog(0.02, nullptr, [&](const std::string& text) { report.set_value(text); });
  for (int step = 0; step < 3; ++step) {
    dog.StepBegins(step, 1);
    dog.StepEnds();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the watcher has gone to sleep
  }
  dog.StepBegins(9, 1);
  EXPECT_THAT(report.get_future().get(), HasSubstr("step 9 of 1 rows"));
}

TEST(Watchdog, StepsThatEndAndWatchdogsWithoutALimitReportNothing) {
  int reports = 0;
  {
    Watchdog dog(30, nullptr, [&](const std::string&) { ++reports; });
    for (int step = 0; step < 1000; ++step) {
      dog.StepBegins(step, 1);
      dog.StepEnds();
    }
    dog.StepBegins(1000, 1);  // and one that runs while the watchdog goes
  }
  {
    Watchdog dog(0, nullptr, [&](const std::string&) { ++reports; });
    dog.StepBegins(1, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(reports, 0);
}

TEST(Watchdog, AFaultIsReportedOnceAfterTheErrorsWereAnswered) {
  std::promise<std::string> report;
  Watchdog dog(0, nullptr, [&](const std::string& text) { report.set_value(text); });
  dog.Fault("gemm: an illegal memory access was encountered");
  dog.Fault("a later one, which follows from it");
  EXPECT_THAT(report.get_future().get(), HasSubstr("gemm: an illegal memory access"));
}

TEST(WatchdogDeathTest, TheProcessEndsWithAReportAndTheExitCodeOfAFailingEnvironment) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(
      {
        Watchdog dog(0.01, [] { return std::string("running: gemm"); });
        dog.StepBegins(3, 2);
        std::this_thread::sleep_for(std::chrono::seconds(60));
      },
      ::testing::ExitedWithCode(kEndedByEnvironment), "sluice: step 3 of 2 rows .*running: gemm");
}

}  // namespace
}  // namespace sluice
