#include <gtest/gtest.h>

#include "base/bounded_queue.h"
#include "base/digest.h"
#include "base/ids.h"
#include "base/random.h"
#include "base/status.h"

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

}  // namespace
}  // namespace sluice
