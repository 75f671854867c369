#include "grammar/constraint.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/check.h"
#include "base/ids.h"
#include "grammar/automaton.h"
#include "grammar/syntax.h"
#include "text/json_depth.h"

namespace sluice {
namespace {

constexpr std::string_view kThink = "<think>";
constexpr std::string_view kEndThink = "</think>";

// What all constraints of a tokenizer use.
struct Vocabulary {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const TokenTrie> trie;
  std::vector<int32_t> stop_tokens;
  TokenMask stops, free;  // free: everything but the stops
  int32_t think = -1, end_think = -1;

  bool IsStop(int32_t token) const {
    return std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end();
  }
  // By the trie's rule: special tokens have no text.
  std::string_view Text(int32_t token) const {
    return tokenizer->IsSpecial(token) ? std::string_view() : tokenizer->TokenBytes(token);
  }
  // Automaton::FirstToken: of a text that is no whole one (a cut character, another normal form) there is
  // none.
  int32_t FirstToken(std::string_view text, bool more) const {
    const std::vector<int32_t> tokens = tokenizer->Encode(text, /*allow_special=*/false);
    if (tokens.empty() || (more && tokens.size() == 1)) return -1;
    const std::string_view first = Text(tokens[0]);
    return !first.empty() && text.starts_with(first) && !IsStop(tokens[0]) ? tokens[0] : -1;
  }
};

// A few threads and a queue. Never full: a sequence has one mask under way at most. The last reference may go
// on one of the threads themselves.
class MaskWorkers {
 public:
  explicit MaskWorkers(int threads) : queue_(std::make_shared<Queue>()) {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([queue = queue_] {
        pthread_setname_np(pthread_self(), "sluice-masks");
        while (auto work = queue->Pop()) work();
      });
    }
  }
  ~MaskWorkers() {
    queue_->Stop();
    for (std::thread& thread : threads_) {
      thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
    }
  }
  void Post(std::function<void()> work) { queue_->Push(std::move(work)); }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable ready;
    std::deque<std::function<void()>> items;
    bool stop = false;

    void Push(std::function<void()> work) {
      {
        std::lock_guard lock(mutex);
        items.push_back(std::move(work));
      }
      ready.notify_one();
    }
    void Stop() {
      {
        std::lock_guard lock(mutex);
        stop = true;
      }
      ready.notify_all();
    }
    std::function<void()> Pop() {  // empty: stopped
      std::unique_lock lock(mutex);
      ready.wait(lock, [this] { return stop || !items.empty(); });
      if (items.empty()) return {};
      auto work = std::move(items.front());
      items.pop_front();
      return work;
    }
  };
  const std::shared_ptr<Queue> queue_;
  std::vector<std::thread> threads_;
};

// A compiled constraint: the program and the automaton that is in use now.
class Compiled final : public TokenConstraint, public std::enable_shared_from_this<Compiled> {
 public:
  Compiled(Program program, std::shared_ptr<const Vocabulary> vocabulary,
           std::shared_ptr<MaskWorkers> workers, ConstraintRequest::Reasoning reasoning)
      : program_(std::make_shared<const Program>(std::move(program))),
        vocabulary_(std::move(vocabulary)),
        workers_(std::move(workers)),
        reasoning_(reasoning),
        automaton_(Fresh()) {}

  std::unique_ptr<ConstraintState> Start(std::span<const int32_t> output, int32_t tokens_left) const override;

  // The automaton to be used, a fresh one when the last has grown too large.
  std::shared_ptr<Automaton> Current() const {
    std::lock_guard lock(mutex_);
    if (automaton_->Full()) automaton_ = Fresh();
    return automaton_;
  }
  const Vocabulary& vocabulary() const { return *vocabulary_; }
  MaskWorkers& workers() const { return *workers_; }
  ConstraintRequest::Reasoning reasoning() const { return reasoning_; }

 private:
  std::shared_ptr<Automaton> Fresh() const {
    return std::make_shared<Automaton>(
        program_, vocabulary_->trie,
        [v = vocabulary_.get()](std::string_view text, bool more) { return v->FirstToken(text, more); });
  }

