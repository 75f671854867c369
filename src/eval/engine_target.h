// Answers by an engine in this process.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "eval/target.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace sluice::eval {

struct EngineTargetOptions {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const ChatTemplate> chat_template;  // may be null: then only plain prompts
  // Makes the engine; called again by Restart. The returned pointer keeps all it needs alive.
  std::function<StatusOr<std::shared_ptr<Engine>>()> make_engine;
  bool host_tier = false, storage_tier = false;
  std::function<Json()> describe;
};

StatusOr<std::unique_ptr<Target>> MakeEngineTarget(EngineTargetOptions options);

}  // namespace sluice::eval
