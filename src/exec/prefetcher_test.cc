#include "exec/prefetcher.h"

#include <gtest/gtest.h>

#include <vector>

namespace sluice {
namespace {

TEST(Prefetcher, DoesEachChunkOfEachJobOnceWhoeverIsFaster) {
  std::vector<std::atomic<int>> times(40);
  std::atomic<int64_t> by_helper{0};
  Prefetcher p(
      [&](int32_t chunk, bool ahead) {
        times[size_t(chunk)].fetch_add(1);
        by_helper.fetch_add(ahead);
      },
      WaitMode::kBlock);
  p.Finish();  // without a job
  for (int job = 0; job < 2000; ++job) {
    const int32_t chunks = job % 41;
    for (auto& t : times) t = 0;
    p.Post(chunks);
    if (job % 3 == 0) std::this_thread::yield();
    p.Finish();
    for (int32_t i = 0; i < 40; ++i) ASSERT_EQ(times[size_t(i)], i < chunks ? 1 : 0) << "job " << job;
  }
  EXPECT_EQ(p.chunks_ahead(), by_helper);
}

TEST(Prefetcher, TheHelperWorksWhileTheCallerDoesSomethingElse) {
  std::atomic<int> ahead{0};
  Prefetcher p([&](int32_t, bool by_helper) { ahead.fetch_add(by_helper); }, WaitMode::kBlock);
  p.Post(5);
  while (ahead != 5) std::this_thread::yield();
  p.Finish();
  EXPECT_EQ(p.chunks_ahead(), 5);
}

}  // namespace
}  // namespace sluice
