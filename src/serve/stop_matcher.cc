#include "serve/stop_matcher.h"

#include <algorithm>

namespace sluice {

StopMatcher::StopMatcher(const std::vector<std::string>& stops, bool keep_match) : keep_match_(keep_match) {
  for (const std::string& text : stops) {
    Stop stop{.text = text, .fallback = std::vector<uint32_t>(text.size(), 0)};
    for (size_t i = 1, k = 0; i < text.size(); ++i) {
      while (k > 0 && text[i] != text[k]) k = stop.fallback[k - 1];
      if (text[i] == text[k]) ++k;
      stop.fallback[i] = uint32_t(k);
    }
    stops_.push_back(std::move(stop));
  }
}

bool StopMatcher::Add(std::string_view text, std::string* ready) {
  if (matched_ >= 0) return true;
  if (stops_.empty()) {
    ready->append(text);
    return false;
  }
  const size_t before = held_.size();
  held_ += text;
  for (size_t i = before; i < held_.size(); ++i) {
    size_t longest = 0;
    for (size_t s = 0; s < stops_.size(); ++s) {
      Stop& stop = stops_[s];
      uint32_t state = stop.state;
      while (state > 0 && stop.text[state] != held_[i]) state = stop.fallback[state - 1];
      if (stop.text[state] == held_[i]) ++state;
      stop.state = state;
      if (state == stop.text.size() && state > longest) {
        longest = state;
        matched_ = int32_t(s);
      }
    }
    if (matched_ < 0) continue;
    ready->append(held_, 0, i + 1 - (keep_match_ ? 0 : longest));
    held_.clear();
    return true;
  }
  size_t keep = 0;
  for (const Stop& stop : stops_) keep = std::max<size_t>(keep, stop.state);
  ready->append(held_, 0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return false;
}

void StopMatcher::Finish(std::string* ready) {
  *ready += held_;
  held_.clear();
}

void StopMatcher::Pass(std::string_view text, std::string* ready) {
  Finish(ready);
  for (Stop& stop : stops_) stop.state = 0;
  ready->append(text);
}

}  // namespace sluice
