#include "replay.h"

#include <gtest/gtest.h>

#include <sstream>

namespace sluice {
namespace {

StatusOr<std::vector<TraceRequest>> Parse(const std::string& text) {
  std::istringstream in(text);
  return ParseTrace(in);
}

TEST(Replay, ATraceSurvivesWritingAndReading) {
  const auto trace = GenerateTrace(200, 3);
  std::stringstream text;
  WriteTrace(trace, text);
  const auto again = ParseTrace(text).value();
  ASSERT_EQ(again.size(), trace.size());
  for (size_t i = 0; i < trace.size(); ++i) {
    EXPECT_EQ(again[i].timestamp_ms, trace[i].timestamp_ms);
    EXPECT_EQ(again[i].input_length, trace[i].input_length);
    EXPECT_EQ(again[i].output_length, trace[i].output_length);
    EXPECT_EQ(again[i].hash_ids, trace[i].hash_ids);
  }
}

TEST(Replay, BadLinesAreNamed) {
  for (const char* bad : {"{", "[]", R"({"timestamp": 0, "output_length": 1, "hash_ids": []})",
                          R"({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []})",
                          R"({"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]})",
                          R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]})"}) {
    const auto r =
        Parse(std::string(R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [7]})") +
              "\n" + bad);
    ASSERT_FALSE(r.ok()) << bad;
    EXPECT_NE(Message(r.status()).find("line 2"), std::string_view::npos) << r.status();
  }
}

TEST(Replay, ABadValueIsShownWithItsLimit) {
  const auto said = [](const std::string& line) { return std::string(Message(Parse(line).status())); };
  EXPECT_EQ(said(R"({"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]})"),
            "trace line 1: input_length is -5; it must be a whole number of tokens from 1 to 16777216");
  EXPECT_EQ(
      said(R"({"timestamp": 0, "input_length": 5, "output_length": 16777217, "hash_ids": [1]})"),
      "trace line 1: output_length is 16777217; it must be a whole number of tokens from 1 to 16777216");
  EXPECT_EQ(said(R"({"timestamp": 0, "input_length": 5, "hash_ids": [1]})"),
            "trace line 1: output_length is missing; it must be a whole number of tokens from 1 to 16777216");
  EXPECT_EQ(said(R"({"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]})"),
            "trace line 1: timestamp is -1; it must be a number of milliseconds from 0 to 1099511627776");
  EXPECT_EQ(said(R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1.5]})"),
            "trace line 1: hash_ids holds 1.5; each must be a whole number of 64 bits");
}

TEST(Replay, WhatDoesNotFitTheDeviceTierWithItsOutputIsRefused) {
  ReplayOptions o;
  o.device_tokens = 640;
  o.host_tokens = 0;
  for (const int lanes : {1, 2}) {
    o.lanes = lanes;
    const ReplayReport r = Replay({{0, 500, 140, {1}}, {1, 500, 141, {1}}, {2, 641, 1, {2, 3}}}, o, nullptr);
    for (const std::string& v : r.violations) ADD_FAILURE() << v;
    EXPECT_EQ(r.requests, 1);
    EXPECT_EQ(r.rejected, 2);
    EXPECT_EQ(r.output_tokens, 140);
  }
}

TEST(Replay, EqualBlocksExpandToEqualTokens) {
  TraceRequest a{0, 700, 1, {4, 9}}, b{0, 1024, 1, {4, 8}};
  const auto x = ExpandPrompt(a), y = ExpandPrompt(b);
  ASSERT_EQ(x.size(), 700u);
  EXPECT_TRUE(std::equal(x.begin(), x.begin() + 512, y.begin()));
  EXPECT_FALSE(std::equal(x.begin() + 512, x.end(), y.begin() + 512));
}

TEST(Replay, TinyPoolsServeEverythingWithoutAViolationUnderEveryPolicy) {
  const auto trace = GenerateTrace(120, 5);
  for (const int lanes : {1, 4}) {
    for (const WritePolicy write :
         {WritePolicy::kWriteThrough, WritePolicy::kWriteThroughSelective, WritePolicy::kWriteBack}) {
      ReplayOptions o;
      o.device_tokens = 60000;
      o.host_tokens = 200000;
      o.lanes = lanes;
      o.write_policy = write;
      o.depth = lanes == 1 ? 1 : 0;
      o.chunk_tokens = 2048;
      o.audit_every = 100;
      o.time_scale = 4;
      const ReplayReport r = Replay(trace, o, nullptr);
      for (const std::string& v : r.violations) ADD_FAILURE() << v;
      EXPECT_EQ(r.requests, 120);
      EXPECT_GT(r.hit_l1, 0);
      EXPECT_GT(r.hit_l2, 0);
      EXPECT_GT(r.cache.evicted_pages_device, 0);
    }
  }
}

TEST(Replay, StorageBehindASmallHostTierGivesHitsOfItsOwn) {
  const auto trace = GenerateTrace(120, 7);
  for (const PrefetchPolicy policy :
       {PrefetchPolicy::kBestEffort, PrefetchPolicy::kWaitComplete, PrefetchPolicy::kTimeout}) {
    ReplayOptions o;
    o.device_tokens = 40960;
    o.host_tokens = 49152;
    o.storage_tokens = 4'000'000;
    o.storage_gb_s = 20;
    o.prefetch = policy;
    o.time_scale = 0.3;
    o.audit_every = 50;
    const ReplayReport a = Replay(trace, o, nullptr), b = Replay(trace, o, nullptr);
    for (const std::string& v : a.violations) ADD_FAILURE() << v;
    EXPECT_EQ(a.requests, 120);
    EXPECT_GT(a.hit_l3, 0);
    EXPECT_EQ(a.hit_l3, b.hit_l3);
    EXPECT_EQ(a.virtual_seconds, b.virtual_seconds);
  }
}

TEST(Replay, HitsDoNotDependOnTheMachine) {
  const auto trace = GenerateTrace(80, 6);
  ReplayOptions o;
  o.device_tokens = 80000;
  o.host_tokens = 160000;
  const ReplayReport a = Replay(trace, o, nullptr), b = Replay(trace, o, nullptr);
  EXPECT_EQ(a.hit_l1, b.hit_l1);
  EXPECT_EQ(a.hit_l2, b.hit_l2);
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.virtual_seconds, b.virtual_seconds);
}

}  // namespace
}  // namespace sluice
