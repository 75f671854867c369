// One chat choice: its text split into content, reasoning and tool calls, as the request wants them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "api/responses.h"
#include "text/response_parser.h"

namespace sluice {

struct ChatFormat {
  ResponseParser::Options parser;
  bool one_call = false;         // parallel_tool_calls: false; the choice ends behind its first call
  bool stream_reasoning = true;  // false: reasoning comes in one piece
  bool hide_reasoning = false;   // never sent (a client that did not ask for it)
};

// Not thread-safe.
class ChatChoice {
 public:
  // Ids of calls: "call_", `unique` and the call's index.
  ChatChoice(const ChatFormat& format, std::string_view unique);

  void Feed(std::string_view text);
  void Finish();  // once, after the last text
  // The one call that may be made was made: nothing behind it counts.
  bool full() const { return full_; }
  bool called() const { return calls_ > 0; }
  std::vector<ResponseEvent> Take();     // what is new, for a stream
  void TakeWhole(ChoiceAnswer* answer);  // all of it, for a whole answer

 private:
  void Keep(std::vector<ResponseEvent> events);

  const bool one_call_, stream_reasoning_, hide_reasoning_;
  ResponseParser parser_;
  std::vector<ResponseEvent> events_;
  std::string held_reasoning_;
  int32_t calls_ = 0;
  bool full_ = false;
};

}  // namespace sluice
