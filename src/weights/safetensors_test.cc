#include "weights/safetensors.h"

#include <fstream>

#include "base/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace sluice {
namespace {

using ::testing::HasSubstr;

std::string FromHex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string s;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) s.push_back(char(digit(hex[i]) * 16 + digit(hex[i + 1])));
  return s;
}

StatusOr<std::unique_ptr<SafetensorsFile>> OpenBytes(const std::string& bytes) {
  static int n = 0;
  const std::string path = testing::TempDir() + "/sluice_bytes_" + std::to_string(n++) + ".safetensors";
  std::ofstream(path, std::ios::binary) << bytes;
  return SafetensorsFile::Open(path);
}

std::string File(const std::string& header, const std::string& data) {
  std::string s(8, '\0');
  for (size_t i = 0; i < 8; ++i) s[i] = char(uint64_t(header.size()) >> (8 * i));
  return s + header + data;
}

TEST(Safetensors, ReadsAScalarList) {
  auto f = OpenBytes(
      FromHex("36000000000000007b2261223a7b226474797065223a22463332222c227368617065223a5b315d2c22646174615f6f"
              "666673657473223a5b302c345d7d7d0000803f"));
  ASSERT_TRUE(f.ok()) << f.status();
  const StoredTensor* t = (*f)->Find("a");
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(t->dtype, DType::kF32);
  float v = 0;
  memcpy(&v, t->data, 4);
  EXPECT_EQ(v, 1.0f);
}

TEST(Safetensors, AcceptsAHeaderPaddedWithSpaces) {
  auto f = OpenBytes(
      FromHex("38000000000000007b2261223a7b226474797065223a225538222c227368617065223a5b325d2c22646174615f6f66"
              "6673657473223a5b302c325d7d7d2020200102"));
  ASSERT_TRUE(f.ok()) << f.status();
  EXPECT_EQ((*f)->Find("a")->bytes, 2);
}

TEST(Safetensors, AcceptsATensorWithoutElements) {
  auto f = OpenBytes(FromHex(
      "38000000000000007b227a223a7b226474797065223a22463332222c227368617065223a5b302c375d2c22646174615f"
      "6f666673657473223a5b302c305d7d7d"));
  ASSERT_TRUE(f.ok()) << f.status();
  EXPECT_EQ((*f)->Find("z")->elements(), 0);
}

struct BadFile {
  const char* name;
  const char* hex;
  const char* message;
  bool names_tensor;
};

class RefusedFiles : public testing::TestWithParam<BadFile> {};