  const std::shared_ptr<const Program> program_;
  const std::shared_ptr<const Vocabulary> vocabulary_;
  const std::shared_ptr<MaskWorkers> workers_;
  const ConstraintRequest::Reasoning reasoning_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<Automaton> automaton_;
};

// One sequence. `Work` is shared with the worker that makes the next mask; between Post and its end nobody
// else touches it.
class Follower final : public ConstraintState {
 public:
  Follower(std::shared_ptr<const Compiled> compiled, std::span<const int32_t> output, int32_t tokens_left)
      : work_(std::make_shared<Work>()) {
    work_->compiled = std::move(compiled);
    work_->automaton = work_->compiled->Current();
    work_->state = work_->automaton->start();
    work_->phase = work_->compiled->reasoning() == ConstraintRequest::Reasoning::kOpen ? Phase::kReasoning
                   : work_->compiled->reasoning() == ConstraintRequest::Reasoning::kMayOpen ? Phase::kBegin
                                                                                            : Phase::kBound;
    for (const int32_t token : output) work_->Take(token);
    Begin(tokens_left);
  }
  ~Follower() override { Wait(); }

  void Accept(int32_t token, int32_t tokens_left) override {
    Wait();
    work_->tokens.push_back(token);
    Begin(tokens_left);
  }

  std::span<const uint64_t> Mask(int32_t tokens_left) override {
    Wait();
    if (tokens_left != work_->tokens_left) {  // not what was prepared for
      work_->tokens_left = tokens_left;
      work_->Prepare();
    }
    return work_->mask;
  }

  // Reads what Begin has settled and the maker of the mask leaves alone.
  void Forced(int32_t max, std::vector<int32_t>* out) override {
    if (work_->phase != Phase::kBound) return;
    Automaton& automaton = *work_->automaton;
    for (int32_t state = work_->state; max > 0; --max) {
      const int32_t token = automaton.ForcedToken(state);
      if (token < 0) return;
      out->push_back(token);
      state = automaton.AfterToken(state, token, work_->vocabulary().Text(token));
      SLUICE_CHECK(state != Automaton::kDead, "forced token {}", token);
    }
  }

 private:
  enum class Phase : uint8_t { kBegin, kReasoning, kBound, kEnded, kFailed };

  struct Work {
    std::shared_ptr<const Compiled> compiled;
    std::shared_ptr<Automaton> automaton;
    int32_t state = 0;
    Phase phase{};
    size_t matched = 0;           // of </think>, in the text of reasoning
    std::vector<int32_t> tokens;  // accepted, not taken yet
    int32_t tokens_left = 0;
    TokenMask mask;  // the next step's, stops included
    std::mutex mutex;
    std::condition_variable done;
    bool busy = false;

    const Vocabulary& vocabulary() const { return compiled->vocabulary(); }

    void Take(int32_t token) {
      const Vocabulary& v = vocabulary();
      if (phase == Phase::kFailed || phase == Phase::kEnded) return;
      if (v.IsStop(token)) {
        phase = Phase::kEnded;
        return;
      }
      if (phase == Phase::kBegin) {
        if (token == v.think) {
          phase = Phase::kReasoning;
          return;
        }
        phase = Phase::kBound;
      }
      if (phase == Phase::kReasoning) {
        if (token == v.end_think) {
          phase = Phase::kBound;
          return;
        }
        for (const char c : v.tokenizer->TokenBytes(token)) {
          matched = c == kEndThink[matched] ? matched + 1 : c == kEndThink[0] ? 1 : 0;
          if (matched == kEndThink.size()) {
            phase = Phase::kBound;  // what the token has behind it is white space at most
            return;
          }
        }
        return;
      }
      const int32_t next = automaton->AfterToken(state, token, v.Text(token));
      if (next == Automaton::kDead) {
        phase = Phase::kFailed;
        return;
      }
      state = next;
      if (automaton->Full()) {
        std::shared_ptr<Automaton> fresh = compiled->Current();
        state = automaton->MoveTo(state, fresh.get());
        automaton = std::move(fresh);
      }
    }

    void TakeAll() {
      for (const int32_t token : tokens) Take(token);
      tokens.clear();
    }

