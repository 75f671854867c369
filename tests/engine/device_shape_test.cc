// What the engine does only for devices with memory of their own, with the CPU's arithmetic: tokens, logits
// bits and logprobs are those of the CPU backend itself.
#include "base/random.h"
#include "device_shaped_backend.h"
#include "model_world.h"

namespace sluice {
namespace {

const std::string kLedger = std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8";

Request Repeating(int64_t length, uint64_t seed) {
  SeededStream random(seed);
  Request r;
  std::vector<int32_t> words;
  for (uint64_t i = 0; i < 3 + seed % 9; ++i) words.push_back(int32_t(random.Below(2000)));
  for (int64_t i = 0; i < length; ++i) r.prompt.push_back(words[size_t(i) % words.size()]);
  r.rid = "r" + std::to_string(seed);
  r.sampling.max_tokens = 24;
  r.sampling.ignore_eos = true;
  r.sampling.temperature = 0;
  r.sampling.seed = seed;
  return r;
}

// Rows that come reduced beside rows that are needed whole, in one batch.
std::vector<Request> Mixed() {
  std::vector<Request> all;
  for (const int64_t length : {1, 40, 64, 65, 130, 150, 200, 129})
    all.push_back(Repeating(length, all.size() + 10));
  all[1].sampling.temperature = 0.9f;
  all[2].sampling.temperature = 0.8f;
  all[2].sampling.top_p = 0.9f;
  all[3].sampling.temperature = 1.0f;
  all[3].sampling.top_k = 30;
  all[4].sampling.temperature = 0.9f;
  all[4].sampling.top_logprobs = 1;
  all[5].sampling.repetition_penalty = 1.2f;
  all[6].sampling.n = 3;
  all[6].sampling.temperature = 0.7f;
  all[7].sampling.temperature = 1.0f;
  all[7].sampling.min_p = 0.05f;
  all[7].sampling.ignore_eos = false;
  all[7].sampling.min_tokens = 9;
  return all;
}

class DeviceShape : public ::testing::TestWithParam<std::pair<int32_t, int32_t>> {};
INSTANTIATE_TEST_SUITE_P(DraftsAndRanks, DeviceShape,
                         ::testing::Values(std::pair(0, 1), std::pair(0, 2), std::pair(3, 1),
                                           std::pair(3, 2)));

TEST_P(DeviceShape, AnswersAreThoseOfTheCpuBackend) {
  auto owned =
      std::make_unique<testing::DeviceShapedBackend>(cpu::MakeCpuBackend({DType::kBF16, "auto"}).value());
  testing::DeviceShapedBackend& backend = *owned;
  ModelWorld plain(kLedger, DType::kBF16, /*with_draft=*/true);
  ModelWorld shaped(kLedger, DType::kBF16, /*with_draft=*/true, std::move(owned));
  RunShape shape;
  shape.chunk = 96;
  shape.max_running = 12;
  shape.kv = DType::kF8E4M3;
  const std::vector<RunAnswer> want = plain.Answer(Mixed(), shape);
  shape.drafts = GetParam().first;
  shape.ranks = GetParam().second;
  shape.threaded = true;
  const std::vector<RunAnswer> got = shaped.Answer(Mixed(), shape);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].error.ok()) << got[i].error;
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    EXPECT_EQ(got[i].hash, want[i].hash) << i;
    ASSERT_EQ(got[i].detail.size(), want[i].detail.size());
    for (size_t t = 0; t < got[i].detail.size(); ++t)
      EXPECT_EQ(got[i].detail[t].logprob, want[i].detail[t].logprob) << i;
  }
  // Steps with drafts follow from what stood before; all others were made while the one before them ran.
  EXPECT_EQ(shaped.prepared, shape.drafts == 0 ? shaped.forwards : 0);
  EXPECT_GT(shaped.forwards, 20);
  EXPECT_EQ(backend.reduced_rows > 0, shape.ranks == 1) << "several ranks bring whole rows together";
  if (shape.drafts > 0) {
    EXPECT_GT(shaped.drafts.accepted, 20);
  }
}

TEST(WarmUpShapes, AreThoseThatStepsBringAndLeaveNoTrace) {
  for (const auto& [drafts, ranks, pages] : {std::tuple(0, 1, 512), {3, 1, 512}, {3, 2, 512}, {2, 1, 9}}) {
    auto owned =
        std::make_unique<testing::DeviceShapedBackend>(cpu::MakeCpuBackend({DType::kBF16, "auto"}).value());
    testing::DeviceShapedBackend& backend = *owned;
    ModelWorld world(kLedger, DType::kBF16, /*with_draft=*/true, std::move(owned));
    RunShape shape;
    shape.chunk = 96;
    shape.max_running = 5;
    shape.kv = DType::kF8E4M3;
    shape.drafts = drafts;
    shape.ranks = ranks;
    shape.pages = pages;
    const std::vector<Request> requests = {Repeating(40, 3), Repeating(130, 4), Repeating(7, 5)};
    const std::vector<RunAnswer> want = world.Answer(requests, shape);
    backend.reduced_rows = 0;
    const int64_t accepted = world.drafts.accepted;
    shape.warm_up = true;
    EXPECT_EQ(world.Answer(requests, shape), want) << drafts << " drafts, " << ranks << " ranks";
    EXPECT_EQ(world.drafts.accepted, accepted) << "what the warm-up drafted is not learnt from";
    const WarmUpReport& warm = world.warm_up;
    SchedulerOptions scheduler;
    scheduler.max_running = shape.max_running;
    scheduler.chunk_tokens = shape.chunk;
    scheduler.draft_tokens = drafts;
    scheduler.context_length = 8192;
    EXPECT_EQ(warm.most_rows, MaxStepRows(scheduler));
    // 1, 2, 4 and 5 sequences at two places, every number of drafts, three times each.
    EXPECT_EQ(warm.verify_steps, drafts * 4 * 2 * 3);
    EXPECT_GE(warm.draft_passes, warm.verify_steps);
    if (pages == 512) {
      EXPECT_GT(warm.longest_context, 8192 - 64);
    } else {
      EXPECT_LE(warm.longest_context, pages * 64);
    }
    EXPECT_EQ(backend.reduced_rows > 0, ranks == 1);
  }
}

}  // namespace
}  // namespace sluice