TEST_P(RefusedFiles, NameTheFileTheTensorAndTheReason) {
  auto f = OpenBytes(FromHex(GetParam().hex));
  ASSERT_FALSE(f.ok());
  const std::string message(f.status().message());
  EXPECT_THAT(message, HasSubstr(GetParam().message));
  EXPECT_THAT(message, HasSubstr(".safetensors"));
  if (GetParam().names_tensor) {
    EXPECT_THAT(message, HasSubstr("tensor \""));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, RefusedFiles,
    testing::Values(BadFile{"SevenBytes", "02000000000000", "too few", false},
                    BadFile{"HeaderPastEnd", "40000000000000007b7d", "only 2 follow", false},
                    BadFile{"HeaderIsAnArray", "05000000000000005b312c325d", "not a JSON object", false},
                    BadFile{"ByteNotCovered",
                            "69000000000000007b2261223a7b226474797065223a225538222c227368617065223a5b315d2c22"
                            "646174615f6f66667365747322"
                            "3a5b302c315d7d2c2262223a7b226474797065223a225538222c227368617065223a5b315d2c2264"
                            "6174615f6f6666736574732"
                            "23a5b322c335d7d7d010203",
                            "begins at data byte 2, expected 1", true},
                    BadFile{"TrailingByte",
                            "35000000000000007b2261223a7b226474797065223a225538222c227368617065223a5b315d2c22"
                            "646174615f6f6666736574732"
                            "23a5b302c315d7d7d0102",
                            "1 bytes follow the last tensor", false},
                    BadFile{"DataCut",
                            "36000000000000007b2261223a7b226474797065223a22463332222c227368617065223a5b325d2c"
                            "22646174615f6f666673657473"
                            "223a5b302c385d7d7d00000000",
                            "cut short", true},
                    BadFile{"BeginAfterEnd",
                            "35000000000000007b2261223a7b226474797065223a225538222c227368617065223a5b325d2c22"
                            "646174615f6f66667365747322"
                            "3a5b322c305d7d7d0102",
                            "[2, 0]", true},
                    BadFile{"ShapeLargerThanBytes",
                            "3e000000000000007b2274223a7b226474797065223a22463332222c227368617065223a5b313030"
                            "302c313030305d2c22646174615f"
                            "6f666673657473223a5b302c345d7d7d00000000",
                            "needs 4000000 bytes", true},
                    BadFile{"MetadataNotAString",
                            "4c000000000000007b225f5f6d657461646174615f5f223a7b226b223a317d2c2261223a7b226474"
                            "797065223a225538222c2273686170"
                            "65223a5b315d2c22646174615f6f666673657473223a5b302c315d7d7d01",
                            "not a string", false},
                    BadFile{"ThreeOffsets",
                            "37000000000000007b2261223a7b226474797065223a225538222c227368617065223a5b315d2c22"
                            "646174615f6f66667365747322"
                            "3a5b302c312c315d7d7d01",
                            "two whole numbers", true}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Safetensors, RefusesOverlapsRepeatsAndUnknownFields) {
  const auto error = [](const std::string& header, const std::string& data) {
    auto f = OpenBytes(File(header, data));
    EXPECT_FALSE(f.ok()) << header;
    return std::string(f.status().message());
  };
  EXPECT_THAT(
      error(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
          "123"),
      HasSubstr("overlap"));
  EXPECT_THAT(
      error(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          "12"),
      HasSubstr("twice"));
  EXPECT_THAT(error(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "1"),
              HasSubstr("repeated"));
  EXPECT_THAT(error(R"({"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}})", "1"), HasSubstr("Q4"));
  EXPECT_THAT(error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", "1"),
              HasSubstr("\"x\""));
  EXPECT_THAT(error(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "1"), HasSubstr("shape"));
  EXPECT_THAT(error(R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", "1"), HasSubstr("shape"));
  EXPECT_THAT(
      error(R"({"a":{"dtype":"F32","shape":[281474976710656,281474976710656],"data_offsets":[0,1]}})", "1"),
      HasSubstr("larger than any file"));
  EXPECT_THAT(error(R"({"a":{"dtype":"U8","shape":[1]}})", "1"), HasSubstr("missing"));
  EXPECT_THAT(error(R"({"a":[]})", ""), HasSubstr("not an object"));
  EXPECT_THAT(error("{\"a\":", ""), HasSubstr("JSON"));
  EXPECT_THAT(error(std::string(200000, '['), ""), HasSubstr("JSON"));
  EXPECT_THAT(error(R"({})", "1"), HasSubstr("1 bytes follow"));
}

TEST(Safetensors, ReadsHeadersLargerThanAHundredThousandBytes) {
  std::string header = "{", data;
  for (int i = 0; i < 2500; ++i) {
    header += fmt::format("{}\"t{}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[{},{}]}}",
                          i ? "," : "", i, i, i + 1);
    data.push_back(char(i));
  }
  header += "}";
  ASSERT_GT(header.size(), 100000u);
  auto f = OpenBytes(File(header, data));
  ASSERT_TRUE(f.ok()) << f.status();
  EXPECT_EQ((*f)->tensors().size(), 2500u);
}

TEST(Safetensors, RefusesEveryTruncationOfAGoodFile) {
  const std::string whole = File(
      R"({"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[],"data_offsets":[8,12]}})",
      "123456789012");
  ASSERT_TRUE(OpenBytes(whole).ok());
  for (size_t n = 0; n < whole.size(); ++n) EXPECT_FALSE(OpenBytes(whole.substr(0, n)).ok()) << n;
}

TEST(Safetensors, MutatedFilesAreRefusedOrStayInBounds) {
  const std::string good = File(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})",
      "0123456789abcdef");
  SeededStream random(20);
  const std::string path = testing::TempDir() + "/sluice_mutated.safetensors";
  const std::string_view pieces[] = {
      "[", "]", "{", "}", ",", ":", "\"", "-1", "99999999999999999999", "1e9", "null", "\\u0000"};
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = good;
    for (uint64_t n = 1 + random.Below(3); n > 0; --n) {
      const size_t at = random.Below(bytes.size());
      switch (random.Below(4)) {
        case 0:
          bytes[at] = char(random.Next());
          break;
        case 1:
          bytes.erase(at, 1 + random.Below(8));
          break;
        case 2:
          bytes.insert(at, pieces[random.Below(std::size(pieces))]);
          break;
        default:
          bytes[at] = char(bytes[at] ^ (1 << random.Below(8)));
      }
      if (bytes.empty()) bytes = "x";
    }
    std::ofstream(path, std::ios::binary) << bytes;
    const auto f = SafetensorsFile::Open(path);
    if (!f.ok()) {
      EXPECT_FALSE(f.status().message().empty());
      continue;
    }
    ++accepted;
    for (const StoredTensor& t : (*f)->tensors()) {
      int sum = 0;
      for (int64_t j = 0; j < t.bytes; ++j) sum += int(t.data[j]);
      EXPECT_GE(sum, 0);
    }
  }
  EXPECT_GT(accepted, 10);  // a changed data byte is a good file
}

TEST(Safetensors, MissingFilesAndFoldersAreNamed) {
  EXPECT_THAT(std::string(SafetensorsFile::Open("/nonexistent.safetensors").status().message()),
              HasSubstr("/nonexistent.safetensors"));
  EXPECT_THAT(std::string(SafetensorsFile::Open(testing::TempDir()).status().message()),
              HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace sluice
