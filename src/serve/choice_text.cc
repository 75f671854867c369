#include "serve/choice_text.h"

#include <utility>

namespace sluice {

TokenLogprob DescribeToken(const Tokenizer& tokenizer, const TokenOut& token) {
  TokenLogprob out{
      .id = token.token, .bytes = std::string(tokenizer.TokenBytes(token.token)), .logprob = token.logprob};
  out.top.reserve(token.top.size());
  for (const auto& [id, logprob] : token.top) {
    out.top.push_back({.id = id, .bytes = std::string(tokenizer.TokenBytes(id)), .logprob = logprob});
  }
  return out;
}

ChoiceText::ChoiceText(std::shared_ptr<const Tokenizer> tokenizer, const GenerationOptions& options,
                       bool with_logprobs, std::vector<int32_t> kept_tokens)
    : tokenizer_(tokenizer),
      stops_(options.stop),
      trim_stop_(options.trim_stop),
      with_logprobs_(with_logprobs),
      min_tokens_(options.sampling.min_tokens),
      detokenizer_(std::move(tokenizer), options.skip_special_tokens, std::move(kept_tokens)),
      matcher_(options.stop, !options.trim_stop) {}

void ChoiceText::Append(const std::string& text) {
  decoded_bytes_ += text.size();
  const size_t before = ready_.size();
  if (tokens_ < min_tokens_) {
    matcher_.Pass(text, &ready_);
  } else if (matcher_.Add(text, &ready_)) {
    matched_stop_ = stops_[size_t(matcher_.matched())];
  }
  released_bytes_ += ready_.size() - before;
}

bool ChoiceText::Add(const TokenOut& token) {
  ++tokens_;
  const size_t begin = decoded_bytes_;
  const std::string text = detokenizer_.Add(token.token);
  Append(text);
  if (with_logprobs_) {
    held_.push_back({begin, decoded_bytes_, DescribeToken(*tokenizer_, token)});
    held_.back().entry.text_offset = characters_;
    characters_ += CountCharacters(text);
  }
  if (!matched_stop_.empty()) finished_ = true;
  ReleaseLogprobs();
  return finished_;
}

void ChoiceText::AddStopToken(const TokenOut& token) {
  if (!trim_stop_) {
    Add(token);
  } else {
    ++tokens_;
  }
}

void ChoiceText::Finish() {
  if (finished_) return;
  finished_ = true;
  Append(detokenizer_.Finish());
  const size_t before = ready_.size();
  matcher_.Finish(&ready_);
  released_bytes_ += ready_.size() - before;
  ReleaseLogprobs();
}

// An entry goes out with the text of its token. At the end the rest goes too, but for tokens that lie behind
// the cut.
void ChoiceText::ReleaseLogprobs() {
  while (!held_.empty() && (held_.front().end <= released_bytes_ || finished_)) {
    const bool cut = held_.front().begin >= released_bytes_ && held_.front().end > released_bytes_;
    if (!cut) ready_logprobs_.push_back(std::move(held_.front().entry));
    held_.pop_front();
  }
}

std::string ChoiceText::TakeText() { return std::exchange(ready_, {}); }
std::vector<TokenLogprob> ChoiceText::TakeLogprobs() { return std::exchange(ready_logprobs_, {}); }

}  // namespace sluice
