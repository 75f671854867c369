#include "api/error.h"

#include "api/json_writer.h"
#include "text/utf8.h"

namespace sluice {

ApiError ErrorFromStatus(const Status& status) {
  ApiError e;
  e.message = std::string(Message(status));
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
      e.http_status = 400;
      break;
    case absl::StatusCode::kUnimplemented:
      e.http_status = 400;
      e.code = "unsupported";
      break;
    case absl::StatusCode::kNotFound:
      e.http_status = 404;
      e.type = "not_found_error";
      break;
    case absl::StatusCode::kAlreadyExists:
      e.http_status = 409;
      e.type = "conflict_error";
      break;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      e.http_status = 401;
      e.type = "authentication_error";
      break;
    case absl::StatusCode::kResourceExhausted:
      e.http_status = 503;
      e.type = "overloaded_error";
      e.code = "overloaded";
      break;
    case absl::StatusCode::kUnavailable:
      e.http_status = 503;
      e.type = "service_unavailable";
      e.code = "unavailable";
      break;
    case absl::StatusCode::kDeadlineExceeded:
      e.http_status = 504;
      e.type = "timeout_error";
      e.code = "timeout";
      break;
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kCancelled:
      e.http_status = 499;
      e.type = "aborted";
      e.code = "aborted";
      break;
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDataLoss:
      e.http_status = 500;
      e.type = "internal_error";
      break;
    default:  // OK, kUnknown and every number that a peer may have sent
      e.http_status = 500;
      e.type = "internal_error";
      if (!status.ok()) e.code = fmt::format("{}", status.raw_code());
      break;
  }
  if (e.message.empty()) {
    e.message = status.ok()
                    ? "the request ended with an error that gave no reason"
                    : fmt::format("the request ended with status {} and no message", status.raw_code());
  }
  return e;
}

std::string ErrorBody(const ApiError& error) {
  std::string out;
  JsonWriter w(&out);
  w.Object().Key("error").Object();
  w.Key("message").Text(error.message).Key("type").Text(error.type);
  w.Key("param").TextOrNull(error.param).Key("code").TextOrNull(error.code);
  w.End().End();
  return out;
}

std::string Quoted(std::string_view text, size_t bytes_max) {
  const bool cut = text.size() > bytes_max;
  text = text.substr(0, bytes_max);
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = DecodeUtf8(text, i);
    if (cut && step.kind == Utf8Kind::kTruncated) break;
    if (step.kind != Utf8Kind::kValid) {
      out += kReplacementChar;
    } else if (step.codepoint < 0x20 || step.codepoint == 0x7f) {
      out += '?';
    } else {
      out += text.substr(i, step.bytes);
    }
    i += step.bytes;
  }
  out += cut ? "\"..." : "\"";
  return out;
}

}  // namespace sluice
