#include "config/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "config/flag_values.h"
#include "config/idle_flags.h"
#include "config/json_argument.h"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

const CommandSyntax kServe{.usage = "sluice serve [options]", .engine_flags = true};

std::vector<std::string> Words(std::string_view text) {
  std::vector<std::string> words;
  for (std::string_view w : SplitWords(text, ' ')) words.emplace_back(w);
  return words;
}

using Environment = std::map<std::string, std::string>;

StatusOr<CommandLine> Parse(const std::vector<std::string>& args, const Environment& env = {},
                            const CommandSyntax& syntax = kServe) {
  return ParseCommandLine(args, syntax, [&](const char* name) -> const char* {
    const auto it = env.find(name);
    return it == env.end() ? nullptr : it->second.c_str();
  });
}

ServerConfig Config(std::string_view args, const Environment& env = {}) {
  auto line = Parse(Words(args), env);
  EXPECT_TRUE(line.ok()) << args << ": " << line.status();
  return line.ok() ? line->server : ServerConfig{};
}

std::string Error(const std::vector<std::string>& args, const Environment& env = {}) {
  auto line = Parse(args, env);
  EXPECT_FALSE(line.ok());
  return line.ok() ? "" : std::string(Message(line.status()));
}

std::string TempFile(const std::string& text) {
  std::string path = ::testing::TempDir() + "/flags_" + std::to_string(::getpid()) + ".yaml";
  std::ofstream(path) << text;
  return path;
}

TEST(FlagTable, NamesAreUniqueAndDashed) {
  std::set<std::string_view> seen;
  for (const FlagSpec& flag : FlagTable()) {
    for (std::string_view name : SplitWords(flag.names, ' ')) {
      EXPECT_TRUE(name.starts_with("--")) << name;
      EXPECT_TRUE(seen.insert(name).second) << name << " is in the table twice";
    }
  }
}

TEST(FlagTable, EveryRowSaysWhatItsStatusNeeds) {
  for (const FlagSpec& flag : FlagTable()) {
    EXPECT_FALSE(flag.help.empty()) << flag.name();
    const bool works = flag.status == FlagStatus::kWorks, refused = flag.status == FlagStatus::kRefused;
    const bool has_target = !std::holds_alternative<std::monostate>(flag.target);
    EXPECT_EQ(works, flag.note.empty()) << flag.name();
    EXPECT_TRUE(!works || has_target || flag.name() == "--config") << flag.name();
    EXPECT_FALSE(refused && has_target) << flag.name();
    EXPECT_TRUE(refused || flag.idle_values.empty()) << flag.name();
    EXPECT_TRUE(flag.type == FlagType::kSwitch || !flag.metavar.empty() || !flag.choices.empty())
        << flag.name();
  }
}

TEST(FlagTable, DefaultsAreLegalValues) {
  for (const FlagSpec& flag : FlagTable()) {
    const std::string text = FlagValueText(flag, ServerConfig{});
    if (text.empty()) continue;
    ServerConfig config;
    EXPECT_TRUE(SetFlagValue(flag, {text}, &config).ok()) << flag.name() << " " << text;
    EXPECT_EQ(FlagValueText(flag, config), text) << flag.name();
  }
}

