// Drafting changes nothing but the speed: tokens, logits bits, logprobs and ends are those of plain decoding.
#include "base/random.h"
#include "model_world.h"

namespace sluice {
namespace {

const std::string kLedger = std::string(SLUICE_SOURCE_DIR) + "/models/ledger-28m-fp8";

ModelWorld& World() {
  static ModelWorld world(kLedger, DType::kBF16, /*with_draft=*/true);
  return world;
}

// A repeating prompt: the trained model goes on with it, so that drafts are right more often than not.
Request Repeating(int64_t length, int32_t max_tokens, uint64_t seed) {
  SeededStream random(seed);
  Request r;
  const uint64_t period = 3 + random.Below(12);
  std::vector<int32_t> words;
  for (uint64_t i = 0; i < period; ++i) words.push_back(int32_t(random.Below(2000)));
  for (int64_t i = 0; i < length; ++i)
    r.prompt.push_back(random.Chance(0.05) ? int32_t(random.Below(2000)) : words[size_t(i) % period]);
  r.rid = "r" + std::to_string(seed);
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  r.sampling.temperature = 0;
  r.sampling.seed = seed;
  return r;
}

// Every kind of request parameter that decides tokens or ends.
std::vector<Request> AllKinds() {
  std::vector<Request> all;
  const int64_t lengths[] = {1, 2, 40, 63, 64, 65, 127, 128, 150, 200};
  for (size_t i = 0; i < std::size(lengths); ++i)
    all.push_back(Repeating(lengths[i], int32_t(30 + 7 * (i % 4)), 10 + i));
  all[1].sampling.temperature = 0.7f;
  all[1].sampling.top_p = 0.9f;
  all[2].sampling.temperature = 1.0f;
  all[2].sampling.top_k = 40;
  all[3].sampling.repetition_penalty = 1.2f;
  all[4].sampling.temperature = 0.5f;
  all[4].sampling.frequency_penalty = 0.3f;
  all[4].sampling.presence_penalty = 0.2f;
  all[5].sampling.logit_bias = {{5, 4.0f}, {9, -3.0f}};
  all[5].sampling.top_logprobs = 2;
  all[6].sampling.ignore_eos = false;
  all[6].sampling.min_tokens = 11;
  all[7].sampling.top_logprobs = 0;
  all[7].sampling.temperature = 0.8f;
  all[8].sampling.n = 3;
  all[8].sampling.temperature = 0.9f;
  all[9].sampling.prompt_logprobs_from = 100;
  return all;
}

void ExpectSame(const std::vector<RunAnswer>& got, const std::vector<RunAnswer>& want,
                const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].error.ok()) << what << ": " << got[i].error;
    EXPECT_EQ(got[i].tokens, want[i].tokens) << what << ", answer " << i;
    EXPECT_EQ(got[i].hash, want[i].hash) << what << ", answer " << i;
    EXPECT_EQ(int(got[i].finish), int(want[i].finish)) << what << ", answer " << i;
    EXPECT_EQ(got[i].matched, want[i].matched) << what << ", answer " << i;
    ASSERT_EQ(got[i].detail.size(), want[i].detail.size());
    for (size_t t = 0; t < got[i].detail.size(); ++t) {
      EXPECT_EQ(got[i].detail[t].logprob, want[i].detail[t].logprob) << what << ", answer " << i;
      EXPECT_EQ(got[i].detail[t].top, want[i].detail[t].top) << what << ", answer " << i;
    }
  }
}

RunShape Drafting(int32_t drafts, int32_t depth) {
  RunShape shape;
  shape.drafts = drafts;
  shape.depth = depth;
  shape.max_running = 12;
  return shape;
}

TEST(Speculation, EveryKindOfRequestGetsTheAnswerOfPlainDecoding) {
  const std::vector<Request> requests = AllKinds();
  RunShape plain;
  plain.max_running = 12;
  const std::vector<RunAnswer> want = World().Answer(requests, plain);
  for (const int32_t drafts : {1, 3, 5}) {
    for (const int32_t depth : {0, 1}) {
      RunShape shape = Drafting(drafts, depth);
      shape.chunk = drafts == 1 ? 4096 : drafts == 3 ? 64 : 37;
      ExpectSame(World().Answer(requests, shape), want, fmt::format("drafts {} depth {}", drafts, depth));
      const DraftCounters& d = World().drafts;
      EXPECT_GT(d.accepted_at[0] * 100, d.proposed_at[0] * 20) << "drafts are no better than chance";
      EXPECT_LT(d.accepted, d.proposed) << "no rejection was met";
    }
  }
}

// Drafts of little chance get no row: the rows behind them move up.
TEST(Speculation, DraftsThatAreNotWorthARowChangeNoBit) {
  const std::vector<Request> requests = AllKinds();
  RunShape plain;
  plain.max_running = 12;
  const std::vector<RunAnswer> want = World().Answer(requests, plain);
  for (const int32_t depth : {0, 1}) {
    RunShape shape = Drafting(4, depth);
    shape.chunk = 37;
    ExpectSame(World().Answer(requests, shape), want, fmt::format("all drafts, depth {}", depth));
    const DraftCounters all = World().drafts;
    shape.drop_drafts = true;
    for (const int32_t ranks : {1, 3}) {
      shape.ranks = ranks;
      ExpectSame(World().Answer(requests, shape), want, fmt::format("depth {} ranks {}", depth, ranks));
      const DraftCounters& some = World().drafts;
      EXPECT_GT(some.accepted, 0);
      EXPECT_LT(some.proposed, all.proposed);
      EXPECT_GT(some.accepted * all.proposed, all.accepted * some.proposed)
          << some.accepted << " of " << some.proposed << ", all: " << all.accepted << " of " << all.proposed;
    }
  }
}

