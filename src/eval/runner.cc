#include "eval/runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>

namespace sluice::eval {
namespace {

double Seconds(std::chrono::steady_clock::time_point from) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
}

// Calls f(i) for i in [begin, end) from `threads` threads, in order of i; stops at the first error.
Status ForEach(size_t begin, size_t end, int threads, const std::function<Status(size_t)>& f) {
  std::atomic<size_t> next{begin};
  std::mutex mutex;
  Status first;
  std::vector<std::thread> workers;
  const size_t count = std::min<size_t>(size_t(std::max(1, threads)), end - begin);
  for (size_t w = 0; w < count; ++w) {
    workers.emplace_back([&] {
      for (;;) {
        const size_t i = next.fetch_add(1);
        if (i >= end) return;
        if (const Status s = f(i); !s.ok()) {
          std::lock_guard lock(mutex);
          if (first.ok()) first = s;
          next = end;
        }
      }
    });
  }
  for (std::thread& t : workers) t.join();
  return first;
}

const char* Name(PassKind k) {
  switch (k) {
    case PassKind::kCold:
      return "cold";
    case PassKind::kWarm:
      return "warm";
    case PassKind::kL2:
      return "l2";
    case PassKind::kL3:
      return "l3";
  }
  return "?";
}

class PassRun {
 public:
  PassRun(const Dataset& dataset, Target* target, const RunOptions& options)
      : dataset_(dataset), target_(target), options_(options) {
    size_t turns = 0;
    for (const Session& s : dataset.sessions) {
      first_turn_.push_back(turns);
      turns += s.turns.size();
    }
    all_turns_ = turns;
  }

  StatusOr<PassResult> Run(PassKind kind, const char* label) {
    PassResult pass;
    pass.name = Name(kind);
    pass.turns.resize(all_turns_);
    std::atomic<int64_t> done{0};
    const auto ask_session = [&](size_t s) {
      const Session& session = dataset_.sessions[s];
      for (size_t t = 0; t < session.turns.size(); ++t) {
        RETURN_IF_ERROR(AskTurn(kind, session, t, &pass.turns[first_turn_[s] + t]));
        const int64_t now = done.fetch_add(1) + 1;
        if (options_.progress) options_.progress(label, now, int64_t(all_turns_));
      }
      return OkStatus();
    };
    const size_t sessions = dataset_.sessions.size();
    // Emptying the device tier needs an engine at rest, so l2 goes group by group.
    const size_t group = kind == PassKind::kL2 ? size_t(options_.concurrency) : sessions;
    if (kind == PassKind::kL3) RETURN_IF_ERROR(target_->Restart());
    const std::optional<DraftCounters> before = target_->Drafts();
    for (size_t begin = 0; begin < sessions; begin += group) {
      if (kind == PassKind::kL2) RETURN_IF_ERROR(target_->DropDevice());
      const auto start = std::chrono::steady_clock::now();
      RETURN_IF_ERROR(ForEach(begin, std::min(sessions, begin + group), options_.concurrency, ask_session));
      pass.seconds += Seconds(start);
    }
    if (before) pass.drafts = target_->Drafts()->Since(*before);
    return pass;
  }

 private:
  Status AskTurn(PassKind kind, const Session& session, size_t t, TurnResult* out) {
    const Turn& turn = session.turns[t];
    Question q;
    q.messages = Json::array();
    for (size_t m = 0; m < turn.messages; ++m) q.messages.push_back(session.messages[m]);
    q.max_tokens = options_.max_tokens;
    q.salt = kind == PassKind::kCold ? fmt::format("eval-cold/{}/{}", session.id, t) : "eval-warm";
    StatusOr<Answer> answer = target_->Ask(q);
    if (!answer.ok()) {
      return Status(answer.status().code(), fmt::format("pass {}, session {}, turn {}: {}", Name(kind),
                                                        session.id, t, Message(answer.status())));
    }
    out->session = &session;
    out->turn = &turn;
    out->number = int32_t(t);
    out->answer = std::move(*answer);
    out->right = out->answer.finish == FinishReason::kStop && out->answer.text == turn.expected;
    return OkStatus();
  }

