#include "eval/dataset.h"

#include <zlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sluice::eval {
namespace {

using ::testing::HasSubstr;

constexpr char kSession[] =
    R"({"id":"a","bucket":512,"kinds":["x","y"],"sure":[true,false],"reference_ok":[true,true],"other":1,"messages":[)"
    R"({"role":"user","content":"q1"},{"role":"assistant","content":"a1"},)"
    R"({"role":"user","content":"q2"},{"role":"assistant","content":"a2"}]})";

TEST(Dataset, TurnsAreTheMessagesBeforeEachAnswer) {
  const Dataset d = ParseDataset(kSession, -1).value();
  ASSERT_EQ(d.sessions.size(), 1u);
  const Session& s = d.sessions[0];
  EXPECT_EQ(s.bucket, "512");
  ASSERT_EQ(s.turns.size(), 2u);
  EXPECT_EQ(s.turns[0].messages, 1u);
  EXPECT_EQ(s.turns[1].messages, 3u);
  EXPECT_EQ(s.turns[1].expected, "a2");
  EXPECT_EQ(s.turns[1].kind, "y");
  EXPECT_TRUE(s.turns[0].sure);
  EXPECT_FALSE(s.turns[1].sure);
  EXPECT_TRUE(*s.turns[1].reference_ok);
  EXPECT_TRUE(d.has_sure && d.has_reference);
}

TEST(Dataset, ErrorsNameTheLine) {
  const auto message = [](std::string_view text) {
    return std::string(ParseDataset(text, -1).status().message());
  };
  EXPECT_THAT(message("{\"question\":\"q\",\"answer\":\"#### 1\"}\n{"), HasSubstr("line 2"));
  EXPECT_THAT(message("{\"question\":\"q\",\"answer\":\"1\"}"), HasSubstr("####"));
  EXPECT_THAT(message("{}"), HasSubstr("neither"));
  EXPECT_THAT(message(""), HasSubstr("no line"));
  EXPECT_THAT(message(R"({"messages":[{"role":"assistant","content":"x"}]})"), HasSubstr("first message"));
  EXPECT_THAT(message(R"({"kinds":["a"],"messages":[{"role":"user","content":"x"}]})"), HasSubstr("kinds"));
}

TEST(Dataset, ReadsPlainAndGzippedFilesUpToTheLimit) {
  const auto folder = std::filesystem::temp_directory_path();
  const std::string plain = folder / "sluice_dataset_test.jsonl",
                    zipped = folder / "sluice_dataset_test.jsonl.gz";
  std::string text;
  for (int i = 0; i < 5; ++i) text += std::string(kSession) + "\n\n";
  std::ofstream(plain) << text;
  gzFile f = gzopen(zipped.c_str(), "wb");
  gzwrite(f, text.data(), unsigned(text.size()));
  gzclose(f);
  for (const std::string& path : {plain, zipped}) {
    EXPECT_EQ(ReadDataset(path, -1)->sessions.size(), 5u);
    EXPECT_EQ(ReadDataset(path, 2)->sessions.size(), 2u);
    std::filesystem::remove(path);
  }
  EXPECT_EQ(ReadDataset(plain, -1).status().code(), absl::StatusCode::kNotFound);
}

TEST(Dataset, TheLimitCountsProblemsBehindTheExamples) {
  const std::string path = std::filesystem::temp_directory_path() / "sluice_dataset_shots_test.jsonl";
  std::string text;
  for (int i = 0; i < 18; ++i) text += fmt::format("{{\"question\":\"q{}\",\"answer\":\"#### {}\"}}\n", i, i);
  std::ofstream(path) << text;
  EXPECT_EQ(ReadDataset(path, 8, 5)->problems.size(), 13u);
  EXPECT_EQ(ReadDataset(path, 8, 20)->problems.size(), 18u);  // there are no more
  EXPECT_EQ(ReadDataset(path, 1, 0)->problems.size(), 1u);
  EXPECT_EQ(ReadDataset(path, -1, 5)->problems.size(), 18u);
  std::ofstream(path) << std::string(kSession) << "\n" << kSession << "\n" << kSession << "\n";
  EXPECT_EQ(ReadDataset(path, 1, 5)->sessions.size(), 1u);  // sessions have no examples
  std::filesystem::remove(path);
}

TEST(Dataset, NumbersAreFoundAsGsm8kScoresThem) {
  EXPECT_EQ(FinalNumber("so 5 + 5 = 10\n#### 1,234").value(), "1234");
  EXPECT_FALSE(FinalNumber("10"));
  EXPECT_EQ(LastNumber("The answer is 18. Or 19.5, at most").value(), "19.5");
  EXPECT_EQ(LastNumber("It is 18.").value(), "18");
  EXPECT_EQ(LastNumber("from 3 to -4 degrees").value(), "-4");
  EXPECT_EQ(LastNumber("7-4").value(), "4");
  EXPECT_EQ(LastNumber("$1,000,000").value(), "1000000");
  EXPECT_FALSE(LastNumber("none"));
  EXPECT_TRUE(SameNumber("18", "18.0"));
  EXPECT_FALSE(SameNumber("18", "18.5"));
}

}  // namespace
}  // namespace sluice::eval
