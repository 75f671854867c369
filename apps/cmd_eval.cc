// sluice eval MODEL|URL: accuracy of a model on a dataset, and equality of its outputs between cache passes.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>

#include "cache/kv_cache.h"
#include "commands.h"
#include "config/flags.h"
#include "engine_setup.h"
#include "eval/dataset.h"
#include "eval/engine_target.h"
#include "eval/http_target.h"
#include "eval/report.h"
#include "eval/runner.h"
#include "eval/verdict.h"
#include "eval_golden.h"
#include "progress_line.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace sluice {
namespace {

using eval::Json;

const CommandSyntax kSyntax = {
    .usage = "sluice eval MODEL|URL --dataset FILE|--golden DIR [options]",
    .summary =
        "Accuracy of a model, and equality of its outputs between cache passes. MODEL is a model folder or "
        "\"bundled\";\n"
        "the URL of a running server (with --api-key when it wants one) supports the passes cold and warm. "
        "Turns "
        "of chat\n"
        "sessions are asked with the dataset's own answers as history, greedily; right = equal text and a "
        "stop.",
    .options =
        {{"--dataset", "FILE",
          ".jsonl or .jsonl.gz: chat sessions (id, bucket, kinds, messages, sure, reference_ok), or "
          "GSM8K-style "
          "lines (question, answer ending in \"#### number\"). Repeated: the sessions of all files"},
         {"--golden", "DIR", "compare logits, greedy tokens and top-k sets with stored ones instead"},
         {"--limit", "N", "sessions of each file, or problems to ask, from the start of the file (all)"},
         {"--json", "FILE", "write one JSON document; - is stdout"},
         {"--passes", "LIST",
          "sessions: cold, warm, l2, l3, comma separated (cold). cold: every turn from nothing. warm: from a "
          "cache that one untimed run filled. l2: device tier emptied first. l3: engine restarted, from "
          "storage. Exit code 1 when nothing of l2 or l3 came from its tier"},
         {"--concurrency", "N", "sessions at once (8)"},
         {"--max-tokens", "N", "of a session's answer (256)"},
         {"--sample", "N", "N sessions of every length bucket, drawn with --sample-seed, instead of all"},
         {"--sample-seed", "N", "of --sample (0)"},
         {"--expected", "FILE",
          "judge every pass against these accuracies: each bucket within its sampling error, core kinds "
          "100%, "
          "sure answers >= 99.5%, agreement with the reference >= 95%; exit code 1 if one does not hold"},
         {"--filled", "",
          "with --passes l3: another process has filled the storage folder with this dataset"},
         {"--compare-with", "FILE", "outputs of another run: its cold pass stands for this run's"},
         {"--outputs", "FILE", "write one JSON line a turn: pass, id, turn, text, output_ids, logits_hash"},
         {"--num-shots", "N", "questions: examples before each one (5)"},
         {"--parallel", "N", "questions at once (8)"},
         {"--max-new-tokens", "N", "of a question's answer (512)"},
         {"--chat-format", "",
          "questions: examples and question as chat messages instead of one plain text"}},
    .engine_flags = true,
    .min_positional = 1,
    .max_positional = 1,
};

struct EvalFlags {
  std::string model;
  std::optional<std::string> dataset, golden, json, outputs, expected, compare;
  std::vector<std::string> more_datasets;  // after the first
  std::string passes;
  int64_t limit = 0, concurrency = 0, max_tokens = 0, num_shots = 0, parallel = 0, max_new_tokens = 0;
  int64_t sample = 0, sample_seed = 0;
  bool chat_format = false, filled = false;
};

std::optional<std::string> Given(const CommandLine& line, std::string_view option) {
  return line.Has(option) ? std::optional(line.Text(option)) : std::nullopt;
}

StatusOr<EvalFlags> FlagsFrom(const CommandLine& line) {
  EvalFlags f;
  f.model = line.positional[0];
  for (const std::vector<std::string>& values : line.All("--dataset")) {
    if (f.dataset) {
      f.more_datasets.push_back(values.front());
    } else {
      f.dataset = values.front();
    }
  }
  f.golden = Given(line, "--golden");
  f.json = Given(line, "--json");
  f.outputs = Given(line, "--outputs");
  f.expected = Given(line, "--expected");
  f.compare = Given(line, "--compare-with");
  f.passes = line.Text("--passes", "cold");
  ASSIGN_OR_RETURN(f.limit, line.Int("--limit", -1, 1));
  ASSIGN_OR_RETURN(f.concurrency, line.Int("--concurrency", 8, 1));
  ASSIGN_OR_RETURN(f.max_tokens, line.Int("--max-tokens", 256, 1));
  ASSIGN_OR_RETURN(f.sample, line.Int("--sample", -1, 1));
  ASSIGN_OR_RETURN(f.sample_seed, line.Int("--sample-seed", 0, 0));
  ASSIGN_OR_RETURN(f.num_shots, line.Int("--num-shots", 5, 0));
  ASSIGN_OR_RETURN(f.parallel, line.Int("--parallel", 8, 1));
  ASSIGN_OR_RETURN(f.max_new_tokens, line.Int("--max-new-tokens", 512, 1));
  f.chat_format = line.Has("--chat-format");
  f.filled = line.Has("--filled");
  if (f.dataset.has_value() == f.golden.has_value())
    return Invalid("give --dataset FILE or --golden DIR, one of them");
  if (f.golden && (f.expected || f.sample >= 0))
    return Invalid("--expected and --sample are for --dataset; --golden has its own bounds");
  return f;
}

// Storage of a run that names none: private, gone afterwards.
class PrivateFolder {
 public:
  ~PrivateFolder() {
    std::error_code error;
    if (!path_.empty()) std::filesystem::remove_all(path_, error);
  }
  StatusOr<std::string> Make() {
    std::string pattern = (std::filesystem::temp_directory_path() / "sluice-eval-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) return Unavailable("cannot make a folder like {}", pattern);
    path_ = pattern;
    return path_;
  }

 private:
  std::string path_;
};

Status WriteFile(const std::string& path, const std::string& content) {
  if (path == "-") {
    std::fwrite(content.data(), 1, content.size(), stdout);
    return OkStatus();
  }
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << content;
  out.close();
  return out ? OkStatus() : Unavailable("{}: cannot write it", path);
}

// The engine as the report's `engine` object.
Json DescribeEngine(const ServerConfig& config, const EngineStack& stack) {
  const EngineSnapshot s = stack.engine->Snapshot();
  Json out = Json::object();
  out["model"] = stack.model->name;
  out["isa"] = stack.model->backend->info().isa;
  out["dtype"] = std::string(Name(stack.model->backend->info().act));
  out["kv_cache_dtype"] = std::string(Name(stack.layout.latent_dtype()));
  out["index_cache_dtype"] = std::string(Name(stack.layout.index_dtype()));
  out["attn_cp_size"] = config.attn_cp_size;
  out["lane_pages"] = std::vector<int64_t>(size_t(stack.memory.lanes), stack.memory.device_pages_per_lane);
  out["rank_bytes_moved"] = stack.ranks->bytes_moved();
  out["rank_draft_bytes_moved"] = stack.ranks->draft_bytes_moved();
  out["cp_kv_exchange"] = config.cp_kv_exchange;
  out["rank_pages_in_place"] = stack.ranks->pages_in_place();
  out["rank_chunks_prefetched"] = stack.ranks->chunks_ahead();
  out["kv_tokens"] = s.max_total_tokens;
  out["host_tokens"] = stack.memory.host_tokens();
  out["steps"] = s.steps;
  out["retractions"] = s.retractions_total;
  out["engine_cpu_seconds"] = s.cpu_seconds;
  out["executor_seconds"] = double(stack.times->total.load()) * 1e-9;
  out["forward_seconds"] = double(stack.times->forward.load()) * 1e-9;
  out["draft_seconds"] = double(stack.times->draft.load()) * 1e-9;
  const DraftCounters& d = s.drafts;
  Json at = Json::array();
  for (int32_t i = 0; i < kMaxDraftTokens && d.proposed_at[size_t(i)] > 0; ++i)
    at.push_back(double(d.accepted_at[size_t(i)]) / double(d.proposed_at[size_t(i)]));
  out["draft"] = {
      {"runs", d.runs}, {"proposed", d.proposed}, {"accepted", d.accepted}, {"acceptance_at", at}};
  return out;
}

// All files of the command line as one, sampled.
StatusOr<eval::Dataset> ReadDatasets(const EvalFlags& flags) {
  ASSIGN_OR_RETURN(eval::Dataset all, eval::ReadDataset(*flags.dataset, flags.limit, flags.num_shots));
  for (const std::string& path : flags.more_datasets) {
    ASSIGN_OR_RETURN(eval::Dataset next, eval::ReadDataset(path, flags.limit, flags.num_shots));
    if (next.kind != all.kind || next.kind != eval::DatasetKind::kSessions)
      return Invalid("--dataset {}: only files of chat sessions can be joined", path);
    for (eval::Session& s : next.sessions) all.sessions.push_back(std::move(s));
    all.has_sure |= next.has_sure;
    all.has_reference |= next.has_reference;
  }
  if (all.kind != eval::DatasetKind::kSessions && (flags.expected || flags.sample >= 0))
    return Invalid("--expected and --sample are for chat sessions; {} holds questions", *flags.dataset);
  if (flags.sample >= 0) eval::SampleSessions(&all, flags.sample, uint64_t(flags.sample_seed));
  return all;
}

StatusOr<int> RunSessions(const EvalFlags& flags, const eval::Dataset& dataset, eval::Target* target) {
  eval::RunOptions options;
  ASSIGN_OR_RETURN(options.passes, eval::ParsePasses(flags.passes));
  options.concurrency = int(flags.concurrency);
  options.max_tokens = int32_t(flags.max_tokens);
  std::optional<eval::Expected> expected;
  if (flags.expected) {
    ASSIGN_OR_RETURN(expected, eval::ReadExpected(*flags.expected));
  }
  options.filled = flags.filled;
  for (const eval::PassKind kind : options.passes) {
    if (flags.filled && (kind == eval::PassKind::kWarm || kind == eval::PassKind::kL2))
      return Invalid("--filled: {}: goes with l3 (and cold) only; the upper tiers of a new process are empty",
                     flags.passes);
  }
  std::optional<eval::PassResult> compared;
  if (flags.compare) {
    ASSIGN_OR_RETURN(compared, eval::ReadColdOutputs(*flags.compare, dataset));
  }
  StatusOr<std::vector<eval::PassResult>> results = std::vector<eval::PassResult>();
  {
    ProgressLine line;
    options.progress = [&line](const std::string& what, int64_t done, int64_t all) {
      line.Show(what, done, all);
    };
    results = eval::RunPasses(dataset, target, options);
  }
  RETURN_IF_ERROR(results.status());
  const eval::PassResult* cold = compared ? &*compared : nullptr;
  for (const eval::PassResult& p : *results) {
    if (p.name == "cold" && !compared) cold = &p;
  }
  Json passes = Json::array();
  std::string lines, verdict_tables, tier_lines;
  bool all_hold = true;
  for (const eval::PassResult& p : *results) {
    passes.push_back(eval::PassJson(p, cold, dataset, target->has_hashes()));
    // Whole pages are hit, never the last token; storage is not asked for less than its least.
    const int64_t pages = p.name == "l3" ? CacheOptions().prefetch_min_tokens : kPageTokens;
    const eval::TierVerdict tier = eval::JudgeTier(p, pages + 1);
    all_hold &= tier.holds;
    if (!tier.line.empty()) tier_lines += "sluice eval: " + tier.line + "\n";
    if (expected) {
      const std::vector<eval::Verdict> verdicts = eval::Judge(p, dataset, *expected);
      for (const eval::Verdict& v : verdicts) all_hold &= v.holds;
      passes.back()["verdicts"] = eval::VerdictJson(verdicts);
      verdict_tables += eval::VerdictTable(p.name, verdicts);
    }
    if (!flags.outputs) continue;
    for (const eval::TurnResult& t : p.turns) lines += eval::OutputLine(p, t, target->has_hashes());
  }
  if (flags.outputs) RETURN_IF_ERROR(WriteFile(*flags.outputs, lines));
  Json document = Json::object();
  document["dataset"] = *flags.dataset;
  document["sessions"] = dataset.sessions.size();
  if (flags.sample >= 0) document["sample_seed"] = flags.sample_seed;
  document["passes"] = passes;
  document["engine"] = target->Describe();
  if (flags.json) RETURN_IF_ERROR(WriteFile(*flags.json, document.dump(2) + "\n"));
  if (flags.json != "-") std::fputs((eval::PassTable(passes) + verdict_tables).c_str(), stdout);
  std::fputs(tier_lines.c_str(), stderr);
  return all_hold ? int(kExitOk) : int(kExitCheckFailed);
}

StatusOr<int> RunQuestions(const EvalFlags& flags, const eval::Dataset& dataset, eval::Target* target) {
  eval::ProblemOptions options;
  options.num_shots = int(flags.num_shots);
  options.parallel = int(flags.parallel);
  options.max_tokens = int32_t(flags.max_new_tokens);
  options.chat = flags.chat_format;
  StatusOr<eval::ProblemReport> report = eval::ProblemReport();
  {
    ProgressLine line;
    options.progress = [&line](const std::string& what, int64_t done, int64_t all) {
      line.Show(what, done, all);
    };
    report = eval::RunProblems(dataset, target, options);
  }
  RETURN_IF_ERROR(report.status());
  if (flags.json) {
    Json document = Json::object();
    document["dataset"] = *flags.dataset;
    document["problems"] = report->problems;
    document["accuracy"] = report->accuracy;
    document["invalid"] = report->invalid;
    document["latency_s"] = report->latency_s;
    document["output_tokens"] = report->output_tokens;
    document["prompt_tokens"] = report->prompt_tokens;
    document["output_tokens_per_s"] = report->output_tokens_per_s;
    document["engine"] = target->Describe();
    RETURN_IF_ERROR(WriteFile(*flags.json, document.dump(2) + "\n"));
  }
  if (flags.json != "-") {
    std::fputs(
        fmt::format(
            "Accuracy: {:.3f}\nInvalid: {:.3f}\nLatency: {:.3f} s\nOutput throughput: {:.3f} token/s\n",
            report->accuracy, report->invalid, report->latency_s, report->output_tokens_per_s)
            .c_str(),
        stdout);
  }
  return int(kExitOk);
}

bool IsUrl(const std::string& model) { return model.find("://") != std::string::npos; }

StatusOr<int> RunDataset(const EvalFlags& flags, const eval::Dataset& dataset, eval::Target* target) {
  return dataset.kind == eval::DatasetKind::kProblems ? RunQuestions(flags, dataset, target)
                                                      : RunSessions(flags, dataset, target);
}

StatusOr<int> RunAgainstServer(const EvalFlags& flags, const ServerConfig& config) {
  if (flags.golden)
    return Invalid("--golden needs the model in this process; give a model folder instead of a URL");
  ASSIGN_OR_RETURN(const std::vector<eval::PassKind> passes, eval::ParsePasses(flags.passes));
  for (const eval::PassKind kind : passes) {
    if (kind == eval::PassKind::kL2 || kind == eval::PassKind::kL3) {
      return Invalid("--passes {}: a server supports cold and warm; give a model folder for l2 and l3",
                     flags.passes);
    }
  }
  ASSIGN_OR_RETURN(const eval::Dataset dataset, ReadDatasets(flags));
  ASSIGN_OR_RETURN(const std::unique_ptr<eval::Target> target,
                   eval::MakeHttpTarget(flags.model, config.api_key));
  return RunDataset(flags, dataset, target.get());
}

StatusOr<int> Run(const EvalFlags& flags, ServerConfig config) {
  if (IsUrl(flags.model)) return RunAgainstServer(flags, config);
  if (flags.model != "bundled") config.model_path = flags.model;
  if (flags.golden) return RunGolden(config, *flags.golden, flags.json.value_or(""));
  ASSIGN_OR_RETURN(const eval::Dataset dataset, ReadDatasets(flags));

  const bool storage = !config.hicache_storage_backend.empty() && config.hicache_storage_backend != "none";
  ASSIGN_OR_RETURN(const std::vector<eval::PassKind> passes, eval::ParsePasses(flags.passes));
  for (const eval::PassKind kind : passes) {
    if (kind == eval::PassKind::kL2 && !config.enable_hierarchical_cache) {
      return Invalid("--passes {}: l2 needs the host tier; add --enable-hierarchical-cache", flags.passes);
    }
    if (kind == eval::PassKind::kL3 && !storage) {
      return Invalid(
          "--passes {}: l3 needs storage; add --enable-hierarchical-cache --hicache-storage-backend file",
          flags.passes);
    }
  }
  config.decode_log_interval = 0;  // the report is the output
  PrivateFolder folder;
  if (config.hicache_storage_backend == "file" && config.hicache_storage_extra_config.empty()) {
    ASSIGN_OR_RETURN(const std::string path, folder.Make());
    config.hicache_storage_extra_config = Json({{"directory", path}}).dump();
  }
  if (flags.concurrency > config.max_running_requests) config.max_running_requests = flags.concurrency;

  SteadyClock clock;
  ASSIGN_OR_RETURN(const std::shared_ptr<LoadedModel> model, LoadModel(config));
  eval::EngineTargetOptions options;
  ASSIGN_OR_RETURN(options.tokenizer,
                   Tokenizer::Load(config.tokenizer_path.empty() ? model->folder : config.tokenizer_path));
  if (auto chat = ChatTemplate::Load(config.tokenizer_path.empty() ? model->folder : config.tokenizer_path);
      chat.ok()) {
    options.chat_template = *chat;
  } else if (!absl::IsNotFound(chat.status())) {
    return chat.status();
  }
  std::weak_ptr<EngineStack> running;
  options.make_engine = [&]() -> StatusOr<std::shared_ptr<Engine>> {
    ASSIGN_OR_RETURN(std::unique_ptr<EngineStack> stack, MakeEngineStack(config, model, &clock));
    const std::shared_ptr<EngineStack> shared = std::move(stack);
    running = shared;
    return std::shared_ptr<Engine>(shared, shared->engine.get());
  };
  options.describe = [&] {
    const std::shared_ptr<EngineStack> stack = running.lock();
    return stack == nullptr ? Json::object() : DescribeEngine(config, *stack);
  };
  options.host_tier = config.enable_hierarchical_cache;
  options.storage_tier = storage;
  ASSIGN_OR_RETURN(const std::unique_ptr<eval::Target> target, eval::MakeEngineTarget(std::move(options)));
  return RunDataset(flags, dataset, target.get());
}

}  // namespace

int RunEval(const std::vector<std::string>& args) {
  StatusOr<CommandLine> line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("eval", line.status());
  if (line->help) {
    std::fputs(HelpText(kSyntax).c_str(), stdout);
    return kExitOk;
  }
  const StatusOr<EvalFlags> flags = FlagsFrom(*line);
  if (!flags.ok()) return FailWith("eval", flags.status());
  SayNotices("eval", line->server);
  const StatusOr<int> code = Run(*flags, std::move(line->server));
  return code.ok() ? *code : FailWith("eval", code.status());
}

}  // namespace sluice
