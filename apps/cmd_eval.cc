// sluice eval MODEL|URL: accuracy of a model on a dataset, and equality of its outputs between cache passes.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>

#include "commands.h"
#include "config/server_config.h"
#include "engine_setup.h"
#include "eval/dataset.h"
#include "eval/engine_target.h"
#include "eval/http_target.h"
#include "eval/report.h"
#include "eval/runner.h"
#include "eval_golden.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace sluice {
namespace {

using eval::Json;

constexpr char kHelp[] = R"(sluice eval: accuracy of a model, and equality of its outputs between cache passes

  sluice eval MODEL --dataset F [options] [engine flags of sluice serve]
  sluice eval MODEL --golden DIR [--json F] [engine flags]

MODEL is a model folder, or "bundled"; or the URL of a running server (--api-key K when it wants one), which
supports the passes cold and warm.
  --dataset F         .jsonl or .jsonl.gz: chat sessions (id, bucket, kinds, messages, sure, reference_ok), or
                      GSM8K-style lines (question, answer ending in "#### number")
  --golden DIR        compare logits, greedy tokens and top-k sets with stored ones instead
  --limit N           sessions or problems to use (default: all)
  --json F            results as one JSON document; - is standard output

chat sessions: every turn is asked with the dataset's own answers as history, greedily; right = equal text and a stop.
  --passes LIST       cold, warm, l2, l3 (default cold). cold: every turn from nothing. warm: from a cache that one
                      untimed run filled. l2: device tier emptied first. l3: engine restarted, from storage
  --concurrency N     sessions at once (default 8)
  --max-tokens N      of an answer (default 256)
  --outputs G         one JSON line a turn: pass, id, turn, text, output_ids, logits_hash

question and answer:
  --num-shots N       examples before each question (default 5)
  --parallel N        questions at once (default 8)
  --max-new-tokens N  of an answer (default 512)
  --chat-format       examples and question as chat messages instead of one plain text
)";

struct EvalFlags {
  std::string model;
  std::optional<std::string> dataset, golden, json, outputs;
  std::string passes = "cold";
  int64_t limit = -1, concurrency = 8, max_tokens = 256, num_shots = 5, parallel = 8, max_new_tokens = 512;
  bool chat_format = false, help = false;
  std::vector<std::string> engine;  // for ParseServerFlags
};

StatusOr<int64_t> Number(const std::string& flag, const std::string& value, int64_t least) {
  char* end = nullptr;
  const long long v = std::strtoll(value.c_str(), &end, 10);
  if (value.empty() || *end != '\0' || v < least)
    return Invalid("{} {}: use a whole number >= {}", flag, value, least);
  return int64_t(v);
}

StatusOr<EvalFlags> ParseFlags(const std::vector<std::string>& args) {
  EvalFlags f;
  for (size_t i = 0; i < args.size(); ++i) {
    std::string flag = args[i];
    if (flag == "--help" || flag == "-h") {
      f.help = true;
      return f;
    }
    std::optional<std::string> joined;
    if (const size_t eq = flag.find('='); flag.starts_with("--") && eq != std::string::npos) {
      joined = flag.substr(eq + 1);
      flag = flag.substr(0, eq);
    }
    if (flag == "--chat-format") {
      f.chat_format = true;
      continue;
    }
    std::optional<std::string>* text = flag == "--dataset"   ? &f.dataset
                                       : flag == "--golden"  ? &f.golden
                                       : flag == "--json"    ? &f.json
                                       : flag == "--outputs" ? &f.outputs
                                                             : nullptr;
    int64_t* number = flag == "--limit"            ? &f.limit
                      : flag == "--concurrency"    ? &f.concurrency
                      : flag == "--max-tokens"     ? &f.max_tokens
                      : flag == "--num-shots"      ? &f.num_shots
                      : flag == "--parallel"       ? &f.parallel
                      : flag == "--max-new-tokens" ? &f.max_new_tokens
                                                   : nullptr;
    if (text != nullptr || number != nullptr || flag == "--passes") {
      if (!joined) {
        if (i + 1 == args.size()) return Invalid("{}: a value is missing", flag);
        joined = args[++i];
      }
      if (text != nullptr) {
        *text = *joined;
      } else if (number != nullptr) {
        const int64_t least = number == &f.limit || number == &f.num_shots ? 0 : 1;
        ASSIGN_OR_RETURN(*number, Number(flag, *joined, least));
      } else {
        f.passes = *joined;
      }
      continue;
    }
    if (i == 0 && !flag.starts_with("-")) {
      f.model = args[i];
    } else {
      f.engine.push_back(args[i]);
    }
  }
  if (f.model.empty()) return Invalid("name a model folder, a URL, or \"bundled\", before the flags");
  if (f.dataset.has_value() == f.golden.has_value())
    return Invalid("give --dataset F or --golden DIR, one of them");
  return f;
}

