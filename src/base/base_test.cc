#include <gtest/gtest.h>

#include "base/bounded_queue.h"
#include "base/digest.h"
#include "base/ids.h"
#include "base/random.h"
#include "base/status.h"
#include "base/stream_copy.h"

namespace sluice {
namespace {

TEST(Digest, MatchesThePublishedVector) {
  const char abc[] = {'a', 'b', 'c'};
  EXPECT_EQ(Hex(Sha256(std::as_bytes(std::span(abc)))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Digest, FramesKeepFieldsApart) {
  Hasher a, b;
  a.AddFramed("ab").AddFramed("c");
  b.AddFramed("a").AddFramed("bc");
  EXPECT_NE(a.Finish(), b.Finish());
}

TEST(Random, PhiloxMatchesThePublishedVector) {
  // Known answer of Random123 for counter and key of all ones.
  const auto r = Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u});
  EXPECT_EQ(r[0], 0x408f276du);
  EXPECT_EQ(r[1], 0x41c83b0eu);
  EXPECT_EQ(r[2], 0xa20bc7c6u);
  EXPECT_EQ(r[3], 0x6d5451fdu);
}

TEST(BoundedQueue, RefusesWhenFullAndWhenClosed) {
  BoundedQueue<int> q(1);
  EXPECT_TRUE(q.TryPush(1));
  EXPECT_FALSE(q.TryPush(2));
  EXPECT_EQ(q.TryPop(), 1);
  q.Close();
  EXPECT_FALSE(q.TryPush(3));
  EXPECT_EQ(q.Pop(), std::nullopt);
}

TEST(StreamCopy, EqualsMemcpyForEverySizeAndAlignment) {
  std::vector<uint8_t> from(4096 + 128), to(4096 + 128), want;
  for (size_t i = 0; i < from.size(); ++i) from[i] = uint8_t(i * 131 + i / 251);
  for (const size_t from_at : {0u, 1u, 17u, 64u}) {
    for (size_t to_at = 0; to_at < 65; to_at += 13) {
      for (const size_t bytes : {0u, 1u, 63u, 64u, 65u, 127u, 128u, 256u, 257u, 656u, 3000u, 4031u}) {
        std::fill(to.begin(), to.end(), uint8_t(0xee));
        want = to;
        std::memcpy(want.data() + to_at, from.data() + from_at, bytes);
        StreamCopy(to.data() + to_at, from.data() + from_at, bytes);
        ASSERT_EQ(to, want) << from_at << " " << to_at << " " << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace sluice
