#include "base/file_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace sluice {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class FileText : public testing::Test {
 protected:
  FileText() : folder_(fs::temp_directory_path() / ("sluice_file_text_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~FileText() override { fs::remove_all(folder_); }
  std::string Path(const char* name) const { return folder_ / name; }
  std::string Message(const char* name) const {
    return std::string(ReadFileText(Path(name)).status().message());
  }
  fs::path folder_;
};

TEST_F(FileText, ReadsTheWholeFile) {
  const std::string text = std::string(200000, 'x') + std::string("\0\n", 2);
  std::ofstream(Path("f"), std::ios::binary) << text;
  EXPECT_EQ(ReadFileText(Path("f")).value(), text);
  std::ofstream(Path("empty"));
  EXPECT_EQ(ReadFileText(Path("empty")).value(), "");
}

TEST_F(FileText, OnlyWhatIsNotThereIsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(ReadFileText(Path("none")).status()));
  EXPECT_THAT(Message("none"), HasSubstr("does not exist; "));
  fs::create_symlink("nowhere", Path("link"));
  EXPECT_TRUE(absl::IsNotFound(ReadFileText(Path("link")).status()));
  EXPECT_THAT(Message("link"), HasSubstr("is a link to a file that does not exist"));
  fs::create_symlink("loop", Path("loop"));
  EXPECT_TRUE(absl::IsUnavailable(ReadFileText(Path("loop")).status()));
  if (geteuid() == 0) return;  // reads everything
  std::ofstream(Path("closed"));
  fs::permissions(Path("closed"), fs::perms::none);
  EXPECT_TRUE(absl::IsUnavailable(ReadFileText(Path("closed")).status()));
}

TEST_F(FileText, PipesDevicesAndFoldersAreRefusedAtOnce) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(Message("pipe"), HasSubstr("is a pipe, not a regular file"));
  fs::create_directory(Path("folder"));
  EXPECT_THAT(Message("folder"), HasSubstr("is a folder, not a regular file"));
  EXPECT_THAT(std::string(ReadFileText("/dev/null").status().message()), HasSubstr("is a device"));
}

TEST_F(FileText, APointerOfGitLfsIsNamedWithItsRemedy) {
  std::ofstream(Path("lfs")) << "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
  EXPECT_THAT(Message("lfs"), HasSubstr("is a Git LFS pointer, not the file itself; run `git lfs pull` in " +
                                        folder_.string()));
}

TEST(JsonComplaint, LosesTheLibrarysPrefix) {
  EXPECT_EQ(JsonComplaint("[json.exception.parse_error.101] parse error at line 1"), "parse error at line 1");
  EXPECT_EQ(JsonComplaint("plain [x] text"), "plain [x] text");
}

}  // namespace
}  // namespace sluice
