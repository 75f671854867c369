#include "scripted_engine.h"

#include <algorithm>
#include <chrono>
#include <span>

#include "nlohmann/json.hpp"

namespace sluice {

ScriptedEngine::ScriptedEngine(const ScriptedOptions& options)
    : options_(options), thread_([this] { Run(); }) {}

ScriptedEngine::~ScriptedEngine() {
  AbortAll();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

ScriptedEngine::Job ScriptedEngine::MakeJob(Request request) {
  Job job;
  std::string text;
  for (const int32_t id : request.prompt) {
    if (id < 256) text += char(id);
  }
  std::vector<std::vector<int32_t>> lists;
  const auto bytes = [](std::string_view s) {
    std::vector<int32_t> ids;
    for (const char c : s) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  };
  const nlohmann::json script = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (script.is_object()) {
    if (script.contains("tokens")) lists = script["tokens"].get<std::vector<std::vector<int32_t>>>();
    if (script.contains("say")) lists = {bytes(script["say"].get<std::string>())};
    job.per_step = script.value("per_step", 1);
    job.prefill_left = script.value("prefill_steps", 0);
    job.end = script.value("end", "stop");
    job.code = script.value("code", 13);
    job.message = script.value("message", "");
  } else {
    lists = {bytes(text)};
  }
  if (lists.empty()) lists.emplace_back();
  for (int32_t i = 0; i < request.sampling.n; ++i) {
    job.choices.push_back({.tokens = lists[std::min(size_t(i), lists.size() - 1)]});
    if (job.end == "stop" && !request.sampling.ignore_eos) job.choices.back().tokens.push_back(kScriptEnd);
  }
  // Whole pages of earlier prompts in the same namespace are hits, up to one token less than the prompt.
  const std::string name_space = request.cache_salt + '\0' + request.adapter;
  Digest256 key = Sha256(std::as_bytes(std::span(name_space.data(), name_space.size())));
  bool hit = true;
  for (size_t p = 0; (p + 1) * 64 <= request.prompt.size(); ++p) {
    key = PageDigest(key, std::span(request.prompt).subspan(p * 64, 64));
    hit = hit && cached_pages_.contains(key) && (p + 1) * 64 < request.prompt.size();
    if (hit) job.cached.device += 64;
    cached_pages_.insert(key);
  }
  job.request = std::move(request);
  return job;
}

Status ScriptedEngine::Submit(Request request) {
  std::lock_guard lock(mutex_);
  if (draining_) return Unavailable("the server is shutting down; send the request to another one");
  if (int64_t(request.prompt.size()) + 1 > options_.context) return Invalid("the prompt is too long");
  if (int64_t(queue_.size()) >= options_.max_queued) {
    ++counts_.requests_rejected;
    return Exhausted("queue: {} requests wait already", queue_.size());
  }
  queue_.push_back(MakeJob(std::move(request)));
  wake_.notify_all();
  return OkStatus();
}

void ScriptedEngine::EmitLocked(Job& job, size_t choice, OutputEvent event) {
  event.choice = int32_t(choice);
  event.cached = job.cached;
  if (event.finish != FinishReason::kNone) job.choices[choice].done = true;
  const SamplingParams& s = job.request.sampling;
  if (job.choices[choice].next == event.tokens.size() && s.prompt_logprobs_from >= 0) {  // its first event
    for (size_t i = size_t(s.prompt_logprobs_from); i < job.request.prompt.size(); ++i) {
      event.prompt_logprobs.push_back(
          {.token = job.request.prompt[i], .logprob = i == 0 ? 0.0f : -float(i) / 8});
    }
  }
  job.request.output->Push(std::move(event));
}

void ScriptedEngine::EndJobLocked(Job& job, const Status& reason) {
  for (size_t c = 0; c < job.choices.size(); ++c) {
    if (job.choices[c].done) continue;
    OutputEvent event;
    event.finish = FinishReason::kAbort;
    event.error = reason;
    EmitLocked(job, c, std::move(event));
  }
}

bool ScriptedEngine::AbortLocked(const std::string& rid, const Status& reason) {
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    if (it->request.rid != rid) continue;
    EndJobLocked(*it, reason);
    queue_.erase(it);
    ++counts_.requests_aborted;
    return true;
  }
  for (auto it = running_.begin(); it != running_.end(); ++it) {
    if (it->request.rid != rid) continue;
    EndJobLocked(*it, reason);
    running_.erase(it);
    ++counts_.requests_aborted;
    return true;
  }
  return false;
}

bool ScriptedEngine::Abort(const std::string& rid) {
  std::lock_guard lock(mutex_);
  return AbortLocked(rid, Aborted("the request was aborted"));
}

void ScriptedEngine::FinishSoon(std::string rid, int32_t choice) {
  std::lock_guard lock(mutex_);
  for (Job& job : running_) {
    if (job.request.rid != rid || job.choices[size_t(choice)].done) continue;
    OutputEvent event;
    event.finish = FinishReason::kStop;
    EmitLocked(job, size_t(choice), std::move(event));
  }
}

int64_t ScriptedEngine::AbortAll() {
  std::lock_guard lock(mutex_);
  int64_t n = 0;
  while (!queue_.empty())
    n += AbortLocked(std::string(queue_.front().request.rid), Unavailable("the server is shutting down"));
  while (!running_.empty()) {
    n += AbortLocked(std::string(running_.front().request.rid), Unavailable("the server is shutting down"));
  }
  return n;
}

bool ScriptedEngine::Flush() {
  std::lock_guard lock(mutex_);
  if (!queue_.empty() || !running_.empty()) return false;
  cached_pages_.clear();
  return true;
}

EngineSnapshot ScriptedEngine::Snapshot() const {
  std::lock_guard lock(mutex_);
  EngineSnapshot s = counts_;
  s.running = int64_t(running_.size());
  s.queued = int64_t(queue_.size());
  s.max_total_tokens = 64 * 1024;
  s.cache.device = {.all = 1024, .free = 1024 - s.running, .leased = s.running};
  return s;
}

void ScriptedEngine::Drain(Nanos deadline) {
  {
    std::lock_guard lock(mutex_);
    draining_ = true;
  }
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (queue_.empty() && running_.empty()) return;
    }
    if (clock_.Now() >= deadline) AbortAll();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void ScriptedEngine::StepJob(Job& job) {
  if (job.prefill_left-- > 0) return;
  const SamplingParams& s = job.request.sampling;
  for (size_t c = 0; c < job.choices.size(); ++c) {
    Choice& choice = job.choices[c];
    if (choice.done) continue;
    OutputEvent event;
    for (int64_t i = 0;
         i < job.per_step && choice.next < choice.tokens.size() && event.finish == FinishReason::kNone; ++i) {
      TokenOut token{.token = choice.tokens[choice.next], .logprob = -float(choice.next + 1) / 8};
      for (int32_t k = 0; k < s.top_logprobs; ++k)
        token.top.emplace_back((token.token + 1 + k) % 260, -float(k + 1));
      const int32_t id = token.token;
      event.tokens.push_back(std::move(token));
      ++choice.next;
      ++counts_.generation_tokens_total;
      const bool stop = (id == kScriptEnd && !s.ignore_eos) ||
                        std::count(s.stop_token_ids.begin(), s.stop_token_ids.end(), id) > 0;
      if (stop) {
        event.finish = FinishReason::kStop;
        event.matched_stop_token = id;
      } else if (int64_t(choice.next) >= s.max_tokens) {
        event.finish = FinishReason::kLength;
      }
    }
    if (event.finish == FinishReason::kNone && choice.next == choice.tokens.size()) {
      if (job.end == "error" || job.end == "abort") {
        event.finish = job.end == "error" ? FinishReason::kError : FinishReason::kAbort;
        if (job.code != 0) event.error = Status(static_cast<absl::StatusCode>(job.code), job.message);
      } else if (job.end == "stop") {
        event.finish = FinishReason::kLength;  // ignore_eos and nothing left to say
      }
    }
    if (!event.tokens.empty() || event.finish != FinishReason::kNone) EmitLocked(job, c, std::move(event));
  }
}

void ScriptedEngine::Run() {
  auto next = std::chrono::steady_clock::now();
  for (;;) {
    std::unique_lock lock(mutex_);
    if (running_.empty() && queue_.empty() && !stop_) {
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      next = std::chrono::steady_clock::now();
    }
    if (stop_) return;
    while (!queue_.empty() && int64_t(running_.size()) < options_.max_running) {
      counts_.prompt_tokens_total += int64_t(queue_.front().request.prompt.size());
      counts_.cached_tokens_total += queue_.front().cached.total();
      running_.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    for (auto it = running_.begin(); it != running_.end();) {
      if (it->request.deadline > 0 && clock_.Now() >= it->request.deadline) {
        EndJobLocked(*it, DeadlineExceeded("the request's time is over"));
      } else {
        StepJob(*it);
      }
      const bool over =
          std::all_of(it->choices.begin(), it->choices.end(), [](const Choice& c) { return c.done; });
      counts_.requests_finished += over;
      it = over ? running_.erase(it) : std::next(it);
    }
    ++counts_.steps;
    lock.unlock();
    next += std::chrono::microseconds(options_.step_us);
    std::this_thread::sleep_until(next);
  }
}

}  // namespace sluice
