// An engine without a model whose tokens the prompt itself dictates, for exact texts, failures and timing.
//
// Prompts are bytes (byte_tokenizer.h). A prompt that is a JSON object is a script:
//   {"say": "ABC"}                       these bytes, one token each, then <|end|> (finish stop) or
//   max_tokens (length)
//   {"tokens": [[240,159],[65]]}         token ids, one list per choice (the last list for further choices)
//   "per_step": 3                        tokens of one event (as with speculation)
//   "prefill_steps": 5                   steps before the first token
//   "end": "stop"|"error"|"abort"|"hang" what comes after the tokens
//   "code": 77, "message": "why"         of the status with error and abort; code 0: none
// Any other prompt is echoed. Sampled logprob of the i-th token: -(i+1)/8; alternatives: ids token+1,
// token+2, ... at -1, -2, ...
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "engine/engine.h"

namespace sluice {

constexpr int32_t kScriptEnd = 256;  // <|end|>, the model's end token

struct ScriptedOptions {
  int64_t step_us = 1000;
  int64_t max_running = 64, max_queued = 64, context = 4096;
};

class ScriptedEngine final : public Engine {
 public:
  explicit ScriptedEngine(const ScriptedOptions& options);
  ~ScriptedEngine() override;
  Status Submit(Request request) override;
  bool Abort(const std::string& rid) override;
  void AbortSoon(std::string rid) override { Abort(rid); }
  void FinishSoon(std::string rid, int32_t choice) override;
  int64_t AbortAll() override;
  bool Flush() override;
  bool DropDeviceCache() override { return true; }
  EngineSnapshot Snapshot() const override;
  void Drain(Nanos deadline) override;

 private:
  struct Choice {
    std::vector<int32_t> tokens;
    size_t next = 0;
    bool done = false;
  };
  struct Job {
    Request request;
    std::vector<Choice> choices;
    int64_t prefill_left = 0, per_step = 1;
    std::string end = "stop", message;
    int code = 13;
    CachedTokens cached;
    bool first = true;
  };
  Job MakeJob(Request request);
  void Run();
  void StepJob(Job& job);
  void EmitLocked(Job& job, size_t choice, OutputEvent event);
  bool AbortLocked(const std::string& rid, const Status& reason);
  void EndJobLocked(Job& job, const Status& reason);

  const ScriptedOptions options_;
  const SteadyClock clock_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  std::list<Job> running_;
  std::set<Digest256> cached_pages_;
  EngineSnapshot counts_;
  bool stop_ = false, draining_ = false;
  std::thread thread_;
};

}  // namespace sluice
