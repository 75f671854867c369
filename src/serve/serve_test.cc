// The parts of the server that need neither a socket nor an engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "base/random.h"
#include "serve/api_key.h"
#include "serve/metrics.h"
#include "serve/stop_matcher.h"
#include "serve/work_pool.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The same by looking at the whole text after each byte.
std::pair<std::string, int> SlowStop(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    int best = -1;
    for (size_t s = 0; s < stops.size(); ++s) {
      if (std::string_view(text).substr(0, end).ends_with(stops[s]) &&
          (best < 0 || stops[s].size() > stops[size_t(best)].size())) {
        best = int(s);
      }
    }
    if (best >= 0) return {text.substr(0, end - stops[size_t(best)].size()), best};
  }
  return {text, -1};
}

TEST(StopMatcherTest, EqualsALookAtTheWholeTextHoweverItIsCut) {
  SeededStream random(7);
  const auto word = [&](size_t longest) {
    std::string w;
    for (size_t i = 0, n = 1 + random.Below(longest); i < n; ++i) w += char('a' + random.Below(2));
    return w;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops;
    for (size_t i = 0, n = 1 + random.Below(3); i < n; ++i) stops.push_back(word(6));
    const std::string text = word(30);
    const auto [want, index] = SlowStop(text, stops);
    StopMatcher matcher(stops, false);
    std::string got;
    bool matched = false;
    for (size_t i = 0; i < text.size() && !matched;) {
      const size_t n = 1 + random.Below(5);
      matched = matcher.Add(std::string_view(text).substr(i, n), &got);
      EXPECT_EQ(want.substr(0, got.size()), got);  // nothing of a stop string gets out
      i += n;
    }
    if (!matched) matcher.Finish(&got);
    EXPECT_EQ(got, want);
    EXPECT_EQ(matched, index >= 0);
    if (index >= 0) {
      EXPECT_EQ(stops[size_t(matcher.matched())], stops[size_t(index)]);
    }
  }
}

TEST(StopMatcherTest, KeepsTheStopStringWhenAsked) {
  StopMatcher matcher({"END"}, true);
  std::string got;
  EXPECT_FALSE(matcher.Add("xE", &got));
  EXPECT_EQ(got, "x");
  EXPECT_TRUE(matcher.Add("NDy", &got));
  EXPECT_EQ(got, "xEND");
}

TEST(ApiKeyTest, WithoutAKeyEverybodyMay) {
  EXPECT_TRUE(ApiKey().Allows({}));
  EXPECT_TRUE(ApiKey("").Allows({}));
  EXPECT_FALSE(ApiKey("k").Allows({}));
  EXPECT_TRUE(ApiKey("k").Allows({.headers = {{"authorization", "Bearer k"}}}));
  EXPECT_FALSE(ApiKey("k").Allows({.headers = {{"authorization", "k"}}}));
  EXPECT_FALSE(ApiKey("k").Allows({.query = "api_key=k"}));
}

TEST(MetricsTest, CountsEachRequestOnceAndNeverGoesNegative) {
  ServeMetrics metrics("m\"x", false);
  metrics.Finished({.endpoint = "chat",
                    .prompt_tokens = 10,
                    .completion_tokens = 5,
                    .cached = {.device = 4, .host = 2},
                    .first_token_s = 0.1,
                    .total_s = -1,
                    .per_token_s = 0.01});
  metrics.Finished(
      {.endpoint = "chat", .result = RequestResult::kAborted, .reason = "client_gone", .prompt_tokens = 3});
  metrics.Finished({.endpoint = "chat", .result = RequestResult::kRejected, .reason = "queue_full"});
  const std::string text = metrics.Render({}, {.connections = 3});
  EXPECT_THAT(text, HasSubstr("sluice:prompt_tokens_total{model_name=\"m\\\"x\"} 13"));
  EXPECT_THAT(text, HasSubstr("cache_source=\"host\"} 2"));
  EXPECT_THAT(text, HasSubstr("sluice:e2e_request_latency_seconds_count{model_name=\"m\\\"x\"} 1"));
  EXPECT_THAT(text, HasSubstr("sluice:e2e_request_latency_seconds_sum{model_name=\"m\\\"x\"} 0"));
  EXPECT_THAT(text, HasSubstr("sluice:time_to_first_token_seconds_count{model_name=\"m\\\"x\"} 1"));
  EXPECT_THAT(text, HasSubstr("reason=\"queue_full\"} 1"));
  EXPECT_THAT(text, HasSubstr("sluice:http_connections{model_name=\"m\\\"x\"} 3"));
  EXPECT_THAT(text, Not(HasSubstr("sglang:")));
}

TEST(MetricsTest, WhatTheCacheWarnsOfHasCountersOfItsOwn) {
  EngineSnapshot engine;
  engine.cache.slow_evictions = 7;
  engine.cache.short_evictions = 8;
  engine.cache.lane_deficits = 9;
  const std::string text = ServeMetrics("m", false).Render(engine, {});
  EXPECT_THAT(text, HasSubstr("sluice:slow_evictions_total{model_name=\"m\"} 7\n"));
  EXPECT_THAT(text, HasSubstr("sluice:short_evictions_total{model_name=\"m\"} 8\n"));
  EXPECT_THAT(text, HasSubstr("sluice:lane_deficits_total{model_name=\"m\"} 9\n"));
}

TEST(WorkPoolTest, LongWorkDoesNotBlockShortWorkAndAFullLaneSaysSo) {
  WorkPool pool({.short_threads = 1, .long_threads = 1, .control_threads = 1, .queue_max = 2});
  std::mutex gate;
  gate.lock();
  std::atomic<int> long_done{0}, short_done{0};
  const auto slow = [&] {
    std::lock_guard wait(gate);
    ++long_done;
  };
  ASSERT_TRUE(pool.Post(WorkLane::kLong, slow));
  while (true) {  // the thread takes one, two more wait
    if (!pool.Post(WorkLane::kLong, slow)) break;
  }
  for (int i = 0; i < 100; ++i) {
    while (!pool.Post(WorkLane::kShort, [&] { ++short_done; })) std::this_thread::yield();
  }
  while (short_done < 100) std::this_thread::yield();
  EXPECT_EQ(long_done, 0);
  gate.unlock();
  pool.Stop();
  EXPECT_GE(long_done, 2);
}

}  // namespace
}  // namespace sluice