TEST(Speculation, AnEndInsideAnAcceptedRunIsTheEndOfPlainDecoding) {
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 6; ++i) requests.push_back(Repeating(100 + int64_t(i), 40, 50 + i));
  RunShape plain;
  const std::vector<RunAnswer> open = World().Answer(requests, plain);
  // Every length, and stop ids that the model is known to produce.
  std::vector<Request> ends;
  for (size_t i = 0; i < requests.size(); ++i) {
    for (const int32_t at : {1, 2, 5, 9, 14}) {
      Request r = requests[i];
      r.rid += fmt::format("-{}", at);
      if ((size_t(at) + i) % 2 == 0) {
        r.sampling.max_tokens = at;
      } else {
        r.sampling.stop_token_ids = {open[i].tokens[size_t(at)]};
        r.sampling.min_tokens = at / 2;
      }
      ends.push_back(std::move(r));
    }
  }
  plain.max_running = 16;
  const std::vector<RunAnswer> want = World().Answer(ends, plain);
  for (const int32_t depth : {0, 1}) {
    RunShape shape = Drafting(4, depth);
    shape.max_running = 16;
    ExpectSame(World().Answer(ends, shape), want, fmt::format("depth {}", depth));
    EXPECT_GT(World().drafts.accepted, 0);
  }
}

TEST(Speculation, RetractionAndTheTreeChangeNoBit) {
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 6; ++i) requests.push_back(Repeating(60 + int64_t(i), 90, 70 + i));
  RunShape plain;
  const std::vector<RunAnswer> want = World().Answer(requests, plain);
  for (const int32_t depth : {0, 1}) {
    RunShape shape = Drafting(3, depth);
    shape.pages = 7;
    shape.radix = true;
    ExpectSame(World().Answer(requests, shape), want, fmt::format("depth {}", depth));
    EXPECT_GT(World().retractions, 0);
  }
}

// The plain and the overlapped loop, and prompts that do not split evenly over the ranks.
TEST(Speculation, RanksPaddingAndOverlapChangeNoBit) {
  std::vector<Request> requests = AllKinds();
  requests.resize(8);
  requests.push_back(Repeating(300, 20, 90));
  RunShape plain;
  plain.kv = DType::kF8E4M3;
  const std::vector<RunAnswer> want = World().Answer(requests, plain);
  DraftCounters alone;
  for (const int32_t ranks : {1, 2, 4, 8}) {
    for (const bool gather : {false, true}) {
      for (const int32_t depth : {0, 1}) {
        if (gather ? ranks == 1 : ranks == 4) continue;
        RunShape shape = Drafting(3, depth);
        shape.kv = DType::kF8E4M3;
        shape.ranks = ranks;
        shape.chunk = 90;
        shape.gather = gather;
        const std::string what = fmt::format("ranks {} gather {} depth {}", ranks, gather, depth);
        ExpectSame(World().Answer(requests, shape), want, what);
        EXPECT_EQ(World().padding > 0, ranks > 1) << what;
        if (depth == 0 && ranks == 1) alone = World().drafts;
        // The drafts too: their rows are the same wherever they were made.
        if (depth == 0) {
          EXPECT_EQ(World().drafts.accepted_at, alone.accepted_at) << what;
        }
      }
    }
  }
}

// Turns of a conversation: hits on the device or on the host, whose draft rows must be those of a cold run.
TEST(Speculation, DraftsAfterAHitAreThoseOfAColdRun) {
  std::vector<Request> turns = {Repeating(200, 30, 5)};
  RunShape plain;
  for (int t = 0; t < 3; ++t) {
    Request next = turns.back();
    const std::vector<RunAnswer> answer = World().Answer({next}, plain);
    next.prompt.insert(next.prompt.end(), answer[0].tokens.begin(), answer[0].tokens.end());
    for (int i = 0; i < 35; ++i) next.prompt.push_back(turns[0].prompt[size_t(i)]);
    next.rid += "+";
    turns.push_back(std::move(next));
  }
  const std::vector<RunAnswer> want = World().Answer(turns, plain, /*turns=*/true);
  DraftCounters cold;
  for (const int64_t host : {-1, 0, 64}) {
    for (const auto& [ranks, gather] : {std::pair(1, false), {2, false}, {3, true}}) {
      RunShape shape = Drafting(3, 0);
      shape.gather = gather;
      shape.radix = host >= 0;
      shape.host_pages = std::max<int64_t>(0, host);
      shape.ranks = ranks;
      const std::vector<RunAnswer> got = World().Answer(turns, shape, /*turns=*/true);
      ExpectSame(got, want, fmt::format("host pages {} ranks {}", host, ranks));
      EXPECT_EQ(got[3].cached.total() > 192, host >= 0);
      EXPECT_EQ(World().loaded_pages > 0, host > 0);
      if (host < 0 && ranks == 1) cold = World().drafts;
      EXPECT_EQ(World().drafts.accepted_at, cold.accepted_at) << "host pages " << host << " ranks " << ranks;
      EXPECT_EQ(World().drafts.runs, cold.runs) << "host pages " << host << " ranks " << ranks;
    }
  }
}

}  // namespace
}  // namespace sluice
