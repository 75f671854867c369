// A string that remembers, byte by byte, what the template wrote and what came from messages. Only the former
// may become control tokens, so the mark survives every operation of the template language.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace sluice::jinja {

class Text {
 public:
  Text() = default;
  Text(std::string bytes, bool from_template);

  const std::string& str() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  bool all_from_template() const { return runs_.empty() || (runs_.size() == 1 && runs_[0].from_template); }

  void Append(std::string_view bytes, bool from_template);
  void Append(const Text& other) { Append(other, 0, other.size()); }
  void Append(const Text& other, size_t begin, size_t end);
  Text Substr(size_t begin, size_t end) const;

  // f(begin, end, from_template) for each run that meets [begin, end), in order.
  template <typename F>
  void ForEachRun(size_t begin, size_t end, F f) const {
    size_t start = 0;
    for (const Run& run : runs_) {
      const size_t from = start < begin ? begin : start;
      const size_t to = run.end < end ? run.end : end;
      if (from < to) f(from, to, run.from_template);
      start = run.end;
      if (start >= end) break;
    }
  }

 private:
  struct Run {
    size_t end;
    bool from_template;
  };
  std::string bytes_;
  absl::InlinedVector<Run, 1> runs_;  // adjacent runs differ; the last ends at size()
};

}  // namespace sluice::jinja
