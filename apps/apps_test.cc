#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "bundled_model.h"
#include "commands.h"
#include "progress_line.h"
#include "serving_datasets.h"
#include "version.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

// A fresh folder that is gone with the test.
class Tree {
 public:
  Tree() : root_(fs::path(::testing::TempDir()) / ("apps_test_" + std::to_string(::getpid()))) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~Tree() { fs::remove_all(root_); }
  fs::path Write(const fs::path& name, const std::string& text) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
    return root_ / name;
  }
  const fs::path& root() const { return root_; }

 private:
  fs::path root_;
};

TEST(ProgressText, FitsTheTerminalAndNeverOverflowsItsBar) {
  EXPECT_EQ(ProgressText("loading layers", 3, 6, 60),
            "loading layers [################----------------] 3 of 6");
  EXPECT_EQ(ProgressText("requests", 0, 9, 30), "requests [------------] 0 of 9");
  EXPECT_EQ(ProgressText("requests", 7, 5, 24), "requests 7 of 5");
  EXPECT_EQ(ProgressText("requests", 7, 5, 79), "requests [" + std::string(32, '#') + "] 7 of 5");
  EXPECT_EQ(ProgressText("requests", 7, 0, 79), "requests 7 of 0");
}

TEST(BundledModel, InstalledBesideTheExecutable) {
  Tree tree;
  const fs::path config = tree.Write("usr/share/sluice/models/tiny/config.json", "{}");
  const auto model = BundledModelPathFor((tree.root() / "usr/bin/sluice").string());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(*model, config.parent_path().string());
}

TEST(BundledModel, SourceTreeOfABuild) {
  Tree tree;
  tree.Write("src tree/models/README.md", "");
  const fs::path config = tree.Write("src tree/models/tiny/config.json", "{}");
  tree.Write("elsewhere/bin/sluice.source", (tree.root() / "src tree").string() + "\n");
  const auto model = BundledModelPathFor((tree.root() / "elsewhere/bin/sluice").string());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(*model, config.parent_path().string());
}

TEST(BundledModel, MissingSaysWhereItLooked) {
  Tree tree;
  const auto model = BundledModelPathFor((tree.root() / "bin/sluice").string());
  EXPECT_EQ(model.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(Message(model.status())),
              ::testing::AllOf(::testing::HasSubstr((tree.root() / "share/sluice/models").string()),
                               ::testing::HasSubstr("--model-path")));
}

TEST(Commands, NamesAreUniqueAndDescribed) {
  std::set<std::string_view> names;
  for (const Command& c : Commands()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_FALSE(c.summary.empty()) << c.name;
  }
}

TEST(Commands, ExitCodesFollowTheStatus) {
  EXPECT_EQ(ExitCodeOf(OkStatus()), 0);
  EXPECT_EQ(ExitCodeOf(Internal("x")), 1);
  EXPECT_EQ(ExitCodeOf(Invalid("x")), 2);
  EXPECT_EQ(ExitCodeOf(Unsupported("x")), 2);
  EXPECT_EQ(ExitCodeOf(NotFound("x")), 3);
  EXPECT_EQ(ExitCodeOf(Exhausted("x")), 3);
  EXPECT_EQ(ExitCodeOf(Unavailable("x")), 3);
}

TEST(Version, NamesCommitCompilerAndBackends) {
  EXPECT_THAT(VersionText(),
              ::testing::AllOf(::testing::StartsWith("sluice "), ::testing::HasSubstr("\ncommit   "),
                               ::testing::HasSubstr("\ncompiler "), ::testing::HasSubstr("\nbackends ")));
}

// One token a byte.
StatusOr<std::vector<std::vector<int32_t>>> Bytes(const std::vector<std::string>& texts) {
  std::vector<std::vector<int32_t>> out;
  for (const std::string& t : texts) out.emplace_back(t.begin(), t.end());
  return out;
}

std::string FileOf(const std::string& name, const std::string& content) {
  const std::string path = ::testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

TEST(Conversations, TheFirstTwoTurnsMakeARequestAndWhatDoesNotFitIsPassedOver) {
  const std::string path = FileOf("sharegpt.json", R"([
    {"id": "1", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi you"}, {"value": "x"}]},
    {"conversations": [{"value": "a"}, {"value": "too short a prompt"}]},
    {"conversations": [{"value": "no answer"}]},
    {"conversation": [{"content": "other names"}, {"content": "of the same"}]},
    {"conversations": [{"value": "this one is too long for the context"}, {"value": "indeed"}]}, 5])");
  const auto all = ConversationWorkload(path, {.num_prompts = 10, .context_len = 30}, Bytes);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 2u);
  std::map<size_t, int32_t> lengths;
  for (const LoadRequest& r : *all) lengths[r.prompt.size()] = r.output_tokens;
  EXPECT_EQ(lengths, (std::map<size_t, int32_t>{{5, 6}, {11, 11}}));
  EXPECT_EQ(ConversationWorkload(path, {.num_prompts = 1}, Bytes)->size(), 1u);
  EXPECT_EQ(ConversationWorkload(path, {.output_len = 7}, Bytes)->at(0).output_tokens, 7);
  for (const char* bad : {"", "{}", "[]", "[1]", R"([{"conversations":[]}])"}) {
    EXPECT_FALSE(ConversationWorkload(FileOf("bad.json", bad), {}, Bytes).ok()) << bad;
  }
  EXPECT_FALSE(ConversationWorkload(path, {.context_len = 3}, Bytes).ok());
  EXPECT_FALSE(ConversationWorkload("/nonexistent.json", {}, Bytes).ok());
}

TEST(Traces, EqualBlocksMakeEqualTokensAndTimesAreStretched) {
  const std::string path =
      FileOf("trace.jsonl",
             "{\"timestamp\": 1000, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [7, 8]}\n"
             "{\"timestamp\": 3000, \"input_length\": 700, \"output_length\": 4, \"hash_ids\": [7, 9]}\n"
             "{\"timestamp\": 4000, \"input_length\": 1, \"output_length\": 9000, \"hash_ids\": [1]}\n");
  const auto r = TraceWorkload(path, {.slowdown = 0.5, .context_len = 1000, .vocab_size = 100});
  ASSERT_TRUE(r.ok()) << r.status();
  ASSERT_EQ(r->size(), 2u);
  EXPECT_EQ((*r)[0].arrival_s, 0);
  EXPECT_EQ((*r)[1].arrival_s, 1.0);
  EXPECT_EQ((*r)[1].output_tokens, 4);
  EXPECT_TRUE(std::equal((*r)[0].prompt.begin(), (*r)[0].prompt.begin() + 512, (*r)[1].prompt.begin()));
  EXPECT_FALSE(std::equal((*r)[0].prompt.begin() + 512, (*r)[0].prompt.end(), (*r)[1].prompt.begin() + 512));
  EXPECT_LT(*std::max_element((*r)[0].prompt.begin(), (*r)[0].prompt.end()), 100);
  EXPECT_EQ(TraceWorkload(path, {.num_prompts = 1, .vocab_size = 100})->size(), 1u);
  EXPECT_FALSE(TraceWorkload(FileOf("bad.jsonl", "{}\n"), {.vocab_size = 100}).ok());
  EXPECT_FALSE(TraceWorkload("/nonexistent.jsonl", {.vocab_size = 100}).ok());
}

}  // namespace
}  // namespace sluice
