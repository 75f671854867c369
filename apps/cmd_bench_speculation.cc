// sluice bench speculation: decode speed with and without drafts, in alternating rounds of one run.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <iostream>
#include <mutex>

#include "commands.h"
#include "config/flag_values.h"
#include "config/flags.h"
#include "engine_setup.h"
#include "eval/dataset.h"
#include "eval/report.h"
#include "nlohmann/json.hpp"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;
using Seconds = std::chrono::duration<double>;

const CommandSyntax kSyntax = {
    .usage = "sluice bench speculation [MODEL] --dataset F [options]",
    .summary =
        "Decodes the dataset's conversations with and without drafts, wave after wave in turn, and compares "
        "speed\nand tokens. "
        "Draft flags as of `sluice serve`; without --speculative-algorithm NEXTN is used.",
    .options = {{"--dataset", "FILE", "conversations, one JSON object a line"},
                {"--batch", "LIST", "requests at once (1,8,32)"},
                {"--conversations", "N",
                 "different ones of a round, from all over the file, as many at once as the batch has (16)"},
                {"--tokens", "N",
                 "output tokens of a request, at most when it is alone: then answers end by themselves (96)"},
                {"--rounds", "N", "of each kind (5)"},
                {"--temperature", "T", "0 takes the most likely token (0)"},
                {"--json", "FILE", "write the result as one JSON document; - is stdout"}},
    .engine_flags = true,
    .max_positional = 1,
};

// When the tokens of a round came. Every request has one.
class Watch final : public OutputChannel {
 public:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    int64_t waiting_first = 0, running = 0;
    int64_t counted = 0;  // tokens between the last first token and the first end
    std::chrono::steady_clock::time_point begin, end;
    bool open = false, closed = false;
    Status error;
  };
  explicit Watch(Shared* shared) : shared_(shared) {}

  void Push(OutputEvent event) override {
    std::lock_guard lock(shared_->mutex);
    const auto now = std::chrono::steady_clock::now();
    for (const TokenOut& t : event.tokens) {
      if (tokens.empty() && --shared_->waiting_first == 0) {
        shared_->open = true;
        shared_->begin = now;
      } else if (shared_->open && !shared_->closed) {
        ++shared_->counted;
      }
      tokens.push_back(t.token);
    }
    if (event.finish == FinishReason::kNone) return;
    if (!event.error.ok()) shared_->error = event.error;
    if (!shared_->closed) {
      shared_->closed = true;
      shared_->end = now;
    }
    if (--shared_->running == 0) shared_->changed.notify_all();
  }
  std::vector<int32_t> tokens;

 private:
  Shared* const shared_;
};

struct Round {
  double seconds = 0;
  int64_t counted = 0;
  double tokens_per_s() const { return double(counted) / seconds; }
  std::vector<std::vector<int32_t>> tokens;
};

// `batch` conversations at once, from `first` on.
Status RunWave(Engine& engine, const std::vector<std::vector<int32_t>>& prompts, size_t first, size_t batch,
               int32_t max_tokens, float temperature, Round* round) {
  Watch::Shared shared;
  shared.waiting_first = shared.running = int64_t(batch);
  std::vector<std::shared_ptr<Watch>> watches;
  for (size_t i = first; i < first + batch; ++i) {
    Request r;
    r.id = NextRequestId();
    r.rid = fmt::format("bench-{}", r.id.value);
    r.prompt = prompts[i % prompts.size()];
    r.sampling.temperature = temperature;
    r.sampling.seed = i;
    r.sampling.max_tokens = max_tokens;
    r.sampling.ignore_eos = batch > 1;  // so that the load stays; alone, what comes after an end is no answer
    watches.push_back(std::make_shared<Watch>(&shared));
    r.output = watches.back();
    RETURN_IF_ERROR(engine.Submit(std::move(r)));
  }
  std::unique_lock lock(shared.mutex);
  shared.changed.wait(lock, [&] { return shared.running == 0; });
  RETURN_IF_ERROR(shared.error);
  round->counted += shared.counted;
  round->seconds += Seconds(shared.end - shared.begin).count();
  for (const auto& w : watches) round->tokens.push_back(w->tokens);
  return OkStatus();
}

// Both kinds serve wave after wave in turn, so that what else the machine does meets both alike.
Status RunRounds(Engine& plain, Engine& drafting, const std::vector<std::vector<int32_t>>& prompts,
                 size_t conversations, size_t batch, int32_t max_tokens, float temperature, Round* a,
                 Round* b) {
  for (size_t first = 0; first < conversations; first += batch) {
    RETURN_IF_ERROR(RunWave(plain, prompts, first, batch, max_tokens, temperature, a));
    RETURN_IF_ERROR(RunWave(drafting, prompts, first, batch, max_tokens, temperature, b));
  }
  return OkStatus();
}

// n of `all`, from all over it.
std::vector<size_t> Spread(size_t n, size_t all) {
  std::vector<size_t> chosen;
  for (size_t i = 0; i < std::min(n, all); ++i) chosen.push_back(i * all / std::min(n, all));
  return chosen;
}

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 == 1 ? v[v.size() / 2] : 0.5 * (v[v.size() / 2 - 1] + v[v.size() / 2]);
}

