#include "transfer/wire.h"

#include <gtest/gtest.h>

#include "base/random.h"

namespace sluice::transfer {
namespace {

Hello SampleHello() {
  Hello h;
  h.instance_id = "p0";
  h.epoch = 7;
  h.model_name = "m";
  h.numerics_class = "cpu/avx2";
  h.page_tokens = 64;
  h.latent_dtype = "bf16";
  h.index_dtype = "bf16";
  h.latent_layers = {0, 1, 2};
  h.index_layers = {0, 2};
  h.regions = {"a", "b"};
  return h;
}

std::vector<ControlMessage> Samples() {
  Complete c;
  c.room = 5;
  c.bytes = 1ull << 40;
  c.counts = {{0, 0, 3}, {1, 2, 3}};
  c.aux = {42,
           -0.5f,
           {{1, -1.f}, {2, -2.f}},
           64,
           128,
           192,
           99,
           {{43, -0.25f, {{3, -3.f}}, 98}},
           {{44, -0.75f, {}, 0}, {45, -1.f, {{6, -6.f}, {7, -7.f}}, 0}},
           {4, 5},
           {0.5f, 1.5f}};
  c.page_digests = {Digest256{1}, Digest256{2}};
  return {SampleHello(),
          HelloAck{3, "no", "ucx"},
          Reserve{9, 7, 1000, Digest256{3}, 2, {5, 6, 7}, 12},
          c,
          Failed{1, "transfer", "why"},
          Abort{2, 1, "client"},
          AbortAck{2},
          Heartbeat{7, 8, {1, 2}, {{3, 4000, "reset"}, {}}},
          DataPath{std::string("\0\x01wire", 6)},
          Taken{{1, 1ull << 40}}};
}

TEST(Wire, EveryMessageSurvivesARoundTripByteByByte) {
  for (const ControlMessage& m : Samples()) {
    const auto bytes = Encode(m);
    FrameReader reader;
    for (size_t i = 0; i < bytes.size(); ++i) {
      auto early = reader.Next();
      ASSERT_TRUE(early.ok() && !early->has_value()) << TypeName(m);
      reader.Feed({&bytes[i], 1});
    }
    auto got = reader.Next();
    ASSERT_TRUE(got.ok() && got->has_value()) << TypeName(m);
    EXPECT_EQ((*got)->index(), m.index());
    EXPECT_EQ(Encode(**got), bytes) << TypeName(m);
  }
}

TEST(Wire, EachAuxFieldArrivesAsItself) {
  const ControlMessage m = Samples()[3];
  const ControlMessage got = *Decode(Encode(m));
  EXPECT_EQ(std::get<Complete>(got).aux, std::get<Complete>(m).aux);
  EXPECT_EQ(std::get<Complete>(got).counts, std::get<Complete>(m).counts);
}

TEST(Wire, RefusesTruncationExtensionAndLies) {
  for (const ControlMessage& m : Samples()) {
    auto bytes = Encode(m);
    auto cut = bytes;
    cut.pop_back();
    EXPECT_FALSE(Decode(cut).ok());
    // A payload with one byte too many or too few under a header that agrees with it.
    auto longer = bytes;
    longer.push_back({});
    uint32_t n = uint32_t(longer.size() - 12);
    std::memcpy(longer.data() + 8, &n, 4);
    EXPECT_FALSE(Decode(longer).ok()) << TypeName(m);
    n = uint32_t(cut.size() - 12);
    std::memcpy(cut.data() + 8, &n, 4);
    EXPECT_FALSE(Decode(cut).ok()) << TypeName(m);
  }
  auto huge = Encode(Reserve{});
  const uint32_t count = 0xffffffffu;
  std::memcpy(huge.data() + huge.size() - 4, &count, 4);
  EXPECT_FALSE(Decode(huge).ok()) << "a list count beyond the payload";
  auto version = Encode(AbortAck{1});
  version[4] = std::byte(9);
  const auto other = Decode(version);
  EXPECT_NE(Message(other.status()).find("version 9"), std::string_view::npos);
}

TEST(Wire, RandomBytesNeverPass) {
  SeededStream random(1);
  for (int i = 0; i < 20000; ++i) {
    auto bytes = Encode(Samples()[random.Below(8)]);
    for (int k = 0; k < 4; ++k) bytes[random.Below(bytes.size())] = std::byte(random.Next());
    FrameReader reader;
    reader.Feed(bytes);
    (void)reader.Next();  // whatever it says, it neither crashes nor reads outside (run under ASan)
  }
}

TEST(Handshake, NamesBothValuesOfEveryDifference) {
  Hello a = SampleHello(), b = SampleHello();
  b.role = Role::kDecode;
  EXPECT_TRUE(CheckCompatible(a, b, false).ok());
  b.latent_dtype = "fp8_e4m3";
  b.index_layers = {0, 1};
  const Status s = CheckCompatible(a, b, false);
  EXPECT_NE(Message(s).find("kv_cache_dtype: bf16 here, fp8_e4m3 there"), std::string_view::npos) << s;
  EXPECT_NE(Message(s).find("index_layers: [0, 2] here, [0, 1] there"), std::string_view::npos) << s;
}

TEST(Handshake, MixedNumericsNeedsItsFlagAndSameRoleIsRefused) {
  Hello a = SampleHello(), b = SampleHello();
  b.role = Role::kDecode;
  b.numerics_class = "cpu/avx512_bf16";
  b.content_fingerprint[0] = 1;
  EXPECT_FALSE(CheckCompatible(a, b, false).ok());
  EXPECT_TRUE(CheckCompatible(a, b, true).ok());
  b.role = Role::kPrefill;
  EXPECT_FALSE(CheckCompatible(a, b, true).ok());
}

}  // namespace
}  // namespace sluice::transfer