// Every flag of the ecosystem that this server speaks to is in the table under the name its users type.
TEST(FlagTable, HoldsTheNamesThatUsersType) {
  const char* names =
      "--model-path --model --tokenizer-path --load-format --served-model-name --context-length --revision "
      "--json-model-override-args --dtype --quantization --kv-cache-dtype --trust-remote-code --random-seed "
      "--config "
      "--host --port --api-key --admin-api-key --skip-server-warmup --log-level --log-requests "
      "--log-requests-level "
      "--log-requests-format --mem-fraction-static --max-running-requests --max-queued-requests "
      "--max-total-tokens "
      "--chunked-prefill-size --max-prefill-tokens --page-size --schedule-policy "
      "--enable-priority-scheduling "
      "--radix-eviction-policy --disable-radix-cache --schedule-conservativeness --tensor-parallel-size "
      "--tp-size --tp "
      "--pp-size --dp-size --enable-dp-attention --ep-size --ep --attention-context-parallel-size "
      "--attn-cp-size "
      "--moe-data-parallel-size --nnodes --node-rank --dist-init-addr --load-balance-method "
      "--enable-dsa-prefill-context-parallel --enable-nsa-prefill-context-parallel --dsa-prefill-cp-mode "
      "--nsa-prefill-cp-mode --enable-prefill-cp --enable-dsa-prefill-cp-layersplit "
      "--enable-dsa-shared-kv-cache "
      "--attention-backend --dsa-prefill-backend --dsa-decode-backend --nsa-prefill-backend "
      "--nsa-decode-backend "
      "--nsa-index-topk-freq --dsa-index-topk-freq --nsa-index-topk-pattern --dsa-index-topk-pattern "
      "--nsa-index-topk-skip-offset --dsa-index-topk-skip-offset --enable-hierarchical-cache --hicache-ratio "
      "--hicache-size --hicache-write-policy --hicache-io-backend --hicache-mem-layout "
      "--hicache-storage-backend "
      "--hicache-storage-prefetch-policy --hicache-storage-backend-extra-config --disaggregation-mode "
      "--disaggregation-transfer-backend --disaggregation-bootstrap-port --disaggregation-ib-device "
      "--num-reserved-decode-tokens --disaggregation-decode-enable-offload-kvcache "
      "--disaggregation-decode-polling-interval --speculative-algorithm --speculative-num-steps "
      "--speculative-eagle-topk "
      "--speculative-num-draft-tokens --speculative-draft-model-path --speculative-attention-mode "
      "--moe-a2a-backend "
      "--moe-runner-backend --deepep-mode --enable-eplb --ep-num-redundant-experts "
      "--enable-two-batch-overlap "
      "--enable-single-batch-overlap --enable-metrics --enable-cache-report --collect-tokens-histogram "
      "--enable-request-time-stats-logging --decode-log-interval --crash-dump-folder --watchdog-timeout "
      "--enable-trace "
      "--otlp-traces-endpoint --kv-events-config --reasoning-parser --tool-call-parser";
  for (const std::string& name : Words(names)) EXPECT_NE(FindFlag(name), nullptr) << name;
}

TEST(Flags, DefaultsAreTheStruct) {
  const ServerConfig config = Config("");
  EXPECT_EQ(config.port, 30000);
  EXPECT_EQ(config.host, "127.0.0.1");
  EXPECT_THAT(config.notices, IsEmpty());
}

TEST(Flags, BothValueFormsAndShortNamesWork) {
  const ServerConfig config =
      Config("--model /m --port=8000 --tp 1 --mem-fraction-static 0.5 --chunked-prefill-size -1");
  EXPECT_EQ(config.model_path, "/m");
  EXPECT_EQ(config.port, 8000);
  EXPECT_EQ(config.mem_fraction_static, 0.5);
  EXPECT_EQ(config.chunked_prefill_size, -1);
}

TEST(Flags, LastOccurrenceWins) { EXPECT_EQ(Config("--port 1 --port 2").port, 2); }

TEST(Flags, SwitchesTurnOnAndOff) {
  EXPECT_TRUE(Config("--disable-radix-cache").disable_radix_cache);
  EXPECT_FALSE(Config("--disable-radix-cache=false").disable_radix_cache);
  EXPECT_FALSE(Config("--no-nsa-dequant-only-topk").nsa_dequant_only_topk);
  EXPECT_FALSE(Config("--dsa-dequant-only-topk off").nsa_dequant_only_topk);
  EXPECT_EQ(Config("--disable-overlap-schedule").step_depth, 0);
  EXPECT_THAT(Error({"--disable-radix-cache=maybe"}), HasSubstr("'maybe' is not a switch value"));
}

TEST(Flags, ChoicesHaveSynonymsAndNoneIsEmpty) {
  EXPECT_EQ(Config("--kv-cache-dtype bfloat16").kv_cache_dtype, "bf16");
  EXPECT_EQ(Config("--hicache-storage-backend none").hicache_storage_backend, "");
  EXPECT_EQ(Error({"--kv-cache-dtype", "fp4_e2m1"}),
            "--kv-cache-dtype: 'fp4_e2m1' is not supported; choose one of auto, bf16, fp8_e4m3, float32");
}