StatusOr<int> Run(CommandLine& line) {
  if (!line.Has("--dataset")) return Invalid("--dataset is missing; give a file of conversations");
  ServerConfig config = line.server;
  if (!line.positional.empty()) config.model_path = line.positional[0];
  if (config.speculative_algorithm.empty()) config.speculative_algorithm = "NEXTN";
  config.decode_log_interval = 0;
  ASSIGN_OR_RETURN(const int64_t max_tokens, line.Int("--tokens", 96, 8));
  ASSIGN_OR_RETURN(const int64_t rounds, line.Int("--rounds", 5, 1));
  ASSIGN_OR_RETURN(const double temperature, line.Real("--temperature", 0));
  std::vector<int64_t> batches;
  const std::string list = line.Has("--batch") ? line.Text("--batch") : "1,8,32";
  for (const std::string_view word : SplitWords(list, ',')) {
    const int64_t batch = std::atoll(std::string(word).c_str());
    if (batch < 1) return Invalid("--batch {}: whole numbers above 0, with commas between them", list);
    batches.push_back(batch);
  }
  ASSIGN_OR_RETURN(const int64_t conversations, line.Int("--conversations", 16, 1));
  const int64_t most = *std::max_element(batches.begin(), batches.end());
  config.max_running_requests = std::max(config.max_running_requests, most);
  ASSIGN_OR_RETURN(const eval::Dataset dataset, eval::ReadDataset(line.Text("--dataset"), -1));

  ASSIGN_OR_RETURN(const std::shared_ptr<LoadedModel> model, LoadModel(config));
  const std::string folder = config.tokenizer_path.empty() ? model->folder : config.tokenizer_path;
  ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(folder));
  ASSIGN_OR_RETURN(const auto chat, ChatTemplate::Load(folder));
  std::vector<std::vector<int32_t>> prompts;
  for (const size_t s : Spread(size_t(std::max(most, conversations)), dataset.sessions.size())) {
    const eval::Session& session = dataset.sessions[s];
    Json messages = Json::array();
    for (size_t m = 0; m < session.turns.back().messages; ++m) messages.push_back(session.messages[m]);
    ASSIGN_OR_RETURN(const ChatPrompt prompt, chat->Render(messages, Json::object(), true));
    prompts.push_back(tokenizer->EncodeSegments(prompt.segments));
  }
  if (prompts.empty()) return Invalid("--dataset {}: no conversations in it", line.Text("--dataset"));

  Json document = {{"model", model->name}, {"draft_tokens", config.DraftTokens()}, {"rows", Json::array()}};
  std::string table =
      fmt::format("{:>6} {:>12} {:>12} {:>7} {:>14} {:>6}   {}\n", "batch", "plain tok/s", "drafts tok/s",
                  "ratio", "accept length", "same", "accepted of reached, by place");
  SteadyClock clock;
  ServerConfig off = config;
  off.speculative_algorithm.clear();
  bool all_same = true;
  for (const int64_t batch : batches) {
    ASSIGN_OR_RETURN(const auto plain, MakeEngineStack(off, model, &clock));
    ASSIGN_OR_RETURN(const auto drafting, MakeEngineStack(config, model, &clock));
    std::vector<double> without, with, ratio;
    bool same = true;
    DraftCounters before;
    for (int64_t r = 0; r <= rounds; ++r) {  // the first warms caches and acceptance
      Round a, b;
      RETURN_IF_ERROR(RunRounds(*plain->engine, *drafting->engine, prompts,
                                size_t(AlignUp(conversations, batch)), size_t(batch), int32_t(max_tokens),
                                float(temperature), &a, &b));
      same &= a.tokens == b.tokens;
      if (r == 0) {
        before = drafting->engine->Snapshot().drafts;
        continue;
      }
      without.push_back(a.tokens_per_s());
      with.push_back(b.tokens_per_s());
      ratio.push_back(b.tokens_per_s() / a.tokens_per_s());
    }
    const DraftCounters drafts = drafting->engine->Snapshot().drafts.Since(before);
    all_same &= same;
    const double length = drafts.runs > 0 ? 1 + double(drafts.accepted) / double(drafts.runs) : 0;
    document["rows"].push_back({{"batch", batch},
                                {"plain_tokens_per_s", Median(without)},
                                {"draft_tokens_per_s", Median(with)},
                                {"ratio", Median(ratio)},
                                {"accept_length", length},
                                {"draft_places", eval::DraftPlacesJson(drafts)},
                                {"runs", drafts.runs},
                                {"same_tokens", same}});
    std::string places;
    for (int32_t i = 0; i < kMaxDraftTokens && drafts.reached_at[size_t(i)] > 0; ++i)
      places += fmt::format("{}{}/{}", i == 0 ? "" : "  ", drafts.accepted_at[size_t(i)],
                            drafts.reached_at[size_t(i)]);
    table += fmt::format("{:>6} {:>12.1f} {:>12.1f} {:>7.3f} {:>14.2f} {:>6}   {}\n", batch, Median(without),
                         Median(with), Median(ratio), length, same ? "yes" : "NO", places);
  }
  const std::string path = line.Text("--json");
  if (path == "-") {
    std::cout << document.dump(2) << "\n";
  } else {
    if (!path.empty()) {
      std::ofstream out(path);
      if (!(out << document.dump(2) << "\n")) return Unavailable("--json {}: cannot be written", path);
    }
    std::cout << table;
  }
  return int(all_same ? kExitOk : kExitCheckFailed);
}

}  // namespace

int RunBenchSpeculation(const std::vector<std::string>& args) {
  StatusOr<CommandLine> line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("bench speculation", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  SayNotices("bench speculation", line->server);
  const StatusOr<int> code = Run(*line);
  return code.ok() ? *code : FailWith("bench speculation", code.status());
}

}  // namespace sluice