// A line that rewrites itself, on terminals only.
class ProgressLine {
 public:
  ~ProgressLine() {
    if (shown_) std::fprintf(stderr, "\r%60s\r", "");
  }
  void Show(const std::string& what, int64_t done, int64_t all) {
    if (!terminal_) return;
    std::lock_guard lock(mutex_);
    shown_ = true;
    std::fprintf(stderr, "\r%-60s", fmt::format("{}: {} of {}", what, done, all).c_str());
  }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  std::mutex mutex_;
  bool shown_ = false;
};

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
  out["kv_tokens"] = s.max_total_tokens;
  out["host_tokens"] = stack.memory.host_tokens();
  out["steps"] = s.steps;
  out["retractions"] = s.retractions_total;
  out["engine_cpu_seconds"] = s.cpu_seconds;
  out["executor_seconds"] = double(stack.times->total.load()) * 1e-9;
  out["forward_seconds"] = double(stack.times->forward.load()) * 1e-9;
  return out;
}

StatusOr<int> RunSessions(const EvalFlags& flags, const eval::Dataset& dataset, eval::Target* target) {
  eval::RunOptions options;
  ASSIGN_OR_RETURN(options.passes, eval::ParsePasses(flags.passes));
  options.concurrency = int(flags.concurrency);
  options.max_tokens = int32_t(flags.max_tokens);
  StatusOr<std::vector<eval::PassResult>> results = std::vector<eval::PassResult>();
  {
    ProgressLine line;
    options.progress = [&line](const std::string& what, int64_t done, int64_t all) {
      line.Show(what, done, all);
    };
    results = eval::RunPasses(dataset, target, options);
  }
  RETURN_IF_ERROR(results.status());
  const eval::PassResult* cold = nullptr;
  for (const eval::PassResult& p : *results) {
    if (p.name == "cold") cold = &p;
  }
  Json passes = Json::array();
  std::string lines;
  for (const eval::PassResult& p : *results) {
    passes.push_back(eval::PassJson(p, cold, dataset, target->has_hashes()));
    if (!flags.outputs) continue;
    for (const eval::TurnResult& t : p.turns) lines += eval::OutputLine(p, t, target->has_hashes());
  }
  if (flags.outputs) RETURN_IF_ERROR(WriteFile(*flags.outputs, lines));
  Json document = Json::object();
  document["dataset"] = *flags.dataset;
  document["passes"] = passes;
  document["engine"] = target->Describe();
  if (flags.json) RETURN_IF_ERROR(WriteFile(*flags.json, document.dump(2) + "\n"));
  if (flags.json != "-") std::fputs(eval::PassTable(passes).c_str(), stdout);
  return int(kExitOk);
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

bool IsUrl(const std::string& model) { return model.starts_with("http://") || model.starts_with("https://"); }

StatusOr<int> RunDataset(const EvalFlags& flags, const eval::Dataset& dataset, eval::Target* target) {
  return dataset.kind == eval::DatasetKind::kProblems ? RunQuestions(flags, dataset, target)
                                                      : RunSessions(flags, dataset, target);
}

StatusOr<int> RunAgainstServer(const EvalFlags& flags) {
  if (flags.golden)
    return Invalid("--golden needs the model in this process; give a model folder instead of a URL");
  ASSIGN_OR_RETURN(const std::vector<eval::PassKind> passes, eval::ParsePasses(flags.passes));
  for (const eval::PassKind kind : passes) {
    if (kind == eval::PassKind::kL2 || kind == eval::PassKind::kL3) {
      return Invalid("--passes {}: a server supports cold and warm; give a model folder for l2 and l3",
                     flags.passes);
    }
  }
  ASSIGN_OR_RETURN(const ServerConfig config, ParseServerFlags(flags.engine));
  ASSIGN_OR_RETURN(const eval::Dataset dataset, eval::ReadDataset(*flags.dataset, flags.limit));
  ASSIGN_OR_RETURN(const std::unique_ptr<eval::Target> target,
                   eval::MakeHttpTarget(flags.model, config.api_key));
  return RunDataset(flags, dataset, target.get());
}

StatusOr<int> Run(const EvalFlags& flags) {
  if (IsUrl(flags.model)) return RunAgainstServer(flags);
  std::vector<std::string> engine_flags = flags.engine;
  if (flags.model != "bundled") {
    engine_flags.push_back("--model-path");
    engine_flags.push_back(flags.model);
  }
  ASSIGN_OR_RETURN(ServerConfig config, ParseServerFlags(engine_flags));
  if (flags.golden) return RunGolden(config, *flags.golden, flags.json.value_or(""));
  ASSIGN_OR_RETURN(const eval::Dataset dataset, eval::ReadDataset(*flags.dataset, flags.limit));

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
  config.decode_log_interval_s = 0;  // the report is the output
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
  const StatusOr<EvalFlags> flags = ParseFlags(args);
  if (!flags.ok()) return FailWith("eval", flags.status());
  if (flags->help) {
    std::fputs(kHelp, stdout);
    return kExitOk;
  }
  const StatusOr<int> code = Run(*flags);
  return code.ok() ? *code : FailWith("eval", code.status());
}

}  // namespace sluice
