#include "api/json_writer.h"

#include <cmath>
#include <iterator>

#include "base/check.h"
#include "fmt/format.h"
#include "text/utf8.h"

namespace sluice {

void AppendJsonString(std::string_view value, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  *out += '"';
  size_t plain = 0;  // bytes from here on that need no change
  const auto flush = [&](size_t end) { out->append(value.data() + plain, end - plain); };
  for (size_t i = 0; i < value.size();) {
    const unsigned char c = static_cast<unsigned char>(value[i]);
    if (c >= 0x20 && c != '"' && c != '\\' && c < 0x80) {
      ++i;
      continue;
    }
    if (c >= 0x80) {
      const Utf8Step step = DecodeUtf8(value, i);
      if (step.kind != Utf8Kind::kValid) {
        flush(i);
        *out += kReplacementChar;
        plain = i + step.bytes;
      }
      i += step.bytes;
      continue;
    }
    flush(i);
    switch (c) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      default:
        *out += "\\u00";
        *out += kHex[c >> 4];
        *out += kHex[c & 15];
    }
    plain = ++i;
  }
  flush(value.size());
  *out += '"';
}

JsonWriter& JsonWriter::Open(char open, char close) {
  BeforeValue();
  *out_ += open;
  closers_ += close;
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::End() {
  SLUICE_DCHECK(!closers_.empty());
  *out_ += closers_.back();
  closers_.pop_back();
  comma_ = true;
  return *this;
}

JsonWriter& JsonWriter::Key(std::string_view key) {
  BeforeValue();
  AppendJsonString(key, out_);
  *out_ += ':';
  comma_ = false;
  return *this;
}

JsonWriter& JsonWriter::Text(std::string_view value) {
  BeforeValue();
  AppendJsonString(value, out_);
  return *this;
}

JsonWriter& JsonWriter::Int(int64_t value) {
  BeforeValue();
  fmt::format_to(std::back_inserter(*out_), "{}", value);
  return *this;
}

JsonWriter& JsonWriter::Num(double value) {
  if (!std::isfinite(value)) return Null();
  BeforeValue();
  fmt::format_to(std::back_inserter(*out_), "{}", value);
  return *this;
}

JsonWriter& JsonWriter::Logprob(float value) {
  if (std::isnan(value)) return Null();
  BeforeValue();
  if (std::isinf(value)) {
    *out_ += "-9999.0";
  } else {
    fmt::format_to(std::back_inserter(*out_), "{}", value);
  }
  return *this;
}

JsonWriter& JsonWriter::Bool(bool value) {
  BeforeValue();
  *out_ += value ? "true" : "false";
  return *this;
}

JsonWriter& JsonWriter::Null() {
  BeforeValue();
  *out_ += "null";
  return *this;
}

JsonWriter& JsonWriter::Raw(std::string_view json) {
  BeforeValue();
  *out_ += json;
  return *this;
}

}  // namespace sluice
