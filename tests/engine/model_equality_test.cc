// Real checkpoints: tokens and logits bits do not depend on chunks, neighbours, depth, threads, retraction or
// the cache.

#include "base/random.h"
#include "model_world.h"

namespace sluice {
namespace {

const std::string kTiny = std::string(SLUICE_SOURCE_DIR) + "/tests/data/tiny-random/";
const std::string kLedger = std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8";

std::vector<Request> Requests(const ModelConfig& config, const std::vector<int64_t>& prompts,
                              int32_t tokens) {
  SeededStream random(11);
  std::vector<Request> out;
  for (const int64_t n : prompts) {
    Request r;
    for (int64_t i = 0; i < n; ++i) r.prompt.push_back(int32_t(random.Below(uint64_t(config.vocab_size))));
    r.rid = "r" + std::to_string(out.size());
    r.sampling.max_tokens = tokens;
    r.sampling.ignore_eos = true;
    r.sampling.temperature = out.size() % 3 == 0 ? 0.0f : 0.9f;
    r.sampling.seed = 100 + out.size();
    if (out.size() % 4 == 1) r.sampling.repetition_penalty = 1.2f;
    out.push_back(std::move(r));
  }
  return out;
}

// Each request by itself, its prompt in one step.
std::vector<RunAnswer> Alone(ModelWorld& world, const std::vector<Request>& requests, DType kv) {
  RunShape shape;
  shape.chunk = 8192;
  shape.max_running = 1;
  shape.depth = 0;
  shape.kv = kv;
  std::vector<RunAnswer> out;
  for (const Request& r : requests) {
    for (RunAnswer& a : world.Answer({r}, shape)) {
      EXPECT_TRUE(a.error.ok()) << a.error;
      out.push_back(std::move(a));
    }
  }
  return out;
}

void ExpectEqual(const std::vector<RunAnswer>& got, const std::vector<RunAnswer>& want,
                 const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].error.ok()) << what << ": " << got[i].error;
    EXPECT_EQ(got[i].tokens, want[i].tokens) << what << ", answer " << i;
    EXPECT_EQ(got[i].hash, want[i].hash) << what << ", answer " << i;
  }
}

struct TinyCase {
  std::string folder;
  DType act, kv;
};
class TinyModel : public ::testing::TestWithParam<TinyCase> {};

TEST_P(TinyModel, ChunksNeighboursDepthAndThreadsChangeNoBit) {
  ModelWorld world(kTiny + GetParam().folder, GetParam().act);
  const std::vector<Request> requests =
      Requests(world.config(), {1, 3, 17, 40, 64, 65, 90, 128, 129, 150, 7, 33}, 12);
  const std::vector<RunAnswer> want = Alone(world, requests, GetParam().kv);
  for (const int64_t chunk : {1, 7, 64, 100, 4096}) {
    for (const int64_t running : {1, 3, 12}) {
      RunShape shape;
      shape.kv = GetParam().kv;
      shape.chunk = chunk;
      shape.max_running = running;
      shape.depth = int32_t((chunk + running) % 2);
      shape.threads = 1 + int(running % 2);
      if (chunk == 1 && running == 1) continue;  // slow and covered by running 3
      ExpectEqual(
          world.Answer(requests, shape), want,
          fmt::format("chunk {} running {} depth {} threads {}", chunk, running, shape.depth, shape.threads));
    }
  }
}

TEST_P(TinyModel, RetractionAndTheCacheChangeNoBit) {
  ModelWorld world(kTiny + GetParam().folder, GetParam().act);
  std::vector<Request> requests = Requests(world.config(), {60, 61, 62, 63, 64, 65}, 90);
  const std::vector<RunAnswer> want = Alone(world, requests, GetParam().kv);
  for (const bool radix : {false, true}) {
    for (const int32_t depth : {0, 1}) {
      RunShape shape;
      shape.kv = GetParam().kv;
      shape.pages = 7;
      shape.radix = radix;
      shape.depth = depth;
      ExpectEqual(world.Answer(requests, shape), want, fmt::format("radix {} depth {}", radix, depth));
      EXPECT_GT(world.retractions, 0);
    }
  }
}

TEST_P(TinyModel, AFollowingTurnFromDeviceOrHostHasTheBitsOfAColdOne) {
  ModelWorld world(kTiny + GetParam().folder, GetParam().act);
  std::vector<Request> requests = Requests(world.config(), {200}, 20);
  std::vector<Request> all = requests;
  for (int turn = 0; turn < 3; ++turn) {
    RunShape shape;
    shape.kv = GetParam().kv;
    const std::vector<RunAnswer> answer = world.Answer({all.back()}, shape);
    Request next = all.back();
    next.prompt.insert(next.prompt.end(), answer[0].tokens.begin(), answer[0].tokens.end());
    for (int32_t i = 0; i < 30; ++i) next.prompt.push_back(i);
    all.push_back(std::move(next));
  }
  const std::vector<RunAnswer> want = Alone(world, all, GetParam().kv);
  for (const int64_t host : {0, 64}) {
    RunShape shape;
    shape.kv = GetParam().kv;
    shape.radix = true;
    shape.host_pages = host;
    const std::vector<RunAnswer> got = world.Answer(all, shape, /*turns=*/true);
    ExpectEqual(got, want, fmt::format("host pages {}", host));
    EXPECT_EQ(got[0].cached.total(), 0);
    EXPECT_EQ(host > 0 ? got[1].cached.host : got[1].cached.device, 192);
    EXPECT_EQ(world.loaded_pages > 0, host > 0);
  }
}

