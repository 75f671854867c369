// sluice run MODEL --prompt TEXT: one answer without HTTP. The shortest path from main to a kernel:
//   RunRun > LoadModel > SequenceRunner::Extend > Model::Forward > ops::Backend > a kernel
#include <fstream>
#include <iostream>
#include <optional>

#include "commands.h"
#include "config/flags.h"
#include "engine_setup.h"
#include "model/sequence_runner.h"
#include "nlohmann/json.hpp"
#include "sampling/sampler.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace sluice {
namespace {

const CommandSyntax kSyntax = {
    .usage = "sluice run [MODEL] --prompt TEXT [options]",
    .summary = "Answers one prompt and ends. Without MODEL the bundled model.",
    .options = {{"--prompt", "TEXT", "the prompt; a chat model gets it as the user's message"},
                {"--system", "TEXT", "a system message before it"},
                {"--raw", "", "the prompt as it stands, without the chat template"},
                {"--max-tokens", "N", "at most this many tokens (256)"},
                {"--temperature", "T", "0 takes the most likely token (0)"},
                {"--top-p", "P", "sample among the most likely tokens of this share (1)"},
                {"--seed", "N", "of sampling (0)"},
                {"--json", "FILE", "write the result as one JSON document; - is stdout"}},
    .engine_flags = true,
    .max_positional = 1,
};

StatusOr<std::vector<int32_t>> PromptTokens(const CommandLine& line, const std::string& folder,
                                            const Tokenizer& tokenizer) {
  const std::string prompt = line.Text("--prompt");
  if (!line.Has("--raw")) {
    const auto chat = ChatTemplate::Load(folder);
    if (chat.ok()) {
      Json messages = Json::array();
      if (line.Has("--system")) messages.push_back({{"role", "system"}, {"content", line.Text("--system")}});
      messages.push_back({{"role", "user"}, {"content", prompt}});
      ASSIGN_OR_RETURN(const ChatPrompt rendered, (*chat)->Render(messages, Json::object(), true));
      return tokenizer.EncodeSegments(rendered.segments);
    }
    if (!absl::IsNotFound(chat.status())) return chat.status();
  }
  const auto prefix = tokenizer.PromptPrefix();
  std::vector<int32_t> ids(prefix.begin(), prefix.end());
  const std::vector<int32_t> text = tokenizer.Encode(prompt, true);
  ids.insert(ids.end(), text.begin(), text.end());
  return ids;
}

StatusOr<int> Run(CommandLine& line) {
  if (!line.Has("--prompt")) return Invalid("--prompt is missing; give the text to answer");
  if (!line.positional.empty()) line.server.model_path = line.positional[0];
  ASSIGN_OR_RETURN(const int64_t max_tokens, line.Int("--max-tokens", 256, 1));
  ASSIGN_OR_RETURN(const int64_t seed, line.Int("--seed", 0, 0));
  ASSIGN_OR_RETURN(const double temperature, line.Real("--temperature", 0));
  ASSIGN_OR_RETURN(const double top_p, line.Real("--top-p", 1));
  if (temperature < 0) return Invalid("--temperature {}: negative; give 0 or more", temperature);
  if (top_p <= 0 || top_p > 1) return Invalid("--top-p {}: not in (0, 1]", top_p);
  const std::string json_path = line.Text("--json");
  const bool show = json_path != "-";

  ASSIGN_OR_RETURN(const std::shared_ptr<LoadedModel> loaded, LoadModel(line.server));
  const std::string text_folder =
      line.server.tokenizer_path.empty() ? loaded->folder : line.server.tokenizer_path;
  ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(text_folder));
  ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, PromptTokens(line, text_folder, *tokenizer));
  if (prompt.empty()) return Invalid("--prompt: no token; give some text");
  if (int64_t(prompt.size()) >= loaded->context_length) {
    return Invalid("--prompt: {} tokens leave no room in the context of {}", prompt.size(),
                   loaded->context_length);
  }

  ASSIGN_OR_RETURN(const KvLayoutOptions kv, KvOptionsFor(line.server, *loaded));
  RunnerOptions options;
  options.max_context = std::min(loaded->context_length, int64_t(prompt.size()) + max_tokens);
  options.chunk =
      line.server.chunked_prefill_size > 0 ? line.server.chunked_prefill_size : int64_t(prompt.size());
  options.chunk = std::min(options.chunk, int64_t(prompt.size()));
  options.latent_dtype = kv.latent_dtype;
  options.index_dtype = kv.index_dtype;
  options.threads = loaded->threads;
  ASSIGN_OR_RETURN(const auto runner, SequenceRunner::Make(*loaded->model, *loaded->backend, options));
  runner->forward_options().dequant_only_topk = line.server.nsa_dequant_only_topk;
  runner->forward_options().dequant_verify = line.server.nsa_dequant_verify;

  Sampler sampler(int32_t(loaded->config.vocab_size), 1);
  SlotInit slot;
  slot.slot = SlotId(0);
  sampler.InitSlot(slot);
  IncrementalDetokenizer detokenizer(tokenizer, true);
  std::string text, finish = "length";
  std::vector<int32_t> output;
  const auto emit = [&](const std::string& piece) {
    text += piece;
    if (show) std::cout << piece << std::flush;
  };
  ASSIGN_OR_RETURN(std::vector<float> logits, runner->Extend(prompt, 1));
  while (true) {
    SampleRow row;
    row.slot = slot.slot;
    row.position = int32_t(runner->length());
    row.temperature = float(temperature);
    row.top_p = float(top_p);
    row.seed = uint64_t(seed);
    SampledToken sampled;
    sampler.Sample(row, logits.data(), &sampled);
    RETURN_IF_ERROR(sampled.status);
    output.push_back(sampled.token);
    const auto& stops = loaded->config.eos_token_ids;
    if (std::find(stops.begin(), stops.end(), sampled.token) != stops.end()) {
      finish = "stop";
      break;
    }
    emit(detokenizer.Add(sampled.token));
    if (int64_t(output.size()) >= max_tokens || runner->length() >= options.max_context) break;
    ASSIGN_OR_RETURN(logits, runner->Extend(std::span(&output.back(), 1), 1));
  }
  emit(detokenizer.Finish());
  if (show) std::cout << "\n";
  if (json_path.empty()) return int(kExitOk);
  const Json doc = {
      {"text", text},         {"prompt_tokens", prompt.size()}, {"output_tokens", output.size()},
      {"cached_tokens", 0},   {"finish_reason", finish},        {"output_ids", output},
      {"model", loaded->name}};
  const std::string dumped = doc.dump(2, ' ', false, Json::error_handler_t::replace);
  if (json_path == "-") {
    std::cout << dumped << "\n";
  } else {
    std::ofstream out(json_path);
    if (!(out << dumped << "\n")) return Unavailable("--json {}: cannot be written", json_path);
  }
  return int(kExitOk);
}

}  // namespace

int RunRun(const std::vector<std::string>& args) {
  StatusOr<CommandLine> line = ParseCommandLine(args, kSyntax);
  if (!line.ok()) return FailWith("run", line.status());
  if (line->help) {
    std::cout << HelpText(kSyntax);
    return kExitOk;
  }
  SayNotices("run", line->server);
  const StatusOr<int> code = Run(*line);
  return code.ok() ? *code : FailWith("run", code.status());
}

}  // namespace sluice