TEST(Flags, ListsTakeWordsUpToTheNextFlag) {
  const ServerConfig config = Config("--cuda-graph-bs 1 2 4 8 --port 9");
  EXPECT_EQ(config.port, 9);
  EXPECT_THAT(config.notices, ElementsAre("--cuda-graph-bs has no effect here: sizes are recorded in the "
                                          "warm-up, others when they come often"));
}

TEST(Flags, BadValuesNameFlagValueAndLimit) {
  EXPECT_EQ(Error({"--port", "http"}), "--port: 'http' is not a whole number");
  EXPECT_EQ(Error({"--port", "1.5"}), "--port: '1.5' is not a whole number");
  EXPECT_EQ(Error({"--port", "70000"}), "--port: 70000 is too large; at most 65535");
  EXPECT_EQ(Error({"--mem-fraction-static", "0"}), "--mem-fraction-static: 0 is too small; at least 0.01");
  EXPECT_EQ(Error({"--mem-fraction-static", "nan"}), "--mem-fraction-static: 'nan' is not a number");
  EXPECT_EQ(Error({"--random-seed", "99999999999999999999"}),
            "--random-seed: '99999999999999999999' does not fit 64 bits");
  EXPECT_EQ(Error({"--port"}), "--port needs a value");
  EXPECT_EQ(Error({"--model-path", "--port", "1"}), "--model-path needs a value");
  EXPECT_THAT(Error({"stray"}), HasSubstr("unexpected word 'stray'"));
}

TEST(Flags, UnknownFlagSuggestsTheNearest) {
  EXPECT_EQ(Error({"--prot", "1"}), "unknown flag --prot; did you mean --port?");
  EXPECT_EQ(Error({"--max-running-request=4"}),
            "unknown flag --max-running-request; did you mean --max-running-requests?");
  EXPECT_EQ(Error({"--mem-fraction", "0.5"}),
            "unknown flag --mem-fraction; did you mean --mem-fraction-static?");
  EXPECT_EQ(Error({"--zzzzzzzzzz"}), "unknown flag --zzzzzzzzzz");
}

TEST(Flags, AllProblemsAreReportedAtOnce) {
  EXPECT_EQ(Error({"--prot", "1", "--port", "x", "--enable-dp-attention"}),
            "unknown flag --prot; did you mean --port?\n--port: 'x' is not a whole number\n"
            "--enable-dp-attention is refused: a sequence's decode already runs on one home rank; prefill is "
            "split with "
            "--attn-cp-size instead");
}

TEST(Flags, RefusedFlagsTakeValuesThatAskForNothing) {
  EXPECT_THAT(Config("--pp-size 1 --dp 1 --nnodes 1 --node-rank 0 --ep-num-redundant-experts 0").notices,
              IsEmpty());
  EXPECT_THAT(Error({"--dp", "8"}), HasSubstr("--dp-size 8 is refused: one server is one replica"));
}

TEST(Flags, NoEffectIsNotedOnce) {
  EXPECT_THAT(Config("--enable-metrics --enable-metrics").notices,
              ElementsAre("--enable-metrics has no effect here: /metrics is always served"));
}

TEST(Flags, OneThatNeedsAnotherIsNotedWithoutIt) {
  for (const IdleFlagRow& row : IdleFlagTable()) {
    ASSERT_NE(FindFlag(row.flag), nullptr) << row.flag;
    EXPECT_EQ(FindFlag(row.flag)->status, FlagStatus::kWorks) << row.flag;
    EXPECT_THAT(Config(row.idle_example).notices,
                Contains(AllOf(StartsWith(std::string(row.flag) + " "),
                               EndsWith(" has no effect here: " + std::string(row.why)))))
        << row.idle_example;
    EXPECT_THAT(Config(row.working_example).notices, IsEmpty()) << row.working_example;
  }
  EXPECT_THAT(Config("--hicache-ratio 4").notices,
              ElementsAre("--hicache-ratio 4 has no effect here: there is no host tier; add "
                          "--enable-hierarchical-cache"));
  EXPECT_THAT(Config("--config " + TempFile("hicache-mem-layout: page_first_direct\n")).notices,
              ElementsAre(HasSubstr("--hicache-mem-layout page_first_direct has no effect here")));
}

