#include <algorithm>

#include "text/tokenizer.h"
#include "text/utf8.h"

namespace sluice {

std::string IncrementalDetokenizer::Strip(std::string text) {
  if (strip_left_ == 0 || text.empty()) return text;
  const std::string& c = tokenizer_->decode_rules().strip_char;
  size_t pos = 0;
  while (strip_left_ > 0 && !c.empty() && text.compare(pos, c.size(), c) == 0) {
    pos += c.size();
    --strip_left_;
  }
  if (pos < text.size()) strip_left_ = 0;
  return text.substr(pos);
}

std::string IncrementalDetokenizer::Add(int32_t id) {
  if (skip_special_ && tokenizer_->IsSpecial(id) && std::find(kept_.begin(), kept_.end(), id) == kept_.end())
    return "";
  held_ += tokenizer_->TokenBytes(id);
  const bool each_byte = tokenizer_->decode_rules().replace_each_byte;
  std::string out;
  size_t pos = 0;
  while (pos < held_.size()) {
    const Utf8Step step = DecodeUtf8(held_, pos);
    if (step.kind == Utf8Kind::kTruncated) break;
    if (step.kind == Utf8Kind::kValid) {
      out.append(held_, pos, step.bytes);
    } else {
      for (size_t i = 0; i < (each_byte ? step.bytes : 1); ++i) out += kReplacementChar;
    }
    pos += step.bytes;
  }
  held_.erase(0, pos);
  return Strip(std::move(out));
}

std::string IncrementalDetokenizer::Finish() {
  std::string out;
  const size_t count =
      tokenizer_->decode_rules().replace_each_byte ? held_.size() : std::min<size_t>(held_.size(), 1);
  for (size_t i = 0; i < count; ++i) out += kReplacementChar;
  held_.clear();
  return Strip(std::move(out));
}

}  // namespace sluice
