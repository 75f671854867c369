// One HTTP request that generates: its engine requests, the events that come back, and the one answer.
//
//   engine thread: PromptChannel::Push -> mailbox        (locks for a moment, never blocks)
//   I/O thread:    Drain: events -> text, stop strings, logprobs -> stream records or the whole answer
//
// Exactly one of these ends it: all choices finished, an error event, the client gone. After that the engine
// is told to stop what still runs and later events are ignored.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "api/messages_responses.h"
#include "api/requests.h"
#include "api/responses.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "http/server.h"
#include "serve/chat_choice.h"
#include "serve/choice_text.h"
#include "serve/metrics.h"
#include "serve/work_pool.h"
#include "text/tokenizer.h"

namespace sluice {

enum class AnswerForm : uint8_t { kChat, kCompletion, kNative, kMessages };

struct GenerationPrompt {
  std::vector<int32_t> ids;   // not empty
  GenerationOptions options;  // max_tokens settled
  std::string rid;            // unique among the running ones
  std::string echo_text;      // with echo
  std::shared_ptr<const TokenConstraint> constraint;
};

struct GenerationSpec {
  AnswerForm form{};
  AnswerMeta meta;
  std::vector<GenerationPrompt> prompts;
  bool stream = false, include_usage = false, continuous_usage = false, cached_details = false;
  bool batch = false;      // native: the answer is a list
  bool own_names = false;  // native: the client named each prompt
  bool echo = false;       // completions
  bool logprobs = false, top_logprobs = false;
  int32_t prompt_logprobs_from = -1;
  bool text_in_logprobs = false;   // native
  std::optional<ChatFormat> chat;  // chat and messages: how the text is split
  bool incremental = false;        // native streams: records carry what is new, not all so far
};

class Generation;

// The running generations by the name that a client can abort them with. Thread-safe.
class RunningRequests {
 public:
  // False: the name is taken.
  bool Add(const std::string& rid, std::weak_ptr<Generation> generation);
  void Remove(const std::string& rid);
  std::shared_ptr<Generation> Find(const std::string& rid) const;
  std::vector<std::shared_ptr<Generation>> All() const;
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<Generation>> running_;
};

// What all generations use; outlives them.
struct GenerationContext {
  Engine* engine = nullptr;
  std::shared_ptr<const Tokenizer> tokenizer;
  ServeMetrics* metrics = nullptr;
  RunningRequests* running = nullptr;
  WorkPool* pool = nullptr;
  const Clock* clock = nullptr;
  double ping_interval_s = 10;
  int32_t retry_after_s = 1;
};

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(GenerationContext* context, GenerationSpec spec, std::shared_ptr<HttpExchange> exchange,
             Nanos arrival);
  ~Generation();
  // Submits everything, or answers with the error that prevents it (then nothing runs). Any thread but the
  // engine's.
  void Launch();
  // By a client's /abort_request: the choices end as aborted and the answer says so. Of prompts that have
  // names of their own only the named one ends; "" is all.
  void Abort(std::string_view rid = "");
  // An answer that no generation exists for: counts it and responds.
  static void Reject(GenerationContext* context, AnswerForm form, HttpExchange* exchange,
                     const ApiError& error, std::string_view reason);

 private:
  class PromptChannel;
  struct Choice {
    ChoiceText text;
    std::unique_ptr<ChatChoice> chat;  // takes the text
    bool started = false, done = false, dirty = false;
    Finish finish;
    std::string whole;                   // text so far (whole answers, native)
    std::vector<TokenLogprob> logprobs;  // to be sent (streams) or so far (whole answers, native)
    std::vector<TokenLogprob> prompt_logprobs;
    std::vector<int32_t> output_ids;
    int32_t spec_proposed = 0, spec_accepted = 0, spec_steps = 0;
    Nanos last_token = 0;
  };
  struct PromptState {
    size_t first_choice = 0;
    int32_t left = 0;  // choices that are not done
    bool seen = false, submitted = false;
    CachedTokens cached;
  };

  void Push(size_t prompt, OutputEvent event);
  void ScheduleLocked();
  void Drain();
  void OnEvent(size_t prompt, OutputEvent& event);
  void StartChoice(size_t prompt, Choice& choice, OutputEvent& event);
  void EndChoice(size_t prompt, Choice& choice);
  void EmitStream(bool last);
  void EmitChat(size_t prompt, int32_t index, Choice& choice, std::string* out);
  void EmitMessages(size_t prompt, Choice& choice, std::string* out);
  void EmitChoice(size_t prompt, int32_t index, Choice& choice, std::string* out);
  void EmitNative(size_t prompt, int32_t index, Choice& choice, bool with_index, std::string* out);
  void Complete();
  void Fail(const ApiError& error, std::string_view reason);
  void Quit();  // stop what still runs, free the name
  void Record(RequestResult result, std::string_view reason);
  std::string WholeBody();
  Usage TotalUsage() const;
  Usage ChoiceUsage(size_t prompt, const Choice& choice) const;
  bool AnswerWithoutEngine(size_t prompt) const;
  double SecondsSince(Nanos t) const;

  GenerationContext* const context_;
  const GenerationSpec spec_;
  const std::shared_ptr<HttpExchange> exchange_;
  const Nanos arrival_;

  std::mutex mutex_;
  std::vector<std::pair<size_t, OutputEvent>> mailbox_;
  bool scheduled_ = false, launched_ = false, gone_ = false;
  GoneReason gone_reason_{};

  // Of the thread that drains (one at a time).
  std::vector<PromptState> prompts_;
  std::vector<Choice> choices_;  // prompt by prompt
  size_t choices_left_ = 0;
  MessagesStream messages_;
  bool finished_ = false;
  Nanos first_token_ = 0, last_token_ = 0;
};

std::string_view EndpointName(AnswerForm form);
// The response for an error: body, status and Retry-After where waiting helps.
HttpResponse ErrorResponse(const ApiError& error, int32_t retry_after_s, AnswerForm form = AnswerForm::kChat);

}  // namespace sluice
