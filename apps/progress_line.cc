#include "progress_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "fmt/format.h"

namespace sluice {
namespace {

constexpr auto kPace = std::chrono::milliseconds(100);

size_t Columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string ProgressText(const std::string& what, int64_t done, int64_t all, size_t width) {
  const std::string count = fmt::format("{} of {}", done, all);
  const size_t used = what.size() + count.size() + 4;
  if (all <= 0 || width < used + 8) return what + " " + count;
  const size_t bar = std::min<size_t>(32, width - used);
  const size_t full = size_t(double(std::clamp<int64_t>(done, 0, all)) / double(all) * double(bar));
  return fmt::format("{} [{}{}] {}", what, std::string(full, '#'), std::string(bar - full, '-'), count);
}

ProgressLine::ProgressLine() : terminal_(isatty(STDERR_FILENO) != 0) {}

ProgressLine::~ProgressLine() {
  if (width_ > 0) std::fprintf(stderr, "\r%*s\r", int(width_), "");
}

void ProgressLine::Show(const std::string& what, int64_t done, int64_t all) {
  if (!terminal_) return;
  std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (what == what_ && now - written_ < kPace && done < all) return;
  written_ = now;
  what_ = what;
  const std::string text = ProgressText(what, done, all, Columns() - 1);
  std::fprintf(stderr, "\r%-*s", int(width_), text.c_str());
  std::fflush(stderr);
  width_ = std::max(width_, text.size());
}

}  // namespace sluice
