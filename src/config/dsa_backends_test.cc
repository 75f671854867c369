#include "config/dsa_backends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "config/flags.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// By hand: b bf16 rows, p packed fp8 rows, r raw fp8 rows.
const std::map<std::string, std::pair<char, char>> kReads = {
    {"flashmla_sparse", {'b', 'p'}}, {"flashmla_kv", {'p', 'p'}},
    {"flashmla_auto", {'b', 'p'}},   {"fa3", {'b', 'b'}},
    {"tilelang", {'b', 'b'}},        {"aiter", {'b', 'r'}},
    {"trtllm", {'b', 'r'}},
};

char Letter(RowFormat f) {
  return f == RowFormat::kBF16 ? 'b' : f == RowFormat::kPackedFp8 ? 'p' : f == RowFormat::kRawFp8 ? 'r' : 'f';
}

TEST(DsaBackends, EveryPairWithBothCacheTypes) {
  std::vector<std::string> names = {"auto"};
  for (const std::string_view name : DsaBackendNames()) names.emplace_back(name);
  ASSERT_EQ(names.size(), kReads.size() + 1);
  int taken = 0, mixed = 0, not_the_layouts = 0;
  for (const char* kv : {"auto", "bf16", "fp8_e4m3"}) {
    const bool fp8 = std::string_view(kv) == "fp8_e4m3";
    const char layout = fp8 ? 'p' : 'b';
    const auto reads = [&](const std::string& n) { return fp8 ? kReads.at(n).second : kReads.at(n).first; };
    for (const std::string& prefill : names) {
      for (const std::string& decode : names) {
        SCOPED_TRACE(fmt::format("{} {} {}", kv, prefill, decode));
        const bool p = prefill != "auto", d = decode != "auto";
        const StatusOr<DsaBackends> got = ChooseDsaBackends(prefill, decode, kv, "auto");
        // The parser refuses what is refused here, and nothing else.
        const StatusOr<ServerConfig> parsed = ParseServerFlags(
            {"--dsa-prefill-backend", prefill, "--nsa-decode-backend", decode, "--kv-cache-dtype", kv});
        EXPECT_EQ(parsed.ok(), got.ok()) << Message(parsed.status());
        if (p && d && reads(prefill) != reads(decode)) {
          ASSERT_FALSE(got.ok());
          EXPECT_THAT(std::string(Message(got.status())), AllOf(HasSubstr("--dsa-prefill-backend " + prefill),
                                                                HasSubstr("--dsa-decode-backend " + decode)));
          EXPECT_THAT(std::string(Message(parsed.status())),
                      AllOf(HasSubstr("--dsa-prefill-backend " + prefill),
                            HasSubstr("--dsa-decode-backend " + decode)));
          ++mixed;
          continue;
        }
        const char rows = p ? reads(prefill) : d ? reads(decode) : layout;
        if (rows != layout) {
          ASSERT_FALSE(got.ok());
          EXPECT_THAT(std::string(Message(got.status())), HasSubstr(p ? prefill : decode));
          ++not_the_layouts;
          continue;
        }
        ASSERT_TRUE(got.ok()) << Message(got.status());
        EXPECT_EQ(Letter(got->rows), layout);
        EXPECT_TRUE(!p || got->prefill == prefill);
        EXPECT_TRUE(!d || got->decode == decode);
        if (p || d) {  // the other side follows: it has a name, of the same rows
          EXPECT_EQ(reads(got->prefill), layout);
          EXPECT_EQ(reads(got->decode), layout);
          EXPECT_EQ(parsed->dsa_prefill_backend, got->prefill);
          EXPECT_EQ(parsed->dsa_decode_backend, got->decode);
        } else {
          EXPECT_EQ(got->prefill, "auto");
          EXPECT_EQ(got->decode, "auto");
        }
        ++taken;
      }
    }
  }
  // bf16: 6 of 7 names have its rows, so 7 x 7 pairs with auto; fp8: 3 of 7, so 4 x 4.
  EXPECT_EQ(taken, 2 * 49 + 16);
  EXPECT_EQ(mixed, 2 * 12 + 32);
  EXPECT_EQ(taken + mixed + not_the_layouts, 3 * 64);
}

TEST(DsaBackends, Float32RowsAreNobodysButTheDefaults) {
  EXPECT_EQ(ChooseDsaBackends("auto", "auto", "auto", "float32")->rows, RowFormat::kF32);
  for (const std::string_view name : DsaBackendNames())
    EXPECT_FALSE(ChooseDsaBackends(name, "auto", "auto", "float32").ok()) << name;
}

TEST(DsaBackends, AnUnknownNameIsRefusedWithTheList) {
  const StatusOr<ServerConfig> parsed = ParseServerFlags({"--dsa-decode-backend", "flashmla"});
  ASSERT_FALSE(parsed.ok());
  EXPECT_THAT(std::string(Message(parsed.status())), HasSubstr("flashmla_sparse, flashmla_kv"));
}

}  // namespace
}  // namespace sluice
