// sluice bench serving URL: a load on a running server, its figures under the names of SGLang's
// bench_serving, and a comparison of the answers with those of another server or an earlier run.
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <optional>
#include <thread>

#include "commands.h"
#include "config/flags.h"
#include "fmt/format.h"
#include "serving_datasets.h"
#include "serving_load.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

const CommandSyntax kSyntax = {
    .usage = "sluice bench serving URL [options]",
    .summary = "Sends a load to a server and reports latency and throughput.",
    .options =
        {
            {"--backend", "NAME", "native (/generate, default), openai (/v1/completions) or openai-chat"},
            {"--dataset-name", "NAME",
             "random (default; token ids, also as random-ids), sharegpt, generated-shared-prefix, mooncake"},
            {"--dataset-path", "FILE",
             "of sharegpt (a JSON list of conversations) or mooncake (a JSONL trace)"},
            {"--num-prompts", "N", "requests (default 100; mooncake: the whole trace)"},
            {"--sharegpt-output-len", "N", "output tokens of every request (default: those of the file)"},
            {"--sharegpt-context-len", "N", "pass over what is longer (default: the server's context)"},
            {"--mooncake-slowdown-factor", "F",
             "stretches the trace's arrival times (default 1; 0: all at once)"},
            {"--random-input-len", "N", "prompt tokens at most (default 256)"},
            {"--random-output-len", "N", "output tokens at most (default 64)"},
            {"--random-range-ratio", "F", "lengths are uniform in [F x length, length] (default 1)"},
            {"--gsp-num-groups", "N", "shared prefixes (default 8)"},
            {"--gsp-prompts-per-group", "N", "requests of each prefix (default 16)"},
            {"--gsp-system-prompt-len", "N", "tokens of a prefix (default 512)"},
            {"--gsp-question-len", "N", "tokens after it (default 64)"},
            {"--gsp-output-len", "N", "output tokens (default 64)"},
            {"--request-rate", "R", "requests a second, Poisson arrivals; inf (default): all at once"},
            {"--max-concurrency", "N", "open requests at most (default: no limit)"},
            {"--seed", "N", "of the workload (default 1)"},
            {"--temperature", "T", "sampling temperature (default 0)"},
            {"--disable-ignore-eos", "", "let answers end before their output length"},
            {"--extra-request-body", "JSON", "an object merged into every request"},
            {"--vocab-size", "N", "token ids are below this (default: what the server says)"},
            {"--api-key", "KEY", "sent as bearer token"},
            {"--no-flush-cache", "", "do not empty the server's cache first"},
            {"--warmup-requests", "N", "untimed requests first (default 1)"},
            {"--wait", "SECONDS", "how long to wait for the server to be ready (default 0)"},
            {"--outputs", "FILE", "write the answers, one JSON line a request, for a later --verify"},
            {"--verify", "URL|FILE",
             "send the same requests there, or read them, and compare: exit 1 at a difference"},
            {"--output-file", "FILE", "append the figures as one JSON line"},
            {"--json", "FILE", "write the figures as one JSON document; - is standard output"},
        },
    .min_positional = 1,
    .max_positional = 1,
};

struct Answer {
  std::vector<int32_t> ids;
  std::string text;
};