TEST(Flags, ExtraConfigOfTheStorageIsJsonOrAFileThatHoldsIt) {
  const std::string flag = "--hicache-storage-backend-extra-config",
                    file = "@" + TempFile("{\"threads\": 2}\n");
  const auto with = [&](const std::string& value) {
    return std::vector<std::string>{"--enable-hierarchical-cache", "--hicache-storage-backend", "file", flag,
                                    value};
  };
  const auto line = Parse(with(file));
  ASSERT_TRUE(line.ok()) << line.status();
  // The text stays where it is: what is in the file may be secret.
  EXPECT_EQ(line->server.hicache_storage_extra_config, file);
  EXPECT_EQ(nlohmann::json::parse(ReadJsonArgument(flag, file).value())["threads"], 2);
  EXPECT_EQ(ReadJsonArgument(flag, "{}").value(), "{}");
  EXPECT_EQ(ReadJsonArgument(flag, "").value(), "");
  EXPECT_THAT(Error(with("@/nowhere/x.json")),
              AllOf(HasSubstr(flag + ": /nowhere/x.json"), HasSubstr("write @FILE with the path")));
  EXPECT_THAT(Error(with("@")), HasSubstr(flag));
  EXPECT_THAT(Error(with("@" + TempFile("[1]"))),
              AllOf(HasSubstr(flag), HasSubstr(".yaml: not a JSON object")));
  EXPECT_THAT(Error(with("{")), HasSubstr(flag + ": not a JSON object: {"));
  EXPECT_THAT(Error({flag, "{"}), HasSubstr(flag + ": not a JSON object: {"));  // also when nothing reads it
  EXPECT_THAT(Error({"--enable-hierarchical-cache", "--hicache-ratio", "0"}),
              HasSubstr("--hicache-ratio: 0 is too small"));
}

TEST(Flags, IndexScheduleFlagsGoToTheOverrides) {
  const ModelOverrides o =
      Config("--dsa-index-topk-freq 4 --nsa-index-topk-skip-offset 3 --nsa-index-topk-pattern FSSF")
          .overrides;
  EXPECT_EQ(o.index_topk_freq, 4);
  EXPECT_EQ(o.index_skip_topk_offset, 3);
  EXPECT_EQ(o.index_topk_pattern, "FSSF");
  const ModelOverrides unset =
      Config("--nsa-index-topk-freq 0 --nsa-index-topk-skip-offset 0 --nsa-index-topk-pattern 0").overrides;
  EXPECT_EQ(unset.index_topk_freq, 0);
  EXPECT_EQ(unset.index_skip_topk_offset, 0);
  EXPECT_EQ(unset.index_topk_pattern, "");
}

TEST(Flags, ConfigFileIsReadAndTheCommandLineWins) {
  const std::string path =
      TempFile("port: 8000\nmax_running_requests: 7\nenable-metrics: true\ncuda-graph-bs: [1, 2]\n");
  const ServerConfig config = Config("--config " + path + " --port 9000");
  EXPECT_EQ(config.port, 9000);
  EXPECT_EQ(config.max_running_requests, 7);
  EXPECT_EQ(config.notices.size(), 2u);
  EXPECT_THAT(config.notices, Contains(HasSubstr(":3: enable-metrics has no effect here")));
}

TEST(Flags, ConfigFileProblemsNameTheLine) {
  const std::string path = TempFile("# c\nprot: 8000\nport: x\n");
  const std::string error = Error({"--config", path});
  EXPECT_THAT(error, HasSubstr(path + ":2: unknown key 'prot'; did you mean port?"));
  EXPECT_THAT(error, HasSubstr(path + ":3: port: 'x' is not a whole number"));
  EXPECT_THAT(Error({"--config", "/nonexistent.yaml"}),
              HasSubstr("--config /nonexistent.yaml: cannot read the file"));
}

