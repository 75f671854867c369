#include "text/jinja/text.h"

namespace sluice::jinja {

Text::Text(std::string bytes, bool from_template) : bytes_(std::move(bytes)) {
  if (!bytes_.empty()) runs_.push_back({bytes_.size(), from_template});
}

void Text::Append(std::string_view bytes, bool from_template) {
  if (bytes.empty()) return;
  bytes_.append(bytes);
  if (!runs_.empty() && runs_.back().from_template == from_template) {
    runs_.back().end = bytes_.size();
  } else {
    runs_.push_back({bytes_.size(), from_template});
  }
}

void Text::Append(const Text& other, size_t begin, size_t end) {
  if (&other == this) {
    const Text copy = other;
    Append(copy, begin, end);
    return;
  }
  const std::string_view bytes = other.bytes_;
  other.ForEachRun(begin, end, [&](size_t from, size_t to, bool origin) {
    Append(bytes.substr(from, to - from), origin);
  });
}

Text Text::Substr(size_t begin, size_t end) const {
  Text out;
  out.Append(*this, begin, end);
  return out;
}

}  // namespace sluice::jinja
