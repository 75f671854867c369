#include "serve/chat_choice.h"

#include <utility>

namespace sluice {
namespace {

ResponseParser::Options WithIds(ResponseParser::Options options, std::string_view unique) {
  options.id_prefix = "call_" + std::string(unique) + "_";
  return options;
}

}  // namespace

ChatChoice::ChatChoice(const ChatFormat& format, std::string_view unique)
    : one_call_(format.one_call),
      stream_reasoning_(format.stream_reasoning),
      hide_reasoning_(format.hide_reasoning),
      parser_(WithIds(format.parser, unique)) {}

void ChatChoice::Feed(std::string_view text) {
  if (!text.empty() && !full_) Keep(parser_.Feed(text));
}

void ChatChoice::Finish() {
  if (!full_) Keep(parser_.Finish());
  if (held_reasoning_.empty()) return;
  events_.push_back({ResponseEvent::Kind::kReasoning, std::exchange(held_reasoning_, {}), "", -1});
}

void ChatChoice::Keep(std::vector<ResponseEvent> events) {
  for (ResponseEvent& event : events) {
    if (full_) return;
    if (event.kind == ResponseEvent::Kind::kReasoning) {
      if (hide_reasoning_) continue;
      if (!stream_reasoning_) {
        held_reasoning_ += event.text;
        continue;
      }
    } else if (!held_reasoning_.empty()) {
      events_.push_back({ResponseEvent::Kind::kReasoning, std::exchange(held_reasoning_, {}), "", -1});
    }
    if (event.kind == ResponseEvent::Kind::kToolEnd) {
      ++calls_;
      full_ = one_call_;
    }
    events_.push_back(std::move(event));
  }
}

std::vector<ResponseEvent> ChatChoice::Take() { return std::exchange(events_, {}); }

void ChatChoice::TakeWhole(ChoiceAnswer* answer) {
  for (ResponseEvent& event : Take()) {
    switch (event.kind) {
      case ResponseEvent::Kind::kContent:
        answer->text += event.text;
        break;
      case ResponseEvent::Kind::kReasoning:
        answer->reasoning += event.text;
        break;
      case ResponseEvent::Kind::kToolBegin:
        answer->tool_calls.push_back({std::move(event.id), std::move(event.text), ""});
        break;
      case ResponseEvent::Kind::kToolArguments:
        answer->tool_calls.back().arguments += event.text;
        break;
      case ResponseEvent::Kind::kToolEnd:
        break;
    }
  }
}

}  // namespace sluice
