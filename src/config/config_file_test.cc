#include "config/config_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ConfigFile, ReadsYamlAndTomlLines) {
  auto entries = ParseFlagFile(
      "# a comment\n---\nmodel-path: /models/GLM-5   # trailing\nport = 8000\n"
      "served-model-name: \"a # b\"\njson-model-override-args: '{\"a\": 1}'\ncuda-graph-bs: [1, 2, 4]\n"
      "numa-node:\n  - 0\n  - 1\n",
      "f.yaml");
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 6u);
  EXPECT_EQ((*entries)[0].key, "model-path");
  EXPECT_THAT((*entries)[0].values, ElementsAre("/models/GLM-5"));
  EXPECT_EQ((*entries)[1].line, 4);
  EXPECT_THAT((*entries)[1].values, ElementsAre("8000"));
  EXPECT_THAT((*entries)[2].values, ElementsAre("a # b"));
  EXPECT_THAT((*entries)[3].values, ElementsAre("{\"a\": 1}"));
  EXPECT_THAT((*entries)[4].values, ElementsAre("1", "2", "4"));
  EXPECT_THAT((*entries)[5].values, ElementsAre("0", "1"));
}

TEST(ConfigFile, ColonsInsideValuesStay) {
  auto entries = ParseFlagFile("dist-init-addr: host:5000\r\n", "f");
  ASSERT_TRUE(entries.ok());
  EXPECT_THAT((*entries)[0].values, ElementsAre("host:5000"));
}

TEST(ConfigFile, ErrorsNameFileAndLine) {
  const struct {
    const char *text, *expected;
  } cases[] = {
      {"port: 1\nport: 2\n", "f:2: 'port' is given twice"},
      {"\n[server]\nport = 1\n", "f:2: '[server]' is a table"},
      {"port\n", "f:1: 'port' is not"},
      {"host: \"abc\n", "f:1: host: a \" is not closed"},
      {"a: [1, 2\n", "f:1: a: a [ is not closed"},
      {"a: {b: 1}\n", "f:1: a: a nested table"},
      {"- 3\n", "f:1: '- 3' belongs to no key"},
      {"a: 1\n- 3\n", "f:2: '- 3' belongs to no key"},
      {"a:\nb: 1\n", "f:1: 'a' has no value"},
      {"a: 'x' y\n", "f:1: a: 'y' follows the value"},
      {": 1\n", "f:1: ': 1' is not"},
  };
  for (const auto& c : cases) {
    auto entries = ParseFlagFile(c.text, "f");
    ASSERT_FALSE(entries.ok()) << c.text;
    EXPECT_THAT(std::string(Message(entries.status())), HasSubstr(c.expected));
  }
}

TEST(ConfigFile, MissingFileIsNotFoundAndEmptyFileIsEmpty) {
  EXPECT_EQ(ReadFlagFile("/nonexistent/f.yaml").status().code(), absl::StatusCode::kNotFound);
  auto entries = ParseFlagFile("", "f");
  ASSERT_TRUE(entries.ok());
  EXPECT_TRUE(entries->empty());
}

}  // namespace
}  // namespace sluice