TEST(Flags, EnvironmentIsAnAliasOfAFlag) {
  const struct {
    const char *variable, *value, *flag, *expected;
    std::string with = "";  // without which the flag is idle
  } cases[] = {
      {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "300", "--disaggregation-bootstrap-timeout", "300"},
      {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "200", "--disaggregation-waiting-timeout", "200"},
      {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "5", "--disaggregation-heartbeat-interval", "5"},
      {"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "3", "--disaggregation-heartbeat-max-failure", "3"},
      {"SGLANG_DISAGGREGATION_QUEUE_SIZE", "4", "--disaggregation-queue-size", ""},
      {"SGLANG_DISAGGREGATION_THREAD_POOL_SIZE", "8", "--disaggregation-thread-pool-size", ""},
      {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1", "--disaggregation-all-cp-ranks-transfer", ""},
      {"SGLANG_CP_SHARED_KV_PER_LAYER_TRANSFER", "0", "--disaggregation-per-layer-transfer", "false"},
      {"SGLANG_CP_SHARED_KV_PER_LAYER_TRANSFER_GROUP", "4", "--disaggregation-layer-group", "4"},
      {"SGLANG_NSA_DEQUANT_ONLY_TOPK", "0", "--nsa-dequant-only-topk", "false"},
      {"SLUICE_UCX_LIBRARY", "/opt/ucx/libucp.so.0", "--disaggregation-ucx-library", "/opt/ucx/libucp.so.0",
       "--disaggregation-transfer-backend ucx "},
      {"SGLANG_ENABLE_CP_V2", "1", "--enable-dsa-prefill-context-parallel", ""},
  };
  std::set<std::string_view> tested = {"SGLANG_NSA_DEQUANT_ONLY_TOPK_VERIFY"};  // its own test below
  for (const auto& c : cases) {
    tested.insert(c.variable);
    const FlagSpec* flag = FindFlag(c.flag);
    ASSERT_NE(flag, nullptr) << c.flag;
    EXPECT_EQ(flag->env, c.variable);
    const ServerConfig config = Config(c.with, {{c.variable, c.value}});
    EXPECT_EQ(FlagValueText(*flag, config), c.expected) << c.variable;
    // Either it is in force or it has no effect; never both.
    const bool works = flag->status == FlagStatus::kWorks;
    EXPECT_THAT(config.notices,
                ElementsAre(works ? fmt::format("{}={} is in force as {}", c.variable, c.value, flag->name())
                                  : fmt::format("{}={} ({}) has no effect here: {}", c.variable, c.value,
                                                flag->name(), flag->note)));

    const std::string own = flag->type == FlagType::kSwitch ? "true" : "7";
    const ServerConfig both = Config(fmt::format("{}{}={}", c.with, c.flag, own), {{c.variable, c.value}});
    EXPECT_EQ(FlagValueText(*flag, both), *c.expected == '\0' ? "" : own) << c.variable << ": the flag wins";
    EXPECT_THAT(both.notices,
                Contains(fmt::format("{}={} is ignored: {} is given", c.variable, c.value, flag->name())));
  }
  for (const FlagSpec& flag : FlagTable()) {
    EXPECT_TRUE(flag.env.empty() || tested.contains(flag.env)) << flag.env << " has no case here";
  }
}

TEST(Flags, VerifyVariableTurnsVerificationOn) {
  const ServerConfig config =
      Config("--kv-cache-dtype fp8_e4m3", {{"SGLANG_NSA_DEQUANT_ONLY_TOPK_VERIFY", "true"}});
  EXPECT_TRUE(config.nsa_dequant_verify);
  EXPECT_FALSE(Config("--no-nsa-dequant-verify", {{"SGLANG_NSA_DEQUANT_ONLY_TOPK_VERIFY", "true"}})
                   .nsa_dequant_verify);
}

TEST(Flags, EnvironmentBeatsTheConfigFileAndBadValuesNameIt) {
  const std::string path = TempFile("disaggregation-layer-group: 2\n");
  EXPECT_EQ(Config("--config " + path, {{"SGLANG_CP_SHARED_KV_PER_LAYER_TRANSFER_GROUP", "4"}})
                .disaggregation_layer_group,
            4);
  EXPECT_EQ(Error({}, {{"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "soon"}}),
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL: 'soon' is not a number");
  EXPECT_THAT(Config("", {{"SGLANG_NSA_DEQUANT_ONLY_TOPK", ""}}).notices, IsEmpty());
}

TEST(Flags, ResolvedJsonShowsEveryTargetAndMasksKeys) {
  const auto json = nlohmann::json::parse(Config("--api-key secret --tp 1 --enable-metrics").ResolvedJson());
  for (const FlagSpec& flag : FlagTable()) {
    if (std::holds_alternative<std::monostate>(flag.target) || flag.switch_sets) continue;
    std::string key(flag.name().substr(2));
    for (char& c : key) c = c == '-' ? '_' : c;
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["api_key"], "***");
  EXPECT_EQ(json["admin_api_key"], "");
  EXPECT_EQ(json["page_size"], 64);
  EXPECT_EQ(json["notices"].size(), 1u);
  const auto redis = nlohmann::json::parse(
      Config(R"(--enable-hierarchical-cache --hicache-storage-backend redis )"
             R"(--hicache-storage-backend-extra-config {"host":"h","password":"secret"})")
          .ResolvedJson());
  EXPECT_EQ(redis["hicache_storage_backend_extra_config"], R"({"host":"h","password":"***"})");
}

const CommandSyntax kTool{.usage = "sluice tool MODEL [options]",
                          .summary = "A tool.",
                          .options = {{"--limit", "N", "turns [all]"},
                                      {"--prefill", "URL PORT", "a prefill server, repeatable"},
                                      {"--passes", "NAME...", "passes"},
                                      {"--quick", "", "less"}},
                          .min_positional = 1,
                          .max_positional = 1};

TEST(CommandOptions, ValuesPairsListsAndSwitches) {
  auto line = Parse(Words("--prefill http://a 1 --limit 5 m --quick --prefill http://b 2 --passes cold warm"),
                    {}, kTool);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_THAT(line->positional, ElementsAre("m"));
  EXPECT_TRUE(line->Has("--quick"));
  EXPECT_EQ(*line->Int("--limit", 9), 5);
  EXPECT_EQ(*line->Int("--other", 9), 9);
  EXPECT_THAT(line->All("--prefill"),
              ElementsAre(ElementsAre("http://a", "1"), ElementsAre("http://b", "2")));
  EXPECT_THAT(line->All("--passes"), ElementsAre(ElementsAre("cold", "warm")));
  EXPECT_FALSE(line->Int("--limit", 9, 6).ok());
}

TEST(CommandOptions, EngineFlagsAreUnknownWithoutAnEngine) {
  EXPECT_FALSE(Parse(Words("m --port 1"), {}, kTool).ok());
  EXPECT_FALSE(Parse(Words("m --quick=1"), {}, kTool).ok());
  EXPECT_FALSE(Parse(Words("m --prefill http://a"), {}, kTool).ok());
  EXPECT_FALSE(Parse({}, {}, kTool).ok());
}

TEST(CommandOptions, HelpBeatsEverything) {
  auto line = Parse(Words("--nonsense --help"), {}, kTool);
  ASSERT_TRUE(line.ok());
  EXPECT_TRUE(line->help);
  EXPECT_THAT(HelpText(kTool), HasSubstr("--prefill URL PORT"));
}

TEST(CommandOptions, OwnOptionsHideEngineFlags) {
  CommandSyntax syntax = kTool;
  syntax.engine_flags = true;
  syntax.options.push_back({"--port", "N", "of the tool"});
  auto line = Parse(Words("m --port 5 --threads 2"), {}, syntax);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->Text("--port"), "5");
  EXPECT_EQ(line->server.port, 30000);
  EXPECT_EQ(line->server.threads, 2);
}

TEST(FlagText, HelpNamesEveryFlag) {
  const std::string help = HelpText(kServe);
  for (const FlagSpec& flag : FlagTable()) EXPECT_THAT(help, HasSubstr(std::string(flag.name())));
}

TEST(FlagText, DocumentIsCurrent) {
  const std::string path = std::string(SLUICE_SOURCE_DIR) + "/docs/flags.md";
  if (std::getenv("SLUICE_UPDATE_DOCS") != nullptr) std::ofstream(path) << FlagsMarkdown();
  std::ifstream file(path);
  const std::string stored(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(stored == FlagsMarkdown()) << "docs/flags.md is stale: run SLUICE_UPDATE_DOCS=1 config_test";
}

}  // namespace
}  // namespace sluice
