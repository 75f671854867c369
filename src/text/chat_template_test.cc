#include "text/chat_template.h"

#include <fstream>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "text/tokenizer.h"

namespace sluice {
namespace {

using testing::HasSubstr;

std::string Source(const std::string& path) { return std::string(SLUICE_SOURCE_DIR) + "/" + path; }
std::string ReadAll(const std::string& path) {
  std::ifstream in(Source(path), std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

const ChatTemplate& Bundled() {
  static const auto t = ChatTemplate::Load(Source("models/ledger-28m-fp8")).value();
  return *t;
}

TEST(BundledTemplate, RendersAndEncodesTheGoldenPromptsExactly) {
  const auto tokenizer = Tokenizer::Load(Source("models/ledger-28m-fp8")).value();
  const Json golden = Json::parse(ReadAll("tests/data/golden/prompts.json"));
  ASSERT_EQ(golden.size(), 8u);
  for (const Json& prompt : golden) {
    const auto rendered = Bundled().Render(prompt["messages"], Json(), true);
    ASSERT_TRUE(rendered.ok()) << rendered.status();
    EXPECT_EQ(rendered->Text(), prompt["text"].get<std::string>());
    EXPECT_EQ(tokenizer->EncodeSegments(rendered->segments), prompt["ids"].get<std::vector<int32_t>>())
        << prompt["name"];
  }
}

}  // namespace
}  // namespace sluice
