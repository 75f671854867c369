// Launch commands as their models' pages publish them: what each flag of theirs means here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "config/flag_values.h"
#include "config/flags.h"

namespace sluice {
namespace {

struct LaunchLine {
  const char* what;
  const char* line;
  const char* problems;  // what the server says, one line per problem; "": it starts
  const char* works;     // flags by status; together they are all flags of the line
  const char* no_effect;
  const char* refused;
};

constexpr char kTp[] =
    "--tp-size 8 is not possible: heads and vocabulary are not split over ranks; ranks share a request's "
    "context "
    "and its cache; set --attn-cp-size to the same number, or --tp-size 1 and --threads for more "
    "cores";
constexpr char kDp[] =
    "--dp-size 8 is refused: one server is one replica; start several and balance between them";
constexpr char kDpAttention[] =
    "--enable-dp-attention is refused: a sequence's decode already runs on one home rank; prefill is split "
    "with "
    "--attn-cp-size instead";

const LaunchLine kLines[] = {
    {"GLM-5, model card",
     "--model-path zai-org/GLM-5 --tp-size 8 --tool-call-parser glm47 --reasoning-parser glm45 "
     "--speculative-algorithm EAGLE "
     "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
     "--mem-fraction-static 0.85 "
     "--served-model-name glm-5",
     "--tp-size 8 is not possible: heads and vocabulary are not split over ranks; ranks share a request's "
     "context "
     "and its cache; set --attn-cp-size to the same number, or --tp-size 1 and --threads for more "
     "cores",
     "--model-path --tp-size --speculative-algorithm --speculative-num-steps --speculative-eagle-topk "
     "--speculative-num-draft-tokens --mem-fraction-static --served-model-name "
     "--tool-call-parser --reasoning-parser",
     "", ""},
    {"GLM-5-FP8, one rank, no speculation",
     "--model-path zai-org/GLM-5-FP8 --tp 1 --trust-remote-code --tool-call-parser glm47 --reasoning-parser "
     "glm45 "
     "--mem-fraction-static 0.8 --kv-cache-dtype fp8_e4m3 --attention-backend nsa --nsa-prefill-backend "
     "flashmla_sparse "
     "--nsa-decode-backend flashmla_kv --page-size 64 --host 0.0.0.0 --port 30000 --enable-metrics",
     "",
     "--model-path --tp --mem-fraction-static --kv-cache-dtype --page-size --host --port --tool-call-parser "
     "--reasoning-parser --nsa-prefill-backend --nsa-decode-backend",
     "--trust-remote-code --attention-backend --enable-metrics", ""},
    {"GLM-5.1 with index sharing by override",
     "--model-path zai-org/GLM-5.1-FP8 --json-model-override-args {\"index_topk_freq\":4} "
     "--chunked-prefill-size 4096 "
     "--max-running-requests 64 --enable-two-batch-overlap --nsa-index-topk-freq 4",
     "--enable-two-batch-overlap with --nsa-index-topk-freq 4 is not possible: a layer that reuses a "
     "selection would meet "
     "the rows of the other half batch; drop --enable-two-batch-overlap, or let every layer select",
     "--model-path --json-model-override-args --chunked-prefill-size --max-running-requests "
     "--nsa-index-topk-freq",
     "--enable-two-batch-overlap", ""},
    {"DeepSeek-V3.2, data-parallel attention",
     "--model deepseek-ai/DeepSeek-V3.2 --tp 8 --dp 8 --enable-dp-attention --trust-remote-code "
     "--tool-call-parser deepseekv32 "
     "--reasoning-parser deepseek-v3 --chat-template tool_chat_template_deepseekv32.jinja",
     nullptr, "--model --tp --tool-call-parser --reasoning-parser", "--trust-remote-code",
     "--dp --enable-dp-attention --chat-template"},
    {"DeepSeek-V3.2, context parallelism",
     "--model deepseek-ai/DeepSeek-V3.2-Exp --tp 8 --ep 8 --dp 2 --enable-dp-attention "
     "--enable-nsa-prefill-context-parallel "
     "--attn-cp-size 4 --nsa-prefill-cp-mode round-robin-split --max-running-requests 32 --moe-a2a-backend "
     "deepep "
     "--cuda-graph-max-bs 32",
     nullptr, "--model --tp --ep --attn-cp-size --max-running-requests --cuda-graph-max-bs",
     "--enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode --moe-a2a-backend",
     "--dp --enable-dp-attention"},
    {"DeepSeek-V3.2, disaggregated decode",
     "--model-path deepseek-ai/DeepSeek-V3.2-Exp --disaggregation-mode decode --host 10.0.0.2 --port 30000 "
     "--tp 8 --dp 8 "
     "--enable-dp-attention --dist-init-addr 10.0.0.2:5757 --nnodes 2 --node-rank 1 --trust-remote-code "
     "--disaggregation-bootstrap-port 8998 --disaggregation-ib-device mlx5_0 --mem-fraction-static 0.8",
     nullptr,
     "--model-path --disaggregation-mode --disaggregation-bootstrap-port --host --port --tp "
     "--mem-fraction-static",
     "--dist-init-addr --trust-remote-code --disaggregation-ib-device",
     "--dp --enable-dp-attention --nnodes --node-rank"},
    {"sparse kernels of different rows",
     "--model-path zai-org/GLM-5-FP8 --kv-cache-dtype fp8_e4m3 --nsa-prefill-backend flashmla_sparse "
     "--nsa-decode-backend fa3",
     "--dsa-prefill-backend flashmla_sparse reads packed fp8 rows (e4m3, scales, bf16 rope) and "
     "--dsa-decode-backend fa3 reads bf16 rows: one cache holds the rows of both phases; name one of the two "
     "and leave the other out, or name two of the same rows",
     "--model-path --kv-cache-dtype --nsa-prefill-backend --nsa-decode-backend", "", ""},
    {"three cache tiers",
     "--model-path zai-org/GLM-5-FP8 --enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy "
     "write_through "
     "--hicache-io-backend direct --hicache-mem-layout page_first_direct --hicache-storage-backend file "
     "--hicache-storage-prefetch-policy wait_complete --enable-cache-report",
     "",
     "--model-path --enable-hierarchical-cache --hicache-ratio --hicache-write-policy --hicache-io-backend "
     "--hicache-mem-layout --hicache-storage-backend --hicache-storage-prefetch-policy",
     "--enable-cache-report", ""},
};

StatusOr<CommandLine> Parse(const LaunchLine& launch) {
  std::vector<std::string> args;
  for (std::string_view word : SplitWords(launch.line, ' ')) args.emplace_back(word);
  return ParseCommandLine(args, CommandSyntax{.usage = "sluice serve", .engine_flags = true},
                          [](const char*) -> const char* { return nullptr; });
}

TEST(LaunchLines, EveryFlagIsClassified) {
  for (const LaunchLine& launch : kLines) {
    std::map<std::string_view, FlagStatus> expected;
    for (std::string_view f : SplitWords(launch.works, ' ')) expected[f] = FlagStatus::kWorks;
    for (std::string_view f : SplitWords(launch.no_effect, ' ')) expected[f] = FlagStatus::kNoEffect;
    for (std::string_view f : SplitWords(launch.refused, ' ')) expected[f] = FlagStatus::kRefused;
    size_t flags = 0;
    for (std::string_view word : SplitWords(launch.line, ' ')) {
      if (!word.starts_with("--")) continue;
      ++flags;
      const FlagSpec* flag = FindFlag(word);
      ASSERT_NE(flag, nullptr) << launch.what << ": " << word;
      ASSERT_TRUE(expected.contains(word)) << launch.what << ": " << word;
      EXPECT_EQ(flag->status, expected[word]) << launch.what << ": " << word;
    }
    EXPECT_EQ(flags, expected.size()) << launch.what;
  }
}

TEST(LaunchLines, StartOrSayEverythingThatIsInTheWay) {
  for (const LaunchLine& launch : kLines) {
    if (launch.problems == nullptr) continue;
    auto line = Parse(launch);
    EXPECT_EQ(line.ok() ? "" : std::string(Message(line.status())), launch.problems) << launch.what;
  }
}

TEST(LaunchLines, RefusedFlagsAreNamedTogether) {
  auto data_parallel = Parse(kLines[3]);
  ASSERT_FALSE(data_parallel.ok());
  EXPECT_THAT(std::string(Message(data_parallel.status())),
              ::testing::AllOf(
                  ::testing::HasSubstr(kDp), ::testing::HasSubstr(kDpAttention),
                  ::testing::HasSubstr("--chat-template tool_chat_template_deepseekv32.jinja is refused")));
  auto context_parallel = Parse(kLines[4]);
  ASSERT_FALSE(context_parallel.ok());
  EXPECT_THAT(std::string(Message(context_parallel.status())),
              ::testing::HasSubstr("'round-robin-split' is not supported; choose one of in-seq-split"));
  EXPECT_THAT(std::string(Message(Parse(kLines[0]).status())), ::testing::HasSubstr(kTp));
}

TEST(LaunchLines, LinesThatStartNoteWhatHasNoEffect) {
  for (const LaunchLine& launch : kLines) {
    auto line = Parse(launch);
    if (!line.ok()) continue;
    EXPECT_EQ(line->server.notices.size(), SplitWords(launch.no_effect, ' ').size()) << launch.what;
  }
}

}  // namespace
}  // namespace sluice
