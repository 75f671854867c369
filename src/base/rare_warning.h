// A warning that an event may repeat as often as it likes: one line in ten seconds, with how many were left
// out.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

#include "base/log.h"

namespace sluice {

// Of one thread. Saying nothing costs one clock reading; arguments are formatted only for a line that is
// written.
class RareWarning {
 public:
  template <typename... A>
  void Say(spdlog::format_string_t<A...> format, A&&... args) {
    const auto now = std::chrono::steady_clock::now();
    if (said_ && now - last_ < kInterval) {
      ++left_out_;
      return;
    }
    said_ = true;
    last_ = now;
    const std::string text = fmt::format(format, std::forward<A>(args)...);
    if (left_out_ == 0) {
      spdlog::warn("{}", text);
    } else {
      spdlog::warn("{} ({} more like it since the last such line)", text, std::exchange(left_out_, 0));
    }
  }

 private:
  static constexpr std::chrono::seconds kInterval{10};
  bool said_ = false;
  std::chrono::steady_clock::time_point last_;
  int64_t left_out_ = 0;
};

}  // namespace sluice
