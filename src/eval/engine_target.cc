#include "eval/engine_target.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace sluice::eval {
namespace {

using std::chrono::milliseconds;

// Collects the events of a request with one choice. With stop strings the text is watched as it grows.
class Collector final : public OutputChannel {
 public:
  Collector(std::shared_ptr<const Tokenizer> tokenizer, std::vector<std::string> stop)
      : detokenizer_(std::move(tokenizer), /*skip_special=*/true), stop_(std::move(stop)) {}

  void Push(OutputEvent event) override {
    std::lock_guard lock(mutex_);
    answer_.cached = event.cached;
    for (const TokenOut& t : event.tokens) {
      ++answer_.output_tokens;
      if (event.finish == FinishReason::kStop && &t == &event.tokens.back())
        break;  // the token that stopped it
      answer_.output_ids.push_back(t.token);
      if (!stopped_) answer_.text += detokenizer_.Add(t.token);
    }
    LookForStop();
    if (event.finish != FinishReason::kNone) {
      if (!stopped_) answer_.text += detokenizer_.Finish();
      LookForStop();
      answer_.finish = stopped_ ? FinishReason::kStop : event.finish;
      answer_.logits_hash = event.logits_hash;
      answer_.spec_proposed = event.spec_proposed;
      answer_.spec_accepted = event.spec_accepted;
      answer_.spec_steps = event.spec_steps;
      answer_.spec_first_accepted = event.spec_first_accepted;
      error_ = event.error;
      done_ = true;
    }
    if (done_ || stopped_) changed_.notify_all();
  }

  // True when the request should be aborted because its text has stopped.
  bool WaitForEndOrStop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_ || stopped_; });
    return !done_;
  }
  StatusOr<Answer> Take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    if (!stopped_ && (answer_.finish == FinishReason::kError || answer_.finish == FinishReason::kAbort))
      return error_;
    return std::move(answer_);
  }

 private:
  void LookForStop() {
    if (stopped_) return;
    size_t first = std::string::npos;
    for (const std::string& s : stop_) first = std::min(first, answer_.text.find(s));
    if (first == std::string::npos) return;
    answer_.text.resize(first);
    stopped_ = true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  IncrementalDetokenizer detokenizer_;
  const std::vector<std::string> stop_;
  Answer answer_;
  Status error_;
  bool stopped_ = false, done_ = false;
};

class EngineTarget final : public Target {
 public:
  explicit EngineTarget(EngineTargetOptions options) : options_(std::move(options)) {}

  Status Start() {
    ASSIGN_OR_RETURN(engine_, options_.make_engine());
    return OkStatus();
  }

  StatusOr<Answer> Ask(const Question& q) override {
    Request request;
    if (q.messages.empty()) {
      const auto prefix = options_.tokenizer->PromptPrefix();
      request.prompt.assign(prefix.begin(), prefix.end());
      const std::vector<int32_t> ids = options_.tokenizer->Encode(q.prompt, /*allow_special=*/false);
      request.prompt.insert(request.prompt.end(), ids.begin(), ids.end());
    } else {
      if (options_.chat_template == nullptr) return Invalid("the model folder has no chat template");
      ASSIGN_OR_RETURN(const ChatPrompt prompt,
                       options_.chat_template->Render(q.messages, Json::object(), true));
      request.prompt = options_.tokenizer->EncodeSegments(prompt.segments);
    }
    const int32_t prompt_tokens = int32_t(request.prompt.size());
    auto collector = std::make_shared<Collector>(options_.tokenizer, q.stop);
    request.id = NextRequestId();
    request.rid = fmt::format("eval-{}", request.id.value);
    request.cache_salt = q.salt;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = q.max_tokens;
    request.sampling.hash_logits = true;
    request.output = collector;
    const std::string rid = request.rid;
    RETURN_IF_ERROR(engine_->Submit(std::move(request)));
    if (collector->WaitForEndOrStop()) engine_->Abort(rid);
    ASSIGN_OR_RETURN(Answer answer, collector->Take());
    answer.prompt_tokens = prompt_tokens;
    return answer;
  }

  bool has_hashes() const override { return true; }

  Status DropDevice() override {
    if (!options_.host_tier) {
      return Unsupported("pass l2 needs the host tier; add --enable-hierarchical-cache");
    }
    // Copies to the host that are planned or on their way come first.
    for (int i = 0; i < 60000; ++i) {
      if (engine_->DropDeviceCache()) return OkStatus();
      std::this_thread::sleep_for(milliseconds(1));
    }
    return Internal("the device tier could not be emptied within 60 s");
  }

  Status Restart() override {
    if (!options_.storage_tier) {
      return Unsupported(
          "pass l3 needs storage; add --enable-hierarchical-cache --hicache-storage-backend file");
    }
    // Under write_back the device tier is the only one that has the rows.
    RETURN_IF_ERROR(DropDevice());
    for (int i = 0, idle = 0; i < 60000 && idle < 20; ++i) {  // what was copied down is stored a moment later
      const CacheStats s = engine_->Snapshot().cache;
      idle = s.pending_backups == 0 && s.pending_stores == 0 ? idle + 1 : 0;
      std::this_thread::sleep_for(milliseconds(1));
    }
    engine_.reset();
    return Start();
  }

  std::optional<DraftCounters> Drafts() const override { return engine_->Snapshot().drafts; }

  Json Describe() override { return options_.describe ? options_.describe() : Json::object(); }

 private:
  const EngineTargetOptions options_;
  std::shared_ptr<Engine> engine_;
};

}  // namespace

StatusOr<std::unique_ptr<Target>> MakeEngineTarget(EngineTargetOptions options) {
  auto target = std::make_unique<EngineTarget>(std::move(options));
  RETURN_IF_ERROR(target->Start());
  return target;
}

}  // namespace sluice::eval
