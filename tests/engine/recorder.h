// An output channel that keeps everything and checks what every request may rely on.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "request/request.h"

namespace sluice {

class Recorder final : public OutputChannel {
 public:
  struct Choice {
    std::vector<int32_t> tokens;
    std::vector<TokenOut> detail;
    std::vector<TokenOut> prompt_logprobs;
    FinishReason finish = FinishReason::kNone;
    Status error;
    CachedTokens cached;
    uint64_t logits_hash = 0;
    int32_t matched_stop = -1;
    int events = 0;
  };
  explicit Recorder(int32_t n) : choices_(size_t(n)) {}

  void Push(OutputEvent event) override {
    std::lock_guard lock(mutex_);
    Choice& c = choices_.at(size_t(event.choice));
    if (c.finish != FinishReason::kNone) {
      violations_.push_back("an event after the final one of choice " + std::to_string(event.choice));
    }
    if (c.events > 0 && !event.prompt_logprobs.empty()) violations_.push_back("prompt logprobs twice");
    ++c.events;
    for (const TokenOut& t : event.tokens) {
      c.tokens.push_back(t.token);
      c.detail.push_back(t);
    }
    if (!event.prompt_logprobs.empty()) c.prompt_logprobs = event.prompt_logprobs;
    c.cached = event.cached;
    c.finish = event.finish;
    c.error = event.error;
    c.matched_stop = event.matched_stop_token;
    c.logits_hash = event.logits_hash;
    ended_ += event.finish != FinishReason::kNone;
  }

  int32_t n() const { return int32_t(choices_.size()); }
  bool done() const {
    std::lock_guard lock(mutex_);
    return ended_ == int(choices_.size());
  }
  Choice choice(int32_t i) const {
    std::lock_guard lock(mutex_);
    return choices_.at(size_t(i));
  }
  std::vector<std::string> violations() const {
    std::lock_guard lock(mutex_);
    return violations_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Choice> choices_;
  std::vector<std::string> violations_;
  int ended_ = 0;
};

}  // namespace sluice
