#include "text/response_parser.h"

#include <algorithm>

namespace sluice {
namespace {

constexpr std::string_view kThink = "<think>";
constexpr std::string_view kEndThink = "</think>";
constexpr std::string_view kSpaces = " \t\r\n";

// Length of the longest end of `text` that is a beginning of `marker`, but not all of it.
size_t HalfMarker(std::string_view text, std::string_view marker) {
  for (size_t n = std::min(text.size(), marker.size() - 1); n > 0; --n) {
    if (marker.starts_with(text.substr(text.size() - n))) return n;
  }
  return 0;
}

}  // namespace

StatusOr<ReasoningStyle> ParseReasoningStyle(std::string_view name) {
  if (name == "none") return ReasoningStyle::kNone;
  for (const std::string_view known :
       {"glm45", "deepseek-r1", "deepseek-v3", "deepseek-v31", "deepseek-v32"}) {
    if (name == known) return ReasoningStyle::kThinkTags;
  }
  return Invalid("reasoning-parser: {} is unknown; use none, glm45, deepseek-r1, deepseek-v3 or deepseek-v32",
                 name);
}

ReasoningStyle DefaultReasoningStyle(std::string_view architecture) {
  return DefaultToolCallStyle(architecture) == ToolCallStyle::kNone ? ReasoningStyle::kNone
                                                                    : ReasoningStyle::kThinkTags;
}

bool PromptOpensReasoning(std::string_view prompt) {
  const size_t end = prompt.find_last_not_of(kSpaces);
  return end != std::string_view::npos && prompt.substr(0, end + 1).ends_with(kThink);
}

ResponseParser::ResponseParser(Options options)
    : options_(std::move(options)),
      matcher_(ToolCallMatcher::Create(options_.tools, options_.declared_tools)) {
  mode_ = options_.reasoning == ReasoningStyle::kNone ? Mode::kContent
          : options_.starts_in_reasoning              ? Mode::kReasoning
                                                      : Mode::kBefore;
  drop_space_ = mode_ == Mode::kReasoning;
}

std::vector<int32_t> ResponseParser::KeptTokens(const Tokenizer& tokenizer) const {
  std::vector<std::string_view> names;
  if (matcher_ != nullptr) names = matcher_->marker_tokens();
  if (options_.reasoning != ReasoningStyle::kNone) names.insert(names.end(), {kThink, kEndThink});
  std::vector<int32_t> ids;
  for (const std::string_view name : names) {
    if (const int32_t id = tokenizer.IdOf(name); id >= 0) ids.push_back(id);
  }
  return ids;
}

std::vector<ResponseEvent> ResponseParser::Feed(std::string_view text) {
  buffer_ += text;
  Process(false);
  return std::exchange(events_, {});
}

std::vector<ResponseEvent> ResponseParser::Finish() {
  Process(true);
  // White space at the end: part of the content, unless it trails reasoning or calls.
  if (mode_ != Mode::kReasoning && !only_calls_since_ && !space_.empty())
    Emit(ResponseEvent::Kind::kContent, space_);
  space_.clear();
  return std::exchange(events_, {});
}

void ResponseParser::Process(bool final) {
  while (in_call_ ? InCall(final) : InText(final)) {
  }
}

// False: nothing more can be decided with the text there is.
bool ResponseParser::InCall(bool final) {
  const ToolCallMatcher::Result result = matcher_->Step(buffer_);
  switch (result) {
    case ToolCallMatcher::Result::kMore:
      if (!final) return false;
      break;
    case ToolCallMatcher::Result::kCall: {
      buffer_.erase(0, matcher_->position());
      space_.clear();
      const int index = next_index_++;
      events_.push_back({ResponseEvent::Kind::kToolBegin, matcher_->call().name,
                         options_.id_prefix + std::to_string(index), index});
      events_.push_back({ResponseEvent::Kind::kToolArguments, matcher_->call().arguments, "", index});
      events_.push_back({ResponseEvent::Kind::kToolEnd, "", "", index});
      only_calls_since_ = true;
      ++section_calls_;
      in_call_ = !matcher_->one_call_a_section();
      return true;
    }
    case ToolCallMatcher::Result::kEnd:
      in_call_ = false;
      if (section_calls_ > 0) {
        buffer_.erase(0, matcher_->position());
        return true;
      }
      Plain(matcher_->begin_marker());  // a section without calls is no markup of ours
      Plain(std::string_view(buffer_).substr(0, matcher_->position()));
      buffer_.erase(0, matcher_->position());
      return true;
    case ToolCallMatcher::Result::kFail:
      break;
  }
  // Broken or cut off. The marker is plain text; what follows it may hold a call of its own, unless the text
  // has ended.
  in_call_ = false;
  if (section_calls_ == 0) Plain(matcher_->begin_marker());
  if (result == ToolCallMatcher::Result::kMore) {
    Plain(buffer_);
    buffer_.clear();
    return false;
  }
  return true;
}

bool ResponseParser::InText(bool final) {
  if (buffer_.empty()) return false;
  if (mode_ == Mode::kBefore) {
    const size_t begin = buffer_.find_first_not_of(kSpaces);
    if (begin == std::string::npos && !final) return false;
    const std::string_view rest =
        begin == std::string::npos ? std::string_view() : std::string_view(buffer_).substr(begin);
    if (rest.starts_with(kThink)) {
      buffer_.erase(0, begin + kThink.size());
      mode_ = Mode::kReasoning;
      drop_space_ = true;
      return true;
    }
    if (!final && kThink.starts_with(rest)) return false;
    mode_ = Mode::kContent;
  }
  // The first marker that means something here; else the end of the text that may be the beginning of one is
  // kept.
  size_t at = std::string::npos, half = 0;
  std::string_view marker;
  const auto look = [&](std::string_view candidate) {
    const size_t found = buffer_.find(candidate);
    if (found < at) {
      at = found;
      marker = candidate;
    }
    half = std::max(half, HalfMarker(buffer_, candidate));
  };
  if (mode_ == Mode::kReasoning) look(kEndThink);
  if (tools_on()) look(matcher_->begin_marker());
  if (at == std::string::npos) {
    const size_t decided = buffer_.size() - (final ? 0 : half);
    Plain(std::string_view(buffer_).substr(0, decided));
    buffer_.erase(0, decided);
    return false;
  }
  Plain(std::string_view(buffer_).substr(0, at));
  buffer_.erase(0, at + marker.size());
  if (marker == kEndThink) {
    mode_ = Mode::kContent;
    space_.clear();
    drop_space_ = true;
    only_calls_since_ = false;
  } else {
    in_call_ = true;
    section_calls_ = 0;
    matcher_->Reset();
  }
  return true;
}

void ResponseParser::Plain(std::string_view text) {
  if (drop_space_) {
    // The tag's own line breaks are markup. Content keeps the indentation of its first line.
    const size_t begin =
        text.find_first_not_of(mode_ == Mode::kReasoning ? kSpaces : std::string_view("\r\n"));
    if (begin == std::string_view::npos) return;
    text.remove_prefix(begin);
    drop_space_ = false;
  }
  if (text.empty()) return;
  const bool reasoning = mode_ == Mode::kReasoning;
  // White space before a call or before </think> is dropped, so the end of the text has to wait.
  const size_t last = reasoning || tools_on() ? text.find_last_not_of(kSpaces) : text.size() - 1;
  if (last == std::string_view::npos) {
    space_ += text;
    return;
  }
  const ResponseEvent::Kind kind =
      reasoning ? ResponseEvent::Kind::kReasoning : ResponseEvent::Kind::kContent;
  if (!space_.empty()) Emit(kind, space_);
  Emit(kind, text.substr(0, last + 1));
  space_ = text.substr(last + 1);
  only_calls_since_ = false;
}

void ResponseParser::Emit(ResponseEvent::Kind kind, std::string_view text) {
  if (!events_.empty() && events_.back().kind == kind) {
    events_.back().text += text;
  } else {
    events_.push_back({kind, std::string(text), "", -1});
  }
}

}  // namespace sluice
