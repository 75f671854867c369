// One choice's way from tokens to what the client may see: detokenised, stop strings cut, logprobs beside
// their text.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "api/requests.h"
#include "api/responses.h"
#include "serve/stop_matcher.h"
#include "text/tokenizer.h"

namespace sluice {

// A token's bytes and those of its alternatives, for the answer.
TokenLogprob DescribeToken(const Tokenizer& tokenizer, const TokenOut& token);

class ChoiceText {
 public:
  // kept_tokens: special tokens whose text a parser needs.
  ChoiceText(std::shared_ptr<const Tokenizer> tokenizer, const GenerationOptions& options, bool with_logprobs,
             std::vector<int32_t> kept_tokens = {});

  // Characters that come before the first token's text (an echoed prompt), for text offsets.
  void StartAt(int64_t characters) { characters_ = characters; }
  // True: this token completed a stop string; later tokens must not be added.
  bool Add(const TokenOut& token);
  // The stop token that ended the choice: counted, its text only where stop text is kept.
  void AddStopToken(const TokenOut& token);
  // No more tokens: what was held back comes out.
  void Finish();

  // What became certain since the last call.
  std::string TakeText();
  std::vector<TokenLogprob> TakeLogprobs();
  int32_t tokens() const { return tokens_; }
  const std::string& matched_stop() const { return matched_stop_; }  // "" = none

 private:
  void Append(const std::string& text);
  void ReleaseLogprobs();

  struct Held {
    size_t begin, end;  // bytes of the choice's text before and after it
    TokenLogprob entry;
  };
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const std::vector<std::string> stops_;
  const bool trim_stop_, with_logprobs_;
  const int32_t min_tokens_;
  IncrementalDetokenizer detokenizer_;
  StopMatcher matcher_;
  std::string ready_;
  std::deque<Held> held_;
  std::vector<TokenLogprob> ready_logprobs_;
  size_t decoded_bytes_ = 0, released_bytes_ = 0;
  int64_t characters_ = 0;
  int32_t tokens_ = 0;
  bool finished_ = false;
  std::string matched_stop_;
};

}  // namespace sluice
