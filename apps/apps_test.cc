#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "bundled_model.h"
#include "commands.h"
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

}  // namespace
}  // namespace sluice