  const Dataset& dataset_;
  Target* const target_;
  const RunOptions& options_;
  std::vector<size_t> first_turn_;
  size_t all_turns_ = 0;
};

std::string ProblemPrompt(const Problem& p, bool with_answer) {
  return "Question: " + p.question + "\nAnswer:" + (with_answer ? " " + p.answer + "\n\n" : "");
}

}  // namespace

StatusOr<std::vector<PassKind>> ParsePasses(const std::string& list) {
  std::vector<PassKind> passes;
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    const std::string name = list.substr(at, end - at);
    at = end + 1;
    bool known = false;
    for (const PassKind k : {PassKind::kCold, PassKind::kWarm, PassKind::kL2, PassKind::kL3}) {
      if (name != Name(k)) continue;
      known = true;
      if (std::find(passes.begin(), passes.end(), k) != passes.end()) {
        return Invalid("--passes {}: {} is there twice", list, name);
      }
      passes.push_back(k);
    }
    if (!known) return Invalid("--passes {}: '{}' is not a pass; use cold, warm, l2, l3", list, name);
  }
  return passes;
}

StatusOr<std::vector<PassResult>> RunPasses(const Dataset& dataset, Target* target,
                                            const RunOptions& options) {
  PassRun run(dataset, target, options);
  std::vector<PassResult> results;
  bool filled = options.filled;
  for (const PassKind kind : options.passes) {
    if (kind != PassKind::kCold && !filled) {
      RETURN_IF_ERROR(run.Run(PassKind::kWarm, "fill").status());
      filled = true;
    }
    ASSIGN_OR_RETURN(PassResult pass, run.Run(kind, Name(kind)));
    results.push_back(std::move(pass));
  }
  return results;
}

StatusOr<ProblemReport> RunProblems(const Dataset& dataset, Target* target, const ProblemOptions& options) {
  const size_t shots = size_t(std::max(0, options.num_shots));
  if (dataset.problems.size() <= shots) {
    return Invalid(
        "--num-shots {}: the dataset holds {} problems, which leaves none to ask; use at most {} shots",
        shots, dataset.problems.size(), dataset.problems.size() - 1);
  }
  std::string examples;
  Json example_messages = Json::array();
  for (size_t i = 0; i < shots; ++i) {
    examples += ProblemPrompt(dataset.problems[i], true);
    example_messages.push_back({{"role", "user"}, {"content", dataset.problems[i].question}});
    example_messages.push_back({{"role", "assistant"}, {"content", dataset.problems[i].answer}});
  }
  std::atomic<int64_t> right{0}, invalid{0}, tokens{0}, done{0};
  const size_t all = dataset.problems.size() - shots;
  std::vector<int32_t> prompt_tokens(all);
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(ForEach(shots, dataset.problems.size(), options.parallel, [&](size_t i) -> Status {
    const Problem& p = dataset.problems[i];
    Question q;
    q.max_tokens = options.max_tokens;
    if (options.chat) {
      q.messages = example_messages;
      q.messages.push_back({{"role", "user"}, {"content", p.question}});
    } else {
      q.prompt = examples + ProblemPrompt(p, false);
      q.stop = {"Question", "Assistant:", "<|separator|>"};
    }
    ASSIGN_OR_RETURN(const Answer answer, target->Ask(q));
    const std::optional<std::string> number = LastNumber(answer.text);
    invalid += !number;
    right += number && SameNumber(*number, *FinalNumber(p.answer));
    tokens += answer.output_tokens;
    prompt_tokens[i - shots] = answer.prompt_tokens;
    const int64_t now = done.fetch_add(1) + 1;
    if (options.progress) options.progress("problems", now, int64_t(all));
    return OkStatus();
  }));
  ProblemReport report;
  report.latency_s = Seconds(start);
  report.problems = int64_t(all);
  report.prompt_tokens = std::move(prompt_tokens);
  report.output_tokens = tokens;
  report.accuracy = double(right) / double(all);
  report.invalid = double(invalid) / double(all);
  report.output_tokens_per_s = double(tokens) / std::max(1e-9, report.latency_s);
  return report;
}

}  // namespace sluice::eval
