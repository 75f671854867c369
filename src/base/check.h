// CHECK ends the process with file, line and values when a program invariant is broken; always on.
// DCHECK is for hot loops and exists in debug builds only.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "fmt/format.h"

namespace sluice {
[[noreturn]] inline void CheckFailed(const char* file, int line, const char* expr,
                                     const std::string& detail) {
  std::fprintf(stderr, "%s:%d: check failed: %s %s\n", file, line, expr, detail.c_str());
  std::abort();
}
}  // namespace sluice

#define SLUICE_CHECK(cond, ...)                                                        \
  do {                                                                                 \
    if (!(cond)) [[unlikely]]                                                          \
      ::sluice::CheckFailed(__FILE__, __LINE__, #cond, ::fmt::format("" __VA_ARGS__)); \
  } while (0)
#ifdef NDEBUG
#define SLUICE_DCHECK(cond, ...) \
  do {                           \
  } while (0)
#else
#define SLUICE_DCHECK(cond, ...) SLUICE_CHECK(cond, __VA_ARGS__)
#endif