TEST_P(TinyModel, ChoicesOfOneRequestAreThoseOfSeparateOnes) {
  ModelWorld world(kTiny + GetParam().folder, GetParam().act);
  for (const int64_t prompt : {5, 64, 100}) {
    Request r = Requests(world.config(), {prompt}, 70)[0];
    r.sampling.temperature = 1;
    r.sampling.n = 4;
    RunShape shape;
    shape.kv = GetParam().kv;
    const std::vector<RunAnswer> forked = world.Answer({r}, shape);
    shape.radix = true;
    ExpectEqual(world.Answer({r}, shape), forked, "with the tree");
    shape.radix = false;
    shape.max_running = 1;  // no slot to fork into: each choice computes the prompt itself
    shape.chunk = 4096;
    ExpectEqual(world.Answer({r}, shape), forked, "one after another");
    EXPECT_NE(forked[0].tokens, forked[1].tokens);
  }
}

TEST(DequantVerify, SelectedRowsAndTheWholeCacheGiveTheSameBits) {
  ModelWorld world(kTiny + "glm-moe-dsa", DType::kBF16);
  const std::vector<Request> requests = Requests(world.config(), {150, 40, 90}, 20);
  const std::vector<RunAnswer> want = Alone(world, requests, DType::kF8E4M3);
  RunShape shape;
  shape.kv = DType::kF8E4M3;
  shape.dequant_verify = true;
  ExpectEqual(world.Answer(requests, shape), want, "verify");
}

TEST(NanInTheCache, EndsTheRequestThatReadsItAndNoOther) {
  ModelWorld world(kTiny + "deepseek-v3", DType::kBF16);
  const std::vector<Request> requests = Requests(world.config(), {100, 40}, 20);
  const std::vector<RunAnswer> want = Alone(world, requests, DType::kBF16);
  RunShape shape;
  shape.radix = true;
  shape.poison_step = 6;  // both decode by then
  const std::vector<RunAnswer> got = world.Answer(requests, shape);
  EXPECT_EQ(got[0].error.code(), absl::StatusCode::kInternal);
  EXPECT_LT(got[0].tokens.size(), 20u);
  EXPECT_TRUE(std::equal(got[0].tokens.begin(), got[0].tokens.end(), want[0].tokens.begin()));
  EXPECT_EQ(got[1], want[1]);
}

INSTANTIATE_TEST_SUITE_P(Families, TinyModel,
                         ::testing::Values(TinyCase{"glm-moe-dsa", DType::kBF16, DType::kBF16},
                                           TinyCase{"glm-moe-dsa", DType::kBF16, DType::kF8E4M3},
                                           TinyCase{"glm-moe-dsa", DType::kF32, DType::kF32},
                                           TinyCase{"deepseek-v32", DType::kBF16, DType::kF8E4M3},
                                           TinyCase{"deepseek-v3", DType::kBF16, DType::kBF16},
                                           TinyCase{"deepseek-v2", DType::kBF16, DType::kBF16},
                                           TinyCase{"glm4-moe-lite", DType::kBF16, DType::kBF16}),
                         [](const auto& info) {
                           std::string name = info.param.folder + "_" + std::string(Name(info.param.act)) +
                                              "_" + std::string(Name(info.param.kv));
                           for (char& c : name) c = isalnum(c) ? c : '_';
                           return name;
                         });

TEST(ReferenceModel, ChunksAndNeighboursChangeNoBit) {
  ModelWorld world(kLedger, DType::kBF16);
  for (const DType kv : {DType::kBF16, DType::kF8E4M3}) {
    const std::vector<Request> requests = Requests(world.config(), {700, 129, 30, 257}, 8);
    const std::vector<RunAnswer> want = Alone(world, requests, kv);
    for (const int64_t chunk : {64, 300}) {
      RunShape shape;
      shape.kv = kv;
      shape.chunk = chunk;
      shape.threads = 2;
      ExpectEqual(world.Answer(requests, shape), want, fmt::format("chunk {}", chunk));
    }
  }
}

#ifdef SLUICE_WHOLE_RANGE  // minutes long: the program engine_range_test (`make range`)
TEST(ReferenceModel, AllChunkSizesAndBatchesChangeNoBit) {
  ModelWorld world(kLedger, DType::kBF16);
  std::vector<int64_t> prompts{4500};
  SeededStream random(3);
  for (int i = 0; i < 31; ++i) prompts.push_back(1 + int64_t(random.Below(600)));
  for (const DType kv : {DType::kBF16, DType::kF8E4M3}) {
    const std::vector<Request> requests = Requests(world.config(), prompts, 8);
    const std::vector<RunAnswer> want = Alone(world, requests, kv);
    for (const int64_t chunk : {64, 128, 256, 512, 1024, 2048, 4096}) {
      for (const int64_t running : {1, 2, 8, 32}) {
        if (running == 1 && chunk != 64 && chunk != 4096) continue;
        RunShape shape;
        shape.kv = kv;
        shape.chunk = chunk;
        shape.max_running = running;
        shape.depth = int32_t(running % 2);
        shape.threads = 2;
        ExpectEqual(world.Answer(requests, shape), want, fmt::format("chunk {} running {}", chunk, running));
      }
    }
  }
}
#endif

}  // namespace
}  // namespace sluice
