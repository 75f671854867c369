#include "serve/generation.h"

#include <utility>

#include "base/check.h"

namespace sluice {

std::string_view EndpointName(AnswerForm form) {
  static constexpr std::string_view kNames[] = {"chat", "completions", "generate", "messages"};
  return kNames[int(form)];
}

HttpResponse ErrorResponse(const ApiError& error, int32_t retry_after_s, AnswerForm form) {
  HttpResponse response{.status = error.http_status,
                        .body = form == AnswerForm::kMessages ? MessagesErrorBody(error) : ErrorBody(error)};
  if (error.http_status == 503 || error.http_status == 429) {
    response.headers.emplace_back("Retry-After", std::to_string(retry_after_s));
  }
  if (error.http_status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

// ---- RunningRequests ----

bool RunningRequests::Add(const std::string& rid, std::weak_ptr<Generation> generation) {
  std::lock_guard lock(mutex_);
  return running_.emplace(rid, std::move(generation)).second;
}

void RunningRequests::Remove(const std::string& rid) {
  std::lock_guard lock(mutex_);
  running_.erase(rid);
}

std::shared_ptr<Generation> RunningRequests::Find(const std::string& rid) const {
  std::lock_guard lock(mutex_);
  const auto it = running_.find(rid);
  return it == running_.end() ? nullptr : it->second.lock();
}

std::vector<std::shared_ptr<Generation>> RunningRequests::All() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Generation>> all;
  for (const auto& entry : running_) {
    if (auto generation = entry.second.lock()) all.push_back(std::move(generation));
  }
  return all;
}

size_t RunningRequests::size() const {
  std::lock_guard lock(mutex_);
  return running_.size();
}

// ---- Generation ----

class Generation::PromptChannel final : public OutputChannel {
 public:
  PromptChannel(std::shared_ptr<Generation> generation, size_t prompt)
      : generation_(std::move(generation)), prompt_(prompt) {}
  void Push(OutputEvent event) override { generation_->Push(prompt_, std::move(event)); }

 private:
  const std::shared_ptr<Generation> generation_;
  const size_t prompt_;
};

Generation::Generation(GenerationContext* context, GenerationSpec spec,
                       std::shared_ptr<HttpExchange> exchange, Nanos arrival)
    : context_(context), spec_(std::move(spec)), exchange_(std::move(exchange)), arrival_(arrival) {
  std::vector<int32_t> kept;
  std::string unique;
  if (spec_.chat) {
    kept = ResponseParser(spec_.chat->parser).KeptTokens(*context->tokenizer);
    unique = spec_.meta.id.substr(spec_.meta.id.size() - std::min<size_t>(spec_.meta.id.size(), 12));
  }
  for (const GenerationPrompt& prompt : spec_.prompts) {
    const int32_t n = prompt.options.sampling.n;
    prompts_.push_back({.first_choice = choices_.size(), .left = n});
    for (int32_t i = 0; i < n; ++i) {
      choices_.push_back(
          Choice{.text = ChoiceText(context->tokenizer, prompt.options, spec_.logprobs, kept)});
      if (!spec_.chat) continue;
      choices_.back().chat =
          std::make_unique<ChatChoice>(*spec_.chat, n == 1 ? unique : fmt::format("{}_{}", unique, i));
    }
  }
  choices_left_ = choices_.size();
}

Generation::~Generation() {
  if (!finished_) context_->running->Remove(spec_.meta.id);
}

double Generation::SecondsSince(Nanos t) const { return double(context_->clock->Now() - t) * 1e-9; }

void Generation::Reject(GenerationContext* context, AnswerForm form, HttpExchange* exchange,
                        const ApiError& error, std::string_view reason) {
  context->metrics->Finished(
      {.endpoint = EndpointName(form), .result = RequestResult::kRejected, .reason = reason});
  exchange->Respond(ErrorResponse(error, context->retry_after_s, form));
}

// A request for no token: nothing to compute, unless prompt tokens are to be scored.
bool Generation::AnswerWithoutEngine(size_t prompt) const {
  return spec_.prompts[prompt].options.sampling.max_tokens == 0 && spec_.prompt_logprobs_from < 0;
}

void Generation::Launch() {
  if (const int64_t most = context_->engine->RequestsMax(); int64_t(spec_.prompts.size()) > most) {
    finished_ = true;
    return Reject(
        context_, spec_.form, exchange_.get(),
        {.message = fmt::format("prompt: {} prompts in one request, but this server runs and queues {} "
                                "(--max-running-requests, --max-queued-requests); send fewer at once",
                                spec_.prompts.size(), most),
         .param = "prompt"},
        "invalid");
  }
  if (!context_->running->Add(spec_.meta.id, weak_from_this())) {
    finished_ = true;
    Reject(context_, spec_.form, exchange_.get(),
           {.http_status = 409,
            .message = "rid: " + Quoted(spec_.meta.id) + " is the name of a running request; choose another",
            .type = "conflict_error",
            .param = "rid"},
           "duplicate_rid");
    return;
  }
  exchange_->OnGone([weak = weak_from_this()](GoneReason reason) {
    auto self = weak.lock();
    if (self == nullptr) return;
    std::lock_guard lock(self->mutex_);
    self->gone_ = true;
    self->gone_reason_ = reason;
    self->ScheduleLocked();
  });
  const Nanos now = context_->clock->Now();
  for (size_t p = 0; p < spec_.prompts.size(); ++p) {
    if (AnswerWithoutEngine(p)) continue;
    const GenerationPrompt& prompt = spec_.prompts[p];
    Request request;
    request.id = NextRequestId();
    request.rid = prompt.rid;
    request.prompt = prompt.ids;
    request.sampling = prompt.options.sampling;
    request.sampling.max_tokens = std::max(1, request.sampling.max_tokens);
    request.sampling.prompt_logprobs_from = spec_.prompt_logprobs_from;
    request.sampling.constraint = prompt.constraint;
    request.cache_salt = prompt.options.cache_salt;
    request.adapter = prompt.options.extra_key;
    request.priority = prompt.options.priority;
    if (prompt.options.timeout_s > 0) request.deadline = now + Nanos(prompt.options.timeout_s * 1e9);
    if (prompt.options.has_room)
      request.remote = {true, uint64_t(prompt.options.room) + p, prompt.options.bootstrap_host,
                        prompt.options.bootstrap_port};
    request.output = std::make_shared<PromptChannel>(shared_from_this(), p);
    prompts_[p].submitted = true;
    if (const Status status = context_->engine->Submit(std::move(request)); !status.ok()) {
      prompts_[p].submitted = false;
      ApiError error = ErrorFromStatus(status);
      if (status.code() == absl::StatusCode::kInvalidArgument) error.code = "context_length_exceeded";
      const std::string_view reason = status.code() == absl::StatusCode::kResourceExhausted ? "queue_full"
                                      : status.code() == absl::StatusCode::kUnavailable     ? "shutting_down"
                                      : status.code() == absl::StatusCode::kInvalidArgument ? "too_long"
                                                                                            : "refused";
      // Events of prompts submitted before stay in the mailbox: it is drained only once launched_ is set.
      Quit();
      Reject(context_, spec_.form, exchange_.get(), error, reason);
      return;
    }
  }
  if (spec_.stream) {
    exchange_->StartStream({.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                            .idle_filler = ": ping\n\n",
                            .idle_interval_s = context_->ping_interval_s});
  }
  std::lock_guard lock(mutex_);
  launched_ = true;
  for (size_t p = 0; p < prompts_.size(); ++p) {
    if (prompts_[p].submitted) continue;
    for (int32_t c = 0; c < prompts_[p].left; ++c) {
      OutputEvent event;
      event.choice = c;
      event.finish = FinishReason::kLength;
      mailbox_.emplace_back(p, std::move(event));
    }
  }
  if (!mailbox_.empty() || gone_) ScheduleLocked();
}

void Generation::Abort(std::string_view rid) {
  for (const GenerationPrompt& prompt : spec_.prompts) {
    if (rid.empty() || !spec_.own_names || prompt.rid == rid) context_->engine->AbortSoon(prompt.rid);
  }
}

void Generation::Push(size_t prompt, OutputEvent event) {
  std::lock_guard lock(mutex_);
  mailbox_.emplace_back(prompt, std::move(event));
  ScheduleLocked();
}

void Generation::ScheduleLocked() {
  if (scheduled_ || !launched_) return;
  scheduled_ = true;
  // Scores of a long prompt are megabytes of text: not on a thread that others' streams wait for.
  if (spec_.prompt_logprobs_from >= 0 &&
      context_->pool->Post(WorkLane::kLong, [self = shared_from_this()] { self->Drain(); })) {
    return;
  }
  exchange_->Post([self = shared_from_this()] { self->Drain(); });
}

void Generation::Drain() {
  for (;;) {
    std::vector<std::pair<size_t, OutputEvent>> events;
    bool gone;
    {
      std::lock_guard lock(mutex_);
      events.swap(mailbox_);
      gone = gone_;
      if (events.empty() && (!gone || finished_)) {
        scheduled_ = false;
        return;
      }
    }
    if (gone && !finished_) {
      Quit();
      Record(RequestResult::kAborted, gone_reason_ == GoneReason::kSlowReader ? "slow_reader"
                                      : gone_reason_ == GoneReason::kShutdown ? "shutdown"
                                                                              : "client_gone");
    }
    for (auto& [prompt, event] : events) {
      if (finished_) break;
      OnEvent(prompt, event);
    }
    if (finished_) continue;
    if (choices_left_ == 0) {
      Complete();
    } else if (spec_.stream) {
      EmitStream(false);
    }
  }
}

void Generation::StartChoice(size_t p, Choice& choice, OutputEvent& event) {
  choice.started = choice.dirty = true;
  PromptState& prompt = prompts_[p];
  if (!prompt.seen) {
    prompt.seen = true;
    prompt.cached = event.cached;
  }
  const GenerationPrompt& spec = spec_.prompts[p];
  int64_t offset = 0;
  if (spec_.prompt_logprobs_from >= 0) {
    choice.prompt_logprobs.reserve(event.prompt_logprobs.size());
    for (size_t i = 0; i < event.prompt_logprobs.size(); ++i) {
      TokenLogprob entry = DescribeToken(*context_->tokenizer, event.prompt_logprobs[i]);
      entry.has_logprob = spec_.prompt_logprobs_from > 0 || i > 0;  // nothing comes before position 0
      entry.text_offset = offset;
      offset += CountCharacters(TokenText(entry.bytes));
      choice.prompt_logprobs.push_back(std::move(entry));
    }
  }
  if (spec_.echo) {
    choice.whole = spec.echo_text;
    if (spec_.logprobs) choice.text.StartAt(CountCharacters(spec.echo_text));
    if (spec_.form == AnswerForm::kCompletion && spec_.logprobs)
      choice.logprobs = std::move(choice.prompt_logprobs);
  }
}

void Generation::OnEvent(size_t p, OutputEvent& event) {
  PromptState& prompt = prompts_[p];
  const GenerationPrompt& spec = spec_.prompts[p];
  SLUICE_CHECK(event.choice >= 0 && event.choice < spec.options.sampling.n, "choice {}", event.choice);
  Choice& choice = choices_[prompt.first_choice + size_t(event.choice)];
  if (choice.done) return;  // cut at a stop string before
  if (event.finish == FinishReason::kError) {
    Fail(ErrorFromStatus(event.error), "engine");
    return;
  }
  if (!choice.started) StartChoice(p, choice, event);
  const bool discard = spec.options.sampling.max_tokens == 0;  // asked for scores of the prompt alone
  if (!event.tokens.empty() && !discard) {
    const Nanos now = context_->clock->Now();
    if (first_token_ == 0) first_token_ = now;
    if (choice.last_token != 0) {
      context_->metrics->InterToken(double(now - choice.last_token) * 1e-9, int64_t(event.tokens.size()));
    }
    choice.last_token = last_token_ = now;
    choice.dirty = true;
  }
  const bool stop_token = event.finish == FinishReason::kStop && event.matched_stop_token >= 0;
  for (size_t i = 0; i < event.tokens.size() && !discard; ++i) {
    const TokenOut& token = event.tokens[i];
    if (spec_.form == AnswerForm::kNative) choice.output_ids.push_back(token.token);
    if (stop_token && i + 1 == event.tokens.size()) {
      choice.text.AddStopToken(token);
      if (spec_.form == AnswerForm::kNative && spec_.logprobs && spec.options.trim_stop) {
        choice.logprobs.push_back(DescribeToken(*context_->tokenizer, token));
      }
    } else if (choice.text.Add(token)) {
      choice.finish = {.reason = FinishReason::kStop,
                       .match = StopMatch::kText,
                       .matched_text = choice.text.matched_stop()};
      if (event.finish == FinishReason::kNone) context_->engine->FinishSoon(spec.rid, event.choice);
      EndChoice(p, choice);
      return;
    }
    if (choice.chat == nullptr) continue;
    choice.chat->Feed(choice.text.TakeText());
    if (choice.chat->full()) {
      choice.finish = {.reason = FinishReason::kStop};
      if (event.finish == FinishReason::kNone) context_->engine->FinishSoon(spec.rid, event.choice);
      EndChoice(p, choice);
      return;
    }
  }
  if (event.finish == FinishReason::kNone) return;
  choice.spec_proposed = event.spec_proposed;
  choice.spec_accepted = event.spec_accepted;
  choice.spec_steps = event.spec_steps;
  if (event.finish == FinishReason::kAbort) {
    // Asked for by a client: an answer that says so. For any other reason (shutdown, deadline, a code that
    // this build does not know): an error.
    const absl::StatusCode code = event.error.code();
    if (code != absl::StatusCode::kOk && code != absl::StatusCode::kAborted &&
        code != absl::StatusCode::kCancelled) {
      Fail(ErrorFromStatus(event.error), code == absl::StatusCode::kDeadlineExceeded ? "timeout"
                                         : code == absl::StatusCode::kUnavailable    ? "shutting_down"
                                                                                     : "engine");
      return;
    }
    choice.finish = {.reason = FinishReason::kAbort, .abort_message = std::string(Message(event.error))};
  } else if (event.finish == FinishReason::kStop) {
    choice.finish = {.reason = FinishReason::kStop,
                     .match = stop_token ? StopMatch::kToken : StopMatch::kNone,
                     .matched_token = event.matched_stop_token};
  } else {
    choice.finish = {.reason = FinishReason::kLength};
  }
  choice.text.Finish();
  EndChoice(p, choice);
}

void Generation::EndChoice(size_t p, Choice& choice) {
  choice.done = choice.dirty = true;
  if (choice.chat != nullptr) {
    choice.chat->Feed(choice.text.TakeText());
    choice.chat->Finish();
    choice.finish.tool_calls = choice.chat->called();
  }
  --prompts_[p].left;
  --choices_left_;
}

Usage Generation::ChoiceUsage(size_t p, const Choice& choice) const {
  return {.prompt = int64_t(spec_.prompts[p].ids.size()),
          .completion = choice.text.tokens(),
          .cached = prompts_[p].cached,
          .details = spec_.cached_details,
          .drafted = choice.spec_proposed,
          .draft_kept = choice.spec_accepted};
}

Usage Generation::TotalUsage() const {
  Usage total{.details = spec_.cached_details};
  for (size_t p = 0; p < prompts_.size(); ++p) {
    total.prompt += int64_t(spec_.prompts[p].ids.size());
    total.cached.device += prompts_[p].cached.device;
    total.cached.host += prompts_[p].cached.host;
    total.cached.storage += prompts_[p].cached.storage;
  }
  for (const Choice& choice : choices_) {
    total.completion += choice.text.tokens();
    total.drafted += choice.spec_proposed;
    total.draft_kept += choice.spec_accepted;
  }
  return total;
}

// A record for each piece; the last one of the choice carries the finish reason.
void Generation::EmitChat(size_t p, int32_t index, Choice& choice, std::string* out) {
  const std::vector<ResponseEvent> events = choice.chat->Take();
  const std::vector<TokenLogprob> logprobs = choice.text.TakeLogprobs();
  if (events.empty() && logprobs.empty() && !choice.done) return;
  const Usage usage = ChoiceUsage(p, choice);
  ChoiceDelta delta{.index = index, .with_logprobs = spec_.logprobs, .logprobs = logprobs};
  if (spec_.continuous_usage) delta.usage = &usage;
  for (const ResponseEvent& event : events) {
    if (event.kind == ResponseEvent::Kind::kToolEnd) continue;
    const bool last = &event == &events.back();
    delta.event = &event;
    delta.finish = last && choice.done ? &choice.finish : nullptr;
    AppendChatDelta(spec_.meta, delta, out);
    delta.logprobs = {};
    if (delta.finish != nullptr) return;
  }
  delta.event = nullptr;
  delta.finish = choice.done ? &choice.finish : nullptr;
  if (choice.done || !delta.logprobs.empty()) AppendChatDelta(spec_.meta, delta, out);
}

void Generation::EmitMessages(size_t p, Choice& choice, std::string* out) {
  const Usage usage = ChoiceUsage(p, choice);
  if (choice.output_ids.empty()) {  // marks that the message was begun
    choice.output_ids.push_back(-1);
    messages_.Start(spec_.meta, usage, out);
  }
  for (const ResponseEvent& event : choice.chat->Take()) messages_.Event(event, out);
  if (choice.done) messages_.End(choice.finish, usage, out);
}

void Generation::EmitChoice(size_t p, int32_t index, Choice& choice, std::string* out) {
  const std::string text =
      std::exchange(choice.whole, {}) + choice.text.TakeText();  // `whole`: echoed prompt
  std::vector<TokenLogprob> logprobs = std::exchange(choice.logprobs, {});
  for (TokenLogprob& entry : choice.text.TakeLogprobs()) logprobs.push_back(std::move(entry));
  if (text.empty() && logprobs.empty() && !choice.done) return;
  const Usage usage = ChoiceUsage(p, choice);
  const ChoiceDelta delta{.index = index,
                          .text = text,
                          .with_logprobs = spec_.logprobs,
                          .logprobs = logprobs,
                          .finish = choice.done ? &choice.finish : nullptr,
                          .usage = spec_.continuous_usage ? &usage : nullptr};
  AppendCompletionDelta(spec_.meta, delta, spec_.top_logprobs, out);
}

void Generation::EmitNative(size_t p, int32_t index, Choice& choice, bool with_index, std::string* out) {
  choice.whole += choice.text.TakeText();
  // The stop token's entry was put in place by OnEvent; the others come before it.
  std::vector<TokenLogprob> fresh = choice.text.TakeLogprobs();
  const bool has_stop_entry = choice.done && choice.finish.match == StopMatch::kToken && spec_.logprobs &&
                              spec_.prompts[p].options.trim_stop && !choice.logprobs.empty();
  choice.logprobs.insert(choice.logprobs.end() - (has_stop_entry ? 1 : 0),
                         std::make_move_iterator(fresh.begin()), std::make_move_iterator(fresh.end()));
  AppendNativeAnswer({.id = spec_.prompts[p].rid,
                      .index = index,
                      .with_index = with_index,
                      .text = choice.whole,
                      .output_ids = choice.output_ids,
                      .usage = ChoiceUsage(p, choice),
                      .finish = choice.done ? &choice.finish : nullptr,
                      .e2e_latency_s = choice.done ? SecondsSince(arrival_) : -1,
                      .with_logprobs = spec_.logprobs,
                      .with_top = spec_.top_logprobs,
                      .text_in_logprobs = spec_.text_in_logprobs,
                      .with_input_logprobs = spec_.prompt_logprobs_from >= 0,
                      .input_logprobs = choice.prompt_logprobs,
                      .output_logprobs = choice.logprobs,
                      .spec_proposed = choice.spec_proposed,
                      .spec_accepted = choice.spec_accepted,
                      .spec_steps = choice.spec_steps},
                     out);
}

void Generation::EmitStream(bool last) {
  std::string out;
  int32_t index = 0;
  for (size_t p = 0; p < prompts_.size(); ++p) {
    for (int32_t c = 0; c < spec_.prompts[p].options.sampling.n; ++c, ++index) {
      Choice& choice = choices_[size_t(index)];
      if (!std::exchange(choice.dirty, false)) continue;
      if (spec_.form == AnswerForm::kNative) {
        out += "data: ";
        EmitNative(p, index, choice, choices_.size() > 1, &out);
        out += "\n\n";
        if (spec_.incremental) {
          choice.whole.clear();
          choice.output_ids.clear();
          choice.logprobs.clear();
          choice.prompt_logprobs.clear();
        }
        continue;
      }
      if (spec_.form == AnswerForm::kChat && choice.output_ids.empty()) {  // marks that the role was sent
        choice.output_ids.push_back(-1);
        Usage usage = ChoiceUsage(p, choice);
        usage.completion = 0;
        AppendChatRole(spec_.meta, index, spec_.continuous_usage ? &usage : nullptr, &out);
      }
      if (spec_.form == AnswerForm::kChat) {
        EmitChat(p, index, choice, &out);
      } else if (spec_.form == AnswerForm::kMessages) {
        EmitMessages(p, choice, &out);
      } else {
        EmitChoice(p, index, choice, &out);
      }
    }
  }
  if (last && spec_.form != AnswerForm::kMessages) {
    if (spec_.include_usage)
      AppendUsageRecord(spec_.meta, spec_.form == AnswerForm::kChat, TotalUsage(), &out);
    out += kStreamDone;
  }
  if (!out.empty()) exchange_->Write(out);
}

std::string Generation::WholeBody() {
  if (spec_.form == AnswerForm::kNative) {
    const bool list = spec_.batch || choices_.size() > 1;
    std::string out = list ? "[" : "";
    int32_t index = 0;
    for (size_t p = 0; p < prompts_.size(); ++p) {
      for (int32_t c = 0; c < spec_.prompts[p].options.sampling.n; ++c, ++index) {
        if (index > 0) out += ',';
        EmitNative(p, index, choices_[size_t(index)], false, &out);
      }
    }
    return list ? out + "]" : out;
  }
  std::vector<ChoiceAnswer> answers;
  for (size_t i = 0; i < choices_.size(); ++i) {
    Choice& choice = choices_[i];
    std::vector<TokenLogprob> logprobs = std::move(choice.logprobs);
    for (TokenLogprob& entry : choice.text.TakeLogprobs()) logprobs.push_back(std::move(entry));
    answers.push_back({.index = int32_t(i),
                       .text = choice.whole + choice.text.TakeText(),
                       .with_logprobs = spec_.logprobs,
                       .with_top = spec_.top_logprobs,
                       .logprobs = std::move(logprobs),
                       .finish = choice.finish});
    if (choice.chat != nullptr) choice.chat->TakeWhole(&answers.back());
  }
  if (spec_.form == AnswerForm::kMessages) return MessageBody(spec_.meta, answers[0], TotalUsage());
  return spec_.form == AnswerForm::kChat ? ChatBody(spec_.meta, answers, TotalUsage())
                                         : CompletionBody(spec_.meta, answers, TotalUsage());
}

void Generation::Complete() {
  bool aborted = false;
  for (const Choice& choice : choices_) aborted |= choice.finish.reason == FinishReason::kAbort;
  Quit();
  Record(aborted ? RequestResult::kAborted : RequestResult::kOk, aborted ? "abort_request" : "");
  if (spec_.stream) {
    EmitStream(true);
    exchange_->EndStream();
  } else {
    exchange_->Respond({.body = WholeBody()});
  }
}

void Generation::Fail(const ApiError& error, std::string_view reason) {
  Quit();
  Record(RequestResult::kError, reason);
  if (!spec_.stream) {
    exchange_->Respond(ErrorResponse(error, context_->retry_after_s, spec_.form));
    return;
  }
  std::string out;
  if (spec_.form == AnswerForm::kMessages) {
    AppendMessagesErrorRecord(error, &out);
  } else {
    AppendErrorRecord(error, &out);
  }
  exchange_->Write(out);
  exchange_->EndStream();
}

void Generation::Quit() {
  finished_ = true;
  for (size_t p = 0; p < prompts_.size(); ++p) {
    if (prompts_[p].submitted && prompts_[p].left > 0) context_->engine->AbortSoon(spec_.prompts[p].rid);
  }
  context_->running->Remove(spec_.meta.id);
}

void Generation::Record(RequestResult result, std::string_view reason) {
  const Usage usage = TotalUsage();
  RequestRecord record{.endpoint = EndpointName(spec_.form),
                       .result = result,
                       .reason = reason,
                       .prompt_tokens = usage.prompt,
                       .completion_tokens = usage.completion,
                       .cached = usage.cached,
                       .total_s = SecondsSince(arrival_)};
  if (first_token_ != 0) {
    record.first_token_s = double(first_token_ - arrival_) * 1e-9;
    const int64_t per_choice = usage.completion / int64_t(std::max<size_t>(1, choices_.size()));
    if (per_choice > 1)
      record.per_token_s = double(last_token_ - first_token_) * 1e-9 / double(per_choice - 1);
  }
  context_->metrics->Finished(record);
}

}  // namespace sluice
