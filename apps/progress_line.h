// A bar on stderr that rewrites itself while something long runs; on terminals only, and gone when it ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace sluice {

// Thread-safe. Show may be called often: it writes a few times a second at most.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  bool shown() const { return terminal_; }  // whether Show does anything
  void Show(const std::string& what, int64_t done, int64_t all);

 private:
  const bool terminal_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point written_{};
  std::string what_;
  size_t width_ = 0;  // of what stands there
};

// "what [#####-----] 12 of 24", at most `width` columns where that is possible.
std::string ProgressText(const std::string& what, int64_t done, int64_t all, size_t width);

}  // namespace sluice
