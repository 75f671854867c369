// Status and StatusOr for the whole product: the one bridge to Abseil's types.
//
// Errors of users and peers are Status; programming errors are CHECK (check.h). A message names the field,
// the value, the limit and the remedy: "max_tokens: 1.5 is not an integer; send a whole number >= 0".
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fmt/format.h"

namespace sluice {

using Status = absl::Status;
template <typename T>
using StatusOr = absl::StatusOr<T>;

inline Status OkStatus() { return absl::OkStatus(); }
inline std::string_view Message(const Status& s) { return {s.message().data(), s.message().size()}; }

// Wrong input: HTTP 400, exit code 2.
template <typename... A>
Status Invalid(fmt::format_string<A...> f, A&&... a) {
  return absl::InvalidArgumentError(fmt::format(f, std::forward<A>(a)...));
}
// Something named does not exist: HTTP 404, exit code 3.
template <typename... A>
Status NotFound(fmt::format_string<A...> f, A&&... a) {
  return absl::NotFoundError(fmt::format(f, std::forward<A>(a)...));
}
// A bounded resource is used up: HTTP 503 or 429, exit code 3.
template <typename... A>
Status Exhausted(fmt::format_string<A...> f, A&&... a) {
  return absl::ResourceExhaustedError(fmt::format(f, std::forward<A>(a)...));
}
// The environment (file, port, peer, library) fails: HTTP 503, exit code 3.
template <typename... A>
Status Unavailable(fmt::format_string<A...> f, A&&... a) {
  return absl::UnavailableError(fmt::format(f, std::forward<A>(a)...));
}
// A combination that is not built or not possible here: exit code 2.
template <typename... A>
Status Unsupported(fmt::format_string<A...> f, A&&... a) {
  return absl::UnimplementedError(fmt::format(f, std::forward<A>(a)...));
}
template <typename... A>
Status Aborted(fmt::format_string<A...> f, A&&... a) {
  return absl::AbortedError(fmt::format(f, std::forward<A>(a)...));
}
template <typename... A>
Status DeadlineExceeded(fmt::format_string<A...> f, A&&... a) {
  return absl::DeadlineExceededError(fmt::format(f, std::forward<A>(a)...));
}
// Two parts of the program disagree: a bug. HTTP 500.
template <typename... A>
Status Internal(fmt::format_string<A...> f, A&&... a) {
  return absl::InternalError(fmt::format(f, std::forward<A>(a)...));
}

}  // namespace sluice

#define SLUICE_CONCAT_INNER(a, b) a##b
#define SLUICE_CONCAT(a, b) SLUICE_CONCAT_INNER(a, b)
#define RETURN_IF_ERROR(expr)          \
  do {                                 \
    ::sluice::Status status_ = (expr); \
    if (!status_.ok()) return status_; \
  } while (0)
#define ASSIGN_OR_RETURN(lhs, expr) ASSIGN_OR_RETURN_IMPL(SLUICE_CONCAT(status_or_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                          \
  if (!tmp.ok()) return tmp.status();         \
  lhs = std::move(tmp).value()