    void Prepare() {
      TakeAll();
      const Vocabulary& v = vocabulary();
      switch (phase) {
        case Phase::kFailed:
          mask.clear();
          return;
        case Phase::kEnded:
          mask = v.stops;
          return;
        case Phase::kReasoning: {
          // Reasoning must leave room for the answer.
          const bool closing = v.end_think >= 0 && tokens_left <= automaton->BytesLeft(state) + 2;
          mask = v.free;
          if (closing) {
            std::fill(mask.begin(), mask.end(), 0);
            mask[size_t(v.end_think) / 64] |= uint64_t(1) << (v.end_think % 64);
          }
          return;
        }
        case Phase::kBound:
          if (Force()) return;
          break;
        case Phase::kBegin:
          break;
      }
      if (automaton->Deep(state)) {
        mask = *automaton->ClosingMask(state, std::min(tokens_left - 2, automaton->BytesLeft(state) - 1));
      } else if (automaton->MustWatch(state, tokens_left)) {
        // Behind this token, tokens_left - 1 are left, one of them for the end.
        mask = *automaton->ClosingMask(state, tokens_left - 2);
      } else {
        mask = *automaton->Mask(state);
      }
      Complete();
    }

    // True: one token alone may come, and the mask says so.
    bool Force() {
      const int32_t token = automaton->ForcedToken(state);
      if (token < 0) return false;
      mask.assign(vocabulary().free.size(), 0);
      mask[size_t(token) / 64] |= uint64_t(1) << (token % 64);
      return true;
    }

    void Complete() {
      const Vocabulary& v = vocabulary();
      if (automaton->Accepts(state)) {
        for (size_t i = 0; i < mask.size(); ++i) mask[i] |= v.stops[i];
      }
      if (phase == Phase::kBegin && v.think >= 0 && v.end_think >= 0 &&
          tokens_left > automaton->BytesLeft(state) + 16) {
        mask[size_t(v.think) / 64] |= uint64_t(1) << (v.think % 64);
      }
    }

    // True: the mask was there already.
    bool PrepareAtOnce() {
      TakeAll();
      if (phase != Phase::kBound) {
        Prepare();
        return true;
      }
      if (Force()) return true;
      if (automaton->Deep(state) || automaton->MustWatch(state, tokens_left)) return false;
      const auto ready = automaton->MaskIfReady(state);
      if (ready == nullptr) return false;
      mask = *ready;
      Complete();
      return true;
    }
  };

  void Begin(int32_t tokens_left) {
    work_->tokens_left = tokens_left;
    if (work_->PrepareAtOnce()) return;
    work_->busy = true;
    work_->compiled->workers().Post([work = work_] {
      work->Prepare();
      std::lock_guard lock(work->mutex);
      work->busy = false;
      work->done.notify_all();
    });
  }
  void Wait() {
    std::unique_lock lock(work_->mutex);
    work_->done.wait(lock, [this] { return !work_->busy; });
  }

  const std::shared_ptr<Work> work_;
};

std::unique_ptr<ConstraintState> Compiled::Start(std::span<const int32_t> output, int32_t tokens_left) const {
  return std::make_unique<Follower>(shared_from_this(), output, tokens_left);
}

StatusOr<Program> CompileProgram(const ConstraintRequest& request, const Tokenizer& tokenizer) {
  GrammarBuilder builder;
  ExprPtr body;
  using Kind = ConstraintRequest::Kind;
  switch (request.kind) {
    case Kind::kJsonObject:
      body = AnyJsonObject(request.whitespace, &builder);
      break;
    case Kind::kJsonSchema: {
      if (JsonTooDeep(request.text)) return Invalid("the schema is nested more than {} deep", kMaxJsonDepth);
      const OrderedJson schema = OrderedJson::parse(request.text, nullptr, /*allow_exceptions=*/false);
      if (schema.is_discarded()) return Invalid("the schema is not valid JSON");
      ASSIGN_OR_RETURN(body, ParseJsonSchema(schema, request.whitespace, &builder));
      break;
    }
    case Kind::kRegex: {
      ASSIGN_OR_RETURN(body, ParseRegex(request.text, {}));
      break;
    }
    case Kind::kEbnf: {
      ASSIGN_OR_RETURN(const int32_t rule, ParseEbnf(request.text, &builder));
      body = RuleExpr(rule);
      break;
    }
    case Kind::kToolCalls: {
      ASSIGN_OR_RETURN(body,
                       ToolCallGrammar(request.style, request.tools, request.one_call, tokenizer, &builder));
      break;
    }
  }
  if (request.reasoning != ConstraintRequest::Reasoning::kNone) {
    body = Seq({Repeat(Literal("\n"), 0, 2), body});  // what stands between </think> and the answer
  }
  return builder.Compile(builder.AddRule("the answer", body));
}

}  // namespace