StatusOr<Json> GetJson(HttpClient* client, const HttpUrl& url, std::string_view path,
                       const std::string& key) {
  HttpCall call{.url = url};
  call.request = {.method = "GET", .path = (url.path == "/" ? "" : url.path) + std::string(path)};
  if (!key.empty()) call.request.headers.emplace_back("Authorization", "Bearer " + key);
  call.stall_timeout_s = 30;
  ASSIGN_OR_RETURN(const HttpResponse response, client->Fetch(std::move(call)));
  if (response.status != 200)
    return Unavailable("{}{}: HTTP {}: {}", url.ToString(), path, response.status,
                       response.body.substr(0, 300));
  Json json = Json::parse(response.body, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    return Unavailable("{}{}: the answer is not a JSON object; give the URL of a sluice server",
                       url.ToString(), path);
  return json;
}

StatusOr<HttpResponse> PostJson(HttpClient* client, const HttpUrl& url, std::string_view path,
                                const std::string& key, const Json& body) {
  HttpCall call{.url = url};
  call.request = {.method = "POST",
                  .path = (url.path == "/" ? "" : url.path) + std::string(path),
                  .headers = {{"Content-Type", "application/json"}},
                  .body = body.is_null() ? "" : body.dump()};
  if (!key.empty()) call.request.headers.emplace_back("Authorization", "Bearer " + key);
  return client->Fetch(std::move(call));
}

// CPU seconds of the server's threads that are not the model's: sockets, parsing and tokenising, scheduling.
// < 0: not said.
double FrontEndCpu(HttpClient* client, const LoadTarget& target) {
  const auto info = GetJson(client, target.url, "/server_info", target.api_key);
  if (!info.ok() || !info->contains("kv_layout")) return -1;  // another server
  const Json& state = (*info)["internal_states"].at(0);
  if (!state.contains("http_cpu_seconds")) return -1;
  return state.value("http_cpu_seconds", 0.0) + state.value("text_cpu_seconds", 0.0) +
         state.value("engine_cpu_seconds", 0.0);
}

// What /server_info says that matters to a measurement: fills vocabulary, model name and stream form; refuses
// a server whose answers are checked while they are made.
Status ReadServerInfo(HttpClient* client, LoadTarget* target, int32_t* vocab_size,
                      int64_t* context_len = nullptr) {
  auto info = GetJson(client, target->url, "/server_info", target->api_key);
  if (!info.ok()) info = GetJson(client, target->url, "/get_server_info", target->api_key);
  if (!info.ok()) return info.status();
  for (const char* check : {"nsa_dequant_verify", "debug_kv"}) {
    const auto it = info->find(check);
    if (it != info->end() && it->is_boolean() && it->get<bool>()) {
      return Unsupported(
          "the server at {} runs with {} on, which checks while it serves; restart it without to measure",
          target->url.ToString(), check);
    }
  }
  if (const auto name = info->find("served_model_name"); target->model.empty())
    target->model = name != info->end() && name->is_string() ? name->get<std::string>() : "default";
  target->incremental = info->contains("kv_layout");
  if (context_len != nullptr && info->contains("context_length") &&
      (*info)["context_length"].is_number_integer())
    *context_len = (*info)["context_length"].get<int64_t>();
  if (const auto model = info->find("model_config"); *vocab_size == 0 && model != info->end()) {
    if (const auto size = model->find("vocab_size"); size != model->end() && size->is_number_integer())
      *vocab_size = size->get<int32_t>();
  }
  return OkStatus();
}

Status WaitUntilReady(HttpClient* client, const LoadTarget& target, double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(int64_t(seconds * 1000));
  for (;;) {
    HttpCall call{.url = target.url};
    call.request = {.method = "GET", .path = (target.url.path == "/" ? "" : target.url.path) + "/health"};
    const auto health = client->Fetch(std::move(call));
    if (health.ok() && health->status == 200) return OkStatus();
    if (std::chrono::steady_clock::now() >= until) {
      if (!health.ok()) return health.status();
      return Unavailable("{}/health: HTTP {}; give the URL of a sluice server", target.url.ToString(),
                         health->status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

// Tokens that the tokenizer makes of the answers' texts; null where the server has no /tokenize.
Json Retokenised(HttpClient* client, const LoadTarget& target, const LoadRun& run) {
  int64_t total = 0;
  constexpr size_t kBatch = 64;
  for (size_t begin = 0; begin < run.results.size(); begin += kBatch) {
    Json texts = Json::array();
    for (size_t i = begin; i < std::min(begin + kBatch, run.results.size()); ++i) {
      if (run.results[i].ok && !run.results[i].text.empty()) texts.push_back(run.results[i].text);
    }
    if (texts.empty()) continue;
    const auto response = PostJson(client, target.url, "/tokenize", target.api_key, {{"prompt", texts}});
    if (!response.ok() || response->status != 200) return nullptr;
    const Json counts = Json::parse(response->body, nullptr, false);
    if (!counts.is_object() || !counts.contains("count")) return nullptr;
    for (const Json& count : counts["count"]) total += count.get<int64_t>();
  }
  return total;
}

StatusOr<std::vector<std::vector<int32_t>>> Tokenise(HttpClient* client, const LoadTarget& target,
                                                     const std::vector<std::string>& texts) {
  ASSIGN_OR_RETURN(const HttpResponse response,
                   PostJson(client, target.url, "/tokenize", target.api_key, {{"prompt", texts}}));
  const Json json = Json::parse(response.body, nullptr, false);
  if (response.status != 200 || !json.is_object() || !json.contains("tokens"))
    return Unavailable("/tokenize answers {}: {}", response.status, response.body.substr(0, 300));
  return json["tokens"].get<std::vector<std::vector<int32_t>>>();
}

StatusOr<std::vector<Answer>> ReadAnswers(const std::string& file) {
  std::ifstream in(file);
  if (!in) return NotFound("--verify {}: no such file, and no http:// URL either", file);
  std::vector<Answer> answers;
  for (std::string line; std::getline(in, line);) {
    const Json j = Json::parse(line, nullptr, false);
    if (!j.is_object() || !j.contains("output_ids") || !j.contains("text")) {
      return Invalid("--verify {}: line {} is not one of --outputs", file, answers.size() + 1);
    }
    answers.push_back({j["output_ids"].get<std::vector<int32_t>>(), j["text"].get<std::string>()});
  }
  return answers;
}

std::vector<Answer> AnswersOf(const LoadRun& run) {
  std::vector<Answer> answers;
  for (const LoadResult& r : run.results) answers.push_back({r.output_ids, r.text});
  return answers;
}

// The first difference as text; "" when all answers are equal.
std::string FirstDifference(const std::vector<Answer>& mine, const std::vector<Answer>& other) {
  if (mine.size() != other.size()) return fmt::format("{} answers here, {} there", mine.size(), other.size());
  for (size_t i = 0; i < mine.size(); ++i) {
    const auto position = [](const auto& a, const auto& b) {
      return size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
    };
    if (mine[i].ids != other[i].ids) {
      const size_t at = position(mine[i].ids, other[i].ids);
      const auto show = [at](const std::vector<int32_t>& ids) {
        return at < ids.size() ? std::to_string(ids[at]) : "none";
      };
      return fmt::format("request {}, token {}: {} here, {} there", i, at, show(mine[i].ids),
                         show(other[i].ids));
    }
    if (mine[i].text != other[i].text) {
      return fmt::format("request {}, byte {} of the text", i, position(mine[i].text, other[i].text));
    }
  }
  return "";
}

void PrintTable(const Json& j) {
  const auto number = [&](const char* label, const char* key) {
    if (j[key].is_null()) return;
    std::cout << (j[key].is_number_integer() ? fmt::format("{:<42}{:>12}\n", label, j[key].get<int64_t>())
                                             : fmt::format("{:<42}{:>12.3f}\n", label, j[key].get<double>()));
  };
  std::cout << "============ Serving Benchmark Result ============\n";
  number("Successful requests:", "completed");
  number("Failed requests:", "failed");
  number("Benchmark duration (s):", "duration");
  number("Total input tokens:", "total_input_tokens");
  number("Total cached tokens:", "total_cached_tokens");
  number("Total generated tokens:", "total_output_tokens");
  number("Total generated tokens (retokenized):", "total_output_tokens_retokenized");
  number("Request throughput (req/s):", "request_throughput");
  number("Input token throughput (tok/s):", "input_throughput");
  number("Output token throughput (tok/s):", "output_throughput");
  number("Total token throughput (tok/s):", "total_throughput");
  number("Concurrency:", "concurrency");
  number("Accept length:", "accept_length");
  number("Front end CPU / wall time:", "frontend_cpu_share");
  for (const auto& [label, key] : {std::pair{"E2E Latency", "e2e_latency_ms"},
                                   {"TTFT", "ttft_ms"},
                                   {"TPOT", "tpot_ms"},
                                   {"ITL", "itl_ms"}}) {
    for (const char* statistic : {"Mean", "Median", "P99"}) {
      std::string name = statistic;
      name[0] = char(name[0] + 32);
      number(fmt::format("{} {} (ms):", statistic, label).c_str(), (name + "_" + key).c_str());
    }
  }
}

StatusOr<int> Run(const CommandLine& line) {
  auto client = HttpClient::Make();
  LoadTarget target;
  ASSIGN_OR_RETURN(target.url, HttpUrl::ParseServer(line.positional[0]));
  const std::string backend = line.Text("--backend", "native");
  if (backend == "native" || backend == "sglang" || backend == "sluice") {
    target.backend = LoadBackend::kNative;
  } else if (backend == "openai" || backend == "sglang-oai" || backend == "vllm") {
    target.backend = LoadBackend::kCompletions;
  } else if (backend == "openai-chat" || backend == "sglang-oai-chat" || backend == "vllm-chat") {
    target.backend = LoadBackend::kChat;
  } else {
    return Invalid("--backend {}: use native, openai or openai-chat", backend);
  }
  target.api_key = line.Text("--api-key");
  target.ignore_eos = !line.Has("--disable-ignore-eos");
  ASSIGN_OR_RETURN(target.temperature, line.Real("--temperature", 0));
  ASSIGN_OR_RETURN(target.max_concurrency, line.Int("--max-concurrency", 0, 0));
  if (line.Has("--extra-request-body")) {
    target.extra_body = Json::parse(line.Text("--extra-request-body"), nullptr, false);
    if (!target.extra_body.is_object()) return Invalid("--extra-request-body is not a JSON object");
  }
  WorkloadOptions work;
  work.dataset = line.Text("--dataset-name", "random");
  const bool shared = work.dataset == "generated-shared-prefix";
  const bool conversations = work.dataset == "sharegpt", trace = work.dataset == "mooncake";
  const std::string dataset_path = line.Text("--dataset-path");
  if ((conversations || trace) && dataset_path.empty())
    return Invalid("--dataset-name {}: give its file with --dataset-path", work.dataset);
  if (!conversations && !trace && !dataset_path.empty())
    return Invalid("--dataset-name {}: it has no file; leave out --dataset-path", work.dataset);
  ASSIGN_OR_RETURN(work.num_prompts, line.Int("--num-prompts", 100, 1, 10'000'000));
  ASSIGN_OR_RETURN(const int64_t sharegpt_output, line.Int("--sharegpt-output-len", 0, 0, 1 << 24));
  ASSIGN_OR_RETURN(const int64_t sharegpt_context, line.Int("--sharegpt-context-len", 0, 0, 1 << 24));
  ASSIGN_OR_RETURN(const double slowdown, line.Real("--mooncake-slowdown-factor", 1));
  if (!(slowdown >= 0)) return Invalid("--mooncake-slowdown-factor {} is not 0 or above", slowdown);
  ASSIGN_OR_RETURN(work.input_len, line.Int("--random-input-len", 256, 1, 1 << 24));
  ASSIGN_OR_RETURN(work.output_len,
                   line.Int(shared ? "--gsp-output-len" : "--random-output-len", 64, 1, 1 << 24));
  ASSIGN_OR_RETURN(work.range_ratio, line.Real("--random-range-ratio", 1));
  if (!(work.range_ratio >= 0 && work.range_ratio <= 1)) {
    return Invalid("--random-range-ratio {} is not from 0 to 1", work.range_ratio);
  }
  ASSIGN_OR_RETURN(work.groups, line.Int("--gsp-num-groups", 8, 1, 1 << 20));
  ASSIGN_OR_RETURN(work.prompts_per_group, line.Int("--gsp-prompts-per-group", 16, 1, 1 << 20));
  ASSIGN_OR_RETURN(work.system_len, line.Int("--gsp-system-prompt-len", 512, 1, 1 << 24));
  ASSIGN_OR_RETURN(work.question_len, line.Int("--gsp-question-len", 64, 1, 1 << 24));
  if (line.Text("--request-rate", "inf") != "inf") {
    ASSIGN_OR_RETURN(work.request_rate, line.Real("--request-rate", 0));
    if (!(work.request_rate > 0))
      return Invalid("--request-rate {} is not above 0; inf sends all at once", work.request_rate);
  }
  ASSIGN_OR_RETURN(const int64_t seed, line.Int("--seed", 1));
  work.seed = uint64_t(seed);
  ASSIGN_OR_RETURN(const int64_t vocab, line.Int("--vocab-size", 0, 0, 1 << 30));
  work.vocab_size = int32_t(vocab);
  ASSIGN_OR_RETURN(const int64_t warmup, line.Int("--warmup-requests", 1, 0, 1000));
  ASSIGN_OR_RETURN(const double wait_s, line.Real("--wait", 0));

  RETURN_IF_ERROR(WaitUntilReady(client.get(), target, wait_s));
  int64_t context_len = 0;
  RETURN_IF_ERROR(ReadServerInfo(client.get(), &target, &work.vocab_size, &context_len));
  if (work.vocab_size <= 0)
    return Invalid("the server does not say its vocabulary's size; give --vocab-size");
  std::vector<LoadRequest> requests;
  if (conversations) {
    const auto tokenize = [&](const std::vector<std::string>& texts) {
      return Tokenise(client.get(), target, texts);
    };
    ASSIGN_OR_RETURN(
        requests, ConversationWorkload(dataset_path,
                                       {.num_prompts = work.num_prompts,
                                        .output_len = sharegpt_output,
                                        .context_len = sharegpt_context > 0 ? sharegpt_context : context_len,
                                        .seed = work.seed},
                                       tokenize));
    SetArrivals(&requests, work.request_rate, work.seed);
  } else if (trace) {
    ASSIGN_OR_RETURN(requests, TraceWorkload(dataset_path,
                                             {.num_prompts = line.Has("--num-prompts") ? work.num_prompts : 0,
                                              .slowdown = slowdown,
                                              .context_len = context_len,
                                              .vocab_size = work.vocab_size}));
    if (work.request_rate > 0) SetArrivals(&requests, work.request_rate, work.seed);
  } else {
    ASSIGN_OR_RETURN(requests, MakeWorkload(work));
  }
  if (warmup > 0) {
    std::vector<LoadRequest> first(requests.begin(),
                                   requests.begin() + std::min<long>(long(warmup), long(requests.size())));
    for (LoadRequest& r : first) r.arrival_s = 0;
    const LoadRun run = RunLoad(client.get(), target, first, nullptr);
    if (!run.results[0].ok) return Unavailable("the first request fails: {}", run.results[0].error);
  }
  if (!line.Has("--no-flush-cache")) {
    const auto flushed = PostJson(client.get(), target.url, "/flush_cache", target.api_key, nullptr);
    if (!flushed.ok() || flushed->status != 200) {
      std::cerr << "the server's cache was not flushed: "
                << (flushed.ok() ? fmt::format("HTTP {}", flushed->status)
                                 : std::string(Message(flushed.status())))
                << "\n";
    }
  }
  auto progress = std::make_optional<ProgressLine>();
  const double cpu_before = FrontEndCpu(client.get(), target);
  const LoadRun run = RunLoad(client.get(), target, requests, &*progress);
  progress.reset();
  const double cpu_after = FrontEndCpu(client.get(), target);
  Json figures = {
      {"backend", backend},
      {"dataset_name", work.dataset},
      {"request_rate", work.request_rate > 0 ? Json(work.request_rate) : Json("inf")},
      {"max_concurrency", target.max_concurrency > 0 ? Json(target.max_concurrency) : Json(nullptr)},
      {"seed", seed}};
  figures.update(SummariseLoad(requests, run));
  // CPU time of sockets, text and scheduling as a share of the run's wall time.
  figures["frontend_cpu_share"] =
      cpu_before < 0 ? Json(nullptr) : Json((cpu_after - cpu_before) / run.duration_s);
  figures["total_output_tokens_retokenized"] = Retokenised(client.get(), target, run);

  int exit_code = kExitOk;
  for (size_t i = 0; i < run.results.size(); ++i) {
    if (run.results[i].ok) continue;
    std::cerr << fmt::format("request {} failed: {}\n", i, run.results[i].error);
    exit_code = kExitCheckFailed;
    break;  // the first one; `failed` has the count
  }
  if (line.Has("--outputs")) {
    std::ofstream out(line.Text("--outputs"));
    for (size_t i = 0; i < run.results.size(); ++i) {
      out << Json{{"index", i}, {"output_ids", run.results[i].output_ids}, {"text", run.results[i].text}}
                 .dump()
          << "\n";
    }
    if (!out.flush()) return Unavailable("--outputs {}: cannot be written", line.Text("--outputs"));
  }
  if (line.Has("--verify")) {
    const std::string with = line.Text("--verify");
    std::vector<Answer> other;
    if (with.starts_with("http://") || with.starts_with("https://")) {
      LoadTarget reference = target;
      ASSIGN_OR_RETURN(reference.url, HttpUrl::ParseServer(with));
      reference.model.clear();
      int32_t other_vocab = work.vocab_size;
      RETURN_IF_ERROR(ReadServerInfo(client.get(), &reference, &other_vocab));
      ProgressLine progress_there;
      const LoadRun reference_run = RunLoad(client.get(), reference, requests, &progress_there);
      for (size_t i = 0; i < reference_run.results.size(); ++i) {
        if (!reference_run.results[i].ok) {
          return Unavailable("request {} fails at {}: {}", i, with, reference_run.results[i].error);
        }
      }
      other = AnswersOf(reference_run);
    } else {
      ASSIGN_OR_RETURN(other, ReadAnswers(with));
    }
    const std::string difference = FirstDifference(AnswersOf(run), other);
    figures["verify"] = {{"with", with}, {"equal", difference.empty()}, {"first_difference", difference}};
    if (!difference.empty()) {
      std::cerr << "answers differ from " << with << ": " << difference << "\n";
      exit_code = kExitCheckFailed;
    }
  }
  if (line.Has("--output-file")) {
    std::ofstream out(line.Text("--output-file"), std::ios::app);
    out << figures.dump() << "\n";
    if (!out.flush()) return Unavailable("--output-file {}: cannot be written", line.Text("--output-file"));
  }
  const std::string json = line.Text("--json");
  if (json == "-") {
    std::cout << figures.dump(2) << "\n";
  } else {
    if (!json.empty()) {
      std::ofstream out(json);
      out << figures.dump(2) << "\n";
      if (!out.flush()) return Unavailable("--json {}: cannot be written", json);
    }
    PrintTable(figures);
  }
  return exit_code;
}

}  // namespace

int RunBenchServing(const std::vector<std::string>& args) {
  auto line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("bench serving", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  const StatusOr<int> code = Run(*line);
  return code.ok() ? *code : FailWith("bench serving", code.status());
}

}  // namespace sluice
