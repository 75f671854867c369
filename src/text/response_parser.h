// Generated text into content, reasoning and tool calls, while it streams: the joined events do not depend on
// where the text was cut.
//
//   reasoning  <think>...</think>, with or without the opening tag (a prompt may end with it). White space
//   around the tags is
//              dropped. A tool call within reasoning is a call, and the reasoning goes on behind it.
//   calls      are sent whole when their end has been seen: begin (id and name), the arguments, end. Markup
//   that turns out to be
//              broken, or that the end of the text cuts off, comes out as plain text, nothing lost. White
//              space between text and a call is dropped.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"
#include "text/tool_call_format.h"

namespace sluice {

struct ResponseEvent {
  enum class Kind { kContent, kReasoning, kToolBegin, kToolArguments, kToolEnd };
  Kind kind;
  std::string text;     // content, reasoning or a piece of the arguments' JSON text; kToolBegin: the name
  std::string id;       // kToolBegin
  int tool_index = -1;  // kTool*: 0, 1, ... in order
};

enum class ReasoningStyle { kNone, kThinkTags };
// "glm45", "deepseek-r1", "deepseek-v3", "deepseek-v32" (all <think> tags) / "none".
StatusOr<ReasoningStyle> ParseReasoningStyle(std::string_view name);
ReasoningStyle DefaultReasoningStyle(std::string_view architecture);
// Whether the prompt ends within an opened <think>, so that generation starts as reasoning.
bool PromptOpensReasoning(std::string_view prompt);

// One per choice; not thread-safe.
class ResponseParser {
 public:
  struct Options {
    ReasoningStyle reasoning = ReasoningStyle::kNone;
    bool starts_in_reasoning = false;
    ToolCallStyle tools =
        ToolCallStyle::kNone;  // kNone unless the request declares tools and tool_choice is not "none"
    nlohmann::ordered_json declared_tools;  // OpenAI form; their parameter types are used
    std::string id_prefix = "call_";        // a call's id is the prefix and its index
  };
  explicit ResponseParser(Options options);

  std::vector<ResponseEvent> Feed(std::string_view text);
  std::vector<ResponseEvent> Finish();  // once, at the end
  // The finish reason is tool_calls exactly if this is not 0.
  int tool_calls_sent() const { return next_index_; }

  // Special tokens that the detokenizer must keep for this parser (IncrementalDetokenizer's `kept`).
  std::vector<int32_t> KeptTokens(const Tokenizer& tokenizer) const;

 private:
  enum class Mode { kBefore, kReasoning, kContent };
  void Process(bool final);
  bool InCall(bool final);
  bool InText(bool final);
  void Plain(std::string_view text);
  void Emit(ResponseEvent::Kind kind, std::string_view text);
  bool tools_on() const { return matcher_ != nullptr; }

  Options options_;
  std::unique_ptr<ToolCallMatcher> matcher_;
  Mode mode_;
  bool in_call_ = false;
  int section_calls_ = 0;          // in the open section
  bool drop_space_ = false;        // leading white space of what comes next is dropped
  bool only_calls_since_ = false;  // no text since the last call
  std::string buffer_;             // not yet decided
  std::string space_;              // white space held until it is known what follows
  int next_index_ = 0;
  std::vector<ResponseEvent> events_;
};

}  // namespace sluice