struct ConstraintCompiler::Shared {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::vector<int32_t> stop_tokens;
  std::shared_ptr<MaskWorkers> workers;

  std::mutex mutex;
  std::shared_ptr<const Vocabulary> vocabulary;                             // made for the first constraint
  std::list<std::pair<std::string, std::shared_ptr<const Compiled>>> kept;  // most recently used first
  std::unordered_map<std::string, decltype(kept)::iterator> by_key;
  int64_t compiled = 0;

  std::shared_ptr<const Vocabulary> VocabularyLocked() {
    if (vocabulary != nullptr) return vocabulary;
    auto v = std::make_shared<Vocabulary>();
    v->tokenizer = tokenizer;
    v->trie = std::make_shared<const TokenTrie>(*tokenizer);
    v->stop_tokens = stop_tokens;
    const size_t words = size_t(CeilDiv(tokenizer->vocab_size(), 64));
    v->stops.assign(words, 0);
    v->free.assign(words, ~uint64_t(0));
    for (const int32_t token : stop_tokens) {
      if (token < 0 || token >= tokenizer->vocab_size()) continue;
      v->stops[size_t(token) / 64] |= uint64_t(1) << (token % 64);
      v->free[size_t(token) / 64] &= ~(uint64_t(1) << (token % 64));
    }
    v->think = tokenizer->IdOf(kThink);
    v->end_think = tokenizer->IdOf(kEndThink);
    return vocabulary = v;
  }
};

ConstraintCompiler::ConstraintCompiler(std::shared_ptr<const Tokenizer> tokenizer,
                                       std::vector<int32_t> stop_tokens, int workers)
    : shared_(std::make_shared<Shared>()) {
  shared_->tokenizer = std::move(tokenizer);
  shared_->stop_tokens = std::move(stop_tokens);
  shared_->workers = std::make_shared<MaskWorkers>(workers);
}

ConstraintCompiler::~ConstraintCompiler() = default;

int64_t ConstraintCompiler::compiled() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->compiled;
}

StatusOr<std::shared_ptr<const TokenConstraint>> ConstraintCompiler::Compile(
    const ConstraintRequest& request) {
  Shared& s = *shared_;
  std::string text = request.text;
  if (request.kind == ConstraintRequest::Kind::kToolCalls) {
    text = request.tools.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  }
  if (text.size() > kTextBytesMax) {
    return Invalid("{} bytes are too many; a constraint has at most {}", text.size(), kTextBytesMax);
  }
  const std::string key = fmt::format("{} {} {} {} {}\n{}", int(request.kind), request.whitespace,
                                      int(request.style), request.one_call, int(request.reasoning), text);
  std::shared_ptr<const Vocabulary> vocabulary;
  {
    std::lock_guard lock(s.mutex);
    if (const auto it = s.by_key.find(key); it != s.by_key.end()) {
      s.kept.splice(s.kept.begin(), s.kept, it->second);
      return std::shared_ptr<const TokenConstraint>(it->second->second);
    }
    vocabulary = s.VocabularyLocked();
  }
  ASSIGN_OR_RETURN(Program program, CompileProgram(request, *s.tokenizer));
  auto compiled =
      std::make_shared<const Compiled>(std::move(program), vocabulary, s.workers, request.reasoning);
  std::lock_guard lock(s.mutex);
  ++s.compiled;
  if (s.by_key.contains(key)) return std::shared_ptr<const TokenConstraint>(compiled);
  s.kept.emplace_front(key, compiled);
  s.by_key[key] = s.kept.begin();
  if (s.kept.size() > kKeptMax) {
    s.by_key.erase(s.kept.back().first);
    s.kept.pop_back();
  }
  return std::shared_ptr<const TokenConstraint>(compiled);
}

}  // namespace sluice
