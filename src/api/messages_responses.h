// Answers of POST /v1/messages, in Anthropic's form: the whole message, and the event stream.
#pragma once

#include <string>

#include "api/responses.h"

namespace sluice {

// The records of one streamed message, in order: Start, Event*, End. Blocks are opened and closed as the
// kinds of what arrives change; their indexes count up.
class MessagesStream {
 public:
  void Start(const AnswerMeta& meta, const Usage& usage, std::string* out);
  void Event(const ResponseEvent& event, std::string* out);
  void End(const Finish& finish, const Usage& usage, std::string* out);

 private:
  enum class Block : uint8_t { kNone, kText, kThinking, kTool };
  void Open(Block block, const ResponseEvent* tool, std::string* out);
  void Close(std::string* out);

  Block open_ = Block::kNone;
  int32_t index_ = -1;
};

std::string MessageBody(const AnswerMeta& meta, const ChoiceAnswer& answer, const Usage& usage);
// {"type":"error","error":{"type","message"}}
std::string MessagesErrorBody(const ApiError& error);
void AppendMessagesErrorRecord(const ApiError& error, std::string* out);
std::string TokenCountBody(int64_t input_tokens);

}  // namespace sluice
